"""Keeper of a SuperLink: runs one command, and ends all its descendants.

It does so when the command ends, or its standard input is closed. The kernel closes that
pipe when the launcher dies for any reason, so no process survives the launcher.

It runs as a file (``python -P supervisor.py FOLDER COMMAND``) and imports nothing from this
package, so it starts fast and uses little memory.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence

import psutil  # type: ignore[import-untyped]

__all__ = ["die_with_parent", "is_running", "keep"]

GRACE = 1.0
"""Seconds between SIGTERM and SIGKILL."""
GIVE_UP = 30.0
"""Seconds after which a process that cannot be killed (broken disk) is ignored."""
_PR_SET_PDEATHSIG = 1  # Linux, <sys/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36


def keep(command: Sequence[str], remove: str | None = None) -> int:
    """Run a command; end all its descendants when it ends or stdin is closed.

    Returns the exit status of the command (negative for the signal that ended it), or 0
    if the keeper ended it. ``remove`` is deleted after the last process has ended.
    """
    closing = threading.Event()
    # Handlers instead of SIG_IGN: the command would inherit ignored signals.
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: closing.set())
    is_subreaper = _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
    )

    def watch() -> None:  # until the other end of stdin is closed
        sys.stdin.buffer.read()
        closing.set()

    threading.Thread(target=watch, daemon=True).start()
    known: set[psutil.Process] = set()
    status = None
    while status is None and not closing.wait(0.2):
        status = _reap(process.pid)
        if not is_subreaper:  # init adopts orphans: remember all descendants
            known.update(psutil.Process().children(recursive=True))
    process.returncode = status or 0  # already waited for, so Popen must not
    _kill_runs()
    _end_descendants(known)
    if remove is not None:
        shutil.rmtree(remove, ignore_errors=True)
    return status or 0


def _prctl(option: int, value: int) -> bool:
    """Set a process attribute on Linux; return whether it was set."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def die_with_parent() -> None:
    """Let the kernel kill the command if the keeper is killed (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _reap(pid: int) -> int | None:
    """Wait for ended children; return the exit status of ``pid`` if it has ended."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if ended[0] == pid:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def _living(known: set[psutil.Process]) -> set[psutil.Process]:
    """Return the running descendants of this process and of ``known``."""
    found = set(psutil.Process().children(recursive=True))
    for process in known:
        with contextlib.suppress(psutil.Error):
            found.add(process)
            found.update(process.children(recursive=True))
    return set(filter(is_running, found))


def is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill_runs() -> None:
    """Kill runs first: a ServerApp that outlives its Ray workers records failures."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()[:2]  # interpreter and script
            if any(os.path.basename(word) == "flwr-simulation" for word in words):
                process.kill()


def _end_descendants(known: set[psutil.Process]) -> None:
    """Send SIGTERM to all descendants, then SIGKILL, and wait until all have ended."""
    start = time.monotonic()
    terminated: set[psutil.Process] = set()
    while living := _living(known):
        known |= living
        waited = time.monotonic() - start
        if waited > GIVE_UP:
            return
        for process in living:
            with contextlib.suppress(psutil.Error):
                if waited > GRACE:
                    process.kill()
                elif process not in terminated:
                    terminated.add(process)
                    process.terminate()
        time.sleep(0.02)
        _reap(0)
    _reap(0)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], remove=sys.argv[1] or None) != 0)
