"""Sets of graphs from an owner's tables: patients with visits and drugs, and molecules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flower_fgl.core.errors import DataError
from flower_fgl.datasets.graph_files.graph_file import save_client_graph
from flower_fgl.datasets.graph_files.graph_set import load_graph_set
from flower_fgl.datasets.splits.graph_sets import client_from_set
from flower_fgl.datasets.tables.prepare import prepare_graph, propose_vocabulary
from flower_fgl.methods import parse_config
from flower_fgl.runs.model_file import read_card
from flower_fgl.simulation.prediction import predict_graph
from tests.datasets.tables.layouts import write
from tests.support.owners import run_owners

RECIPE = """
vocabulary = "vocabulary.toml"

[[graphs]]
table = "patients.csv"
[graphs.columns]
patient = "id"
household = "key"
back = {kind = "label", classes = {1 = "back", 0 = "well"}}
born = "ignore"

[[nodes]]
type = "patient"
table = "patients.csv"
[nodes.columns]
patient = {kind = "id", graph = true}
born = "date"
"*" = "ignore"

[[nodes]]
type = "visit"
table = "visits.csv"
[nodes.columns]
patient = "graph"
visit = "id"
ward = "category"

[[nodes]]
type = "drug"
from = "edges"

[[edges]]
relation = "had"
source = "patient"
target = "visit"
table = "visits.csv"
[edges.columns]
patient = {kind = "source", graph = true}
visit = "target"
"*" = "ignore"

[[edges]]
relation = "gave"
source = "visit"
target = "drug"
private = true
table = "doses.csv"
[edges.columns]
patient = "graph"
visit = "source"
drug = "target"
"""
VOCABULARY = """
[nodes.patient.numbers]
born = {mean = 0.0, std = 100.0, median = 0.0}
[nodes.visit.categories]
ward = ["a", "b"]
"""
PATIENTS = """patient,household,back,born
p1,h1,1,1970-01-11
p2,h1,0,1970-01-21
p3,,,1970-01-31
"""
VISITS = """patient,visit,ward
p1,1,a
p1,2,b
p2,1,c
p3,1,a
"""
DOSES = """patient,visit,drug
p1,1,x
p1,2,x
p2,1,x
p3,1,y:2
"""


def owner(folder: Path, **changed: str) -> tuple[Path, list[Path]]:
    """Write the tables of a hospital; return recipe and tables."""
    folder.mkdir(exist_ok=True)
    files = {"recipe_toml": RECIPE, "vocabulary_toml": VOCABULARY}
    files |= {"patients_csv": PATIENTS, "visits_csv": VISITS, "doses_csv": DOSES}
    recipe, _, *tables = write(folder, **files | changed)
    return recipe, tables


def test_tables_become_a_set_of_typed_graphs(tmp_path: Path) -> None:
    lines = prepare_graph(*owner(tmp_path), tmp_path / "set")
    owned = load_graph_set(tmp_path / "set")
    dataset = owned.dataset
    assert (owned.ids, owned.keys) == (("p1", "p2", "p3"), ("h1", "h1", "p3"))
    assert dataset.y.tolist() == [0, 1, -1]
    assert dataset.class_names == ("back", "well")
    schema = dataset.schema
    assert schema is not None
    assert schema.widths == (("drug", 0), ("patient", 1), ("visit", 3))
    gave, had = ("visit", "gave", "drug"), ("patient", "had", "visit")
    assert (schema.relations, schema.private) == ((gave, had), {gave})
    assert torch.bincount(dataset.batch).tolist() == [4, 3, 3]
    assert dataset.node_type is not None
    visits = dataset.x[dataset.node_type == 2, 1:]
    assert visits.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]
    born = dataset.x[dataset.node_type == 1, 0]
    torch.testing.assert_close(born, torch.tensor([0.1, 0.2, 0.3]))
    assert dataset.messages is not None
    assert dataset.messages.relation is not None
    found = dataset.batch[dataset.messages.index[0]]
    assert torch.bincount(found[dataset.messages.relation == 0]).tolist() == [2, 1, 1]
    assert len(owned.prepared.split()) == 3
    assert (tmp_path / "set" / "edges" / "gave.csv").read_text() == (
        "graph,source,target\np1,1,x\np1,2,x\np2,1,x\np3,1,y:2\n"
    )
    assert "graphs: 3" in lines
    assert "label of graphs: none: 1, back: 1, well: 1" in lines


def test_an_exported_set_keeps_the_recipe(tmp_path: Path) -> None:
    prepare_graph(*owner(tmp_path), tmp_path / "set")
    owned = load_graph_set(tmp_path / "set")
    values = {"setting": "graph", "model": "rgcn", "schema-align": "private"}
    client = client_from_set(owned, parse_config(values))
    save_client_graph(tmp_path / "set.npz", client)
    assert load_graph_set(tmp_path / "set.npz").prepared == owned.prepared


def test_a_set_of_plain_graphs_is_prepared_too(tmp_path: Path) -> None:
    recipe = """
    [[graphs]]
    table = "molecules.csv"
    columns = {name = "id", toxic = "label", role = "split"}
    [[nodes]]
    table = "atoms.csv"
    columns = {molecule = "graph", atom = "id", mass = "number"}
    [[edges]]
    table = "bonds.csv"
    columns = {molecule = "graph", one = "source", other = "target", order = "number"}
    """
    path, *tables = write(
        tmp_path,
        recipe_toml=recipe,
        molecules_csv="name,toxic,role\nm1,yes,train\nm2,no,test\n",
        atoms_csv="molecule,atom,mass\nm1,1,12\nm2,1,1\nm1,2,16\n",
        bonds_csv="molecule,one,other,order\nm1,1,2,2\n",
    )
    prepare_graph(path, tables, tmp_path / "set")
    owned = load_graph_set(tmp_path / "set")
    assert owned.dataset.x.tolist() == [[12], [16], [1]]
    assert owned.dataset.masks["test"].tolist() == [False, True]
    assert owned.dataset.messages is not None
    assert owned.dataset.messages.x.tolist() == [[2]]
    with pytest.raises(DataError, match=r"set of graphs is written as a folder"):
        prepare_graph(path, tables, tmp_path / "set.npz")


def test_a_proposed_vocabulary_has_no_graphs(tmp_path: Path) -> None:
    recipe, tables = owner(tmp_path)
    propose_vocabulary(recipe, tables, tmp_path / "words.toml")
    assert '"a"' in (text := (tmp_path / "words.toml").read_text())
    assert "graphs" not in text


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"visits_csv": VISITS + "p9,1,a\n", "doses_csv": DOSES + "p9,1,x\n"},
            r'1 drug nodes are of no graph, e.g. "p9:x"',
        ),
        ({"doses_csv": DOSES + "p2,2,x\n"}, r'source: "p2:2" has no row'),
        (
            {"visits_csv": VISITS + "p1,1,b\n"},
            r'visits.csv, row 2 and visits.csv, row 6 have one id, "p1:1"',
        ),
        ({"visits_csv": VISITS.replace("p2", "p:2")}, "no colon"),
        (
            {"recipe_toml": RECIPE.replace('patient = "graph"\nvisit = "id"',
                                           'patient = "ignore"\nvisit = "id"')},
            "visit nodes have 0 columns that name the graph",
        ),
        (
            {"recipe_toml": RECIPE.replace('ward = "category"', 'ward = "label"')},
            "visit nodes have columns of the kind label",
        ),
        (
            {"recipe_toml": RECIPE.replace('born = "ignore"', 'born = "date"')},
            "graphs have columns of the kind date",
        ),
        (
            {"recipe_toml": RECIPE[RECIPE.index("[[nodes]]"):]},
            "patient nodes have 1 columns that name the graph",
        ),
        (
            {"patients_csv": PATIENTS + "p4,,0,1970-01-01\n"},
            None,
        ),
    ],
    ids=str,
)  # fmt: skip
def test_tables_that_are_no_set_are_refused(
    changed: dict[str, str], message: str | None, tmp_path: Path
) -> None:
    recipe, tables = owner(tmp_path, **changed)
    if message is None:  # a patient without visits is a graph of one node
        prepare_graph(recipe, tables, tmp_path / "set")
        sizes = torch.bincount(load_graph_set(tmp_path / "set").dataset.batch)
        assert sizes.tolist() == [4, 3, 3, 1]
        return
    with pytest.raises(DataError, match=message):
        prepare_graph(recipe, tables, tmp_path / "set")
    assert not (tmp_path / "set").exists()


def test_owners_compare_recipes_of_sets_and_predict(tmp_path: Path) -> None:
    patients = PATIENTS.splitlines()[0] + "\n"
    visits, doses = "patient,visit,ward\n", "patient,visit,drug\n"
    for k in range(30):
        patients += f"p{k},h{k},{k % 2},1970-01-{1 + k % 28:02}\n"
        visits += f"p{k},v,{'ab'[k % 2]}\n"
        doses += f"p{k},v,{'xy'[k % 2]}\n"
    tables = {"patients_csv": patients, "visits_csv": visits, "doses_csv": doses}
    public = RECIPE.replace("private = true\n", "")
    other = VOCABULARY.replace('["a", "b"]', '["b", "a"]')
    nodes = []
    for number in range(4):
        words = other if number == 3 else VOCABULARY
        folder = tmp_path / f"own{number}"
        made = owner(folder, recipe_toml=public, vocabulary_toml=words, **tables)
        prepare_graph(*made, folder / "set")
        nodes.append({"graph": str(folder / "set"), "name": f"owner-{number}"})
    settings = {"setting": "graph", "model": "rgcn", "hidden_channels": 4, "rounds": 1}
    run = run_owners(nodes, tmp_path / "run", **settings)
    (refused,) = run.summary["refused"]
    assert refused["name"] == "owner-3"
    card = read_card(tmp_path / "run")
    assert card is not None
    assert card.prepared
    new = owner(tmp_path / "new", recipe_toml=public, **tables)
    prepare_graph(*new, tmp_path / "new" / "set", has_labels=False)
    found = predict_graph(tmp_path / "run", tmp_path / "new" / "set")
    assert len(found.values) == 30
    with pytest.raises(DataError, match="another recipe or vocabulary"):
        predict_graph(tmp_path / "run", tmp_path / "own3" / "set")
