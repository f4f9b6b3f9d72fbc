"""`servekit init`: a new project from a template that runs as it is."""

import keyword
import re
import shutil
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Final

import typer

from servekit.cli.console import Line, rows, write
from servekit.errors import ConfigError

PLACEHOLDER: Final = "__project__"
"""Stands in a template's texts for the project's name."""

_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")
_LONGEST: Final = 60
_DOT: Final = "dot-"
"""How a name starts in a template that starts with a dot in a project: so it does nothing here."""
_MADE: Final = shutil.ignore_patterns("__pycache__", ".*", "*.onnx", "*.pyc")


class Template(StrEnum):
    """What a project can start from."""

    CLASSIFIER = "classifier"
    PIPELINE = "pipeline"


_STEPS: Final[dict[Template, tuple[str, ...]]] = {
    Template.CLASSIFIER: (
        "pip install -e '.[dev]'",
        "python train.py",
        "pytest",
        "servekit dev app.py",
    ),
    Template.PIPELINE: ("pip install -e '.[dev]'", "pytest", "servekit dev app.py"),
}


def init(
    name: Annotated[str, typer.Argument(help="Name of the project, and of its new folder.")],
    *,
    template: Annotated[
        Template, typer.Option("--template", "-t", help="What to start from.")
    ] = Template.PIPELINE,
) -> None:
    """Start a project from a template.

    classifier: digits, trained with scikit-learn and served as ONNX. pipeline: two services in
    numpy, one for signals and one for batches of their spectra.
    """
    create(name, template, Path.cwd())
    write(*_next_steps(name, template))


def create(name: str, template: Template, parent: Path) -> Path:
    """Make the folder `name` in `parent` and return it.

    Raises:
        ConfigError: The name can't be a project's, or the folder has something in it.
    """
    if not _NAME.fullmatch(name) or len(name) > _LONGEST or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} can't be a project's name; use letters, digits, and single - or _ between "
            f"them, a letter first, at most {_LONGEST}"
        )
    if name.lower().replace("_", "-") == "servekit":
        raise ConfigError(
            "a project named 'servekit' would hide servekit itself; take another name"
        )
    folder = parent / name
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder} is there already, and is no folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; choose another name, or empty it")
    try:
        shutil.copytree(templates() / template, folder, ignore=_MADE, dirs_exist_ok=True)
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            text = path.read_text("utf-8")
            if PLACEHOLDER in text:
                path.write_text(text.replace(PLACEHOLDER, name), "utf-8")
        for path in sorted(folder.rglob(f"{_DOT}*"), reverse=True):  # what is in a folder before it
            path.rename(path.with_name(f".{path.name.removeprefix(_DOT)}"))
    except OSError as error:
        raise ConfigError(f"can't write {folder}: {error.strerror or error}") from error
    return folder


def templates() -> Path:
    """Return the folder of the templates: in the wheel beside this file, else in the checkout."""
    shipped = Path(__file__).with_name("templates")
    return shipped if shipped.is_dir() else Path(__file__).parents[2] / "templates"


def _next_steps(name: str, template: Template) -> list[Line]:
    steps = (f"cd {name}", *_STEPS[template])
    call = "servekit call predict -d @sample.json"
    return [
        [("made ", ""), (f"{name}/", "bold"), (f" from the template {template}", "")],
        [],
        *rows([[(step, "cyan")] for step in steps], indent="  "),
        *rows([[(call, "cyan"), ("# in another terminal", "dim")]], indent="  "),
    ]
