"""Countries of Twitch: reader of the published files, and their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from flower_fgl.core.errors import ConfigError, DataError
from flower_fgl.datasets.graph_files.graph_file import load_graph_file
from flower_fgl.datasets.owners import list_owners
from flower_fgl.datasets.sources.load import find_source, load
from flower_fgl.datasets.sources.raw_readers import twitch
from flower_fgl.methods import parse_config


def write(
    folder: Path,
    targets: str = "9,1,True,5,False,1\n8,1,False,5,False,0\n9,1,True,5,False,1\n",
    features: dict[str, list[int]] | None = None,
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "musae_DE_target.csv").write_text(
        "id,days,mature,views,partner,new_id\n" + targets
    )
    (folder / "musae_DE_edges.csv").write_text("from,to\n0,1\n")
    text = json.dumps({"0": [3, 3, 5], "1": [3169]} if features is None else features)
    (folder / "musae_DE_features.json").write_text(text)
    return folder


def test_the_published_files_become_one_graph(tmp_path: Path) -> None:
    raw = twitch(write(tmp_path), name="DE").dataset
    assert raw.x.shape == (2, 3170)
    assert raw.x.to_dense().nonzero().tolist() == [[0, 3], [0, 5], [1, 3169]]
    assert raw.y.tolist() == [0, 1]  # by new_id; the repeated row agrees
    assert raw.edge_index.tolist() == [[0, 1], [1, 0]]
    assert raw.class_names == ("not mature", "mature")


@pytest.mark.parametrize(
    ("targets", "features"),
    [
        ("9,1,True,5,False,1\n", None),  # node 0 has no label
        ("9,1,True,5,False,0\n8,1,False,5,False,0\n", {"0": [1]}),  # two labels
        ("9,1,True,5,False,0\n8,1,False,5,False,1\n", {"0": [3170]}),
    ],
)
def test_files_that_do_not_fit_each_other_are_refused(
    targets: str, features: dict[str, list[int]] | None, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match="do not fit each other"):
        twitch(write(tmp_path, targets, features), name="DE")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "musae_DE_target.csv").write_text("id,mature\n1,True\n")
    with pytest.raises(DataError, match="needs the columns new_id and mature"):
        twitch(folder, name="DE")


def test_a_country_is_a_dataset_and_an_owner() -> None:
    with pytest.raises(ConfigError, match=r'country "EN".*ENGB'):
        find_source("twitch:EN")
    config = parse_config({"owners": "twitch:DE,twitch:FR"})
    assert [owner.name for owner in list_owners(config)] == ["DE", "FR"]
    assert config.data_name == "DE+FR"
    parse_config({"dataset": "twitch:DE"})


def test_a_real_country_equals_its_graph_file(real_data: Path, tmp_path: Path) -> None:
    file = real_data / "owners" / "twitch" / "PTBR.npz"
    if not file.exists():
        pytest.skip("no owners in the data folder")
    ours = load("twitch:PTBR", data_dir=real_data, cache_dir=tmp_path)
    theirs = load_graph_file(file).dataset
    assert torch.equal(ours.edge_index, theirs.edge_index)
    assert torch.equal(ours.y, theirs.y)
    assert torch.equal(ours.x.to_dense(), theirs.x.to_dense())
