"""Graphs from an owner's tables: values, vocabulary, ids, formats and what is counted."""

from __future__ import annotations

import math
import tomllib
from datetime import date
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.graph_file import LocalGraphFile, load_graph_file
from flower_fgl.datasets.tables.prepare import prepare_graph, propose_vocabulary
from tests.datasets.tables.layouts import (
    ACCOUNTS,
    LARGE,
    RECIPE,
    TRANSFERS,
    VOCABULARY,
    bank,
    write,
)


def prepared(folder: Path, **changed: str) -> tuple[LocalGraphFile, list[str]]:
    """Return the graph of a bank and what was printed."""
    recipe, tables = bank(folder, **changed)
    lines = prepare_graph(recipe, tables, folder / "graph")
    return load_graph_file(folder / "graph"), lines


def column(graph: LocalGraphFile, name: str) -> list[float]:
    """Return one feature of all nodes."""
    values: list[float] = graph.dataset.x[
        :, graph.dataset.feature_names.index(name)
    ].tolist()
    return values


def test_each_kind_of_column_becomes_its_features(tmp_path: Path) -> None:
    graph, _ = prepared(tmp_path)
    assert graph.dataset.feature_names == (
        *("opened", "opened missing", "balance", "balance missing"),
        *("country=AT", "country=DE", "country=(other)", "business", "foreign"),
    )
    # 2019-05-02 is 18,018 days after 1970-01-01; the vocabulary has mean 18,000, std 400
    assert column(graph, "opened")[0] == pytest.approx(18 / 400)
    assert column(graph, "opened")[2] == pytest.approx(278 / 400)  # the median
    assert column(graph, "opened missing") == [0, 0, 1, 0, 0]
    assert column(graph, "balance")[0] == pytest.approx((math.log(121.5) - 6) / 2)
    assert column(graph, "balance")[1] == 0  # the mean
    assert column(graph, "balance missing") == [0, 1, 0, 0, 0]
    assert column(graph, "country=AT") == [1, 0, 1, 0, 0]
    assert column(graph, "country=(other)") == [0, 0, 0, 1, 0]  # FR is unseen
    assert column(graph, "business") == [0, 1, 0, 0, 0]
    assert graph.dataset.y.tolist() == [1, 0, 1, -1, -1]
    assert graph.dataset.class_names == ("fraud", "ok")


def test_large_account_numbers_keep_all_digits(tmp_path: Path) -> None:
    graph, _ = prepared(tmp_path)
    assert graph.names == (*(str(LARGE + i) for i in range(4)), "9000000000000000009")
    recipe, tables = bank(tmp_path)
    prepare_graph(recipe, tables, tmp_path / "graph.npz")
    archive = load_graph_file(tmp_path / "graph.npz")
    assert archive.node_ids.tolist() == [int(name) for name in graph.names]


def test_accounts_of_others_are_flagged_and_counted(tmp_path: Path) -> None:
    graph, lines = prepared(tmp_path)
    assert column(graph, "foreign") == [0, 0, 0, 0, 1]
    assert graph.dataset.x[4].tolist() == [0] * 8 + [1]
    text = "\n".join(lines)
    assert "1 foreign nodes" in text
    assert 'opened: 1 empty, filled by "median"' in text
    assert "country: 1 cells are not in the vocabulary: FR" in text
    assert "label of nodes: none: 2, fraud: 1, ok: 2" in text
    assert "nodes: 5, with 9 features" in text


def test_a_proposed_vocabulary_has_the_values_of_one_party(tmp_path: Path) -> None:
    recipe, tables = bank(tmp_path)
    propose_vocabulary(recipe, tables, tmp_path / "proposed.toml")
    found = tomllib.loads((tmp_path / "proposed.toml").read_text())["nodes"]
    logs = np.log1p([120.5, 15000, 88])
    assert found["categories"] == {"country": ["AT", "DE", "FR"]}
    assert found["numbers"]["balance"] == pytest.approx(
        {"mean": logs.mean(), "std": logs.std(), "median": np.log1p(120.5)}, rel=1e-5
    )
    assert found["numbers"]["opened"]["median"] == 18278  # 2020-01-17


def test_the_hash_follows_meanings_and_vocabulary_only(tmp_path: Path) -> None:
    def of(**changed: str) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        return prepared(folder, **changed)[0].prepared

    first = of()
    renamed = RECIPE.replace("balance =", "Saldo =").replace(
        "log = true", 'log = true, name = "balance"'
    )
    renamed = renamed.replace("fraud = {", "Betrug = {")
    accounts = ACCOUNTS.replace("balance", "Saldo").replace("fraud", "Betrug")
    assert of(recipe_toml=renamed, accounts_csv=accounts) == first
    pattern = RECIPE.replace("balance =", '"bal*" =')
    assert of(recipe_toml=pattern) == first
    inline = RECIPE.replace('vocabulary = "vocabulary.toml"', "")
    inline += VOCABULARY.replace("[nodes.", "[vocabulary.nodes.")
    assert of(recipe_toml=inline) == first
    assert of(vocabulary_toml=VOCABULARY.replace("18000", "18001")) != first
    assert of(recipe_toml=RECIPE.replace('"mean"', '"zero"')) != first


@pytest.mark.parametrize("is_first", [True, False])
def test_the_longest_pattern_declares_a_column(is_first: bool, tmp_path: Path) -> None:
    recipe = RECIPE.replace('holder = "ignore"\n', "")
    old, others = (
        'balance = {kind = "number", missing = "mean", log = true}',
        '"*" = "ignore"',
    )
    pattern = old.replace("balance", '"bal*"')
    new = f"{others}\n{pattern}" if is_first else f"{pattern}\n{others}"
    graph, _ = prepared(tmp_path, recipe_toml=recipe.replace(old, new))
    assert column(graph, "balance missing") == [0, 1, 0, 0, 0]
    assert column(graph, "balance")[0] == pytest.approx((math.log(121.5) - 6) / 2)
    assert "holder" not in graph.dataset.feature_names


def test_decimal_commas_and_semicolons_are_read(tmp_path: Path) -> None:
    table = ACCOUNTS.replace(",", ";").replace("120.5", "120,5")
    recipe = RECIPE.replace(
        'table = "accounts*.csv"',
        'table = "accounts*.csv"\nseparator = ";"\ndecimal = ","',
    )
    graph, _ = prepared(tmp_path, accounts_csv=table, recipe_toml=recipe)
    assert column(graph, "balance")[0] == pytest.approx((math.log(121.5) - 6) / 2)


def test_years_of_two_digits_are_of_both_centuries(tmp_path: Path) -> None:
    recipe = RECIPE.replace('"date"', '"date", format = "%y-%m-%d"')
    table = ACCOUNTS.replace("2021-", "71-").replace(",20", ",")
    graph, _ = prepared(tmp_path, accounts_csv=table, recipe_toml=recipe)
    opened = column(graph, "opened")
    for value, day in ((opened[0], "2019-05-02"), (opened[3], "1971-11-30")):
        days = (date.fromisoformat(day) - date(1970, 1, 1)).days
        assert value == pytest.approx((days - 18000) / 400)


def test_a_number_that_stands_for_an_empty_cell_has_any_form(tmp_path: Path) -> None:
    recipe = RECIPE.replace("log = true", 'empty = ["-1"]')
    frame = pd.DataFrame({"account": [1, 2], "to": [2, 1]})
    for name, cells in {"text": ["-1.0", "5"], "number": [-1.0, 5.0]}.items():
        (folder := tmp_path / name).mkdir()
        path, (_, transfers) = bank(folder, recipe_toml=recipe)
        path.write_text(recipe.replace("accounts*.csv", "accounts*"), "utf-8")
        more = {"opened": "2020-01-17", "balance": cells, "country": "AT"}
        more |= {"business": "no", "holder": "h", "fraud": "1"}
        table = folder / ("accounts.csv" if name == "text" else "accounts.parquet")
        transfers.write_text("from,to,amount\n1,2,3\n", "utf-8")
        write_table = frame.assign(**more).drop(columns="to")
        if name == "text":
            write_table.to_csv(table, index=False)
        else:
            pytest.importorskip("pyarrow")
            write_table.to_parquet(table)
        prepare_graph(path, [table, transfers], folder / "graph")
        graph = load_graph_file(folder / "graph")
        assert column(graph, "balance missing") == [1, 0]


@pytest.mark.parametrize(
    ("form", "empty"),
    [("", ["NA", "9999-12-31"]), (', format = "%d.%m.%Y"', ["31.12.9999"])],
)
def test_a_date_that_stands_for_an_empty_cell_is_one_in_parquet_too(
    form: str, empty: list[str], tmp_path: Path
) -> None:
    pytest.importorskip("pyarrow")
    days = ["2019-05-02", "9999-12-31"]
    found = []
    for name in ("csv", "parquet"):
        (folder := tmp_path / name).mkdir()
        text = RECIPE.replace('"date"', f'"date", empty = {empty}{form}')
        recipe, (accounts, transfers) = bank(
            folder,
            recipe_toml=text.replace("accounts*.csv", f"accounts.{name}"),
            transfers_csv="from,to,amount\n1,2,3\n",
        )
        more = {"balance": 1.0, "country": "AT", "business": "no", "holder": "h"}
        frame = pd.DataFrame({"account": [1, 2], "opened": days, "fraud": [1, 0]})
        frame = frame.assign(**more)
        if name == "csv":
            if form:
                frame["opened"] = ["02.05.2019", "31.12.9999"]
            frame.to_csv(accounts, index=False)
        else:
            frame["opened"] = np.array(days, dtype="datetime64[us]")
            accounts = accounts.with_suffix(".parquet")
            frame.to_parquet(accounts)
        tables = [accounts, transfers]
        propose_vocabulary(recipe, tables, folder / "vocabulary-new.toml")
        words = (folder / "vocabulary-new.toml").read_text("utf-8")
        scale = tomllib.loads(words)["nodes"]["numbers"]["opened"]
        assert scale == {"mean": 18018, "std": 1, "median": 18018}
        prepare_graph(recipe, tables, folder / "graph")
        graph = load_graph_file(folder / "graph")
        assert column(graph, "opened missing") == [0, 1]
        found.append(column(graph, "opened"))
    # the median of the vocabulary, 18,278, has mean 18,000 and std 400
    assert found[0] == found[1] == pytest.approx([18 / 400, 278 / 400])


def test_several_files_of_a_table_are_read_as_one(tmp_path: Path) -> None:
    header, *rows = ACCOUNTS.splitlines()
    recipe, tables = bank(tmp_path, accounts_csv="\n".join([header, *rows[:2], ""]))
    tables += write(tmp_path, **{"accounts-b_csv": "\n".join([header, *rows[2:], ""])})
    lines = prepare_graph(recipe, tables, tmp_path / "graph")
    assert "accounts-b.csv: 2 nodes" in lines
    assert len(load_graph_file(tmp_path / "graph").names) == 5


def test_a_file_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    recipe, (accounts, transfers) = bank(tmp_path)
    (tmp_path / "link").symlink_to(tmp_path)
    for again in (transfers, Path(str(transfers)), tmp_path / "link" / transfers.name):
        with pytest.raises(DataError, match=r"transfers.csv is the same file as"):
            prepare_graph(recipe, [accounts, transfers, again], tmp_path / "graph")


def test_blank_lines_count_as_rows_and_hold_no_node(tmp_path: Path) -> None:
    graph, _ = prepared(tmp_path, accounts_csv=ACCOUNTS.replace("\n", "\n\n", 2))
    assert len(graph.names) == 5
    recipe, tables = bank(
        tmp_path,
        accounts_csv="\n\n".join(ACCOUNTS.split("\n")).replace("2021-11-30", "soon"),
    )
    with pytest.raises(
        DataError, match=r'accounts.csv, row 9, column "opened".*"soon"'
    ):
        prepare_graph(recipe, tables, tmp_path / "other")


def test_cells_of_several_lines_are_noted(tmp_path: Path) -> None:
    note = "If a quotation mark is not closed, the rows below it are lost."
    lost = ACCOUNTS.replace("h2,", '"h2,').replace("h3,", 'h3",')
    transfers = "from,to,amount\n"
    transfers += f'{LARGE},{LARGE + 1},"1\n0"\n{LARGE + 1},{LARGE},"2\n\n0"\n'
    _, lines = prepared(tmp_path, accounts_csv=lost, transfers_csv=transfers)
    assert lines[:2] == [
        "accounts.csv: 3 nodes",
        f"accounts.csv: 1 cell of holder spans several lines (row 3). {note}",
    ]
    assert (
        f"transfers.csv: 2 cells of amount span several lines (first in row 2). {note}"
        in lines
    )


def test_tables_that_join_add_columns_and_drop_other_rows(tmp_path: Path) -> None:
    header, *rows = (line.rpartition(",") for line in ACCOUNTS.splitlines())
    accounts = "\n".join([header[0], *(row[0] for row in rows), ""])
    labels = f"account,fraud\n{LARGE + 3},1\n{LARGE},0\n77,0\n9000000000000000009,1\n"
    recipe = RECIPE.replace(
        'fraud = {kind = "label", classes = {1 = "fraud", 0 = "ok"}}', ""
    )
    recipe += (
        '[[nodes]]\ntable = "labels.csv"\njoin = true\n[nodes.columns]\naccount = "id"\n'
        'fraud = {kind = "label", classes = {1 = "fraud", 0 = "ok"}}\n'
    )
    path, tables = bank(tmp_path, recipe_toml=recipe, accounts_csv=accounts)
    tables += write(tmp_path, labels_csv=labels)
    lines = prepare_graph(path, tables, tmp_path / "graph")
    counts = "columns of 2 nodes, 2 rows dropped, which name no own node"
    assert f"labels.csv: {counts}" in lines
    assert load_graph_file(tmp_path / "graph").dataset.y.tolist() == [1, -1, -1, 0, -1]


def test_ids_of_several_columns_are_joined_in_the_order_of_the_recipe(
    tmp_path: Path,
) -> None:
    recipe, *tables = write(
        tmp_path,
        recipe_toml='[[nodes]]\ntable = "accounts.csv"\n[nodes.columns]\nbank = "id"\n'
        'account = "id"\nbalance = "number"\n[[edges]]\ntable = "transfers*.csv"\n'
        '[edges.columns]\nbank = "source"\naccount = "source"\nto_bank = "target"\n'
        'to_account = "target"\n',
        accounts_csv="account,balance,bank\n1,10,1\n2,20,1\n1,30,2\n2,40,2\n",
        transfers_csv="to_bank,bank,to_account,account\n2,1,1,2\n",  # 1:2 to 2:1
        **{"transfers-b_csv": "account,bank,to_account,to_bank\n2,1,2,2\n"},  # to 2:2
    )
    prepare_graph(recipe, tables, tmp_path / "graph")
    graph = load_graph_file(tmp_path / "graph", needs_labels=False)
    assert graph.names == ("1:1", "1:2", "2:1", "2:2")
    ends = {frozenset(pair) for pair in graph.dataset.edge_index.T.tolist()}
    assert ends == {frozenset({1, 2}), frozenset({1, 3})}


def test_graphml_is_read_with_text_ids_and_a_repeated_name(tmp_path: Path) -> None:
    (path,) = write(
        tmp_path,
        bank_graphml='<graphml xmlns="http://graphml.graphdrawing.org/xmlns">'
        '<key id="a" for="node" attr.name="age" attr.type="long"/>'
        '<key id="b" for="node" attr.name="id" attr.type="string"/>'
        '<key id="c" for="edge" attr.name="sum" attr.type="double"/>'
        '<graph edgedefault="directed">'
        f'<node id="{LARGE}"><data key="a">31</data><data key="b">h1</data></node>'
        '<node id="n1"><data key="a">40</data></node>'
        f'<edge source="n1" target="{LARGE}"><data key="c">2.5</data></edge>'
        "</graph></graphml>",
    )
    (recipe,) = write(
        tmp_path,
        recipe_toml='[[nodes]]\ntable = "*.graphml"\n[nodes.columns]\nid = "id"\n'
        'age = "number"\n"id.1" = "ignore"\n[[edges]]\ntable = "*.graphml"\n'
        '[edges.columns]\nsource = "source"\ntarget = "target"\nsum = "ignore"\n',
    )
    prepare_graph(recipe, [path], tmp_path / "graph")
    graph = load_graph_file(tmp_path / "graph", needs_labels=False)
    assert graph.names == (str(LARGE), "n1")
    assert graph.dataset.x.tolist() == [[31], [40]]
    assert graph.dataset.edge_index.tolist() == [[0, 1], [1, 0]]


def graphml(folder: Path, number: int = 1) -> tuple[Path, Path]:
    """Write a recipe and a document with a default of each kind."""
    graph = (
        '<graph edgedefault="directed"><node id="a"><data key="n">red</data></node>'
        '<node id="b"/><node id="c"><data key="n"/><data key="all">7</data></node>'
        '<edge source="a" target="b"/><edge source="b" target="c">'
        '<data key="e">1.5</data></edge></graph>'
    )
    recipe, path = write(
        folder,
        recipe_toml='[[nodes]]\ntable = "a.graphml"\n[nodes.columns]\nid = "id"\n'
        'color = {kind = "category", missing = "zero"}\nage = "number"\n'
        '[[edges]]\ntable = "a.graphml"\n[edges.columns]\nsource = "source"\n'
        'target = "target"\nsum = "number"\nage = "ignore"\n'
        '[vocabulary.nodes.categories]\ncolor = ["red", "blue"]\n'
        "[vocabulary.nodes.numbers]\nage = {mean = 0, std = 1, median = 0}\n"
        "[vocabulary.edges.numbers]\nsum = {mean = 0, std = 1, median = 0}\n",
        a_graphml="<graphml>"
        '<key id="n" for="node" attr.name="color" attr.type="string">'
        "<default>blue</default></key>"
        '<key id="all" for="all" attr.name="age" attr.type="long">'
        "<default>40</default></key>"
        '<key id="e" for="edge" attr.name="sum" attr.type="double">'
        "<default>2.5</default></key>"
        '<key id="x" for="node" attr.name="none" attr.type="string"><default/></key>'
        f"{graph * number}</graphml>",
    )
    return recipe, path


def test_values_that_graphml_leaves_out_are_its_defaults(tmp_path: Path) -> None:
    recipe, path = graphml(tmp_path)
    prepare_graph(recipe, [path], tmp_path / "graph")
    graph = load_graph_file(tmp_path / "graph", needs_labels=False)
    assert column(graph, "color=red") == [1, 0, 0]
    assert column(graph, "color=blue") == [0, 1, 0]
    assert column(graph, "color missing") == [
        0,
        0,
        1,
    ]  # an empty value, not the default
    assert column(graph, "age") == [40, 40, 7]
    sums = pd.read_csv(tmp_path / "graph" / "edges.csv")["sum"]
    assert sums.tolist() == [2.5, 1.5]


def test_a_graphml_file_of_two_graphs_is_refused(tmp_path: Path) -> None:
    recipe, path = graphml(tmp_path, number=2)
    with pytest.raises(
        DataError, match=r"a.graphml must hold one graph, and has 2\. Write"
    ):
        prepare_graph(recipe, [path], tmp_path / "graph")


NPZ = """[[nodes]]
table = "graph.npz"
columns = {id = "id", x0 = "number", split = "split"}
[[edges]]
table = "graph.npz"
columns = {source = "source", target = "target"}
"""


def from_npz(folder: Path, **masks: list[int]) -> None:
    """Prepare a graph of four nodes from an ``.npz`` file."""
    (recipe,) = write(folder, recipe_toml=NPZ)
    arrays = {name: np.array(mask) for name, mask in masks.items()}
    edges = np.array([[0, 1], [2, 3]])
    np.savez(folder / "graph.npz", x=np.zeros((4, 1)), edge_index=edges, **arrays)
    prepare_graph(recipe, [folder / "graph.npz"], folder / "graph")


@pytest.mark.parametrize(
    "masks",
    [([1, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 0]), ([0, 3], [1], [0, 0, 0, 0])],
)
def test_masks_of_an_npz_file_are_numbers_of_nodes_or_0_and_1(
    masks: tuple[list[int], ...], tmp_path: Path
) -> None:
    names = ("train_mask", "val_mask", "test_mask")
    from_npz(tmp_path, **dict(zip(names, masks, strict=True)))
    nodes = pd.read_csv(tmp_path / "graph" / "nodes.csv")
    assert nodes["split"].fillna("").tolist() == ["train", "val", "", "train"]
    edges = pd.read_csv(tmp_path / "graph" / "edges.csv")
    assert edges.to_numpy().tolist() == [[0, 2], [1, 3]]  # (2, edges)


@pytest.mark.parametrize("mask", [[2, 2], [0, 4], [1, 0, 0, 2]])
def test_masks_of_an_npz_file_that_list_no_nodes_are_refused(
    mask: list[int], tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="train_mask must be one array of different"):
        from_npz(tmp_path, train_mask=mask)


def test_two_columns_of_a_parquet_file_with_one_name_are_refused(
    tmp_path: Path,
) -> None:
    arrow, parquet = (pytest.importorskip(f"pyarrow{p}") for p in ("", ".parquet"))
    recipe, tables = bank(tmp_path)
    cells = [arrow.array([text]) for text in ("1", "AT", "DE")]
    names = ["account", "country", "country"]
    parquet.write_table(arrow.table(cells, names), tmp_path / "accounts.parquet")
    text = RECIPE.replace("accounts*.csv", "accounts.parquet")
    recipe.write_text(text, "utf-8")
    with pytest.raises(DataError, match="has two columns with one name"):
        prepare_graph(
            recipe, [tmp_path / "accounts.parquet", tables[1]], tmp_path / "graph"
        )


def test_parquet_keeps_large_integers_dates_and_gaps(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    whole, _ = prepared(tmp_path)
    frame = pd.DataFrame(
        {
            "account": pd.array([LARGE + i for i in range(4)], dtype="Int64"),
            "opened": pd.to_datetime(["2019-05-02", "2020-01-17", None, "2021-11-30"]),
            "balance": [120.5, None, 15000, 88],
            "country": pd.Categorical(["AT", "DE", "AT", "FR"]),
            "business": [False, True, False, False],
            "holder": ["h1", "h2", "h3", "h4"],
            "fraud": pd.array([0, 1, 0, None], dtype="Int64"),
        }
    )
    frame.to_parquet(tmp_path / "accounts.parquet")
    recipe, tables = bank(
        tmp_path, recipe_toml=RECIPE.replace("accounts*.csv", "accounts.parquet")
    )
    prepare_graph(
        recipe, [tmp_path / "accounts.parquet", tables[1]], tmp_path / "other"
    )
    other = load_graph_file(tmp_path / "other")
    assert other.names == whole.names
    assert other.dataset.x.tolist() == whole.dataset.x.tolist()
    assert other.dataset.y.tolist() == whole.dataset.y.tolist()


def test_a_value_that_is_unseen_at_prediction_has_a_place(tmp_path: Path) -> None:
    whole, _ = prepared(tmp_path)
    accounts = "".join(f"{line.rpartition(',')[0]}\n" for line in ACCOUNTS.splitlines())
    recipe, tables = bank(tmp_path, accounts_csv=accounts.replace("AT", "XX"))
    prepare_graph(recipe, tables, tmp_path / "new", has_labels=False)
    new = load_graph_file(tmp_path / "new", needs_labels=False)
    assert new.dataset.feature_names == whole.dataset.feature_names
    assert new.prepared == whole.prepared
    assert column(new, "country=(other)") == [1, 0, 1, 1, 0]


def test_nothing_is_written_after_an_error_or_over_a_graph(tmp_path: Path) -> None:
    recipe, tables = bank(tmp_path, accounts_csv=ACCOUNTS.replace("120.5", "a lot"))
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError):
        prepare_graph(recipe, tables, tmp_path / "graph")
    labels = ACCOUNTS.replace(",0\n", ",\n").replace(",1\n", ",\n")
    unlisted = RECIPE.replace(', classes = {1 = "fraud", 0 = "ok"}', "")
    recipe, tables = bank(tmp_path, accounts_csv=labels, recipe_toml=unlisted)
    with pytest.raises(
        DataError, match=r"(?s)was not written:\n.*graph/nodes.csv: no node has"
    ):
        prepare_graph(recipe, tables, tmp_path / "graph")
    assert sorted(tmp_path.iterdir()) == before
    recipe, tables = bank(tmp_path)
    prepare_graph(recipe, tables, tmp_path / "graph")
    with pytest.raises(DataError, match="exists"):
        prepare_graph(recipe, tables, tmp_path / "graph")


CHANGES = {
    "unknown column": (
        {"accounts_csv": ACCOUNTS.replace("holder", "owner")},
        'has the column "owner", which .* does not declare. .*"owner" = "ignore"',
    ),
    "lacking column": (
        {
            "accounts_csv": ACCOUNTS.replace("business", "holder2").replace(
                "holder,", "x,"
            ),
            "recipe_toml": RECIPE.replace("holder =", '"*" ='),
        },
        'declares the column "business", which accounts.csv lacks. Known: account,',
    ),
    "date": (
        {"accounts_csv": ACCOUNTS.replace("2020-01-17", "17.01.2020")},
        r'accounts.csv, row 3, column "opened": expected a date such as 2026-01-31, got '
        r'"17.01.2020".*format = "%d.%m.%Y"',
    ),
    "number": (
        {"accounts_csv": ACCOUNTS.replace("15000", "NA")},
        r'row 4, column "balance": expected a number, got "NA".*empty = \["NA"\]',
    ),
    "decimal comma": (
        {"accounts_csv": ACCOUNTS.replace("120.5", '"120,5"')},
        'got "120,5".*decimal = ","',
    ),
    "thousands beside decimal commas": (
        {
            "accounts_csv": ACCOUNTS.replace(",", ";").replace("120.5", "15.000"),
            "recipe_toml": RECIPE.replace(
                "[nodes.columns]", 'separator = ";"\ndecimal = ","\n[nodes.columns]'
            ),
        },
        'row 2, column "balance": expected a number, got "15.000".*thousands without',
    ),
    "text of a missing number": (
        {"accounts_csv": ACCOUNTS.replace("120.5", "nan")},
        r'got "nan".*empty = \["nan"\]',
    ),
    "semicolons": (
        {"accounts_csv": ACCOUNTS.replace(",", ";")},
        "has one column, account;opened;.*Set separator = ';'",
    ),
    "no rows": (
        {"transfers_csv": "from,to,amount\n"},
        "transfers.csv has no rows. Remove it",
    ),
    "word for the day of the command": (
        {"accounts_csv": ACCOUNTS.replace("2020-01-17", "today")},
        'row 3, column "opened": expected a date such as 2026-01-31, got "today"',
    ),
    "table to join without a common id": (
        {
            "recipe_toml": RECIPE
            + '[[nodes]]\ntable = "more.csv"\njoin = true\n'
            + '[nodes.columns]\naccount = "id"\nage = "yes/no"\n',
            "more_csv": f"account,age\n{LARGE}.0,1\n",
        },
        f'more.csv: no id, e.g. "{LARGE}.0", is one of the nodes, e.g. "{LARGE}"',
    ),
    "edges without a listed node": (
        {"transfers_csv": f"from,to,amount\n{LARGE}.0,9,1\n"},
        f'transfers.csv: no id, e.g. "{LARGE}.0", is one of the nodes, e.g. "{LARGE}"',
    ),
    "separator of two characters": (
        {
            "recipe_toml": RECIPE.replace(
                "[nodes.columns]", 'separator = "; "\n[nodes.columns]'
            )
        },
        "separator must be one character, no line break, got '; '",
    ),
    "separator that ends the line": (
        {
            "recipe_toml": RECIPE.replace(
                "[nodes.columns]", 'separator = "\\n"\n[nodes.columns]'
            )
        },
        r"separator must be one character, no line break, got '\\n'",
    ),
    "rule that is no finite number": (
        {"recipe_toml": RECIPE.replace('"mean"', "nan")},
        'column "balance": missing must be .* or a finite number, got nan',
    ),
    "rule beyond all floats": (
        {"recipe_toml": RECIPE.replace('"mean"', "9" * 400)},
        'column "balance": missing must be .* or a finite number, got 9',
    ),
    "scale beyond all floats": (
        {"vocabulary_toml": VOCABULARY.replace("400.0", "4" * 400)},
        r'"opened" in \[nodes.numbers\] must be .*std above 0',
    ),
    "decimal mark": (
        {
            "recipe_toml": RECIPE.replace(
                "[nodes.columns]", 'decimal = ";"\n[nodes.columns]'
            )
        },
        'decimal must be "." or ",", got',
    ),
    "format of dates": (
        {"recipe_toml": RECIPE.replace('"date"', '"date", format = "%Q"')},
        'format = "%Q" is no form of dates',
    ),
    "year of two digits": (
        {
            "recipe_toml": RECIPE.replace('"date"', '"date", format = "%y-%m-%d"'),
            "accounts_csv": ACCOUNTS.replace("2021-", "45-").replace(",20", ","),
        },
        'row 5, column "opened": expected a date in the past, .*got "45-11-30". Write',
    ),
    "year of two digits in a date of the locale": (
        {
            "recipe_toml": RECIPE.replace('"date"', '"date", format = "%x"'),
            "accounts_csv": ACCOUNTS.replace("2019-05-02", "05/02/19")
            .replace("2020-01-17", "01/17/20")
            .replace("2021-11-30", "11/30/45"),
        },
        'row 5, column "opened": expected a date in the past, .*got "11/30/45". Write',
    ),
    "scale of zero": (
        {"vocabulary_toml": VOCABULARY.replace("400.0", "0")},
        r'"opened" in \[nodes.numbers\] must be .*std above 0',
    ),
    "time of nodes": (
        {"recipe_toml": RECIPE.replace('holder = "ignore"', 'holder = "time"')},
        "a time of nodes or graphs needs cuts",
    ),
    "part of a split": (
        {
            "recipe_toml": RECIPE.replace(
                'holder = "ignore"',
                'holder = {kind = "split", parts = {h1 = "first"}}',
            )
        },
        "parts must be train, val or test",
    ),
    "name of the label": (
        {
            "recipe_toml": RECIPE.replace(
                '"yes/no"', '{kind = "yes/no", name = "label"}'
            )
        },
        'a feature cannot have the name "label"',
    ),
    "yes or no": (
        {"accounts_csv": ACCOUNTS.replace("yes", "ja")},
        'row 3, column "business": expected one of yes, .*, got "ja"',
    ),
    "empty cell": (
        {"accounts_csv": ACCOUNTS.replace("DE", "")},
        'row 3, column "country": expected a category, got an empty cell. Declare what',
    ),
    "class": (
        {"accounts_csv": ACCOUNTS.replace("h2,1", "h2,2")},
        'row 3, column "fraud": expected one of 1, 0, got "2"',
    ),
    "repeated id": (
        {"accounts_csv": ACCOUNTS.replace(f"{LARGE + 2},", f"{LARGE},")},
        f'accounts.csv, row 2 and accounts.csv, row 4 have one id, "{LARGE}"',
    ),
    "empty id": (
        {"accounts_csv": ACCOUNTS.replace(f"{LARGE + 2},", ",")},
        'row 4, column "account": expected an id, got an empty cell',
    ),
    "missing end": (
        {"recipe_toml": RECIPE.replace('"flag"', '"refuse"')},
        'transfers.csv, row 4, target: "9000000000000000009" has no row .*foreign = "flag"',
    ),
    "empty end": (
        {"transfers_csv": TRANSFERS.replace(f"{LARGE + 2},20", ",20")},
        'transfers.csv, row 3, column "to": expected an id, got an empty cell',
    ),
    "account number as a number": (
        {
            "recipe_toml": RECIPE.replace("log = true", "empty = []"),
            "accounts_csv": ACCOUNTS.replace("120.5", f"{LARGE}"),
        },
        'row 2, column "balance".*declare it as "id"',
    ),
    "no nodes": (
        {"recipe_toml": '[[edges]]\ntable = "transfers.csv"\n'},
        r"has no nodes. Add a table \[\[nodes\]\]",
    ),
    "no edges": (
        {"recipe_toml": RECIPE.partition("[[edges]]")[0]},
        r"has no edges. Add a table \[\[edges\]\]",
    ),
    "unknown kind": (
        {"recipe_toml": RECIPE.replace('"yes/no"', '"bool"')},
        'column "business": unknown kind .bool.. .*Known: category',
    ),
    "table of edges to join": (
        {
            "recipe_toml": RECIPE.replace(
                "[edges.columns]", "join = true\n[edges.columns]"
            )
        },
        r"\[\[edges\]\] 1: join = true is for tables of nodes or graphs; each row",
    ),
    "name of several columns": (
        {
            "recipe_toml": RECIPE.replace("balance =", '"bal*" =').replace(
                "log = true", 'name = "balance"'
            )
        },
        r'column "bal\*": name = … is for one column.*Remove it, or declare each',
    ),
    "unknown option": (
        {"recipe_toml": RECIPE.replace("log = true", "logs = true")},
        'unknown key "logs". Did you mean "log"',
    ),
    "no vocabulary": (
        {"recipe_toml": RECIPE.replace('vocabulary = "vocabulary.toml"', "")},
        r'needs a vocabulary, with "opened" in \[nodes.numbers\].*--propose',
    ),
    "entry of the vocabulary": (
        {"vocabulary_toml": VOCABULARY.replace("country", "land")},
        r'the vocabulary has no entry "country" in \[nodes.categories\]',
    ),
    "times of edges without a class": (
        {"recipe_toml": RECIPE.replace('amount = "ignore"', 'amount = "time"')},
        'edges have columns of the kind time, but no label.*"ignore"',
    ),
    "ragged rows": (
        {"accounts_csv": ACCOUNTS.replace("h3,0", "h3,0,1")},
        "accounts.csv is not a CSV table whose rows have equally many cells",
    ),
    "a first row that is too long": (
        {"accounts_csv": ACCOUNTS.replace("h1,0", "h1,0,1")},
        "accounts.csv is not a CSV table whose rows have equally many cells",
    ),
    "table that is not given": (
        {"recipe_toml": RECIPE.replace("accounts*", "customers")},
        r"accounts.csv is no table of .*Known: customers.csv",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_an_error_names_the_place_and_the_remedy(case: str, tmp_path: Path) -> None:
    changed, expected = CHANGES[case]
    recipe, tables = bank(tmp_path, **changed)
    with pytest.raises(DataError, match=f"(?s){expected}"):
        prepare_graph(recipe, tables, tmp_path / "graph")


def test_a_label_may_be_absent_only_for_predict(tmp_path: Path) -> None:
    accounts = "".join(f"{line.rpartition(',')[0]}\n" for line in ACCOUNTS.splitlines())
    recipe, tables = bank(tmp_path, accounts_csv=accounts)
    with pytest.raises(
        DataError, match=r'"fraud", which accounts.csv lacks.*--no-labels'
    ):
        prepare_graph(recipe, tables, tmp_path / "graph")


def test_a_category_of_ids_is_refused_in_a_proposal(tmp_path: Path) -> None:
    rows = "".join(f"{i},2020-01-01,1,C{i},no,A,0\n" for i in range(1001))
    recipe, tables = bank(
        tmp_path,
        accounts_csv=f"{ACCOUNTS.splitlines()[0]}\n{rows}",
        transfers_csv="from,to,amount\n1,2,3\n",
    )
    with pytest.raises(DataError, match=r'"country" has 1,001 values.*"ignore"'):
        propose_vocabulary(recipe, tables, tmp_path / "proposed.toml")
    assert not (tmp_path / "proposed.toml").exists()
