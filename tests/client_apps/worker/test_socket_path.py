"""The path of a worker's socket, and the SuperNode it belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from flower_fgl.client_apps.worker.socket_path import (
    ParentProcess,
    find_parent_process,
    private_folder,
    worker_socket,
)

HERE = ParentProcess(os.getpid(), psutil.Process().create_time())


def test_every_supernode_config_and_folder_has_its_own_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", tempfile.mkdtemp(dir="/tmp"))
    first = worker_socket({"partition-id": 0}, HERE)
    assert first == worker_socket({"partition-id": 0}, HERE)
    found = {
        first,
        worker_socket({"partition-id": 1}, HERE),
        worker_socket({"partition-id": 0}, ParentProcess(1, 0.0)),
    }
    monkeypatch.chdir(tmp_path)
    found.add(worker_socket({"partition-id": 0}, HERE))
    assert len(found) == 4


def test_a_socket_is_in_state_dir_unless_its_path_is_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    short = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    own = worker_socket({"state-dir": str(short / "own")}, HERE)
    assert own.parent == short / "own" / "workers"
    for folder in (own.parent, own.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700
    far = worker_socket({"state-dir": str(short / ("x" * 90))}, HERE)
    assert far.parent == short / f"flower-fgl-{os.getuid()}"
    monkeypatch.setattr(tempfile, "tempdir", str(short / ("y" * 90)))
    with pytest.raises(OSError, match=r"is too long for a socket\. Set TMPDIR"):
        worker_socket({}, HERE)


def test_a_folder_that_others_may_enter_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "elsewhere").symlink_to(private_folder(tmp_path / "own"))
    for name in ("open", "elsewhere"):
        with pytest.raises(PermissionError, match=r"mode 0700\. Remove it"):
            private_folder(tmp_path / name)


def test_the_supernode_is_found_among_the_ancestors(tmp_path: Path) -> None:
    code = (
        "from flower_fgl.client_apps.worker.socket_path import find_parent_process\n"
        "print(find_parent_process().pid)"
    )
    between = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}])"
    )
    (tmp_path / "flower-supernode").write_text(
        f"import os\n{between}\nprint(os.getpid())"
    )
    done = subprocess.run(
        [sys.executable, tmp_path / "flower-supernode"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    found, supernode = done.stdout.split()
    assert found == supernode
    assert find_parent_process().pid == os.getppid()


def test_reused_process_ids_and_zombies_are_not_alive() -> None:
    assert HERE.is_alive()
    assert not ParentProcess(HERE.pid, HERE.started - 60).is_alive()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    parent = ParentProcess(ended.pid, psutil.Process(ended.pid).create_time())
    while psutil.Process(ended.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    assert not parent.is_alive()
    ended.wait()
    assert not parent.is_alive()
