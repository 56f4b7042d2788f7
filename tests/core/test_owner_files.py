"""What is the file of a data owner, in the working folder or the data folder."""

import os
from io import TextIOWrapper
from pathlib import Path

import pytest

from flower_fgl.core import held_kind
from flower_fgl.core.held_kind import find_owner, name_of_file, owners_in
from flower_fgl.core.settings import listed_names
from flower_fgl.core.targets import CLASSES, NUMBERS
from flower_fgl.datasets.owners import list_owners
from flower_fgl.methods import parse_config
from tests.core.test_held_kind import tables


def test_owners_are_graph_files_and_folders_of_tables(tmp_path: Path) -> None:
    tables(tmp_path / "nodes", nodes="id,f,target")
    tables(tmp_path / "set", graphs="id,smiles,target")
    tables(tmp_path / "typed", relations="relation,source,target,file")
    tables(tmp_path / "other", notes="a,b")
    tables(tmp_path / ".hidden", nodes="id,f,label")
    (tmp_path / "b.npz").touch()
    (tmp_path / "folder.npz").mkdir()
    (tmp_path / "readme.txt").touch()
    expected = ["b", "nodes", "set", "typed"]
    assert sorted(map(name_of_file, owners_in(tmp_path))) == expected
    config = parse_config({"owners": str(tmp_path)})
    assert [owner.name for owner in list_owners(config)] == expected


def test_the_working_folder_comes_before_the_data_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables(tmp_path / "data" / "a", nodes="id,f,target")
    tables(tmp_path / "here" / "a", nodes="id,f,label")
    tables(tmp_path / "data" / "b", nodes="id,f,target")
    monkeypatch.chdir(tmp_path / "here")
    data = tmp_path / "data"
    assert find_owner("a", data) == Path("a")
    assert find_owner("b", data) == data / "b"
    assert find_owner("c", data) is None
    assert find_owner("x" * 5000, None) is None
    assert listed_names(" a,, b ,") == ["a", "b"]
    for owners, kind in (("a,b,b", NUMBERS), ("a, a,b,", CLASSES)):
        values = {"owners": owners, "data-dir": str(data)}
        assert parse_config(values).predicts == kind


def test_a_file_is_read_once_while_it_is_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tables(tmp_path / n, nodes="id,f,label") / "nodes.csv" for n in "abc"]
    read: list[Path] = []
    reader = held_kind.csv.reader

    def count(file: TextIOWrapper) -> object:
        read.append(Path(file.name))
        return reader(file)

    monkeypatch.setattr(held_kind.csv, "reader", count)
    values = {"owners": str(tmp_path)}
    for _ in range(3):
        assert parse_config(values).predicts == CLASSES
    assert sorted(read) == places
    read.clear()
    for place in places[:2]:
        place.write_text("id,f,target\n")
        os.utime(place, ns=(1, 1))
    for _ in range(3):
        assert parse_config(values).predicts == NUMBERS
    assert sorted(read) == places[:2]
