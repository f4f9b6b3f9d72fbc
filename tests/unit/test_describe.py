"""`describe` makes an `AppSpec` of a class; `load` finds the class that a target names."""

import json
import os
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any, Literal

import pytest

import servekit as sk
from servekit.errors import AuthorError, ConfigError, SetupError, SpecError
from servekit.spec.app import AppSpec, DependencySpec
from servekit.spec.definition import definition
from servekit.spec.describe import describe
from servekit.spec.own import OwnModules
from servekit.spec.target import load, target_of

ROOT = Path(__file__).parents[2]


@sk.service(gpu=1)
class Embedder:
    """Makes vectors."""

    def __init__(self, size: int = 2) -> None:
        self.size = size

    @sk.batched(max_size=8)
    def embed(self, texts: list[str]) -> list[list[float]]:
        """Embed one text."""
        return [[float(self.size)] for _ in texts]


@sk.service(prefix="/llm")
class LLM:
    @sk.endpoint(tags=["text"])
    async def generate(self, prompt: str, *, max_tokens: int = 16) -> AsyncIterator[str]:
        yield prompt * max_tokens


@sk.service
class Search:
    embedder = sk.depends(Embedder, timeout_s=20)
    llm = sk.depends(LLM)
    big = sk.depends(sk.ref(Embedder, name="big", args={"size": 8}))

    @sk.endpoint(method="GET")
    def query(self, text: str, k: int | None = None, order: Literal["up", "down"] = "up") -> str:
        return f"{text} {k} {order}"


# ---- describe


@pytest.mark.slow
def test_an_app_has_its_services_dependencies_first() -> None:
    app = describe(Search)
    assert app.root == "Search"
    assert [s.name for s in app.services] == ["Embedder", "LLM", "big", "Search"]
    assert app.service("Search").dependencies == (
        DependencySpec(attribute="embedder", service="Embedder", timeout_s=20.0),
        DependencySpec(attribute="llm", service="LLM"),
        DependencySpec(attribute="big", service="big"),
    )


def test_only_the_root_gets_routes_by_itself() -> None:
    prefixes = {s.name: s.prefix for s in describe(Search).services}
    assert prefixes == {"Search": "", "LLM": "/llm", "Embedder": None, "big": None}
    assert describe(Embedder).service("Embedder").prefix == ""


def test_a_ref_can_be_the_root() -> None:
    app = describe(sk.ref(Embedder, name="big", args={"size": 8}))
    (big,) = app.services
    assert (app.root, big.name, big.prefix, big.args) == ("big", "big", "", {"size": 8})
    assert big.target.endswith(":Embedder")


def test_endpoints_have_their_schemas() -> None:
    app = describe(Search)
    embed = app.service("Embedder").endpoint("embed")
    assert (embed.kind, embed.doc, embed.idempotent) == ("batched", "Embed one text.", True)
    assert embed.input["type"] == "string"
    assert embed.output["items"]["type"] == "number"
    generate = app.service("LLM").endpoint("generate")
    assert (generate.kind, generate.tags, generate.is_async) == ("stream", ("text",), True)
    assert set(generate.input["properties"]) == {"prompt", "max_tokens"}
    assert generate.output["type"] == "string"


def test_a_spec_is_plain_data() -> None:
    app = describe(Search)
    again = AppSpec.from_json(app.to_json())
    assert again == app
    assert again.revision == app.revision
    assert app.service("Embedder").doc == "Makes vectors."


def test_the_revision_follows_the_settings() -> None:
    one = describe(sk.ref(Embedder, name="x", gpu=1))
    assert describe(sk.ref(Embedder, name="x", gpu=1)).revision == one.revision
    assert describe(sk.ref(Embedder, name="x", gpu=2)).revision != one.revision


def test_a_constructor_needs_its_arguments() -> None:
    @sk.service
    class Model:
        def __init__(self, path: str, *, size: int = 1) -> None: ...

    with pytest.raises(SpecError, match=r"Model: .*missing a required argument: 'path'.*args="):
        describe(Model)
    with pytest.raises(SpecError, match=r"'big' .*unexpected keyword .*Did you mean 'size'\?"):
        describe(sk.ref(Model, name="big", args={"path": "x", "sise": 1}))
    describe(sk.ref(Model, name="big", args={"path": "x", "size": 1}))


def test_get_takes_scalars_alone() -> None:
    @sk.service
    class Lists:
        @sk.endpoint(method="GET")
        def query(self, texts: list[str]) -> int:
            return len(texts)

    @sk.service
    class Body:
        @sk.endpoint(method="GET")
        def query(self, text: str, /) -> int:
            return len(text)

    with pytest.raises(SpecError, match=r"Lists\.query: parameter 'texts' of a GET endpoint"):
        describe(Lists)
    with pytest.raises(SpecError, match=r"Body\.query: a GET endpoint takes named parameters"):
        describe(Body)


# ---- import strings


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory, with modules that nothing else will see."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(dedent(source))
    return path


APP = """
    import servekit as sk

    @sk.service
    class Inner:
        @sk.endpoint
        def ask(self) -> int:
            return 1

    @sk.service
    class Outer:
        inner = sk.depends(Inner)

    class Plain: ...
"""


def test_modules_and_files_are_loaded(folder: Path) -> None:
    file = write(folder / "sub" / "sk_app_a.py", APP)
    for target in ("sub.sk_app_a:Inner", "sub/sk_app_a.py:Inner", f"{file}:Inner"):
        assert load(target).__name__ == "Inner"
    assert sys.path[0] == str(file.parent)
    assert load("sub/sk_app_a.py") is load("sk_app_a:Outer")
    assert load("sub.sk_app_a").__name__ == "Outer"


def test_a_module_without_one_root_lists_the_choices(folder: Path) -> None:
    write(folder / "sk_app_b.py", APP.replace("sk.depends(Inner)", "None"))
    with pytest.raises(ConfigError, match=r"2 root .*choose one: sk_app_b:Inner, sk_app_b:Outer"):
        load("sk_app_b")
    write(folder / "sk_app_c.py", "import servekit")
    with pytest.raises(ConfigError, match="sk_app_c: has no service"):
        load("sk_app_c")


def test_imported_services_are_no_roots(folder: Path) -> None:
    write(folder / "sk_base.py", APP)
    write(
        folder / "sk_app_d.py",
        """
        import servekit as sk
        from sk_base import Outer

        @sk.service
        class Mine(Outer): ...
        """,
    )
    assert load("sk_app_d").__name__ == "Mine"
    write(folder / "sk_app_e.py", "from sk_base import Outer")
    assert load("sk_app_e").__name__ == "Outer"


@pytest.mark.parametrize(
    ("target", "error", "message"),
    [
        ("sk_app_f:Outr", ConfigError, "has no class 'Outr'. Did you mean 'Outer'?"),
        ("sk_app_f:sk", ConfigError, "is a module; give a class"),
        ("sk_app_f:Plain", SpecError, "Plain is no service"),
        ("sk_app_f:f.<locals>.A", ConfigError, "move it to the top level of a module"),
        ("sk_missing:Outer", SetupError, "there is no module 'sk_missing'"),
        ("sk_missing.py:Outer", ConfigError, "sk_missing.py: there is no such file"),
        ("json.py", ConfigError, "Python has another module named 'json'"),
        ("sk_raises", SetupError, "importing sk_raises raised ZeroDivisionError"),
        ("sk_exits", SetupError, "importing sk_exits raised SystemExit: 3"),
        ("sk_lacks", SetupError, "importing sk_lacks raised ModuleNotFoundError"),
        ("sk_wrong", SpecError, "Search: replicas=0"),
    ],
)
def test_what_can_not_be_loaded_says_why(
    folder: Path, target: str, error: type[AuthorError], message: str
) -> None:
    write(folder / "sk_app_f.py", APP)
    write(folder / "json.py", APP)
    write(folder / "sk_raises.py", "1 / 0")
    write(folder / "sk_exits.py", "raise SystemExit(3)")
    write(folder / "sk_lacks.py", "import sk_not_installed")
    write(
        folder / "sk_wrong.py", "import servekit as sk\n@sk.service(replicas=0)\nclass Search: ..."
    )
    with pytest.raises(error) as caught:
        load(target)
    assert message in str(caught.value)


def test_an_import_error_keeps_its_cause(folder: Path) -> None:
    write(folder / "sk_raises_too.py", "1 / 0")
    with pytest.raises(SetupError) as caught:
        load("sk_raises_too")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_targets_lead_back(folder: Path) -> None:
    write(folder / "sk_app_g.py", APP)
    cls = load("sk_app_g.py")
    assert target_of(cls) == "sk_app_g:Outer"
    assert load(target_of(cls)) is cls

    class Local: ...

    assert "<locals>" in target_of(Local)


def test_a_script_is_named_by_its_file(folder: Path) -> None:
    file = write(
        folder / "sk_script.py",
        dedent(APP)
        + "if __name__ == '__main__':\n"
        + "    from servekit.spec.describe import describe\n"
        + "    print(describe(Outer).to_json().decode())\n",
    )
    services = json.loads(run(str(file)))["services"]
    assert services[1]["target"] == f"{file.resolve()}:Outer"
    assert load(services[1]["target"]).__name__ == "Outer"
    services = json.loads(run("-m", "sk_script"))["services"]
    assert services[1]["target"] == "sk_script:Outer"


def run(*arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


# ---- the digest of the code


def code(target: str) -> str:
    cls = load(target)
    return describe(cls).service(definition(cls).name).code


def test_the_digest_follows_the_sources_of_the_class_and_its_bases(folder: Path) -> None:
    base = "import servekit as sk\nclass Base:\n    size = 1\n"
    derived = (
        "import servekit as sk\nfrom sk_below import Base\n@sk.service\nclass Model(Base): ...\n"
    )
    write(folder / "sk_below.py", base)
    write(folder / "sk_above.py", derived)
    first = code("sk_above:Model")
    assert len(first) == 12
    write(folder / "sk_below.py", base + "# edited\n")
    write(folder / "sk_above.py", derived.replace("...", "pass  # edited"))
    second = code("sk_above:Model")
    write(folder / "sk_above.py", derived + "\n\n# edited\nother = 1\n")
    assert code("sk_above:Model") == first != second
    write(folder / "sk_below.py", base.replace("1", "2"))
    assert code("sk_above:Model") not in (first, second)


@pytest.mark.slow
def test_a_caller_follows_the_endpoints_of_what_it_calls() -> None:
    def caller(kind: Any, **options: Any) -> Any:
        @sk.service
        class Inner:
            @sk.endpoint(**options)
            def ask(self, x: kind) -> int:
                return 1

        @sk.service
        class Outer:
            inner = sk.depends(Inner)

        app = describe(Outer)
        return app.service("Outer").code, app.service("Inner").revision

    outer, inner = caller(int)
    assert caller(int) == (outer, inner)
    assert caller(int, tags=["a"], max_concurrency=2)[0] == outer, "no affair of its callers"
    assert caller(int, tags=["a"])[1] != inner
    assert caller(str)[0] != outer
    assert caller(int, idempotent=True)[0] != outer
    assert caller(int, timeout_s=3)[0] != outer


def test_own_modules_are_found_without_importing_them(folder: Path) -> None:
    app = """
        import servekit as sk

        @sk.service
        class Lazy:
            @sk.endpoint
            def ask(self) -> int:
                import json
                from sk_lazy.inner import answer
                from sk_space.below.far import more
                return answer() + more()
    """
    far = write(folder / "sk_space" / "below" / "far.py", "def more(): return 1")
    write(folder / "sk_app_h.py", app)
    inner = write(folder / "sk_lazy" / "inner.py", "def answer(): return 1")
    write(folder / "sk_lazy" / "__init__.py", "")
    own = OwnModules()
    before = describe(load("sk_app_h"), own).service("Lazy").code
    assert "sk_lazy" not in sys.modules
    names = {str(file.relative_to(folder.resolve())) for file in own.files() if "sk_" in str(file)}
    assert names >= {"sk_app_h.py", "sk_lazy/__init__.py", "sk_lazy/inner.py"}
    assert own.find("json") is own.find("numpy") is own.find("servekit.errors") is None
    assert own.find("sk_lazy.no") is own.find("json.no") is own.find("no.no") is None
    inner.write_text("def answer(): return 2")
    after = describe(load("sk_app_h")).service("Lazy").code
    assert after != before
    far.write_text("def more(): return 2")
    assert describe(load("sk_app_h")).service("Lazy").code != after


def test_what_python_imports_by_itself_is_not_the_authors(folder: Path, monkeypatch) -> None:
    """Debian's sitecustomize is a link to /etc, outside of all folders of Python."""
    file = write(folder / "sitecustomize.py", "")
    module = types.ModuleType("sitecustomize")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "sitecustomize", module)
    assert OwnModules().find("sitecustomize") is None
    assert file.resolve() not in OwnModules().files()


def test_all_own_modules_are_known_imported_or_not(folder: Path) -> None:
    """A plug-in that only a string names may be loaded by a replica, later."""
    app = """
        import importlib
        import servekit as sk

        @sk.service
        class Host:
            @sk.endpoint
            def ask(self, name: str) -> int:
                return importlib.import_module(f"sk_plugins.{name}").answer()
    """
    write(folder / "sk_app_p.py", app)
    write(folder / "sk_plugins" / "__init__.py", "")
    plugin = write(folder / "sk_plugins" / "deep" / "one.py", "def answer(): return 1")
    write(folder / "sk_plugins" / "deep" / "__init__.py", "")
    own = OwnModules()
    before = describe(load("sk_app_p"), own).service("Host").code
    assert "sk_plugins" not in sys.modules
    assert {"sk_app_p", "sk_plugins", "sk_plugins.deep.one"} <= set(own.names())
    assert plugin.resolve() in own.files()
    plugin.write_text("def answer(): return 2")
    assert describe(load("sk_app_p")).service("Host").code != before


@pytest.mark.parametrize("place", ["site-packages", "dist-packages"])
def test_what_an_installer_wrote_is_nobodys_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Else each reload would read all of a large library that is installed for the user."""
    name = f"sk_installed_{place[:4]}"
    write(folder / "lib" / place / f"{name}.py", "")
    monkeypatch.syspath_prepend(folder / "lib" / place)
    own = OwnModules()
    assert own.find(name) is None
    own.add([name])
    assert own.find(name) is not None


def test_modules_may_be_objects_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answers(types.ModuleType):
        def __getattr__(self, name: str) -> object:
            return object()

    class Slotted:
        __slots__ = ()

    odd = Answers("sk_odd")
    odd.__file__ = None
    monkeypatch.setitem(sys.modules, "sk_odd", odd)
    monkeypatch.setitem(sys.modules, "sk_answers", Answers("sk_answers"))
    monkeypatch.setitem(sys.modules, "sk_slotted", Slotted())  # type: ignore[arg-type]
    own = OwnModules()
    assert own.files()
    assert not {"sk_odd", "sk_answers", "sk_slotted"} & own.names()


def test_a_service_in_an_installed_package_has_a_digest(folder: Path) -> None:
    own = OwnModules()
    assert own.find("email") is None
    own.add(["email"])
    found = own.find("email")
    assert found is not None
    assert found.is_package
