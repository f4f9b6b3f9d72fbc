"""Digests of code: an edit changes those of exactly the services that run what was edited."""

import ast
from textwrap import dedent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.spec.sources import Source, Sources


def modules(text: str) -> dict[str, str]:
    """Return the modules of `--- name` headed parts; the first is the app."""
    found: dict[str, str] = {}
    for part in dedent(text).split("--- ")[1:]:
        name, _, source = part.partition("\n")
        found[name.strip()] = source
    return found


def digests(files: dict[str, Any]) -> dict[str, str]:
    """Return the digest of each service of all modules, by its class's name."""

    def find(name: str) -> Source | None:
        place = name.replace(".", "/")
        for path, is_package in ((place, False), (f"{place}/__init__", True)):
            if (content := files.get(path)) is not None:
                encoded = content.encode() if isinstance(content, str) else content
                return Source(encoded, is_package)
        return None

    def dotted(path: str) -> str:
        return path.removesuffix("/__init__").replace("/", ".")

    names = [dotted(path) for path in files]
    sources = Sources(find, lambda: names)
    found: dict[str, str] = {}
    for module, content in files.items():
        if isinstance(content, str) and "service" in content:
            for node in ast.parse(content).body:
                if isinstance(node, ast.ClassDef) and "service" in ast.unparse(node.decorator_list):
                    found[node.name] = sources.digest(dotted(module), node.name)
    return found


def changed(text: str, *edits: tuple[str, str]) -> set[str]:
    """Return whose digests change when each `old` is replaced by `new`, in whatever module."""
    files = modules(text)
    after = dict(files)
    for old, new in edits:
        (name,) = [name for name, source in files.items() if source.count(old) == 1]
        after[name] = after[name].replace(old, new)
        ast.parse(after[name])
    was, now = digests(files), digests(after)
    return {name for name in was | now if was.get(name) != now.get(name)}


APP = """
    --- app
    '''An app.'''
    from __future__ import annotations
    import functools
    import logging
    import os
    from dataclasses import dataclass
    from typing import TYPE_CHECKING
    import numpy as np
    import servekit as sk
    from helpers import clean, count
    from models import Embedder
    import tables
    if TYPE_CHECKING:
        from nowhere import Nothing

    log = logging.getLogger(__name__)
    LIMIT = 10
    WORDS = {"a": 1}
    FOLD = functools.partial(clean, fold=True)
    MODE = os.environ.get("MODE", "fast")

    def timed(fn):
        '''Time it.'''
        @functools.wraps(fn)
        def wrapper(*args):
            log.info("called")
            return fn(*args)
        return wrapper

    @dataclass
    class Hit:
        text: str
        score: float = 0.5

        def better(self) -> bool:
            return self.score > LIMIT

    @dataclass
    class Config:
        size: int = 3

    CONFIG = Config()

    def lower(text):
        table = WORDS
        return table.get(text.lower(), 0)

    @sk.service
    class A:
        '''Docs of A.'''
        embedder = sk.depends(Embedder, timeout_s=3)

        @sk.endpoint
        @timed
        def run(self, text: str) -> int:
            return lower(text) + clean(text)

    @sk.service(gpu=0.5)
    class B:
        @sk.endpoint
        def hits(self, text: str) -> list[Hit]:
            log = CONFIG.size
            return [Hit(text, log)]

        @sk.endpoint
        def other(self) -> int:
            return 1

    BIG = sk.ref(B, name="big")

    @sk.service
    class C:
        b = sk.depends(BIG)
        plain = sk.depends(sk.ref(B, name="plain"))

        @sk.endpoint
        def run(self) -> int:
            return tables.sizes()

    if __name__ == "__main__":
        print(FOLD)
    --- helpers
    import re
    _SPACE = re.compile("a")
    _UNUSED = 1
    def clean(text, fold=False):
        from deep import strip
        return strip(_SPACE.sub("b", text))
    def count(text):
        return len(text)
    --- deep
    DEPTH = 1
    def strip(text):
        return text.strip()
    def other():
        return DEPTH
    --- tables
    ROWS = 3
    def sizes():
        return ROWS
    def more():
        return 4
    --- models
    import servekit as sk
    from pydantic import BaseModel
    class Vector(BaseModel):
        values: list[float]
        def norm(self):
            return length(self)
    class Weights(BaseModel):
        path: str = "x"
    def length(vector):
        return 7
    class Base:
        @sk.endpoint
        def dim(self) -> int:
            return 5
    @sk.service
    class Embedder(Base):
        weights = Weights
        @sk.endpoint
        def embed(self, text: str, k: int = 2) -> "list[Vector]":
            return [Vector(values=[])]
        def inner(self):
            return 6
"""


def test_nothing_changes_when_nothing_does():
    assert digests(modules(APP)) == digests(modules(APP))
    assert set(digests(modules(APP))) == {"A", "B", "C", "Embedder"}
    assert len(set(digests(modules(APP)).values())) == 4


def test_settings_of_a_service_that_is_called_are_not_the_callers():
    """What it is named is in the caller's edges, the rest is its own."""
    for settings in ("replicas=2", 'args={"size": CONFIG.size}', "gpu=1"):
        assert changed(APP, ('name="big"', f'name="big", {settings}')) == set()


def test_formatting_and_comments_change_nothing():
    files = modules(APP)
    shaped = {
        name: "# first\n\n" + ast.unparse(ast.parse(source)) + "\n# last\n"
        for name, source in files.items()
    }
    assert shaped != files
    assert digests(shaped) == digests(files)


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        # in the app's own module
        ("'''An app.'''", "'''The app.'''", ""),
        ("'''Docs of A.'''", "'''Docs.'''", "A"),
        ("return lower(text) + clean(text)", "return lower(text)", "A"),
        ("timeout_s=3", "timeout_s=4", "A"),
        ("table.get(text.lower(), 0)", "table.get(text, 0)", "A"),
        ('WORDS = {"a": 1}', 'WORDS = {"a": 2}', "A"),
        ('log.info("called")', 'log.info("run")', "A"),
        ("getLogger(__name__)", "getLogger('x')", "A"),
        ("LIMIT = 10", "LIMIT = 11", "B C"),
        ("self.score > LIMIT", "self.score < LIMIT", "B C"),
        ("score: float = 0.5", "score: float = 0.75", "B C"),
        ("size: int = 3", "size: int = 4", "A B C"),
        ("CONFIG = Config()", "CONFIG = Config(size=5)", "A B C"),
        ("return [Hit(text, log)]", "return []", "B"),
        ("return 1\n\nBIG", "return 2\n\nBIG", "B"),
        ("gpu=0.5", "gpu=1", "B"),
        ('name="big"', 'name="bigger"', ""),
        ("fold=True", "fold=False", ""),
        ("print(FOLD)", "print(1)", ""),
        ('"MODE", "fast"', '"MODE", "slow"', ""),
        ("from nowhere import Nothing", "from nowhere import Something", ""),
        ("import numpy as np\n", "import numpy as np, json\n", "A B C"),
        ("from helpers import clean, count", "from helpers import count, clean", ""),
        ("from helpers import clean, count", "from helpers import clean", ""),
        ("def lower(text):", "def upper(): ...\ndef lower(text):", ""),
        # what is called in another process counts by its types
        ("def hits(self, text: str)", "def hits(self, text: int)", "B C"),
        ("def other(self) -> int:", "def other(self) -> bool:", "B C"),
        ("return [Vector(values=[])]", "return []", "Embedder"),
        ("return 6", "return 66", "Embedder"),
        ('path: str = "x"', 'path: str = "y"', "Embedder"),
        ("k: int = 2", "k: int = 3", "Embedder A"),
        ("values: list[float]", "values: list[int]", "Embedder A"),
        ("return length(self)", "return 0", "Embedder A"),
        ("return 7", "return 8", "Embedder A"),
        ("return 5", "return 55", "Embedder"),
        ("def dim(self) -> int:", "def dim(self) -> str:", "Embedder A"),
        # other modules
        ('_SPACE.sub("b", text)', '_SPACE.sub("c", text)', "A"),
        ('re.compile("a")', 're.compile("aa")', "A"),
        ("_UNUSED = 1", "_UNUSED = 2", ""),
        ("return len(text)", "return 0", ""),
        ("return text.strip()", "return text", "A"),
        ("DEPTH = 1", "DEPTH = 2", ""),
        # `import tables` may use all of it
        ("ROWS = 3", "ROWS = 4", "C"),
        ("return 4", "return 44", "C"),
        # what is done when a module is imported is done in every process that imports it
        ("LIMIT = 10", "LIMIT = 10\nlogging.basicConfig(level=1)", "A B C"),
        ("DEPTH = 1", "DEPTH = 1\nprint(DEPTH)", "A"),
        ("_UNUSED = 1", "_UNUSED = 1\nprint(2)", "A B C"),
        ("import re\n", "import re\nimport deep\n", ""),
        ("ROWS = 3", "ROWS = 3\nprint(ROWS)", "A B C"),
        ("def length(vector):", "print(3)\ndef length(vector):", "A B C Embedder"),
        ("from pydantic import BaseModel\n", "from pydantic import BaseModel, Field\n", "A B C Embedder"),
        ("from pydantic import BaseModel\n", "from pydantic import BaseModel\nimport models\n", ""),
        ("import re\n", "import re\nimport torchvision\n", "A B C"),
    ],
)  # fmt: skip
def test_an_edit_changes_exactly_those_that_run_it(old, new, expected):
    assert changed(APP, (old, new)) == set(expected.split())


TWO = """
    --- app
    import sys, functools
    import servekit as sk
    import lib
    {top}
    @sk.service
    class A:
        @sk.endpoint
        def run(self) -> int:
            {body}
    @sk.service
    class B:
        @sk.endpoint
        def run(self) -> int:
            return 2
    def free():
        return "old"
    class Plain:
        note = "old"
    REGISTRY = {{}}
    --- other
    VALUE = "old value"
"""


@pytest.mark.parametrize(
    ("top", "body", "expected"),
    [
        # Only A names it.
        ("", "return free()", "A"),
        ("call = free", "return call()", "A"),
        ("", "return sys.intern(free())", "A"),
        ("", "return (lambda: free())()", "A"),
        ("", "return [free() for _ in 'a']", "A"),
        ("", "import os\n            return free()", "A"),
        ("type_of: 'free' = 1", "return type_of", "A"),
        ("class Sub: f = free", "return Sub", "A"),
        ("def outer(x=free): ...", "return outer", "A"),
        ("later = lambda: free()", "return later", "A"),
        ("def twice():\n        return free()", "return twice()", "A"),
        # Nobody does.
        ("", "return 1", ""),
        ("", "free = 3; return free", ""),
        ("", "self.free = 3; return self.free", ""),
        ("unused = free", "return 1", ""),
        ("def unused(): return free()", "return 1", ""),
        # A can't be told from what it names.
        ("", "return globals()['fr' + 'ee']()", "A"),
        ("", "return eval('fr' + 'ee()')", "A"),
        ("", "exec('x = fr' + 'ee()'); return 1", "A"),
        ("", "return vars()", "A"),
        ("", "import importlib; return importlib.import_module('app').free()", "A"),
        ("", "import pickle; return pickle.load(open('x'))", "A"),
        ("import pickle", "return pickle.load(open('x'))", "A"),
        ("", "return sys.modules['app']", "A"),
        ("", "return object.__subclasses__()", "A"),
        ("", "return __import__('app')", "A"),
        ("from lib import *", "return 1", "A B"),
        ("def __getattr__(name): return free", "return 1", "A B"),
        # Importing the module uses it, for whatever.
        ("lib.register(free)", "return 1", "A B"),
        ("done = lib.register(free)", "return 1", "A B"),
        ("lib.hook = free", "return 1", "A B"),
        ("lib.hooks['a'] = free", "return 1", "A B"),
        ("if lib.fast: run = free", "return 1", "A B"),
        ("try: run = free()\n    except Exception: pass", "return 1", "A B"),
        ("for each in (free,): each()", "return 1", "A B"),
        ("with lib.open(): free()", "return 1", "A B"),
        ("result = free()", "return 1", "A B"),
        ("@lib.register\n    def task(): return free()", "return 1", "A B"),
        (("def register(fn):\n        REGISTRY[1] = fn\n        return fn\n"
         "    @register\n    def task(): return free()"), "return 1", "A B"),
        ("class Sub(lib.Base): f = free", "return 1", "A B"),
        ("class Sub(metaclass=lib.Meta): f = free", "return 1", "A B"),
        (("class Base:\n        def __init_subclass__(cls): ...\n"
         "    class Sub(Base): f = free"), "return 1", "A B"),
        ("def default(x=lib.register(free)): ...", "return 1", "A B"),
        ("a = 1\n    a += free()", "return 1", "A B"),
        ("assert free", "return 1", "A B"),
        ("@free.register\n    def task(): ...", "return 1", "A B"),
        ("@lib.task(free)\n    def task(): ...", "return 1", "A B"),
        ("found = lib.get(free)", "return 1", "A B"),
        ("found = REGISTRY.get(free)", "return 1", "A B"),
        ("class Sub(Plain, metaclass=lib.Meta): f = free", "return 1", "A B"),
        ("found = list(map(free, [1]))", "return 1", "A B"),
        ("found = sorted([1], key=free)", "return 1", "A B"),
        ("found = functools.reduce(free, [1])", "return 1", "A B"),
        ("found = setattr(sys, 'hook', free)", "return 1", "A B"),
        ("found = lambda *, x=lib.register(free): x", "return 1", "A B"),
        (("class Reg:\n        def __init__(self, fn): REGISTRY[1] = fn\n"
         "    class Sub(Reg): ...\n    found = Sub(free)"), "return 1", "A B"),
        (("class Field:\n        def __set_name__(self, owner, name): REGISTRY[1] = free\n"
         "    class Sub: x = Field()"), "return 1", "A B"),
        (("import pydantic\n    class Base(pydantic.BaseModel):\n"
         "        def __pydantic_init_subclass__(cls): ...\n"
         "    class Sub(Base): f = free"), "return 1", "A B"),
        (("class Base: __init_subclass__ = lib.hook\n    class Sub(Base): f = free"),
         "return 1", "A B"),
        (("class Top:\n        def __init_subclass__(cls): ...\n    class Base(Top): ...\n"
         "    class Sub(Base): f = free"), "return 1", "A B"),
        (("def deco(fn):\n        def inner(x=lib.register(fn)): ...\n        return inner\n"
         "    @deco\n    def task(): return free()"), "return 1", "A B"),
        # What wraps and returns is as good as nothing.
        ("found = tuple([free])", "return 1", ""),
        ("class Sub(Plain): f = free", "return 1", ""),
        ("import abc\n    class Sub(Plain, metaclass=abc.ABCMeta): f = free", "return 1", ""),
        ("from msgspec import Struct\n    class Sub(Struct, frozen=True): f = free", "return 1", ""),
        ("found = REGISTRY.get('a')", "return 1", ""),
        ("found = ' '.join(['a']).strip()", "return 1", ""),
        ("@functools.cache\n    def task(): return free()", "return 1", ""),
        (("def wrap(fn):\n        def inner(): return fn()\n        return inner\n"
         "    @wrap\n    def task(): return free()"), "return 1", ""),
        (("def wrap(n):\n        def outer(fn):\n            def inner(): return fn()\n"
         "            return inner\n        return outer\n"
         "    @wrap(3)\n    def task(): return free()"), "return 1", ""),
        (("def wrap(n):\n        def outer(fn):\n            REGISTRY[n] = fn\n            return fn\n"
         "        return outer\n    @wrap(3)\n    def task(): return free()"), "return 1", "A B"),
        ("part = functools.partial(free)", "return 1", ""),
        ("if __name__ == '__main__': free()", "return 1", ""),
    ],
)  # fmt: skip
def test_in_doubt_it_counts(top, body, expected):
    text = TWO.replace("{top}", top).replace("{body}", body).replace("{{}}", "{}")
    assert changed(text, ('return "old"', 'return "new"')) == set(expected.split())


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        ("found = REGISTRY.get(3)", ""),
        ("found = REGISTRY.setdefault(3, 2)", "A B"),
        ("import other\n    found = other.get(3)", "A B"),
        ("found = sys.intern(3)", "A B"),
        ("_ = sys.setrecursionlimit(3)", "A B"),
        ("found = functools.partial(int, 3)", ""),
        ("from pathlib import Path\n    found = Path('3').resolve()", ""),
        ("import threading\n    lock = threading.Semaphore(3)", ""),
        ("import torch\n    _ = torch.manual_seed(3)", "A B"),
        ("import numpy as np\n    found = np.zeros(3)", ""),
        ("import numpy as np\n    _ = np.seterr(all=3)", "A B"),
        ("found = frozenset(range(3))", ""),
        ("_ = setattr(sys, 'hook', 3)", "A B"),
        ("_ = exec('3')", "A B"),
        ("found = print(3)", "A B"),
        ("sys.setrecursionlimit(3)", "A B"),
        ("from __future__ import annotations\n    found = 3", ""),
    ],
)
def test_a_statement_that_nobody_names(top, expected):
    text = TWO.replace("{top}", top).replace("{body}", "return 1").replace("{{}}", "{}")
    text = text.replace("return 2", "return 0")
    assert changed(text, ("3", "4")) == set(expected.split())


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return 1", ""),
        ("import other; return other.VALUE", "A"),
        ("from other import VALUE; return VALUE", "A"),
        ("import pickle; return pickle", "A"),
        ("import importlib.metadata as m; return m", ""),
        ("import importlib.metadata; return importlib.import_module('other')", "A"),
        ("from sys import modules; return modules", "A"),
        ("from torch import load; return load('x')", "A"),
        ("import numpy; return numpy.load('x', allow_pickle=True)", "A"),
        ("import torch as t; return t.load('x', weights_only=False)", "A"),
        ("import pandas; return pandas.read_pickle('x')", "A"),
        ("import builtins; return builtins.__import__('other')", "A"),
        ("import inspect; return inspect.currentframe().f_globals", "A"),
        ("return globals()", ""),
    ],
)
def test_modules_that_are_imported_late_or_by_pickles(body, expected):
    text = TWO.replace("{top}", "").replace("{body}", body).replace("{{}}", "{}")
    assert changed(text, ("old value", "new value")) == set(expected.split())


def test_what_others_import_into_a_package_can_be_had_from_it():
    text = """
    --- app
    import pkg
    import servekit as sk
    @sk.service
    class A:
        def run(self):
            return pkg.low.answer()
    @sk.service
    class B:
        def run(self):
            import other.deep as deep
            return deep.answer()
    --- pkg/__init__
    NAME = 1
    --- pkg/low
    def answer():
        return 2
    --- other/__init__
    NAME = 3
    --- other/deep
    def answer():
        return 4
    """
    assert changed(text, ("return 2", "return 22")) == {"A"}
    assert changed(text, ("return 4", "return 44")) == {"B"}
    assert changed(text, ("NAME = 1", "NAME = 11")) == {"A"}
    assert changed(text, ("NAME = 3", "NAME = 33")) == set()


PACKAGE = """
    --- pkg/__init__
    from .low import shared
    VERSION = 1
    --- pkg/app
    import servekit as sk
    from . import parts
    from .low import shared
    from .parts import one
    from .sub.deep import thing as renamed
    from pkg import VERSION
    @sk.service
    class A:
        def run(self):
            return one()
    @sk.service
    class B:
        def run(self):
            return parts.two()
    @sk.service
    class C:
        def run(self):
            return renamed, shared, VERSION
    --- pkg/low
    def shared():
        return 1
    --- pkg/parts
    def one():
        return 2
    def two():
        return 3
    --- pkg/sub/__init__
    HERE = 4
    --- pkg/sub/deep
    from ..parts import two
    def thing():
        return two() + 5
"""


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return 1", "return 11", "C"),
        ("return 2", "return 22", "A B"),
        ("return 3", "return 33", "B C"),
        ("HERE = 4", "HERE = 44", ""),
        ("HERE = 4", "print(4)", "A B C"),
        ("return two() + 5", "return two()", "C"),
        ("VERSION = 1", "VERSION = 2", "C"),
        ("VERSION = 1", "VERSION = 1\nprint()", "A B C"),
    ],
)
def test_packages_and_relative_imports(old, new, expected):
    assert changed(PACKAGE, (old, new)) == set(expected.split())


CALLED = """
    --- app
    import servekit as sk
    import parts
    from parts import Reply, impl
    class Own:
        @sk.endpoint
        def own(self) -> "parts.Reply": ...
    {child}
    @sk.service
    class Parent:
        child = sk.depends(Child)
        def run(self):
            return self.child
    --- parts
    import servekit as sk
    from typing import Annotated, Generic, TypeVar
    T = TypeVar("T")
    class Reply:
        def norm(self):
            return 1
    Short = Annotated[Reply, "short"]
    class Base:
        @sk.endpoint
        def run(self) -> Reply: ...
    class Of(Generic[T]):
        @sk.endpoint
        def run(self) -> Short: ...
    def impl(self) -> Reply: ...
"""


@pytest.mark.parametrize(
    "child",
    [
        "@sk.service\n    class Child(Own): ...",
        "@sk.service\n    class Child(parts.Base): ...",
        "@sk.service\n    class Child(parts.Of[int]): ...",
        "from parts import Of\n    @sk.service\n    class Child(Of[int]): ...",
        "from parts import Base as B\n    @sk.service\n    class Child(B): ...",
        "@sk.service\n    class Child:\n        run = sk.endpoint(impl)",
        "@sk.service\n    class Child:\n        run: object = sk.endpoint(fn=parts.impl)",
        "@sk.service\n    class Child:\n        @sk.endpoint\n        def run(self, x: 'list[parts.Short]'): ...",
        "@sk.service\n    class Child:\n        if sk:\n            @sk.endpoint\n            def run(self) -> Reply: ...",
    ],
)
def test_a_caller_runs_the_types_of_what_it_calls_wherever_they_come_from(child):
    text = CALLED.replace("{child}", child)
    assert "Parent" in changed(text, ("return 1", "return 11"))


def test_an_open_package_is_asked_before_its_submodules():
    text = """
    --- app
    import servekit as sk
    from pkg import low
    @sk.service
    class A:
        def run(self):
            return low
    --- pkg/__init__
    def __getattr__(name):
        return 1
    --- pkg/low
    def answer():
        return 2
    """
    assert changed(text, ("return 1", "return 11")) == {"A"}
    assert changed(text, ("return 2", "return 22")) == {"A"}


def test_an_import_in_a_class_is_one_of_its_module():
    text = """
    --- app
    import servekit as sk
    class Unused:
        import other
    @sk.service
    class A: ...
    --- other
    print(1)
    """
    assert changed(text, ("print(1)", "print(2)")) == {"A"}


def test_what_is_no_python_counts_by_its_bytes():
    files: dict[str, Any] = modules(PACKAGE)
    before = digests(files)
    files["pkg/low"] = b"\x7fELF\0 1"
    once = digests(files)
    files["pkg/low"] = b"\x7fELF\0 2"
    twice = digests(files)
    assert len({before["C"], once["C"], twice["C"]}) == 3


def test_a_class_that_is_not_plainly_there_counts_with_its_module():
    files = modules(TWO.replace("{top}", "").replace("{body}", "return 1").replace("{{}}", "{}"))

    def digest(files: dict[str, str]) -> str:
        def find(name: str) -> Source | None:
            return Source(files[name].encode()) if name in files else None

        return Sources(find, lambda: files).digest("app", "Made.Inner")

    edited = files | {"app": files["app"].replace('return "old"', "return 0")}
    assert digest(files) != digest(edited)


def test_imports_in_circles_end():
    text = """
    --- app
    import servekit as sk
    from app import A as again
    from left import go
    @sk.service
    class A:
        def run(self):
            return go(again)
    @sk.service
    class B: ...
    --- left
    from right import back
    def go(x):
        return back(x)
    --- right
    import left
    from right import nothing
    def back(x):
        return left.go(x) or 1
    """
    assert changed(text, ("or 1", "or 2")) == {"A"}


def test_a_circle_that_could_not_be_imported_is_still_read():
    text = """
    --- app
    import servekit as sk
    from left import x, Base
    class Own(Base): ...
    made = x()
    @x
    @sk.service
    class A(Own):
        def run(self):
            return x
    --- left
    from right import x, Base
    class Above(Base): ...
    --- right
    from left import x
    from app import Own
    class Base(Own): ...
    class Me(Me): one = Me()
    @deco
    def deco(fn):
        return fn
    """
    assert changed(text, ("class Above(Base): ...", "class Above(Base): pass")) <= {"A"}


@pytest.mark.slow
def test_programs_may_be_deep():
    chain = "".join(f"def f{n}():\n    return f{n + 1}()\n" for n in range(3000))
    service = "import servekit as sk\n@sk.service\nclass A:\n    def run(self): return f0()\n"
    files = {"app": f"{chain}def f3000(): return 1\n{service}"}
    assert digests(files) != digests({"app": files["app"].replace("return 1\n", "return 2\n")})


# -- many small programs


@st.composite
def programs(draw: st.DrawFn) -> tuple[dict[str, list[tuple[str, set[str]]]], list[set[str]]]:
    """Draw two modules of definitions that use each other, and what each of three services uses.

    Names are `m0_3`: the fourth of the first module. A definition uses some that stand before it, of
    its own module or of an earlier one.
    """
    defined: list[str] = []
    found: dict[str, list[tuple[str, set[str]]]] = {}
    for number in range(2):
        module: list[tuple[str, set[str]]] = []
        for place in range(draw(st.integers(1, 5))):
            uses = draw(st.sets(st.sampled_from(defined), max_size=3)) if defined else set()
            module.append((f"m{number}_{place}", uses))
            defined.append(f"m{number}_{place}")
        found[f"m{number}"] = module
    services = [draw(st.sets(st.sampled_from(defined), max_size=3)) for _ in range(3)]
    return found, services


KINDS = (
    "def {name}(x={n}):\n    return [{uses}]\n",
    "async def {name}():\n    def inner(): return ({uses}, {n})\n    return inner\n",
    "class {name}:\n    value = {n}\n    def run(self): return [{uses}]\n",
    "{name} = [{n}, {uses}]\n",
    "{name}: list = [lambda: [{uses}], {n}]\n",
)


def written(
    program: tuple[dict[str, list[tuple[str, set[str]]]], list[set[str]]], edited: str = ""
) -> dict[str, str]:
    definitions, services = program
    files: dict[str, str] = {}
    for module, members in definitions.items():
        own = {name for name, _ in members}
        abroad = sorted({use for _, uses in members for use in uses} - own)
        lines = [f"from {name.partition('_')[0]} import {name}\n" for name in abroad]
        for place, (name, uses) in enumerate(members):
            kind = KINDS[(place + len(module) + len(uses)) % len(KINDS)]
            number = 2 if name == edited else 1
            lines.append(kind.format(name=name, n=number, uses=", ".join(sorted(uses)) or "0"))
        files[module] = "".join(lines)
    lines = ["import servekit as sk\n"]
    lines += [f"from {u.partition('_')[0]} import {u}\n" for u in sorted(set().union(*services))]
    for place, uses in enumerate(services):
        body = ", ".join(sorted(uses))
        lines.append(f"@sk.service\nclass S{place}:\n    def run(self): return [{body}]\n")
    files["app"] = "".join(lines)
    return files


@pytest.mark.slow
@given(programs(), st.data())
def test_an_edit_anywhere_changes_those_that_reach_it_and_no_others(program, data):
    definitions, services = program
    graph = {name: uses for members in definitions.values() for name, uses in members}
    edited = data.draw(st.sampled_from(sorted(graph)))

    def reaches(names: set[str]) -> bool:
        return edited in names or any(reaches(graph[name]) for name in names)

    before, after = digests(written(program)), digests(written(program, edited))
    changes = {name for name in before if before[name] != after[name]}
    assert changes == {f"S{n}" for n, uses in enumerate(services) if reaches(uses)}
