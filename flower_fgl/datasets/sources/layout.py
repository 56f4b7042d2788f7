"""The form in which a dataset may lie on disk, and its reader by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flower_fgl.datasets.sources.raw_readers import Raw

__all__ = ["Layout"]


@dataclass(frozen=True)
class Layout:
    """One form in which a dataset may lie on disk.

    Parameters
    ----------
    folder : str
        Folder below the data folder.
    files : tuple of str
        Required files, relative to ``folder``.
    reader : str
        Reference ``module:function`` to the reader. :meth:`read` imports it, so the
        table of datasets loads without torch.
    arguments : mapping of str to str or bool
        Keyword arguments of the reader, besides its first argument, a folder.
    leaf : str or None
        Name that a library loader gives ``folder`` below its root; ``.`` if root and
        folder are the same. The reader then gets a root it may write to. With ``None``
        the reader gets ``folder`` itself and only reads.
    url : str
        Where the files are published.
    can_download : bool
        Whether the reader downloads missing files.
    is_partial : bool
        Whether parts of the published dataset are absent, so its statistics differ.
    """

    folder: str
    files: tuple[str, ...]
    reader: str
    arguments: Mapping[str, str | bool] = field(default_factory=dict)
    leaf: str | None = None
    url: str = ""
    can_download: bool = False
    is_partial: bool = False

    def read(self, root: Path) -> Raw:
        """Import the reader and read ``folder``, or the root of a library loader.

        Readers raise any kind of error.
        """
        return resolve_name(self.reader)(root, **self.arguments)  # type: ignore[no-any-return]
