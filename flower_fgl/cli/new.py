"""``flower-fgl new``: write a package with a method of one's own."""

import keyword
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import typer

from flower_fgl.cli.arguments import show
from flower_fgl.core.errors import ConfigError, refuse
from flower_fgl.core.extensions import check_name, owner_of
from flower_fgl.core.options import fields_by_key
from flower_fgl.core.settings import GeneralSettings
from flower_fgl.methods import METHODS

__all__ = ["new", "write_package"]

NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
TEMPLATES = Path(__file__).parent / "templates"
MODEL = {"name": "my-method", "module": "my_method", "class": "MyMethod"}
"""Names in the templates, which are replaced."""


def new(
    name: str = typer.Argument(..., help="Name of the method, e.g. my-method."),
    folder: Path | None = typer.Option(
        None, help="Folder to write; by default one with the name of the method."
    ),
) -> None:
    """Write a Python package with a new method that runs, to be changed into yours.

    The package has a settings class, a server half, a client half, tests and an entry
    point, by which every installation of flower-fgl finds the method.
    """
    target = Path(name) if folder is None else folder
    files = write_package(name, target)
    show(f"Wrote {len(files)} files:")
    for file in files:
        show(f"  {target / file}")
    show(
        "The method runs as it is: FedAvg with server momentum and a confidence "
        "penalty.\nNext:\n"
        f"  cd {target}\n"
        "  pip install -e '.[test]'\n"
        f"  flower-fgl run --method {name}\n"
        "  pytest"
    )


def write_package(name: str, folder: Path) -> list[Path]:
    """Write the package of a new method; return its files, relative to ``folder``."""
    names = _names(name)
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(
            f"{folder} exists already. Name another folder: "
            f"flower-fgl new {name} --folder DIR"
        )
    written = []
    try:
        for source in sorted((TEMPLATES / "method").rglob("*.txt")):
            place = str(source.relative_to(TEMPLATES / "method").with_suffix(""))
            path = Path(_filled(place, names))
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            text = _filled(source.read_text("utf-8"), names)
            (folder / path).write_text(text, "utf-8")
            written.append(path)
    except OSError as error:
        raise ConfigError(
            f"Cannot write {error.filename}: {error.strerror}. Choose another --folder."
        ) from error
    return written


def _names(name: str) -> dict[str, str]:
    """Check the name of a method; return those of its package, module and classes."""
    refuse(
        {
            "The name of a new method must start with a letter and contain lower-case "
            f"letters, digits and single - between them, e.g. my-method. Got {name!r}.": (
                not NAME.fullmatch(name)
            )
        }
    )
    check_name("methods", name)
    taken = "flower-fgl" if name in METHODS.own else owner_of("methods", name)
    module = name.replace("-", "_")
    is_module = module == "tests" or find_spec(module) is not None
    refuse(
        {
            f'There is a method "{name}" already: it comes from {taken}. Choose another '
            "name, so that both can be compared.": taken,
            f'"{name}" is a setting of every run, so no method can have this name. '
            "Choose another name.": name in fields_by_key(GeneralSettings),
            f"The package would be called {module}, but this is the name of another "
            "module or a word of Python. Choose another name.": (
                is_module or keyword.iskeyword(module)
            ),
        }
    )
    words = [word[:1].upper() + word[1:] for word in name.split("-")]
    return {"name": name, "module": module, "class": "".join(words)}


def _filled(text: str, names: Mapping[str, str]) -> str:
    """Replace the names of the template."""
    for key, model in MODEL.items():
        text = text.replace(model, names[key])
    return text
