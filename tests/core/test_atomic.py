"""A file is replaced completely or not at all; private files are private at once."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

import pytest

from flower_fgl.core.atomic import make_private_folder, replacing, write_file


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(
    error: BaseException, tmp_path: Path
) -> None:
    path = tmp_path / "file"
    write_file(path, b"old")

    def fail() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_private_file_is_private_even_over_a_readable_one(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = tmp_path / "file"
        path.write_bytes(b"old")
        with replacing(path, is_private=True) as file:
            file.write(b"new")
            (scratch,) = tmp_path.glob(".file.*.tmp")
            assert mode(scratch) == 0o600
        assert (path.read_bytes(), mode(path)) == (b"new", 0o600)
        make_private_folder(tmp_path / "a" / "b")
        assert mode(tmp_path / "a") == mode(tmp_path / "a" / "b") == 0o700
    finally:
        os.umask(before)


def test_a_private_folder_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o750)
    make_private_folder(tmp_path / "shared")
    assert mode(tmp_path / "shared") == 0o750


def test_file_and_folder_are_synced_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def logged_fsync(number: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file")
        fsync(number)

    def logged_replace(source: Path, target: Path) -> None:
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "replace", logged_replace)
    write_file(tmp_path / "file", b"data")
    assert done == ["file", "rename", "folder"]
    done.clear()
    write_file(tmp_path / "file", b"data", is_synced=False)
    assert done == ["rename"]


def test_a_planted_link_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "file"
    victim.write_bytes(b"mine")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "guessed")
    for taken in (f".file.{os.getpid()}.tmp", ".file.guessed.tmp"):
        (tmp_path / taken).symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_file(path, b"new")
    assert victim.read_bytes() == b"mine"
    assert not path.exists()


def test_a_new_file_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (b"first", b"second"):
        with contextlib.suppress(FileExistsError), replacing(path, is_new=True) as file:
            file.write(content)
    assert path.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["file"]
