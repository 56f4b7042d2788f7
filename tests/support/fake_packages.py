"""Packages with entry points, made by writing their metadata to a folder on the path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["METHOD_ROW", "fake_package"]

METHOD_ROW = """
from dataclasses import dataclass
from flower_fgl.core.options import option
from flower_fgl.methods import Method

@dataclass(frozen=True)
class Settings:
    strength: float = option(1.0, "how much", ge=0)
    finetune_epochs: int = option(0, "local epochs after the last round", ge=0)

METHOD = Method(
    name="{name}",
    paper="none",
    strategy="flower_fgl.strategies.fedavg:FedAvg",
    client_app="flower_fgl.client_apps.fedavg:FedAvgClientApp",
    settings=Settings,
    payload="4P up, 4P down",
)
"""
"""Code of a row that computes what FedAvg does."""


def fake_package(
    folder: Path,
    package: str,
    code: str,
    entries: Mapping[str, str],
    kind: str = "methods",
) -> None:
    """Write a module and the metadata that pip would write for it.

    Parameters
    ----------
    folder : Path
        Folder to put on ``sys.path``.
    package : str
        Name of the package; its module is the name with ``_`` in place of ``-``.
    code : str
        Content of the module.
    entries : mapping of str to str
        Attribute of the module by name of the entry point.
    kind : str
        Table of the entry points.
    """
    module = package.replace("-", "_")
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
    )
    lines = [f"{name} = {module}:{attribute}" for name, attribute in entries.items()]
    text = "\n".join([f"[flower_fgl.{kind}]", *lines, ""])
    (info / "entry_points.txt").write_text(text)
