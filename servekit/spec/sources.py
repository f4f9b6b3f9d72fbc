"""A digest of exactly the code that a service runs: sources in, digests out.

A service runs its class, and what that names: functions, classes and constants of its module, and of
the author's other modules through their imports, and so on. It also runs what those modules do when
they are imported. Comments and formatting don't count, and neither does what only other services in
the same file use. A service that is depended on counts by the types in its signatures alone, as its
code runs elsewhere.

Where names can't be followed (`import *`, `globals()`, `import module` without names, pickles), the
whole module counts, or all of them: a replica that is restarted for nothing is better than one that
runs old code.
"""

import ast
import hashlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from servekit.spec.inert import Meaning, builtin, is_inert
from servekit.spec.module import EDGES, Module, Reach, Statement, names_in, parse

_METHODS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS = (*_METHODS, ast.ClassDef)
_ASSIGNMENTS = (ast.Assign, ast.AnnAssign)


class Source(NamedTuple):
    """One of the author's modules, as it lies on the disk."""

    content: bytes
    is_package: bool = False


class Sources:
    """The author's modules.

    Args:
        find: Returns a module by its dotted name; None if it is not the author's.
        names: Returns all of the author's, also those that nothing has imported yet.
    """

    def __init__(
        self, find: Callable[[str], Source | None], names: Callable[[], Iterable[str]]
    ) -> None:
        self._find = find
        self._names = names
        self._known: tuple[str, ...] = ()
        self._read: dict[str, Module | bytes | None] = {}
        self._inert: dict[Statement, bool] = {}

    def digest(self, module: str, name: str) -> str:
        """Return the digest of what runs in the process of a class, 12 hex digits.

        Args:
            module: Where the class is.
            name: Its qualified name.
        """
        walk = _Walk(self)
        walk.module(module)
        walk.name(module, name.partition(".")[0])
        return walk.digest()

    def read(self, name: str) -> Module | bytes | None:
        """Return a module; its bytes if it is no Python, None if it isn't the author's."""
        if name not in self._read:
            found = self._find(name)
            self._read[name] = found and (
                parse(name, found.content, is_package=found.is_package) or found.content
            )
        return self._read[name]

    def everything(self) -> Iterable[str]:
        """Return the names of all modules."""
        self._known = self._known or tuple(self._names())
        return {*self._known, *(name for name, found in self._read.items() if found is not None)}

    def is_inert(self, module: Module, statement: Statement) -> bool:
        """Return whether a statement matters only to what names it."""
        if statement not in self._inert:
            self._inert[statement] = False  # what goes in circles isn't plain
            self._inert[statement] = is_inert(statement.node, _Names(self, module))
        return self._inert[statement]

    def defined(self, module: Module, name: str) -> tuple[Module, ast.ClassDef] | None:
        """Return the class that a name stands for, and where it is, if it plainly is one."""
        meaning = _Names(self, module).meaning(name)
        node = meaning.statement and meaning.statement.node
        if isinstance(node, ast.ClassDef) and isinstance(meaning.scope, _Names):
            where = meaning.scope.module
            return None if where.is_open or module.is_open else (where, node)
        return None

    def reference(self, module: Module, name: str) -> tuple[Module, Statement] | None:
        """Return the `name = sk.ref(Class, …)` that a name stands for, if it plainly is one."""
        meaning = _Names(self, module).meaning(name)
        statement, scope = meaning.statement, meaning.scope
        if statement is None or not isinstance(scope, _Names) or not statement.edges:
            return None
        if scope.module.is_open or module.is_open:
            return None
        value = statement.node.value if isinstance(statement.node, ast.Assign) else None
        is_call = isinstance(value, ast.Call) and ast.unparse(value.func).endswith("ref")
        return (scope.module, statement) if is_call else None

    def is_service(self, module: Module, node: ast.ClassDef) -> bool:
        """Return whether a class is plainly decorated with `@sk.service`."""
        names = _Names(self, module)
        for decorator in node.decorator_list:
            called = decorator.func if isinstance(decorator, ast.Call) else decorator
            root = called.value if isinstance(called, ast.Attribute) else called
            if isinstance(root, ast.Name) and names.meaning(root.id).package == "servekit":
                return True
        return False


class _Names:
    """The `Scope` of a module."""

    def __init__(self, sources: Sources, module: Module) -> None:
        self._sources = sources
        self.module = module

    def is_inert(self, statement: Statement) -> bool:
        return self._sources.is_inert(self.module, statement)

    def meaning(self, name: str) -> Meaning:
        module: Module | bytes | None = self.module
        followed: set[Statement] = set()
        while isinstance(module, Module):
            binders = module.binders.get(name, [])
            if not binders and not module.is_open and not followed:
                return builtin(name)
            if len(binders) != 1 or binders[0] in followed:
                break
            (statement,) = binders
            if not isinstance(statement.node, ast.Import | ast.ImportFrom):
                is_code = isinstance(statement.node, _DEFINITIONS)
                scope = _Names(self._sources, module)
                return Meaning("code" if is_code else "data", statement=statement, scope=scope)
            followed.add(statement)
            target = statement.imports[0]
            name, module = target.name, self._sources.read(target.module)
            if module is None:
                return Meaning("installed", package=target.module.partition(".")[0])
        return Meaning("unknown")


class _Walk:
    """One walk over all that a class reaches, one step after another: programs are deep."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._statements: dict[str, set[Statement]] = {}
        self._parts: set[tuple[str, str]] = set()
        self._seen: set[tuple[str, ...]] = set()
        self._todo: list[Callable[[], None]] = []

    def digest(self) -> str:
        while self._todo:
            self._todo.pop()()
        digest = hashlib.sha256()
        for name, taken in sorted(self._statements.items()):
            module = self._sources.read(name)
            assert isinstance(module, Module)
            for statement in module.statements:  # in their order, which may matter
                if statement in taken:
                    digest.update(f"{name}\0{statement.text}\0".encode())
        for name, text in sorted(self._parts):
            digest.update(f"{name}\0{text}\0".encode())
        return digest.hexdigest()[:12]

    def _once(self, step: Callable[..., None], *names: str) -> None:
        """Take a step later, unless it was taken or is to be taken."""
        if (key := (step.__name__, *names)) not in self._seen:
            self._seen.add(key)
            self._todo.append(partial(step, *names))

    def _read(self, name: str) -> Module | None:
        found = self._sources.read(name)
        if isinstance(found, bytes):
            self._parts.add((name, hashlib.sha256(found).hexdigest()))
            return None
        return found

    # -- what is reached ---------------------------------------------------------------------

    def module(self, name: str) -> None:
        """Take what importing a module does, apart from binding names."""
        self._once(self._module, name)

    def name(self, module: str, name: str) -> None:
        """Take what a module binds to a name."""
        self._once(self._name, module, name)

    def whole(self, module: str) -> None:
        """Take all of a module."""
        self._once(self._whole, module)

    def _module(self, name: str) -> None:
        package = name.rpartition(".")[0]
        if package:
            self.module(package)
        found = self._read(name)
        if found is None:
            return
        for statement in found.statements:
            if not self._sources.is_inert(found, statement):
                self._take(found, statement)
            elif isinstance(statement.node, ast.Import | ast.ImportFrom):
                self._load(statement)
                if not statement.binds & found.used and self._is_installed(statement):
                    # It is there for what it does, like adding operators to a library.
                    self._parts.add((name, statement.text))

    def _is_installed(self, statement: Statement) -> bool:
        return all(self._sources.read(target.module) is None for target in statement.imports)

    def _load(self, statement: Statement) -> None:
        for target in statement.imports:
            self.module(target.module)
            if target.name:
                self.module(f"{target.module}.{target.name}")  # if that is one

    def _name(self, module: str, name: str) -> None:
        found = self._read(module)
        if found is None:
            return
        if found.is_open or name not in found.binders:
            self.whole(module)
        for statement in found.binders.get(name, []):
            self._take(found, statement)

    def _whole(self, module: str) -> None:
        self.module(module)
        found = self._read(module)
        if found is not None:
            for statement in found.statements:
                self._take(found, statement)

    def _take(self, module: Module, statement: Statement) -> None:
        taken = self._statements.setdefault(module.name, set())
        if statement in taken:
            return
        taken.add(statement)
        for name in statement.uses & module.binders.keys():
            self.name(module.name, name)
        for name in statement.edges:
            self._edge(module, name)
        self._load(statement)
        for target in statement.imports:
            self._import(target.module, target.name)
        if statement.reach is Reach.MODULE or module.is_open:
            self.whole(module.name)
        elif statement.reach is Reach.EVERYTHING:
            for name in self._sources.everything():
                self.whole(name)

    def _import(self, module: str, name: str) -> None:
        found = self._read(module)
        if found is not None and found.is_open:
            self.whole(module)  # its `__getattr__` is asked before a submodule of that name
        if name and found is not None and name in found.binders:
            self.name(module, name)
        elif name and self._sources.read(f"{module}.{name}") is not None:
            self._package(f"{module}.{name}")
        else:
            self._package(module)

    def _package(self, module: str) -> None:
        """Take a module that can be looked into, with those below it, whoever imports them."""
        self.whole(module)
        found = self._read(module)
        if found is not None and found.package == module:
            for name in self._sources.everything():
                if name.startswith(f"{module}."):
                    self.whole(name)

    # -- services that are depended on -------------------------------------------------------

    def _edge(self, module: Module, name: str) -> None:
        """Take the types of a service that is called; anything else as it is."""
        found = self._sources.defined(module, name)
        if found is not None and self._sources.is_service(*found):
            self._types(*found)
        elif (reference := self._sources.reference(module, name)) is not None:
            for cls in reference[1].edges:  # the settings are the other service's
                self._edge(reference[0], cls)
        elif name in module.binders:
            self.name(module.name, name)

    def _types(self, scope: Module, node: ast.ClassDef) -> None:
        key = ("types", scope.name, node.name)
        if key in self._seen:
            return
        self._seen.add(key)
        for member in node.body:
            if isinstance(member, _METHODS) and member.decorator_list:
                self._parts.add((f"{scope.name}.{node.name}", _signature(member)))
                self._named(scope, member.args, member.returns)
            elif isinstance(member, _ASSIGNMENTS) and isinstance(member.value, ast.Call):
                self._named(scope, *_functions(member.value))
        for base in node.bases:
            found = self._sources.defined(scope, base.id) if isinstance(base, ast.Name) else None
            if found is None:
                self._named(scope, base)
            else:
                self._types(*found)

    def _named(self, scope: Module, *nodes: ast.AST | None) -> None:
        for node in filter(None, nodes):
            for name in names_in(node):
                if name in scope.binders:
                    self.name(scope.name, name)


def _signature(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    returns = "" if method.returns is None else ast.dump(method.returns)
    return f"{type(method).__name__} {method.name} {ast.dump(method.args)} {returns}"


def _functions(call: ast.Call) -> Iterator[ast.expr]:
    """Yield what `run = sk.endpoint(function)` makes a method of; `sk.depends` is nobody's type."""
    if not ast.unparse(call.func).endswith(EDGES):
        yield from (*call.args, *(keyword.value for keyword in call.keywords))
