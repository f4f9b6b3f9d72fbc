"""Whether a statement does nothing but bind its names, when its module is imported.

What does more may change how other code works, without being named by it: a decorator that registers
its function, a call at the top level, an assignment to an attribute. Such statements count for
everything that runs in the process. The question has no exact answer, so whatever isn't plainly
inert is not: then more is restarted than had to be.
"""

import ast
import builtins
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from servekit.spec.module import Statement

_WRAPPING = frozenset(
    {"abc", "attr", "attrs", "contextlib", "dataclasses", "enum", "functools", "msgspec"}
    | {"pydantic", "servekit", "tenacity", "typing", "typing_extensions"}
)
"""Packages that take an author's code and give it back wrapped, but keep nothing of it."""
_WRAPPERS = frozenset(
    {"jax.jit", "numba.jit", "numba.njit", "torch.compile", "torch.inference_mode"}
    | {"torch.no_grad", "triton.jit"}
)
"""The same, of packages that also have others."""

_BASES = frozenset(
    {"abc", "collections", "enum", "msgspec", "pydantic", "torch", "typing", "typing_extensions"}
)
"""Packages whose classes don't take note of their subclasses."""

_READING = frozenset(
    {"copy", "count", "decode", "encode", "endswith", "format", "get", "index", "items", "join"}
    | {"keys", "lower", "read_bytes", "read_text", "replace", "resolve", "split", "splitlines"}
    | {"startswith", "strip", "upper", "values"}
)
"""Methods that change nothing."""

_CONSTRUCTORS = frozenset({"__init__", "__new__", "__post_init__", "__setattr__"})
_ON_SUBCLASS = frozenset({"__init_subclass__", "__set_name__"})


@dataclass(frozen=True)
class Meaning:
    """What a global name stands for.

    Attributes:
        kind: `"code"` is an own function or class, `"data"` another own value, `"installed"` comes
            from elsewhere, `"builtin"` is Python's.
        package: Of something installed, its outermost package.
        statement: Of something own, what binds it.
        scope: Where the names in that are looked up.
    """

    kind: Literal["code", "data", "installed", "builtin", "unknown"]
    package: str = ""
    statement: Statement | None = None
    scope: "Scope | None" = None


class Scope(Protocol):
    """The global names of one module."""

    def meaning(self, name: str) -> Meaning:
        """Return what a name stands for."""
        ...

    def is_inert(self, statement: Statement) -> bool:
        """Return `is_inert` of one of the module's statements; False while that is being asked."""
        ...


def builtin(name: str) -> Meaning:
    """Return the meaning of a name that no module binds."""
    return Meaning("builtin" if hasattr(builtins, name) else "unknown")


def is_inert(node: ast.stmt, scope: Scope) -> bool:
    """Return whether a top-level statement plainly does nothing but bind names."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return getattr(node, "module", None) != "__future__"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        return all(_gives_back(d, scope) for d in node.decorator_list) and all(
            _only_computes(default, scope) for default in defaults
        )
    if isinstance(node, ast.ClassDef):
        return (
            all(_is_harmless(keyword, scope) for keyword in node.keywords)
            and all(_gives_back(d, scope) for d in node.decorator_list)
            and all(_ignores_subclasses(base, scope) for base in node.bases)
            and all(_is_docstring(member) or is_inert(member, scope) for member in node.body)
        )
    if isinstance(node, ast.Assign):
        return all(map(_is_plain, node.targets)) and _only_computes(node.value, scope)
    if isinstance(node, ast.AnnAssign):
        return _is_plain(node.target) and (node.value is None or _only_computes(node.value, scope))
    # `type X = …` of Python 3.12 doesn't even compute its value.
    return isinstance(node, ast.Pass) or type(node).__name__ == "TypeAlias"


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_plain(node: ast.expr) -> bool:
    """Return whether an assignment's target is one name, or several."""
    if isinstance(node, ast.Tuple | ast.List):
        return all(map(_is_plain, node.elts))
    return isinstance(node, ast.Name)


# ---- what is applied to code


def _gives_back(node: ast.expr, scope: Scope) -> bool:
    """Return whether a decorator only wraps what it is given."""
    function = node
    if isinstance(node, ast.Call):
        if not all(_only_computes(argument, scope) for argument in _arguments(node)):
            return False
        function = node.func
    dotted = ast.unparse(function)
    meaning = _meaning(function, scope)
    if meaning.kind == "installed":
        return meaning.package in _WRAPPING or dotted in _WRAPPERS
    if meaning.kind == "code":
        return dotted.isidentifier() and _runs_inert(meaning, again=isinstance(node, ast.Call))
    # `@property`, and `@value.setter`, which is the class's own.
    return meaning.kind == "builtin" or dotted.endswith((".setter", ".getter", ".deleter"))


def _is_harmless(keyword: ast.keyword, scope: Scope) -> bool:
    """Return whether a keyword of a class, like `frozen=True`, is a plain setting."""
    if keyword.arg == "metaclass":
        return _meaning(keyword.value, scope).package in _BASES
    return _only_computes(keyword.value, scope)


def _ignores_subclasses(node: ast.expr, scope: Scope) -> bool:
    """Return whether a base class does nothing when it gets a subclass."""
    if isinstance(node, ast.Subscript):  # Generic[T]
        node = node.value
    meaning = _meaning(node, scope)
    if meaning.kind == "installed":
        return meaning.package in _BASES
    if meaning.kind != "code":
        return meaning.kind == "builtin"
    found = _own(meaning)
    return (
        isinstance(node, ast.Name)
        and isinstance(found, ast.ClassDef)
        and not _ON_SUBCLASS & set(_methods(found))
        and _is_made_inertly(meaning)
    )


# ---- values


def _only_computes(node: ast.AST, scope: Scope) -> bool:
    """Return whether computing a value changes nothing else."""
    if isinstance(node, ast.Lambda):
        return all(_only_computes(default, scope) for default in node.args.defaults)
    if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
        return False
    if isinstance(node, ast.Call) and not _call_only_computes(node, scope):
        return False
    return all(_only_computes(child, scope) for child in ast.iter_child_nodes(node))


def _call_only_computes(node: ast.Call, scope: Scope) -> bool:
    function = node.func
    meaning = _meaning(function, scope)
    if meaning.package in _WRAPPING:
        return True
    if meaning.kind == "installed" or isinstance(function, ast.Attribute):
        # What gets none of the author's code can keep none.
        names = (name for argument in _arguments(node) for name in _names(argument))
        if any(scope.meaning(name).kind in ("code", "unknown") for name in names):
            return False
        is_read = meaning.kind == "data" or _root(function) is None
        return meaning.kind == "installed" or (
            is_read and isinstance(function, ast.Attribute) and function.attr in _READING
        )
    return meaning.kind == "builtin" or (meaning.kind == "code" and _runs_inert(meaning))


def _runs_inert(meaning: Meaning, *, again: bool = False) -> bool:
    """Return whether calling an own function or class plainly changes nothing.

    That is so for a function that only makes and returns another one, as decorators do, and for a
    class without a constructor of its own, as data classes are. With `again`, what is returned is
    called, too.
    """
    found, scope = _own(meaning), meaning.scope
    if scope is None:
        return False
    if isinstance(found, ast.ClassDef):
        return not _CONSTRUCTORS & set(_methods(found)) and _is_made_inertly(meaning)
    return isinstance(found, ast.FunctionDef) and _makes_function(found, scope, again=again)


def _makes_function(node: ast.FunctionDef, scope: Scope, *, again: bool) -> bool:
    *steps, last = node.body
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Name):
        return False
    for step in steps:
        if _is_docstring(step):
            continue
        if not isinstance(step, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        if not all(_gives_back(decorator, scope) for decorator in step.decorator_list):
            return False
        if again and step.name == last.value.id:
            if not isinstance(step, ast.FunctionDef) or step.decorator_list:
                return False
            if not _makes_function(step, scope, again=False):
                return False
    return True


# ---- names


def _meaning(node: ast.expr, scope: Scope) -> Meaning:
    """Return what the outermost name of `a.b[c].d` stands for."""
    root = _root(node)
    return Meaning("unknown") if root is None else scope.meaning(root)


def _root(node: ast.expr) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_made_inertly(meaning: Meaning) -> bool:
    scope, statement = meaning.scope, meaning.statement
    return scope is not None and statement is not None and scope.is_inert(statement)


def _own(meaning: Meaning) -> ast.stmt | None:
    return None if meaning.statement is None else meaning.statement.node


def _arguments(node: ast.Call) -> list[ast.expr]:
    return [*node.args, *(keyword.value for keyword in node.keywords)]


def _names(node: ast.AST) -> Iterator[str]:
    return (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))


def _methods(node: ast.ClassDef) -> Iterable[str]:
    return (member.name for member in node.body if isinstance(member, ast.FunctionDef))
