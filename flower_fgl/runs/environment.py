"""Where and with what a run was made: versions, commit, host and device."""

import contextlib
import hashlib
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from flower_fgl.core.errors import first_of
from flower_fgl.core.extensions import Kind, code_of
from flower_fgl.core.version import VERSION

__all__ = ["describe_environment", "environment_comments", "extension_labels"]
__all__ += ["find_commit", "hash_source", "mixed_versions", "version_label"]

PACKAGES = ("flwr", "torch", "torch-geometric")
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


def describe_environment(
    engine: str, device: str, rows: Iterable[tuple[Kind, str]] = ()
) -> dict[str, Any]:
    """Return versions, commit, host and device for ``summary.json``.

    The keys are ``versions`` (Ray's with engine ``ray``), ``commit`` if the package runs
    from a checkout, ``source_sha256``, ``host`` (its memory in 10⁹ bytes) and ``device``;
    ``extensions`` if other packages add some of the run's ``rows``: their versions and
    source hashes. No name of a host, user or folder is in it.
    """
    packages = [*PACKAGES, "ray"] if engine == "ray" else PACKAGES
    versions = {"python": platform.python_version(), "flower-fgl": VERSION}
    for name in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    commit = find_commit(Path(__file__).resolve().parents[2])
    codes = dict(filter(None, (code_of(kind, name) for kind, name in rows)))
    extensions = {name: hash_source(place) for name, place in sorted(codes.items())}
    return {
        "versions": versions,
        **({"extensions": extensions} if extensions else {}),
        **({"commit": commit} if commit else {}),
        "source_sha256": hash_source(Path(__file__).resolve().parents[1]),
        "host": {
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "os": f"{platform.system()} {platform.release()} {platform.machine()}",
        },
        "device": _device_name(device),
    }


def environment_comments(started: str, environment: Mapping[str, Any]) -> str:
    """Format start time and environment as comment lines for ``config.toml``."""
    host = environment["host"]
    machine = (
        f"{host['cpu']}, {host['cores']} cores, {host['memory_gb']} GB, {host['os']}"
    )
    versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items())
    lines = {
        "started": started,
        "versions": versions,
        "commit": environment.get("commit", ""),
        "source": environment.get("source_sha256", ""),
        "extensions": ", ".join(extension_labels(environment)),
        "host": machine,
        "device": environment["device"],
    }
    return "".join(f"# {k}: {' '.join(v.split())}\n" for k, v in lines.items() if v)


def version_label(environment: Mapping[str, Any]) -> str:
    """Name the versions of packages, and the source hash or, without one, the commit."""
    versions = environment.get("versions") or {}
    source = str(environment.get("source_sha256", ""))
    commit = str(environment.get("commit", ""))
    parts = [f"{k} {v}" for k, v in sorted(versions.items()) if k != "python"]
    own = f"source {source[:12]}" if source else f"commit {commit[:12] or 'unknown'}"
    return ", ".join([*parts, own, *extension_labels(environment)])


def extension_labels(environment: Mapping[str, Any]) -> list[str]:
    """Name the packages that add rows of a run, with version and source hash."""
    codes = environment.get("extensions") or {}
    return [f"{name} source {source[:12]}" for name, source in sorted(codes.items())]


def mixed_versions(environments: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Name the versions with which the runs of one comparison were made, if several.

    Ray's version, which only some engines use, is not compared, and that of a package which
    adds a method, backbone or dataset only between the runs that use it.
    """
    seen: dict[str, dict[str, list[str]]] = {}
    for name, environment in environments.items():
        versions = dict(environment.get("versions") or {})
        versions.pop("ray", None)
        own = version_label({**environment, "versions": versions, "extensions": {}})
        for label in (own, *extension_labels(environment)):
            package = "" if label == own else label.partition(" ")[0]
            seen.setdefault(package, {}).setdefault(label, []).append(name)
    out = []
    for package, labels in seen.items():
        listed = [f"{label} ({first_of(names, 3)})" for label, names in labels.items()]
        if len(labels) > 1:
            out.append(
                f"the runs were made with {len(labels)} versions{package and ' of '}"
                f"{package}: {'; '.join(listed)}. Scores may differ between versions; to "
                "measure all with one, move the older run folders and run the experiment "
                "again."
            )
    return out


@lru_cache(maxsize=4)
def hash_source(package: Path) -> str:
    """Return the SHA-256 of names and contents of all ``.py`` files of a package.

    A package may be a single file.
    """
    total = hashlib.sha256()
    found = [package] if package.is_file() else package.rglob("*.py")
    files = {file.relative_to(package).as_posix(): file for file in found}
    for name in sorted(files):
        content = files[name].read_bytes()
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def find_commit(checkout: Path) -> str:
    """Return the commit of a git checkout, read without git; empty if it cannot be read."""
    try:
        folder = checkout / ".git"
        if folder.is_file():  # a linked worktree names its own folder
            named = folder.read_text("utf-8").removeprefix("gitdir:").strip()
            folder = checkout / named
        head = (folder / "HEAD").read_text("utf-8").strip()
        if not head.startswith("ref:"):
            return head if COMMIT.fullmatch(head) else ""
        return _read_reference(folder, head.removeprefix("ref:").strip())
    except (OSError, ValueError):
        return ""


def _read_reference(folder: Path, name: str) -> str:
    """Return the commit of a branch: from its own file, or from the packed ones."""
    shared = folder
    if (folder / "commondir").is_file():
        shared = folder / (folder / "commondir").read_text("utf-8").strip()
    for place in (folder, shared):
        if (place / name).is_file():
            text = (place / name).read_text("utf-8").strip()
            return text if COMMIT.fullmatch(text) else ""
    for line in (shared / "packed-refs").read_text("utf-8").splitlines():
        commit, _, reference = line.partition(" ")
        if reference == name and COMMIT.fullmatch(commit):
            return commit
    return ""


@lru_cache
def _cpu_model() -> str:
    """Return the model of the processor, empty if it is not known."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return match[1]
    return platform.machine()


def _device_name(device: str) -> str:
    """Return the device of this process, with the model of a GPU."""
    torch = sys.modules.get("torch")  # a reader of runs does not load it
    if torch is None or not torch.cuda.is_available() or device == "cpu":
        return "cpu" if device == "auto" else device
    name = "cuda:0" if device == "auto" else device
    with contextlib.suppress(RuntimeError, AssertionError, ValueError):
        return f"{name} {torch.cuda.get_device_name(name)}"
    return name
