"""One module's source, cut into the statements that a digest is made of.

In goes a module's text; out come its top-level statements, each with the names that it binds, the
global names that it uses, and what it imports. Positions, comments and formatting are gone. What
never runs in a replica (`if TYPE_CHECKING:`, `if __name__ == "__main__":`) is left out.
"""

import ast
import symtable
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

EDGES = ("depends", "ref")
"""What makes an edge of the graph, in `servekit`."""
_ANY_NAME_HERE = frozenset({"globals", "exec", "eval", "compile"})
_HERE_WITHOUT_ARGUMENTS = frozenset({"vars", "dir", "locals"})
_ANY_MODULE = frozenset({"importlib", "pkgutil", "runpy", "imp", "pydoc"})
_UNPICKLES = frozenset({"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve"})
_PLAIN = frozenset({"importlib.metadata", "importlib.resources"})
_REACHES = frozenset({("sys", "modules"), ("torch", "load")})
_HIDDEN_ATTRIBUTES = frozenset(
    {"__globals__", "__import__", "__subclasses__", "f_globals", "import_module", "read_pickle"}
)
_UNPICKLING_KEYWORDS = frozenset({"allow_pickle", "weights_only"})


class Reach(IntEnum):
    """What a statement may use without naming it."""

    NOTHING = 0
    MODULE = 1
    EVERYTHING = 2


class Imported(NamedTuple):
    """`from module import name`, or `import module` without a name; "*" is all names."""

    module: str
    name: str = ""


@dataclass(frozen=True, eq=False)
class Statement:
    """One statement at the top level of a module, or one name of an import.

    Attributes:
        node: The statement.
        binds: The global names that it sets.
        uses: The global names that it may look up, when it runs or later.
        edges: Of those in `sk.depends(X)` and `sk.ref(X)`, which are not in `uses`.
        imports: What it imports, also within functions.
        reach: What else it may use.
    """

    node: ast.stmt
    binds: frozenset[str]
    uses: frozenset[str] = frozenset()
    edges: frozenset[str] = frozenset()
    imports: tuple[Imported, ...] = ()
    reach: Reach = Reach.NOTHING

    @cached_property
    def text(self) -> str:
        """Return the content: equal for what means the same."""
        return ast.dump(self.node)


@dataclass(frozen=True, eq=False)
class Module:
    """A module.

    Attributes:
        name: Its dotted name.
        package: The package that its relative imports start from.
        statements: In their order.
        binders: Those that bind a name, by name.
        used: The names that any of them uses.
        is_open: Names may come from elsewhere (`import *`, a `__getattr__`), so all of it counts.
    """

    name: str
    package: str
    statements: tuple[Statement, ...]
    binders: dict[str, list[Statement]] = field(init=False)
    used: frozenset[str] = field(init=False)
    is_open: bool = field(init=False)

    def __post_init__(self) -> None:
        used = (statement.uses | statement.edges for statement in self.statements)
        object.__setattr__(self, "used", frozenset().union(*used))
        binders: dict[str, list[Statement]] = {}
        for statement in self.statements:
            for name in statement.binds:
                binders.setdefault(name, []).append(statement)
        object.__setattr__(self, "binders", binders)
        object.__setattr__(self, "is_open", "*" in binders or "__getattr__" in binders)


@lru_cache(maxsize=2048)
def parse(name: str, source: bytes, *, is_package: bool) -> Module | None:
    """Read a module; None if this is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    package = name if is_package else name.rpartition(".")[0]
    return Module(name, package, tuple(_statements(tree, package)))


def _statements(tree: ast.Module, package: str) -> Iterator[Statement]:
    calls = frozenset(_edge_calls(tree))
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from _imports(node, package)
        elif not _never_runs(node):
            uses, edges = _without_edges(node, calls)
            yield Statement(
                node,
                binds=frozenset(_bound(node)),
                uses=uses,
                edges=edges,
                imports=tuple(imported(node, package)),
                reach=max(map(_reach, ast.walk(node))),
            )


def _edge_calls(tree: ast.Module) -> Iterator[str]:
    """Yield what `servekit.depends` and `servekit.ref` are called in a module."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name == "servekit":
                    yield from (f"{alias.asname or alias.name}.{name}" for name in EDGES)
        elif isinstance(node, ast.ImportFrom) and node.module == "servekit":
            yield from (alias.asname or alias.name for alias in node.names if alias.name in EDGES)


def _without_edges(node: ast.stmt, calls: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that a statement uses otherwise, and those it only depends on."""
    edges = [
        call for call in ast.walk(node) if isinstance(call, ast.Call) and _is_edge(call, calls)
    ]
    classes = [call.args[0] for call in edges]
    for call in edges:
        call.args[0] = ast.Constant(None)
    uses = frozenset(_used(node))
    for call, cls in zip(edges, classes, strict=True):
        call.args[0] = cls
    return uses, frozenset(cls.id for cls in classes if isinstance(cls, ast.Name))


def _is_edge(call: ast.Call, calls: frozenset[str]) -> bool:
    function = call.func
    name = function.id if isinstance(function, ast.Name) else ""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        name = f"{function.value.id}.{function.attr}"
    return name in calls and bool(call.args) and isinstance(call.args[0], ast.Name)


def _imports(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[Statement]:
    """Yield one statement for each name, so that another name on the same line changes nothing."""
    for alias in node.names:
        if isinstance(node, ast.Import):
            one: ast.stmt = ast.Import([alias])
            binds = alias.asname or alias.name.partition(".")[0]
        else:
            one = ast.ImportFrom(node.module, [alias], node.level)
            binds = alias.asname or alias.name
        yield Statement(
            one,
            frozenset({binds}),
            imports=tuple(imported(one, package)),
            reach=_reach(one),
        )


def _never_runs(node: ast.stmt) -> bool:
    if isinstance(node, ast.Pass):
        return True
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # the module's docstring, or an ellipsis
    if not isinstance(node, ast.If) or node.orelse:
        return False
    test = ast.unparse(node.test)
    return test in ("TYPE_CHECKING", "typing.TYPE_CHECKING", "__name__ == '__main__'")


def imported(node: ast.AST, package: str) -> Iterator[Imported]:
    """Yield all imports in a piece of code, with the absolute names of their modules."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            for alias in inner.names:
                yield Imported(alias.name)
                if alias.asname is None and "." in alias.name:
                    yield Imported(alias.name.partition(".")[0])  # which is what it binds
        elif isinstance(inner, ast.ImportFrom):
            module = inner.module or ""
            if inner.level:
                above = package.split(".")[: len(package.split(".")) - inner.level + 1]
                module = ".".join([*above, *filter(None, [module])])
            yield from (Imported(module, alias.name) for alias in inner.names)


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds in the module."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        return
    for inner in _here(node):
        if isinstance(inner, ast.Name) and not isinstance(inner.ctx, ast.Load):
            yield inner.id
        elif isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield inner.name
        elif isinstance(inner, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in inner.names)
        elif isinstance(inner, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and inner.name:
            yield inner.name


def _here(node: ast.AST) -> Iterator[ast.AST]:
    """Walk the code that runs when the statement does: not into functions and classes."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _here(child)


def _used(node: ast.stmt) -> Iterator[str]:
    """Yield the global names that a statement refers to, in any scope within it."""
    tables = [symtable.symtable(ast.unparse(node), "module", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        outer = table.get_type() in ("module", "class")
        for symbol in table.get_symbols():
            # What a class binds is looked up outside of it as long as it isn't bound yet.
            if symbol.is_referenced() if outer else symbol.is_global():
                yield symbol.get_name()
    for annotation in _annotations(node):
        yield from names_in(annotation)


def _annotations(node: ast.AST) -> Iterator[ast.expr]:
    """Yield all annotations in a piece of code."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and inner.returns is not None:
            yield inner.returns
        elif isinstance(inner, ast.arg | ast.AnnAssign) and inner.annotation is not None:
            yield inner.annotation


def names_in(annotation: ast.AST) -> Iterator[str]:
    """Yield the names in an annotation, or in all of a signature, also in its quoted parts."""
    for inner in ast.walk(annotation):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            try:
                quoted = ast.parse(inner.value, mode="eval").body
            except (SyntaxError, ValueError):
                continue  # the text of a Literal, or the dims of an array
            yield from names_in(quoted)


def _reach(node: ast.AST) -> Reach:
    """Return what one piece of code may use without naming it."""
    if isinstance(node, ast.Name):
        if node.id == "__import__":
            return Reach.EVERYTHING
        return Reach.MODULE if node.id in _ANY_NAME_HERE else Reach.NOTHING
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        without = node.func.id in _HERE_WITHOUT_ARGUMENTS and not node.args
        return Reach.MODULE if without else Reach.NOTHING
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        hidden = node.attr in _HIDDEN_ATTRIBUTES or (owner, node.attr) in _REACHES
        return Reach.EVERYTHING if hidden else Reach.NOTHING
    if isinstance(node, ast.keyword):
        return Reach.EVERYTHING if node.arg in _UNPICKLING_KEYWORDS else Reach.NOTHING
    if isinstance(node, ast.Import):
        modules = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        names = [(node.module, alias.name) for alias in node.names]
        if any(name in _REACHES or name[1] in _HIDDEN_ATTRIBUTES for name in names):
            return Reach.EVERYTHING
        modules = [] if node.level else [node.module or ""]
    else:
        return Reach.NOTHING
    roots = {module.partition(".")[0] for module in modules if module not in _PLAIN}
    return Reach.EVERYTHING if roots & (_ANY_MODULE | _UNPICKLES) else Reach.NOTHING
