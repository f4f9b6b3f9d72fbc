"""`@service`, `@endpoint`, `@batched` and the lifecycle decorators."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from typing import Any

import pytest

import servekit as sk
from servekit.errors import InvalidOutput, ServekitError, SpecError
from servekit.spec.definition import EndpointDefinition, definition
from servekit.spec.policy import BatchPolicy, Resources


@sk.service(
    name="embedder",
    prefix="/embed",
    replicas=sk.Autoscale(max=3),
    gpu=0.5,
    cpu=2,
    memory="1GiB",
    limits=sk.Limits(max_queued=7),
    env={"OMP_NUM_THREADS": "1"},
    version="7",
)
class Embedder:
    """Makes vectors."""

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self.events: list[str] = []

    @sk.batched(max_size=8, max_wait_ms=2)
    def embed(self, texts: list[str]) -> list[list[int]]:
        """Embed."""
        return [[len(text)] * self.size for text in texts]

    @sk.batched(max_size=8)
    async def upper(self, items: list[sk.Item[str]]) -> list[str | sk.ItemError]:
        bad = sk.ItemError(ValueError("empty"))
        return [item.value.upper() + item.ctx.request_id if item.value else bad for item in items]

    @sk.batched(max_size=8)
    def add(self, left: list[int], right: list[int]) -> list[int]:
        return [a + b for a, b in zip(left, right, strict=True)]

    @sk.batched(max_size=8, axis=0)
    def project(self, rows: list[float]) -> list[float]:
        return [2 * row for row in rows]

    @sk.batched(max_size=8)
    def broken(self, texts: list[str]) -> list[str]:
        return [*texts, "one more"]

    @sk.endpoint(method="GET", tags=["figures"], timeout_s=3, max_concurrency=2)
    def dim(self) -> int:
        return self.size

    @sk.endpoint(path="/v1/say", media_type="text/plain", idempotent=True, internal=True)
    async def say(self, text: str) -> AsyncIterator[str]:
        for word in text.split():
            yield word

    @sk.endpoint
    def again(self, text: str) -> Iterator[str]:
        return iter(text)


def found(cls: type) -> dict[str, EndpointDefinition]:
    return dict(definition(cls).endpoints)


def only(*members: Callable[..., Any], **options: Any) -> type:
    """Make a service of these methods."""
    body = {getattr(m, "__name__", "member"): m for m in members}
    return sk.service(**options)(type("Search", (), body))


# ---- what a service is


def test_the_class_stays_itself() -> None:
    class Plain: ...

    assert sk.service(Plain) is Plain
    assert isinstance(Embedder(), Embedder)


def test_options_become_the_definition() -> None:
    service = definition(Embedder)
    assert service.cls is Embedder
    assert (service.name, service.prefix, service.version) == ("embedder", "/embed", "7")
    assert service.replicas == sk.Autoscale(max=3)
    assert service.resources == Resources(gpu=0.5, cpu=2.0, memory=2**30)
    assert service.limits.max_queued == 7
    assert service.env == {"OMP_NUM_THREADS": "1"}
    assert list(service.endpoints) == [
        "embed", "upper", "add", "project", "broken", "dim", "say", "again",
    ]  # fmt: skip


def test_endpoints_are_described() -> None:
    endpoints = found(Embedder)
    embed, dim, say = endpoints["embed"], endpoints["dim"], endpoints["say"]
    assert (embed.kind, embed.method, embed.path, embed.is_async) == (
        "batched", "POST", "/embed", False,
    )  # fmt: skip
    assert embed.batch == BatchPolicy(max_size=8, max_wait_ms=2)
    assert embed.where == "Embedder.embed"
    assert embed.fn(Embedder(), ["ab"]) == [[2, 2]]
    assert (dim.kind, dim.method, dim.tags, dim.timeout_s) == ("unary", "GET", ("figures",), 3)
    assert dim.max_concurrency == 2
    assert (say.kind, say.path, say.is_async, say.internal) == ("stream", "/v1/say", True, True)
    assert say.media_type == "text/plain"


@pytest.mark.parametrize(
    ("name", "idempotent"), [("embed", True), ("dim", True), ("say", True), ("again", False)]
)
def test_batched_and_get_are_idempotent_unless_told_otherwise(name: str, idempotent: bool) -> None:
    assert found(Embedder)[name].idempotent is idempotent


def test_a_client_batch_has_a_route_of_its_own() -> None:
    endpoints = found(Embedder)
    assert endpoints["embed"].routes == ("/embed", "/embed/batch")
    assert endpoints["dim"].routes == ("/dim",)
    assert endpoints["say"].routes == ()


def test_items_are_recognised() -> None:
    endpoints = found(Embedder)
    assert [name for name, e in endpoints.items() if e.wants_items] == ["upper"]


def test_streams_are_recognised_by_code_or_annotation() -> None:
    class Streams:
        @sk.endpoint
        def generator(self) -> Generator[int, None, None]:
            yield 1

        @sk.endpoint
        def iterator(self) -> "Iterator[int]":
            return iter([1])

        @sk.endpoint
        def async_iterator(self) -> AsyncIterator[int]:
            raise NotImplementedError

        @sk.endpoint
        async def answer(self) -> list[int]:
            return [1]

    forms = {n: (e.kind, e.is_async) for n, e in found(sk.service(Streams)).items()}
    assert forms == {
        "generator": ("stream", False),
        "iterator": ("stream", False),
        "async_iterator": ("stream", True),
        "answer": ("unary", True),
    }


def test_a_wrapped_method_keeps_its_name() -> None:
    def logged(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return fn(*args, **kwargs)

        return wrapper

    class Wrapped:
        @sk.endpoint
        @logged
        def query(self, text: str) -> str:
            return text

    assert found(sk.service(Wrapped))["query"].where.endswith("Wrapped.query")
    assert Wrapped().query("x") == "x"


def test_one_function_may_have_two_names() -> None:
    class Named:
        @sk.endpoint
        def query(self) -> int:
            return 1

        search = query

    endpoints = found(sk.service(Named))
    assert [(e.name, e.path) for e in endpoints.values()] == [
        ("query", "/query"),
        ("search", "/search"),
    ]


# ---- inheritance


def test_a_subclass_is_a_service_of_its_own() -> None:
    class Special(Embedder):
        @sk.endpoint
        def dim(self) -> int:
            return 2 * super().dim()

    with pytest.raises(SpecError, match="Special is no service, it only inherits from Embedder"):
        definition(Special)
    service = definition(sk.service(Special))
    assert service.name == "Special"
    assert list(service.endpoints) == list(definition(Embedder).endpoints)
    assert service.endpoints["dim"].method == "POST"
    assert Special(size=3).dim() == 6
    assert definition(Embedder).endpoints["dim"].method == "GET"


def test_none_drops_an_inherited_endpoint() -> None:
    class Less(Embedder):
        embed = None  # type: ignore[assignment]

    assert "embed" not in found(sk.service(Less))


def test_a_bare_override_is_refused() -> None:
    class Special(Embedder):
        def dim(self) -> int:  # type: ignore[override]
            return 1

    with pytest.raises(SpecError, match=r"Special\.dim: replaces a decorated method.*`dim = None`"):
        sk.service(Special)


# ---- plain calls


def test_a_plain_call_runs_the_function_itself() -> None:
    embedder = Embedder()
    assert embedder.dim() == 2
    assert list(embedder.again("ab")) == ["a", "b"]
    assert embedder.project([1.0]) == [2.0]


def test_a_plain_call_of_a_batched_method_takes_one_item() -> None:
    embedder = Embedder(size=1)
    assert embedder.embed("abc") == [3]
    assert embedder.add(1, 2) == 3
    assert asyncio.run(embedder.upper("x")) == "X"


def test_an_item_error_is_raised() -> None:
    with pytest.raises(ValueError, match="empty"):
        asyncio.run(Embedder().upper(""))


def test_a_wrong_number_of_results_is_refused() -> None:
    with pytest.raises(InvalidOutput, match=r"Embedder\.broken returned 2 results for 1 item"):
        Embedder().broken("x")


def test_a_plain_instance_has_no_remote_calls() -> None:
    embedder = Embedder()
    for call in (lambda: embedder.dim.remote(), lambda: embedder.say.remote("x")):
        with pytest.raises(ServekitError, match=r"needs a handle.*sk\.depends, sk\.local"):
            call()
    with pytest.raises(ServekitError, match=r"Embedder\.dim\.options"):
        embedder.dim.options(timeout_s=1)


def test_class_access_returns_the_endpoint() -> None:
    assert repr(Embedder.embed) == "<endpoint Embedder.embed>"
    assert Embedder.embed.__doc__ == "Embed."
    assert repr(Embedder().embed) == "<endpoint Embedder.embed>"


# ---- lifecycle


def test_hooks_are_plain_methods_in_the_order_they_run() -> None:
    class Base:
        @sk.setup(order=1)
        def last(self) -> None: ...

        @sk.setup
        def first(self) -> str:
            return "plain"

        @sk.teardown
        def close(self) -> None: ...

    class Derived(Base):
        @sk.setup
        async def second(self) -> None: ...

        @sk.warmup
        def warm(self) -> None: ...

        @sk.ready
        def is_ready(self) -> bool:
            return True

        @sk.live
        def is_live(self) -> bool:
            return True

        @sk.on_build
        def compile(self) -> None: ...

        @sk.teardown
        def close_more(self) -> None: ...

    hooks = definition(sk.service(Derived)).hooks
    assert {kind: [fn.__name__ for fn in fns] for kind, fns in hooks.items()} == {
        "on_build": ["compile"],
        "setup": ["first", "second", "last"],
        "warmup": ["warm"],
        "ready": ["is_ready"],
        "live": ["is_live"],
        "reconfigure": [],
        "teardown": ["close_more", "close"],
    }
    assert Derived().first() == "plain"


def test_a_hook_can_not_be_two_things() -> None:
    def load(self: object) -> None: ...

    sk.setup(load)
    with pytest.raises(SpecError, match=r"load: is @sk\.setup already.*@sk\.teardown"):
        sk.teardown(load)
    with pytest.raises(SpecError, match=r"load: is @sk\.setup.*@sk\.endpoint"):
        sk.endpoint(load)


def test_a_hook_takes_self_alone() -> None:
    def load(self: object, path: str) -> None: ...
    def nothing() -> None: ...
    def gen(self: object) -> Iterator[int]:
        yield 1

    with pytest.raises(SpecError, match=r"load\(self, path\): @sk\.setup is called with `self`"):
        sk.setup(load)
    with pytest.raises(SpecError, match="called with `self` alone"):
        sk.warmup(nothing)
    with pytest.raises(SpecError, match="can't be a generator"):
        sk.ready(gen)
    with pytest.raises(SpecError, match="decorate a plain method"):
        sk.live(staticmethod(load))


def test_reconfigure_takes_arguments_of_the_constructor() -> None:
    @sk.service
    class S:
        def __init__(self, low: float = 0.0, high: float = 1.0, path: str = "x") -> None: ...

        @sk.reconfigure
        def between(self, low: float, *, high: float) -> None: ...

    assert definition(S).tunable == ("high", "low")


def test_reconfigure_that_can_not_be_called() -> None:
    def nothing(self: object) -> None: ...
    def anything(self: object, **args: float) -> None: ...

    for fn in (nothing, anything):
        with pytest.raises(SpecError, match=r"takes some of the constructor's parameters"):
            sk.reconfigure(fn)

    class S:
        def __init__(self, treshold: float = 0.5) -> None: ...

        @sk.reconfigure
        def tune(self, threshold: float) -> None: ...

    with pytest.raises(SpecError, match=r"S\.tune: .*takes 'threshold'.*Did you mean 'treshold'"):
        sk.service(S)


# ---- mistakes


def no_self() -> int:
    return 1


def forgot_self(text: str) -> str:
    return text


def query(self: Any, text: str) -> str:
    return text


def streaming(self: Any, texts: list[str]) -> Iterator[str]:
    yield from texts


async def no_yield(self: Any) -> AsyncIterator[str]:
    raise NotImplementedError


def iterable(self: Any) -> Iterable[str]:
    return []


def alone(self: Any) -> list[str]:
    return []


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: sk.endpoint(no_self), r"no_self: has no `self`; write `def no_self\(self"),
        (lambda: sk.endpoint(forgot_self), "forgot_self: has no `self`"),
        (lambda: sk.endpoint(staticmethod(query)), "query: is a staticmethod"),
        (lambda: sk.endpoint(classmethod(query)), "query: is a classmethod"),
        (lambda: sk.endpoint(sk.endpoint(query)), "query: decorate a plain method, once"),  # type: ignore[call-overload]
        (lambda: sk.endpoint(no_yield), "no_yield: an `async def` that returns AsyncIterator"),
        (lambda: sk.endpoint(iterable), r"iterable: returns Iterable; write Iterator\[X\]"),
        (lambda: sk.endpoint(path="query")(query), r"query: path='query'; a path looks like"),
        (lambda: sk.endpoint(path="/a/")(query), "query: path='/a/'"),
        (lambda: sk.endpoint(path="/a/../b")(query), r"query: path='/a/\.\./b'"),
        (lambda: sk.endpoint(path="/items/{id}")(query), "has no parameters"),
        (lambda: sk.endpoint(method="PUT")(query), "query: method='PUT'; write 'GET' or 'POST'"),  # type: ignore[call-overload]
        (lambda: sk.endpoint(timeout_s=0)(query), "query: timeout_s=0; must be above 0"),
        (lambda: sk.endpoint(max_concurrency=0)(query), "query: max_concurrency=0"),
        (lambda: sk.endpoint(tags="nlp")(query), r"query: tags='nlp'; write a list"),
        (lambda: sk.batched(max_size=8)(streaming), "streaming: @sk.batched can't stream"),
        (lambda: sk.batched(max_size=8)(alone), "alone: @sk.batched needs a parameter"),
        (lambda: sk.batched(max_size=0)(query), r"query: batched\(max_size=0\)"),
        (lambda: sk.batched(max_size=4, pad_to=(1, 2))(query), r"query: batched\(pad_to=\(1, 2\)"),
        (
            lambda: sk.batched(max_size=4, axis=0, size_of=len)(query),  # type: ignore[call-overload]
            "query: size_of= is for lists",
        ),
    ],
)
def test_a_mistake_in_a_method_names_it_and_the_fix(
    decorate: Callable[[], object], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        decorate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "my service"}, r"Search: name='my service'; a name has"),
        ({"prefix": "search"}, r"Search: prefix='search'; a prefix looks like '/search'"),
        ({"prefix": "/"}, r"Search: prefix='/'.*The root's is ''"),
        ({"replicas": 0}, r"Search: replicas=0; must be 1 or more.*sk\.Autoscale\(min=0"),
        ({"gpu": 1.5}, r"Search: gpu=1\.5: write a share of one device"),
        ({"gpu": -1}, r"Search: gpu=-1\.0"),
        ({"cpu": -1}, r"Search: cpu=-1\.0"),
        ({"memory": "lots"}, r"Search: memory: 'lots' is no size"),
        ({"env": {"A": 1}}, r"Search: env\['A'\]=1; write it as text"),
    ],
)
def test_a_mistake_in_an_option_names_the_class_and_the_fix(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        only(**options)


def test_an_endpoint_name_can_not_be_private() -> None:
    class Search:
        @sk.endpoint
        def _query(self) -> int:
            return 1

    with pytest.raises(SpecError, match=r"Search\._query: an endpoint's name can't start with '_'"):
        sk.service(Search)


@pytest.mark.parametrize("wrapper", [staticmethod, classmethod, property])
def test_nothing_goes_around_an_endpoint(wrapper: Callable[..., Any]) -> None:
    class Search:
        query = wrapper(sk.endpoint(query))

    with pytest.raises(SpecError, match=rf"Search\.query: is a {wrapper.__name__} around"):
        sk.service(Search)


@pytest.mark.parametrize(
    "path", ["/docs", "/openapi.json", "/livez", "/readyz", "/startupz", "/metrics", "/playground"]
)
def test_pages_of_servekit_are_reserved(path: str) -> None:
    with pytest.raises(SpecError, match=f"query: '{path}' is a page of servekit itself"):
        only(sk.endpoint(path=path)(query))
    only(sk.endpoint(path=path)(query), prefix="/search")


def test_two_endpoints_can_not_share_a_path() -> None:
    @sk.endpoint(path="/embed/batch")
    def other(self: Any) -> int:
        return 1

    @sk.batched(max_size=4)
    def embed(self: Any, texts: list[str]) -> list[str]:
        return texts

    with pytest.raises(SpecError, match=r"embed and .*other have the same path '/embed/batch'"):
        only(other, embed)


def test_only_a_class_is_a_service() -> None:
    with pytest.raises(SpecError, match="decorate a class"):
        sk.service(query)  # type: ignore[call-overload]
    with pytest.raises(SpecError, match=r"Embedder: is decorated with @sk\.service twice"):
        sk.service(Embedder)
    with pytest.raises(SpecError, match="int is no service; decorate the class"):
        definition(int)
    with pytest.raises(SpecError, match="'Embedder' is no class"):
        definition("Embedder")  # type: ignore[arg-type]
