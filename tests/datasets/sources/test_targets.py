"""Datasets with several labels per item: the setting ``target`` chooses one of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from flower_fgl import simulate
from flower_fgl.cli.main import app
from flower_fgl.core.config import RunConfig
from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.core.options import Scalar
from flower_fgl.core.settings import TARGETS
from flower_fgl.core.unused_settings import reject_unused_settings
from flower_fgl.datasets.build import load_dataset
from flower_fgl.datasets.client_graph import GraphDataset, NodeDataset
from flower_fgl.datasets.owners import list_owners
from flower_fgl.datasets.sources import load as load_module
from flower_fgl.datasets.sources.load import SOURCES, load
from flower_fgl.datasets.sources.raw_readers import Raw, choose_target, read_targets
from flower_fgl.datasets.store import open_store
from flower_fgl.lab.experiments.experiment_file import read_experiment
from flower_fgl.methods import parse_config
from flower_fgl.runs.writer import RunWriter
from flower_fgl.simulation.prediction import predict_graph
from tests.support import raw_writers as raw

UNKNOWN = float("nan")
HAS_37 = [1, 0, 1, 1, 0, 1, 0, 1, 1, 0, 1, 0]
ASSAYS = ("NR-AR", "NR-AhR", "SR-p53")
RESULTS = [[0, 1, UNKNOWN], [UNKNOWN, 0, UNKNOWN], [1, 0, UNKNOWN]]


def yelp_labels() -> np.ndarray:
    labels = np.zeros((raw.NUM_NODES, 100), dtype=int)
    labels[:, 37] = HAS_37
    labels[3, :50] = 1  # one node with many labels
    return labels


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write Yelp and Tox21 in their layouts."""
    data = tmp_path_factory.mktemp("targets")
    raw.write_saint(data / "Yelp" / "raw", yelp_labels())
    raw.write_ogb_graphs(
        data / "ogbg_moltox21", "scaffold", labels=np.array(RESULTS), targets=ASSAYS
    )
    return data


@pytest.fixture
def data(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder; statistics of the published files are not compared."""
    monkeypatch.setenv("FLOWER_FGL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(load_module, "_check_statistics", lambda *_: None)
    return files


def read(name: str, target: str, data: Path, cache: Path) -> NodeDataset | GraphDataset:
    return load(name, data_dir=data, cache_dir=cache, target=target)


def config_of(data: Path, **values: Scalar) -> RunConfig:
    given = {"dataset": "yelp", "target": "37", "clients": 2, "data-dir": str(data)}
    return parse_config({**given, **values})


def test_one_label_of_yelp_is_a_task_of_two_classes(data: Path, tmp_path: Path) -> None:
    dataset = read("yelp", "37", data, tmp_path)
    assert isinstance(dataset, NodeDataset)
    assert dataset.class_names == ("no 37", "37")
    assert dataset.y.tolist() == HAS_37
    assert dataset.y.dtype == torch.int64
    assert torch.equal(dataset.x, torch.from_numpy(raw.features()))
    found = {(u, v) for u, v in dataset.edge_index.T.tolist() if u < v}
    assert found == raw.SIMPLE
    masks = {k: mask.nonzero().flatten().tolist() for k, mask in dataset.masks.items()}
    assert list(masks.values()) == list(raw.ROLES.values())
    # a node has a label whatever other labels it has
    assert read("yelp", "49", data, tmp_path).y.nonzero().flatten().tolist() == [3]
    assert not bool(read("yelp", "50", data, tmp_path).y.any())


def test_a_target_of_molecules_has_the_name_in_the_files(
    data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = read("ogbg-moltox21", "NR-AhR", data, tmp_path)
    assert isinstance(dataset, GraphDataset)
    assert dataset.class_names == ("no NR-AhR", "NR-AhR")
    assert dataset.y.tolist() == [1, 0, 0]
    assert dataset.batch.tolist() == [0] * 7 + [1] * 4 + [2]
    part = read("ogbg-moltox21", "NR-AR", data, tmp_path)
    assert '1 of 3 graphs have no label for target = "NR-AR"' in caplog.text
    assert isinstance(part, GraphDataset)
    assert part.y.tolist() == [0, 1]
    assert part.batch.tolist() == [0] * 7 + [1]  # without the graph of 4 nodes
    rows = [*range(7), 11]
    assert torch.equal(part.x.to_dense(), dataset.x.to_dense()[rows])
    found = {(u, v) for u, v in part.edge_index.T.tolist() if u < v}
    assert found == {(u, v) for u, v in raw.SIMPLE if v < 7}
    masks = {name: mask.tolist() for name, mask in part.masks.items()}
    assert masks == {"train": [True, False], "val": [False] * 2, "test": [False, True]}
    with pytest.raises(DataError, match=r'no graph has a label for target = "SR-p53"'):
        read("ogbg-moltox21", "SR-p53", data, tmp_path)


def test_bonds_of_a_molecule_without_a_label_are_left_out(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "ogbg_moltox21"
    bonds = np.stack([np.arange(len(raw.EDGES)) % 4, *np.zeros((2, len(raw.EDGES)))], 1)
    raw.write_ogb_graphs(
        folder, "scaffold", labels=np.array(RESULTS), bonds=bonds.astype(int)
    )
    part = read("ogbg-moltox21", "0", tmp_path / "data", tmp_path / "cache")
    assert part.messages is not None
    kept = (raw.EDGES < 7).all(axis=1)  # the graph of 4 nodes has no label
    assert part.messages.index.T.tolist() == raw.EDGES[kept].tolist()
    found = part.messages.x.argmax(dim=1).tolist()
    assert found == bonds[kept, 0].tolist()


def test_proteins_have_the_mean_attributes_of_their_edges(
    data: Path, tmp_path: Path
) -> None:
    labels = np.zeros((raw.NUM_NODES, 112), dtype=int)
    labels[:, 5] = HAS_37
    raw.write_proteins(tmp_path / "data" / "ogbn_proteins", labels)
    dataset = read("ogbn-proteins", "5", tmp_path / "data", tmp_path / "cache")
    assert isinstance(dataset, NodeDataset)
    assert dataset.y.tolist() == HAS_37
    for node in range(raw.NUM_NODES):
        own = [
            [2 * k / 4, (2 * k + 1) / 4]
            for k, ends in enumerate(raw.EDGES.tolist())
            for end in ends
            if end == node
        ]
        expected = np.mean(own, axis=0).tolist() if own else [0.0, 0.0]
        assert dataset.x[node].tolist() == pytest.approx(expected)
    masks = {k: mask.nonzero().flatten().tolist() for k, mask in dataset.masks.items()}
    assert list(masks.values()) == list(raw.ROLES.values())


def test_graphs_without_a_label_count_in_the_published_numbers(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        load_module, "_check_statistics", lambda *numbers: seen.append(numbers[2])
    )
    read("ogbg-moltox21", "NR-AR", data, tmp_path)
    assert (seen[0].graphs, seen[0].nodes, seen[0].edges) == (3, 12, len(raw.SIMPLE))
    assert (seen[0].classes, seen[0].targets) == (2, 3)


def test_without_names_in_the_files_targets_are_numbered(
    data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "ogbg_molmuv"
    raw.write_ogb_graphs(folder, "scaffold", labels=np.array(RESULTS))
    dataset = read("ogbg-molmuv", "1", tmp_path / "data", tmp_path)
    assert dataset.class_names == ("no 1", "1")


def test_a_node_without_a_label_stays_in_the_graph() -> None:
    y = read_targets(torch.tensor([[1.0, UNKNOWN], [0.0, 1.0]]), "x")
    assert y.tolist() == [[1, -1], [0, 1]]
    assert y.dtype == torch.int8
    edges = torch.tensor([[0, 1], [1, 0]])
    nodes = Raw.of(torch.ones(2, 1), edges, y, names=("a", "b")).dataset
    chosen = choose_target(nodes, "b")
    assert chosen.y.tolist() == [-1, 1]
    assert chosen.class_names == ("no b", "b")
    assert chosen.x.shape == (2, 1)


@pytest.mark.parametrize("labels", [[[0.5, 1.0]], [[2, 0]], [[-1, 0]]])
def test_targets_that_are_no_classes_are_refused(labels: list[list[float]]) -> None:
    with pytest.raises(DataError, match="expected labels of 2 targets that are 0 or 1"):
        read_targets(torch.tensor(labels), "x")


def test_an_unknown_target_is_refused_with_the_list(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        read("ogbg-moltox21", "NR-AR2", data, tmp_path)
    expected = 'Did you mean "NR-AR"? Known: NR-AR, NR-AhR, SR-p53.'
    assert str(error.value).endswith(expected)
    many = Raw.of(
        torch.ones(1, 1),
        torch.empty((2, 0), dtype=torch.int64),
        torch.zeros(1, 617, dtype=torch.int8),
        names=tuple(f"assay-{i}" for i in range(617)),
    )
    with pytest.raises(ConfigError) as error:
        choose_target(many.dataset, "assay-61x")
    assert "Did you mean" in str(error.value)
    assert "It has 617: assay-0, assay-1, " in str(error.value)
    assert str(error.value).endswith("assay-29, …, assay-616.")


@pytest.mark.parametrize("name", TARGETS)
def test_without_target_the_dataset_is_refused_with_an_example(name: str) -> None:
    count, example = TARGETS[name]
    setting = "graph" if SOURCES[name].task == "graph" else "transductive"
    rule = "uniform" if setting == "graph" else "metis"
    given: dict[str, Scalar] = {"dataset": name, "setting": setting, "partition": rule}
    with pytest.raises(ConfigError) as error:
        parse_config(given)
    assert f"{name} has {count} targets" in str(error.value)
    assert SOURCES[name].statistics.targets == count
    assert f'target = "{example}"' in str(error.value)
    config = parse_config({**given, "target": example})
    assert (config.main_score, config.positive_class) == ("auroc", example)
    assert config.sources["positive-class"] == "data set"
    assert parse_config(config.flat()).flat() == config.flat()
    kept = parse_config({**given, "target": example, "positive-class": f"no {example}"})
    assert kept.positive_class == f"no {example}"


@pytest.mark.parametrize("target", ["100", "-1", "037", "restaurants"])
def test_a_number_out_of_range_is_refused_before_the_files_are_read(
    target: str,
) -> None:
    with pytest.raises(ConfigError, match=r"whose targets are the numbers 0 to 99\."):
        parse_config({"dataset": "yelp", "target": target})


def test_a_run_is_repeated_with_another_target(tmp_path: Path) -> None:
    def repeated(target: str, **more: Scalar) -> RunConfig:
        first = parse_config({"dataset": "yelp", "target": "1", **more})
        folder = tmp_path / f"{target}-{len(more)}"
        RunWriter.create(folder, config=first.flat(), sources=first.sources)
        experiment = read_experiment(folder / "config.toml")
        (run,) = experiment.with_options({"target": target}).runs()
        return parse_config(run.settings)

    for target, sought in {"1": "1", "2": "2", "all": ""}.items():
        again = repeated(target)
        assert (again.positive_class, again.main_score) == (sought, "auroc")
    own = {"positive-class": "no 1"}
    assert repeated("1", **own).positive_class == "no 1"
    with pytest.raises(ConfigError, match='"no 1" is no class of target = "2": its'):
        repeated("2", **own)
    with pytest.raises(ConfigError, match="Remove positive-class"):
        repeated("all", **own)


def test_links_of_yelp_need_no_target(data: Path) -> None:
    config = config_of(data, setting="link", target="")
    assert load_dataset(config).edge_index.shape == (2, 2 * len(raw.SIMPLE))
    idle = config_of(data, setting="link")
    assert not idle.positive_class
    with pytest.raises(ConfigError, match="target has no effect: it needs a dataset"):
        reject_unused_settings(["target"], [idle])
    # a partition by classes reads them
    by_class = config_of(data, setting="link", partition="dirichlet")
    reject_unused_settings(["target"], [by_class])


def test_target_is_refused_where_a_dataset_has_one_label(tmp_path: Path) -> None:
    message = "target has no effect: it needs a dataset with several labels"
    with pytest.raises(ConfigError, match=message):
        simulate("fedavg", clients=2, target="1", output_dir=str(tmp_path / "runs"))
    command = ["partition", "--dataset", "cora", "--set", "target=1"]
    result = CliRunner().invoke(app, command)
    assert message in str(result.exception)
    config = parse_config({"target": "1", "owners": "a,b"})
    with pytest.raises(ConfigError, match=message):
        reject_unused_settings(["target"], [config])


def test_owners_do_not_list_a_dataset_with_several_labels() -> None:
    with pytest.raises(ConfigError, match="owners takes datasets with one label"):
        list_owners(parse_config({"owners": "yelp,cora"}))
    links = parse_config({"owners": "yelp,cora", "setting": "link"})
    assert [owner.name for owner in list_owners(links)] == ["yelp", "cora"]


def test_every_target_has_a_store_and_a_hash_of_its_own(data: Path) -> None:
    stores = [open_store(config_of(data, target=t), 2) for t in ("37", "38")]
    assert stores[0].folder != stores[1].folder
    hashes = {store.index.partition_sha256 for store in stores}
    assert len(hashes) == 2
    assert list(stores[1].index.clients[0]["target"]["names"]) == ["no 38", "38"]
    labels = {}
    for partition_id in range(2):
        client = stores[0].load(partition_id)
        labels |= dict(
            zip(client.node_ids.tolist(), client.graph.y.tolist(), strict=True)
        )
    assert [labels[node] for node in range(raw.NUM_NODES)] == HAS_37


def test_a_run_scores_the_target_as_the_sought_class(
    data: Path, tmp_path: Path
) -> None:
    run = simulate(
        "fedavg",
        "yelp",
        target="37",
        clients=2,
        rounds=2,
        split="public",
        partition="uniform",
        partition_seed=6,
        hidden_channels=4,
        data_dir=str(data),
        output_dir=str(tmp_path / "runs"),
    )
    assert run.config["target"] == "37"
    assert run.config["positive-class"] == "37"
    assert run.summary["class_names"] == ["no 37", "37"]
    assert run.summary["metric"] == "auroc"
    assert run.best is not None
    assert run.best["test"]["num_nodes"] == len(raw.ROLES["te"])
    assert {"auroc", "auprc", "precision_at_k"} <= run.best["test"].keys()
    assert "target 37" in run.headline()
    folder = tmp_path / "graphs"
    arguments = ["export", str(folder), "--dataset", "yelp", "--clients", "2"]
    pairs = ("target=37", f"data-dir={data}", "split=public")
    arguments += [part for pair in pairs for part in ("--set", pair)]
    result = CliRunner().invoke(app, [*arguments, "--rule", "uniform"])
    assert result.exit_code == 0, result.exception
    prediction = predict_graph(run.path, sorted(folder.glob("*.npz"))[0])
    assert prediction.card.class_names == ("no 37", "37")


def test_the_partition_command_shows_the_classes_of_the_target(data: Path) -> None:
    command = ["partition", "--dataset", "yelp", "--clients", "2", "--rule", "uniform"]
    pairs = ["--set", "target=37", "--set", f"data-dir={data}"]
    result = CliRunner().invoke(app, [*command, *pairs])
    assert result.exit_code == 0, result.exception
    store = open_store(config_of(data, partition="uniform"), 2)
    assert store.index.partition_sha256 in result.output.replace("\n", "")
    refused = CliRunner().invoke(app, [*command, "--set", f"data-dir={data}"])
    assert 'Choose one with target, e.g. target = "37"' in str(refused.exception)
