"""Whether a statement does nothing but bind its names, when its module is imported.

What does more may change how other code works, without being named by it: a decorator that registers
its function, a call at the top level, an assignment to an attribute. Such statements count for
everything that runs in the process. The question has no exact answer, so whatever isn't plainly
inert is not: then more is restarted than had to be.
"""

import ast
import builtins
from collections.abc import Iterator
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

_VALUES = frozenset(
    {"collections", "dataclasses", "datetime", "decimal", "fractions", "hashlib", "itertools"}
    | {"json", "math", "operator", "pathlib", "re", "string", "struct", "uuid"}
)
"""Packages whose functions only make values."""
_READING = frozenset(
    {"arange", "array", "asarray", "copy", "count", "decode", "device", "encode", "endswith"}
    | {"format", "get", "getLogger", "get_logger", "getenv", "index", "items", "join", "keys"}
    | {"linspace", "lower", "ones", "read_bytes", "read_text", "replace", "resolve", "split"}
    | {"splitlines", "startswith", "strip", "tensor", "upper", "values", "zeros"}
)
"""Functions and methods that change nothing, whoever has them."""
_BUILTINS = frozenset(
    {"abs", "bool", "bytes", "classmethod", "complex", "dict", "divmod", "enumerate", "float"}
    | {"frozenset", "int", "isinstance", "issubclass", "len", "list", "max", "min", "object"}
    | {"ord", "pow", "property", "range", "repr", "reversed", "round", "set", "slice", "sorted"}
    | {"staticmethod", "str", "sum", "tuple", "zip"}
)
"""Of Python's own: those that call nothing that they are given."""
_RUNNING = frozenset({"reduce", "update_wrapper"})
"""Functions of packages that otherwise wrap, which call what they are given or change it."""

_ON_SUBCLASS = frozenset({"__init_subclass__", "__pydantic_init_subclass__"})


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
            and all(
                _is_docstring(member) or _is_inert_member(member, scope) for member in node.body
            )
        )
    if isinstance(node, ast.Assign):
        return all(map(_is_plain, node.targets)) and _only_computes(node.value, scope)
    if isinstance(node, ast.AnnAssign):
        return _is_plain(node.target) and (node.value is None or _only_computes(node.value, scope))
    # `type X = …` of Python 3.12 doesn't even compute its value.
    return isinstance(node, ast.Pass) or type(node).__name__ == "TypeAlias"


def _is_inert_member(node: ast.stmt, scope: Scope) -> bool:
    # An import here is one that the module makes, though not at its top level.
    return not isinstance(node, ast.Import | ast.ImportFrom) and is_inert(node, scope)


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
        again = isinstance(node, ast.Call)
        return dotted.isidentifier() and _only_wraps(meaning, again=again)
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
        and not _ON_SUBCLASS & set(_members(found))
        and _is_made_inertly(meaning)
    )


# ---- values


def _only_computes(node: ast.AST, scope: Scope) -> bool:
    """Return whether computing a value changes nothing else."""
    if isinstance(node, ast.Lambda):
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        return all(_only_computes(default, scope) for default in defaults)
    if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom):
        return False
    if isinstance(node, ast.Call) and not _call_only_computes(node, scope):
        return False
    return all(_only_computes(child, scope) for child in ast.iter_child_nodes(node))


def _call_only_computes(node: ast.Call, scope: Scope) -> bool:
    function = node.func
    meaning = _meaning(function, scope)
    name = ast.unparse(function).rpartition(".")[2]
    if meaning.package in _WRAPPING:
        return name not in _RUNNING
    if meaning.kind == "builtin" and isinstance(function, ast.Name):
        return name in _BUILTINS and all(keyword.arg != "key" for keyword in node.keywords)
    # What gets none of the author's code can neither keep nor call any.
    inner = (part for argument in _arguments(node) for part in ast.walk(argument))
    used = (part.id for part in inner if isinstance(part, ast.Name))
    if any(scope.meaning(one).kind in ("code", "unknown") for one in used):
        return False
    if meaning.kind == "installed":
        # By convention a capital makes an object of a class.
        return meaning.package in _VALUES or name in _READING or name[:1].isupper()
    is_read = isinstance(function, ast.Attribute) and name in _READING
    return is_read and (meaning.kind in ("builtin", "data") or _root(function) is None)


def _only_wraps(meaning: Meaning, *, again: bool) -> bool:
    """Return whether an own function only makes another one and returns it, as decorators do.

    With `again`, what is returned is called, too.
    """
    found, scope = _own(meaning), meaning.scope
    if scope is None or not isinstance(found, ast.FunctionDef):
        return False
    return _makes_function(found, scope, again=again)


def _makes_function(node: ast.FunctionDef, scope: Scope, *, again: bool) -> bool:
    *steps, last = node.body
    if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Name):
        return False
    for step in steps:
        if _is_docstring(step):
            continue
        if not isinstance(step, ast.FunctionDef | ast.AsyncFunctionDef):
            return False
        if not is_inert(step, scope):
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


def _members(node: ast.ClassDef) -> Iterator[str]:
    for member in node.body:
        if isinstance(member, ast.FunctionDef):
            yield member.name
        elif isinstance(member, ast.Assign):
            yield from (target.id for target in member.targets if isinstance(target, ast.Name))
