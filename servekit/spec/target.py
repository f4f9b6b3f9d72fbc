"""Import strings: `load` finds the service class that one names, `target_of` names a class.

A target is `"module:Class"`, `"module"`, `"path/file.py:Class"` or `"path/file.py"`. Without a class
it means the module's root service: the one that no other service in it depends on.
"""

import importlib
import sys
from pathlib import Path
from types import ModuleType

from servekit.errors import AuthorError, ConfigError, SetupError, suggest
from servekit.spec.definition import ATTRIBUTE, definition


def target_of(cls: type) -> str:
    """Return a target that a fresh process with the same search path can load.

    The script that Python was started with is named by its file. A class from inside a function or
    a notebook has a target too, but `load` refuses it.
    """
    module = cls.__module__
    if module == "__main__":
        main = sys.modules[module]
        spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
        if spec is not None:  # python -m package.module
            module = spec.name
        elif file is not None:
            module = str(Path(file).resolve())
    return f"{module}:{cls.__qualname__}"


def split(target: str) -> tuple[str, str]:
    """Return a target's module or file, and its class; "" where it names none."""
    module_name, colon, class_name = target.rpartition(":")
    if not colon or class_name.endswith(".py"):
        return target, ""
    return module_name, class_name


def load(target: str) -> type:
    """Import a service class; the file's folder, or the current one, is searched first.

    Raises:
        ConfigError: There is no such file or class, or it is unclear which one is meant.
        SetupError: Importing the module raised; the cause is kept.
        SpecError: The class is no service.
    """
    module_name, class_name = split(target)
    module = _import_file(module_name) if module_name.endswith(".py") else _import(module_name)
    cls = _member(module, class_name, target) if class_name else _root(module, target)
    definition(cls)
    return cls


def _import_file(name: str) -> ModuleType:
    file = Path(name).resolve()
    if not file.is_file():
        raise ConfigError(f"{name}: there is no such file in {Path.cwd()}")
    folder = str(file.parent)
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    module = _import(file.stem)
    if Path(module.__file__ or "").resolve() != file:
        raise ConfigError(
            f"{name}: Python has another module named {file.stem!r} ({module.__file__ or 'built in'}); "
            "rename the file"
        )
    return module


def _import(name: str) -> ModuleType:
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except AuthorError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise SetupError(
                f"there is no module {name!r} in {here} or on Python's search path; "
                "give its file, like 'path/to/app.py:Class'"
            ) from error
        raise SetupError(f"importing {name} raised {type(error).__name__}: {error}") from error


def _member(module: ModuleType, name: str, target: str) -> type:
    if "<locals>" in name or module.__name__ == "__main__":
        raise ConfigError(
            f"{target}: another process can't load a class from inside a function or a notebook; "
            "move it to the top level of a module"
        )
    value: object = module
    for part in name.split("."):
        inner: object = getattr(value, part, None)
        if inner is None:
            known = [n for n, v in vars(value).items() if isinstance(v, type)]
            raise ConfigError(
                f"{target}: {module.__name__} has no class {name!r}.{suggest(part, known)}"
            )
        value = inner
    if not isinstance(value, type):
        raise ConfigError(f"{target}: is a {type(value).__name__}; give a class")
    return value


def _root(module: ModuleType, target: str) -> type:
    services = list(
        dict.fromkeys(
            value
            for value in vars(module).values()
            if isinstance(value, type) and ATTRIBUTE in vars(value)
        )
    )
    # What a module imports from elsewhere is there to build on.
    services = [s for s in services if s.__module__ == module.__name__] or services
    needed = {edge.target.cls for s in services for edge in definition(s).dependencies.values()}
    roots = [service for service in services if service not in needed]
    if len(roots) == 1:
        return roots[0]
    if not services:
        raise ConfigError(f"{target}: has no service; decorate a class with @sk.service")
    choices = ", ".join(f"{target}:{service.__qualname__}" for service in roots or services)
    raise ConfigError(f"{target}: has {len(roots)} root services; choose one: {choices}")
