"""The `Image` that a module declares, read without importing it: what the module needs may not be here.

So its arguments are literals. After the app was described in its own environment, `build` compares
what was read with what the module really says.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from servekit.errors import ConfigError, SpecError
from servekit.spec.container import Image

_METHODS = ("apt", "run", "packages", "lockfile", "include", "env", "secrets")


def image_of(file: Path, service: str = "") -> Image:
    """Return the image that a service's decorator has; the default one where it has none.

    Args:
        file: The module.
        service: The class; "" is the one class of the module that has an image.

    Raises:
        ConfigError: It can't be told which one is meant, or an argument is no literal.
        SpecError: It can't be an image.
    """
    tree = ast.parse(file.read_bytes(), str(file))
    names = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    found = [*_declarations(tree, service)]
    if not found:
        return Image()
    images = {
        value.lineno: _evaluate(value, names, f"{file.name}:{value.lineno}") for value in found
    }
    first, *others = images.values()
    if any(other != first for other in others):
        lines = ", ".join(map(str, images))
        raise ConfigError(
            f"{file.name}: has several images (lines {lines}); name the root service, like "
            f"{file.name}:Class"
        )
    return first


def _declarations(tree: ast.Module, service: str) -> Iterator[ast.expr]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and service in ("", node.name):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call):
                    for keyword in decorator.keywords:
                        if keyword.arg == "image":
                            yield keyword.value


def _evaluate(node: ast.expr, names: dict[str, ast.expr], where: str) -> Image:
    """Return what a chain of calls makes: `sk.Image("…").apt("…")`."""
    if isinstance(node, ast.Name) and node.id in names:
        return _evaluate(names[node.id], {k: v for k, v in names.items() if k != node.id}, where)
    if isinstance(node, ast.Call):
        called = node.func
        args, kwargs = _literals(node, where)
        try:
            if isinstance(called, ast.Attribute) and called.attr in _METHODS:
                image: Image = getattr(_evaluate(called.value, names, where), called.attr)(
                    *args, **kwargs
                )
                return image
            if (called.attr if isinstance(called, ast.Attribute) else _name(called)) == "Image":
                return Image(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{where}: image=: {error}") from None
        except SpecError as error:
            raise SpecError(f"{where}: {error}") from None
    raise ConfigError(
        f"{where}: image={ast.unparse(node)} is not read without importing the module; write "
        "sk.Image(…) and its methods there, or in a name of the module"
    )


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _literals(node: ast.Call, where: str) -> tuple[list[Any], dict[str, Any]]:
    kwargs: dict[str, Any] = {}
    try:
        args = [ast.literal_eval(arg) for arg in node.args]
        for keyword in node.keywords:
            if keyword.arg is None:
                raise ValueError(f"**{ast.unparse(keyword.value)}")
            kwargs[keyword.arg] = ast.literal_eval(keyword.value)
    except ValueError:
        raise ConfigError(
            f"{where}: an argument of {ast.unparse(node.func)}(…) is no literal; the image is read "
            "without importing the module"
        ) from None
    return args, kwargs
