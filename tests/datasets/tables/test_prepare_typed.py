"""Typed graphs from an owner's tables: values, what owners compare, and predictions."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_fgl import simulate
from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.tables.prepare import prepare_graph, propose_vocabulary
from flower_fgl.simulation.prediction import predict_graph
from tests.datasets.tables.layouts import write
from tests.support.owners import run_owners

RECIPE = """
vocabulary = "vocabulary.toml"
foreign = "flag"

[[nodes]]
type = "card"
table = "cards.csv"
[nodes.columns]
number = "id"
opened = {kind = "date", since = "2020-01-01"}
network = "category"
fraud = {kind = "label", classes = {1 = "fraud", 0 = "ok"}}
part = "split"

[[nodes]]
type = "shop"
table = "shops.csv"
[nodes.columns]
shop = "id"
country = {kind = "category", missing = "zero"}

[[nodes]]
type = "device"
from = "edges"

[[edges]]
relation = "pays"
source = "card"
target = "shop"
table = "payments.csv"
[edges.columns]
number = "source"
shop = "target"
"*" = "ignore"

[[edges]]
relation = "used"
source = "card"
target = "device"
private = true
table = "payments.csv"
[edges.columns]
number = "source"
device = "target"
"*" = "ignore"
"""
VOCABULARY = """
[nodes.card.numbers]
opened = {mean = 100.0, std = 50.0, median = 31.0}
[nodes.card.categories]
network = ["amex", "visa"]
[nodes.shop.categories]
country = ["AT", "DE"]
"""
CARDS = """number,opened,network,fraud,part
c1,2020-01-11,visa,0,train
c2,2021-01-01,amex,1,train
c3,2020-02-01,other,1,val
c4,2020-02-01,visa,0,val
c5,2020-05-01,amex,1,test
c6,2020-05-02,amex,0,test
"""
SHOPS = """shop,country
s1,AT
s2,FR
s3,
"""
PAYMENTS = """number,shop,device,amount
c1,s1,d1,3
c2,s1,d2,4
c3,s2,d1,5
c4,s3,d1,5
c5,s9,d3,6
c6,s2,d3,6
"""
SMALL: dict[str, Any] = {"model": "rgcn", "hidden_channels": 4, "rounds": 1}


def owner(folder: Path, **changed: str) -> tuple[Path, list[Path]]:
    """Write the tables of an owner; return recipe and tables."""
    folder.mkdir(exist_ok=True)
    files = {"recipe_toml": RECIPE, "vocabulary_toml": VOCABULARY, "cards_csv": CARDS}
    files |= {"shops_csv": SHOPS, "payments_csv": PAYMENTS}
    recipe, _, *tables = write(folder, **files | changed)
    return recipe, tables


def without_device(text: str) -> str:
    """Return the recipe without devices."""
    text = text.replace('[[nodes]]\ntype = "device"\nfrom = "edges"\n', "")
    return text[: text.index('[[edges]]\nrelation = "used"')]


def test_tables_of_kinds_become_a_typed_graph(tmp_path: Path) -> None:
    recipe, tables = owner(tmp_path)
    lines = prepare_graph(recipe, tables, tmp_path / "graph")
    graph = load_graph_file(tmp_path / "graph")
    schema = graph.dataset.schema
    assert schema is not None
    assert schema.widths == (("card", 5), ("device", 0), ("shop", 5))
    used = ("card", "used", "device")
    assert schema.relations == (("card", "pays", "shop"), used)
    assert schema.private == {used}
    assert graph.dataset.feature_names == (
        *("card.opened", "card.network=amex", "card.network=visa"),
        *("card.network=(other)", "card.foreign"),
        *("shop.country=AT", "shop.country=DE", "shop.country=(other)"),
        *("shop.country missing", "shop.foreign"),
    )
    x, names = graph.dataset.x, graph.names
    # 2021-01-01 is 366 days after 2020-01-01; the vocabulary has mean 100, std 50
    torch.testing.assert_close(x[1, :5], torch.tensor([5.32, 1, 0, 0, 0]))
    torch.testing.assert_close(x[2, 1:5], torch.tensor([0.0, 0, 1, 0]))
    shops = x[names.index("s1") :, 5:]
    assert names[-4:] == ("s1", "s2", "s3", "s9")
    assert shops.tolist() == [
        [1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0],  # FR is not in the vocabulary
        [0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1],  # only a payment names s9
    ]
    assert graph.dataset.class_names == ("fraud", "ok")
    assert graph.dataset.y[:6].tolist() == [1, 0, 0, 1, 0, 1]
    assert len(graph.prepared.split()) == 3
    text = "\n".join(lines)
    assert "network: 1 cells are not in the vocabulary: other" in text
    assert "card nodes: 6, with 5 features" in text
    assert "used edges: 6, with 0 features" in text


def test_a_proposed_vocabulary_is_one_of_kinds(tmp_path: Path) -> None:
    recipe, tables = owner(tmp_path)
    propose_vocabulary(recipe, tables, tmp_path / "proposed.toml")
    found = tomllib.loads((tmp_path / "proposed.toml").read_text())["nodes"]
    assert found["card"]["categories"] == {"network": ["amex", "other", "visa"]}
    assert found["card"]["numbers"]["opened"]["median"] == 76.0  # of 31, 121 days
    assert found["shop"] == {"categories": {"country": ["AT", "FR"]}}
    (tmp_path / "vocabulary.toml").write_text((tmp_path / "proposed.toml").read_text())
    prepare_graph(recipe, tables, tmp_path / "graph")


def test_a_kind_has_the_same_hash_in_another_recipe(tmp_path: Path) -> None:
    def of(name: str, **changed: str) -> dict[str, str]:
        recipe, tables = owner(tmp_path / name, **changed)
        prepare_graph(recipe, tables, tmp_path / name / "graph")
        graph = load_graph_file(tmp_path / name / "graph")
        assert graph.dataset.schema is not None
        kinds = graph.dataset.schema.node_types
        return dict(zip(kinds, graph.prepared.split(), strict=True))

    whole = of("whole")
    few = of("few", recipe_toml=without_device(RECIPE))
    assert few == {kind: whole[kind] for kind in ("card", "shop")}
    other = of("other", vocabulary_toml=VOCABULARY.replace("100.0", "101.0"))
    assert other["shop"] == whole["shop"]
    assert other["card"] != whole["card"]


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"recipe_toml": RECIPE.replace('type = "card"\n', "", 1)},
            r"some tables name a kind of nodes \(type = …\) or a relation, others none",
        ),
        (
            {"recipe_toml": RECIPE.replace('target = "shop"\n', "", 1)},
            r"\[\[edges\]\] 1: the edges of a relation need relation = its name",
        ),
        (
            {"recipe_toml": RECIPE.replace('target = "shop"', 'target = "store"', 1)},
            'the relation "pays" has the kind "store", which is no kind of nodes. Kinds: '
            "card, shop, device",
        ),
        (
            {"recipe_toml": RECIPE.replace('relation = "used"', 'relation = "pays"')},
            'two relations have the name "pays", from card to shop and from card to device',
        ),
        (
            {"recipe_toml": RECIPE.replace('type = "device"', 'type = "Card"')},
            'the kinds "card" and "Card" differ only by case',
        ),
        (
            {"recipe_toml": RECIPE.replace('type = "device"', 'type = "a/b"')},
            "'a/b' is no name of a kind or relation",
        ),
        (
            {
                "recipe_toml": RECIPE.replace(
                    'country = {kind = "category", missing = "zero"}',
                    'country = {kind = "label", classes = ["AT"]}',
                )
            },
            "card nodes and shop nodes both list classes",
        ),
        (
            {"recipe_toml": RECIPE.replace('"flag"', '"refuse"')},
            r'payments.csv, row 6, target: "s9" has no row in the tables of shop nodes',
        ),
        ({"shops_csv": "shop,country\n"}, "shops.csv has no rows"),
        (
            {"vocabulary_toml": VOCABULARY.replace("shop", "Shop")},
            r'the vocabulary has no entry "country" in \[nodes.shop.categories\]',
        ),
        (
            {
                "vocabulary_toml": VOCABULARY.replace(
                    '["amex", "visa"]', str([f"n{i}" for i in range(1001)])
                )
            },
            r'"network" in \[nodes.card.categories\] lists 1,001 values, the limit is',
        ),
    ],
)
def test_a_recipe_or_table_that_does_not_fit_is_named(
    changed: dict[str, str], text: str, tmp_path: Path
) -> None:
    recipe, tables = owner(tmp_path, **changed)
    with pytest.raises(DataError, match=text):
        prepare_graph(recipe, tables, tmp_path / "graph")
    assert not (tmp_path / "graph").exists()


def test_edges_of_a_relation_may_have_labels(tmp_path: Path) -> None:
    text = RECIPE.replace(
        'shop = "target"\n"*" = "ignore"',
        'shop = "target"\namount = "number"\nwhen = "time"\ndevice = "ignore"\n'
        'late = {kind = "label", classes = ["no", "yes", "lost"]}',
    ).replace(
        'fraud = {kind = "label", classes = {1 = "fraud", 0 = "ok"}}', 'fraud = "label"'
    )
    payments = (
        "number,shop,device,amount,when,late\nc1,s1,d1,3,2,yes\nc2,s1,d2,4,1,no\n"
        "c1,s1,d3,5,3,no\n"
    )
    recipe, tables = owner(tmp_path, recipe_toml=text, payments_csv=payments)
    words = (
        VOCABULARY + "[edges.pays.numbers]\namount = {mean = 4, std = 2, median = 4}"
    )
    (tmp_path / "vocabulary.toml").write_text(words)
    lines = prepare_graph(recipe, tables, tmp_path / "graph")
    table = load_graph_file(tmp_path / "graph").dataset.edges
    assert table is not None
    assert table.class_names == ("no", "yes", "lost")
    assert table.y.tolist() == [0, 1, 0]  # sorted by time
    assert table.x.flatten().tolist() == [0, -0.5, 0.5]
    assert "label of pays edges: no: 2, yes: 1" in lines


def test_an_archive_is_refused_before_tables_are_read(tmp_path: Path) -> None:
    recipe, _ = owner(tmp_path)
    with pytest.raises(DataError, match="A typed graph is written as a folder"):
        prepare_graph(recipe, [tmp_path / "none.csv"], tmp_path / "graph.npz")


def test_a_category_of_a_million_values_is_one_error(tmp_path: Path) -> None:
    rows = "".join(f"c{i},2020-01-11,net{i},0,\n" for i in range(1_000_000))
    cards = "number,opened,network,fraud,part\n" + rows
    recipe, tables = owner(tmp_path, cards_csv=cards)
    with pytest.raises(DataError) as caught:
        propose_vocabulary(recipe, tables, tmp_path / "proposed.toml")
    assert 'The category "network" has 1,000,000 values' in str(caught.value)


@pytest.fixture(scope="module")
def owners(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare three owners, of which the last has no devices."""
    folder = tmp_path_factory.mktemp("owners")
    for name in ("a", "b", "c"):
        text = without_device(RECIPE) if name == "c" else RECIPE
        recipe, tables = owner(folder / f"{name} tables", recipe_toml=text)
        (folder / "own").mkdir(exist_ok=True)
        prepare_graph(recipe, tables, folder / "own" / name)
    return folder


def test_owners_with_other_kinds_train_and_another_scale_is_refused(
    owners: Path, tmp_path: Path
) -> None:
    values = SMALL | {"schema_align": "name"}
    run = simulate(
        "fedavg", owners=str(owners / "own"), output_dir=str(tmp_path), **values
    )
    assert run.summary["best"]["test"]["num_nodes"] == 6
    scale = VOCABULARY.replace("100.0", "101.0")
    recipe, tables = owner(tmp_path / "tables", vocabulary_toml=scale)
    prepare_graph(recipe, tables, tmp_path / "d")
    paths = [*sorted((owners / "own").iterdir()), tmp_path / "d"]
    reason = r'the features of its "card" nodes differ in number, name or recipe'
    with pytest.raises(DataError, match=f"d: {reason}"):
        simulate(
            "fedavg",
            owners=",".join(map(str, paths)),
            output_dir=str(tmp_path),
            **values,
        )
    nodes = [{"graph": str(path)} for path in paths]
    deployed = run_owners(nodes, tmp_path / "run", **values)
    (refused,) = deployed.summary["refused"]
    assert refused["name"] == "d"
    assert reason in refused["reason"]


def test_equal_schemas_compare_one_hash_of_all_recipes(
    owners: Path, tmp_path: Path
) -> None:
    for name, scale in (("a", "100.0"), ("b", "100.0"), ("c", "101.0")):
        text = RECIPE.replace("private = true\n", "")
        words = VOCABULARY.replace("100.0", scale)
        recipe, tables = owner(
            tmp_path / f"{name} tables", recipe_toml=text, vocabulary_toml=words
        )
        (tmp_path / "own").mkdir(exist_ok=True)
        prepare_graph(recipe, tables, tmp_path / "own" / name)
    with pytest.raises(DataError, match="c: its features were prepared with another"):
        simulate(
            "fedavg", owners=str(tmp_path / "own"), output_dir=str(tmp_path), **SMALL
        )
    nodes = [{"graph": str(path)} for path in sorted((tmp_path / "own").iterdir())]
    deployed = run_owners(nodes, tmp_path / "run", **SMALL)
    (refused,) = deployed.summary["refused"]
    assert refused["name"] == "c"
    assert "prepared with another recipe or vocabulary" in refused["reason"]


def test_new_rows_are_prepared_by_the_same_recipe(owners: Path, tmp_path: Path) -> None:
    nodes = [{"graph": str(path)} for path in sorted((owners / "own").iterdir())]
    values = SMALL | {"schema_align": "name"}
    run_owners(nodes, tmp_path / "run", **values)
    (model,) = (tmp_path / "run-models").glob("**/*-a-*")
    cards = "number,opened,network\nn1,2020-03-01,diners\nn2,2020-03-02,visa\n"
    payments = "number,shop,device,amount\nn1,s1,d9,3\nn2,s1,d9,4\n"
    recipe, tables = owner(tmp_path / "new", cards_csv=cards, payments_csv=payments)
    prepare_graph(recipe, tables, tmp_path / "graph", has_labels=False)
    found = predict_graph(model, tmp_path / "graph")
    assert found.items["node"].tolist() == ["n1", "n2"]
    assert found.values.isfinite().all()
    other = VOCABULARY.replace("100.0", "101.0")
    recipe, tables = owner(
        tmp_path / "new",
        cards_csv=cards,
        payments_csv=payments,
        vocabulary_toml=other,
    )
    prepare_graph(recipe, tables, tmp_path / "other", has_labels=False)
    with pytest.raises(DataError, match="prepared with another recipe or vocabulary"):
        predict_graph(model, tmp_path / "other")
