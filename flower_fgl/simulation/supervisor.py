"""Two programs that :mod:`flower_fgl.simulation.superlink` starts: a keeper and a warm ``flwr``.

``keep`` runs one command and ends everything that descends from it, once the command
ends or the keeper's own standard input is closed. Since the kernel closes that pipe
with the process at its other end, nothing survives the launcher, however it dies.

``flwr`` answers Flower command lines, one after another, in one interpreter: importing
Flower takes 0.9 s, which would else be paid for each of them.

Both are run as files (``python -P supervisor.py``) and import nothing of this
package, so they start fast and stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import entry_points

import psutil  # type: ignore[import-untyped]

__all__ = ["answer_flwr", "keep"]

GRACE = 1.0
"""Seconds between asking processes to end and killing them."""
GIVE_UP = 30.0
"""Seconds after which a process that cannot be killed (broken disk) is left."""
_PR_SET_PDEATHSIG = 1  # Linux, <sys/prctl.h>
_PR_SET_CHILD_SUBREAPER = 36


def keep(command: Sequence[str], remove: str | None = None) -> int:
    """Run a command, and end all its descendants when it or our stdin ends.

    Parameters
    ----------
    command : sequence of str
        Program and arguments.
    remove : str, optional
        Folder deleted after the last process has ended.

    Returns
    -------
    int
        Exit status of the command (negative: the signal that ended it), 0 where it had
        to be ended.
    """
    closing = threading.Event()
    # Handlers, not SIG_IGN: ignored signals would stay ignored in the command.
    for name in (signal.SIGINT, signal.SIGHUP):
        signal.signal(name, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: closing.set())
    is_subreaper = _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=_die_with_parent
    )
    watch = threading.Thread(target=_wait_for_end_of_input, args=(closing,))
    watch.daemon = True
    watch.start()
    known: set[psutil.Process] = set()
    status = None
    while status is None and not closing.wait(0.2):
        status = _reap(process.pid)
        if not is_subreaper:  # orphans go to init: remember who was ours
            known.update(psutil.Process().children(recursive=True))
    process.returncode = status or 0  # collected here, Popen need not look again
    _kill_runs()
    _end_descendants(known)
    if remove is not None:
        shutil.rmtree(remove, ignore_errors=True)
    return status or 0


def answer_flwr() -> None:
    """Answer requests for ``flwr`` commands, one JSON object a line, until stdin ends.

    A request holds ``arguments`` and ``output``, the file that takes what the command
    prints; the answer is a line with ``code``, its exit status.
    """
    flwr = next(iter(entry_points(group="console_scripts", name="flwr"))).load()
    streams = (1, os.dup(1)), (2, os.dup(2))
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        request = json.loads(line)
        sys.argv = ["flwr", *request["arguments"]]
        with open(request["output"], "wb", buffering=0) as output:
            for number, _ in streams:  # Flower prints past a replaced sys.stdout
                os.dup2(output.fileno(), number)
            code = _exit_status(flwr)
        for number, own in streams:
            os.dup2(own, number)
        print(json.dumps({"code": code}), file=answers, flush=True)


def _exit_status(program: object) -> int:
    """Call a console script's function as the script would."""
    assert callable(program)
    try:
        program()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except Exception:  # the interpreter would print it and end with status 1
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _wait_for_end_of_input(closing: threading.Event) -> None:
    """Set ``closing`` once nobody holds the other end of our stdin."""
    sys.stdin.buffer.read()
    closing.set()


def _prctl(option: int, value: int) -> bool:
    """Set a process attribute on Linux; return whether it was set."""
    if sys.platform != "linux":
        return False
    return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)


def _die_with_parent() -> None:
    """Have the kernel kill the command if even the keeper is killed (Linux)."""
    _prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))


def _reap(pid: int) -> int | None:
    """Collect ended children; return the exit status of ``pid`` if it is among them."""
    status = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            if ended[0] == pid:
                status = os.waitstatus_to_exitcode(ended[1])
    return status


def _living(known: set[psutil.Process]) -> set[psutil.Process]:
    """Return the descendants of this process and of ``known`` that still run."""
    found = set(psutil.Process().children(recursive=True))
    for process in known:
        with contextlib.suppress(psutil.Error):
            found.add(process)
            found.update(process.children(recursive=True))
    living = set()
    for process in found:
        with contextlib.suppress(psutil.Error):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                living.add(process)
    return living


def _kill_runs() -> None:
    """Kill runs before what they need.

    A server half that lives on while its Ray workers end would write that they failed.
    """
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()[:2]  # the interpreter, the script
            if any(os.path.basename(word) == "flwr-simulation" for word in words):
                process.kill()


def _end_descendants(known: set[psutil.Process]) -> None:
    """Ask all descendants to end, kill those that do not, wait until all are gone."""
    start = time.monotonic()
    asked: set[psutil.Process] = set()
    while living := _living(known):
        known |= living
        waited = time.monotonic() - start
        if waited > GIVE_UP:
            return
        for process in living:
            with contextlib.suppress(psutil.Error):
                if waited > GRACE:
                    process.kill()
                elif process not in asked:
                    asked.add(process)
                    process.terminate()
        time.sleep(0.02)
        _reap(0)
    _reap(0)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        sys.exit(keep(sys.argv[3:], remove=sys.argv[2] or None) != 0)
    answer_flwr()
