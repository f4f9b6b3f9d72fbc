"""`depends`, `ref` and the walk over the graph."""

import pytest

import servekit as sk
from servekit.errors import SpecError
from servekit.spec.definition import ServiceDefinition, definition
from servekit.spec.graph import ServiceRef, topology
from servekit.spec.policy import Resources


@sk.service(gpu=0.5, prefix="/embed", env={"A": "1"})
class Embedder:
    def __init__(self, size: int = 2) -> None:
        self.size = size

    @sk.endpoint
    def dim(self) -> int:
        return self.size


@sk.service
class LLM:
    embedder = sk.depends(Embedder)

    @sk.endpoint
    def score(self, text: str) -> int:
        return len(text)


@sk.service(prefix="/search")
class Search:
    embedder = sk.depends(Embedder)
    big = sk.depends(sk.ref(Embedder, name="big", gpu=1), timeout_s=20, retries=0)
    llm = sk.depends(LLM)

    @sk.endpoint
    def query(self, text: str) -> int:
        return self.embedder.dim() + self.llm.score(text)


def names(root: type) -> list[str]:
    return [service.name for service in topology(definition(root))]


# ---- the descriptor


def test_dependencies_are_in_the_definition() -> None:
    edges = definition(Search).dependencies
    assert list(edges) == ["embedder", "big", "llm"]
    assert edges["embedder"].target is definition(Embedder)
    assert (edges["embedder"].timeout_s, edges["embedder"].retries) == (None, 1)
    assert (edges["big"].attribute, edges["big"].timeout_s, edges["big"].retries) == ("big", 20, 0)


def test_the_class_has_the_dependency_itself() -> None:
    assert {Search.embedder: 1}[Search.embedder] == 1
    assert (Search.embedder.owner, Search.embedder.attribute) == (Search, "embedder")
    assert repr(Search.embedder) == "<dependency Search.embedder on Embedder>"


def test_a_plain_instance_says_how_to_bind_it() -> None:
    search = Search()
    with pytest.raises(AttributeError, match=r"sk\.local\(Search\).*assign a fake"):
        search.query("x")
    search.embedder = Embedder(size=5)  # type: ignore[assignment]
    search.llm = LLM()  # type: ignore[assignment]
    assert search.query("abc") == 8


def test_dependencies_are_inherited_and_replaced() -> None:
    @sk.service
    class More(Search):
        big = sk.depends(Embedder)
        llm = None

    edges = definition(More).dependencies
    assert list(edges) == ["embedder", "big"]
    assert edges["big"].target is definition(Embedder)


# ---- variants


def test_a_ref_is_a_variant_without_routes() -> None:
    big = sk.ref(Embedder, name="big", gpu=2, memory="1KiB", version="2", args={"size": 4})
    assert isinstance(big, ServiceRef)
    assert (big.definition.name, big.definition.prefix) == ("big", None)
    assert big.definition.resources == Resources(gpu=2, memory=1024)
    assert big.definition.args == {"size": 4}
    assert big.definition.env == {"A": "1"}
    assert definition(Embedder).name == "Embedder"


def test_a_ref_is_configured_further() -> None:
    big = sk.ref(Embedder, name="big", gpu=2)
    bigger = big.configure(
        name="bigger",
        prefix="/bigger",
        replicas=sk.Autoscale(max=2),
        cpu=4,
        limits=sk.Limits(max_queued=1),
        env={},
    )
    assert bigger.definition.resources == Resources(gpu=2, cpu=4)
    assert (bigger.definition.name, bigger.definition.prefix) == ("bigger", "/bigger")
    assert (bigger.definition.env, bigger.definition.limits.max_queued) == ({}, 1)
    assert big.definition.name == "big"


def test_arguments_are_what_a_fresh_process_reads_back() -> None:
    assert sk.ref(Embedder, name="x", args={"size": (1, 2)}).definition.args == {"size": [1, 2]}
    with pytest.raises(SpecError, match=r"sk\.ref\(Embedder, name='x'\): args=.*JSON values"):
        sk.ref(Embedder, name="x", args={"size": object()})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": 1.5}, r"sk\.ref\(Embedder, name='x'\): gpu=1\.5"),
        ({"replicas": -1}, "replicas=-1; must be 1 or more"),
        ({"memory": "much"}, "memory: 'much' is no size"),
    ],
)
def test_a_mistake_in_a_ref_names_it(options: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        sk.ref(Embedder, name="x", **options)  # type: ignore[arg-type]


def test_only_services_can_be_depended_on() -> None:
    class Plain: ...

    with pytest.raises(SpecError, match=r"sk\.depends: Plain is no service"):
        sk.depends(Plain)
    with pytest.raises(SpecError, match=r"sk\.depends: 'Embedder' is no class"):
        sk.depends("Embedder")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"sk\.ref: Plain is no service"):
        sk.ref(Plain, name="x")
    with pytest.raises(SpecError, match=r"sk\.depends: timeout_s=0; must be above 0"):
        sk.depends(Embedder, timeout_s=0)
    with pytest.raises(SpecError, match=r"sk\.depends: retries=-1; must be 0 or more"):
        sk.depends(Embedder, retries=-1)


# ---- the walk


def test_dependencies_come_first_and_once() -> None:
    assert names(Search) == ["Embedder", "big", "LLM", "Search"]


def test_equal_refs_are_one_service() -> None:
    @sk.service
    class Two:
        one = sk.depends(sk.ref(Embedder, name="big", gpu=1))
        search = sk.depends(Search)

    assert names(Two) == ["big", "Embedder", "LLM", "Search", "Two"]


def test_two_variants_need_two_names() -> None:
    @sk.service
    class Two:
        one = sk.depends(sk.ref(Embedder, name="big", gpu=2))
        search = sk.depends(Search)

    with pytest.raises(
        SpecError,
        match=r"Search\.big and Two\.one: two different services are named 'big' "
        r"\(they differ in resources\); give one another name: sk\.ref",
    ):
        names(Two)


def test_two_classes_need_two_names() -> None:
    @sk.service(name="Embedder")
    class Fake: ...

    @sk.service
    class Two:
        fake = sk.depends(Fake)
        real = sk.depends(Embedder)

    with pytest.raises(SpecError, match=r"Two\.real and Two\.fake.*\(Fake and Embedder\)"):
        names(Two)


def test_a_service_can_not_need_another_of_its_name() -> None:
    @sk.service(name="Embedder")
    class Wrapper:
        inner = sk.depends(Embedder)

    with pytest.raises(SpecError, match=r"Wrapper\.inner and Wrapper: two different services"):
        names(Wrapper)


def test_a_circle_is_refused() -> None:
    @sk.service
    class A: ...

    @sk.service
    class B:
        a = sk.depends(A)

    _add_edge(definition(A), "b", definition(B))
    with pytest.raises(SpecError, match=r"B\.a: the services depend .* in a circle: A → B → A"):
        names(A)


def _add_edge(owner: ServiceDefinition, attribute: str, target: ServiceDefinition) -> None:
    from servekit.spec.definition import DependencyDefinition

    edges = owner.dependencies
    assert isinstance(edges, dict)
    edges[attribute] = DependencyDefinition(attribute=attribute, target=target)


def test_two_services_can_not_share_a_route() -> None:
    @sk.service(prefix="/search")
    class Other:
        search = sk.depends(Search)

        @sk.endpoint
        def query(self) -> int:
            return 1

    with pytest.raises(
        SpecError, match=r"Other\.query and Search\.query have the same route '/search/query'"
    ):
        names(Other)
