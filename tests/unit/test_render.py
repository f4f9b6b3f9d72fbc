"""Pictures of an app."""

from collections.abc import AsyncIterator
from textwrap import dedent

import servekit as sk
from servekit.spec.describe import describe
from servekit.spec.render import mermaid, tree


@sk.service(gpu=0.5, replicas=sk.Autoscale(min=1, max=4))
class Embedder:
    @sk.batched(max_size=64, max_wait_ms=4, target_ms=50)
    def embed(self, texts: list[str]) -> list[int]:
        return [len(text) for text in texts]


@sk.service(prefix="/llm", replicas=2)
class LLM:
    embedder = sk.depends(Embedder)

    @sk.endpoint
    async def generate(self, prompt: str) -> AsyncIterator[str]:
        yield prompt


@sk.service(prefix="/search")
class Search:
    embedder = sk.depends(Embedder)
    llm = sk.depends(LLM)

    @sk.endpoint
    def query(self, text: str) -> str:
        return text

    @sk.endpoint(internal=True)
    def size(self) -> int:
        return 1


def test_a_tree_shows_routes_batches_and_replicas() -> None:
    expected = """\
        Search  /search
        ├── query  POST /search/query
        ├── size   internal
        ├── embedder → Embedder  1 to 4 replicas  gpu 0.5
        │   └── embed  batched ≤64, waits ≤4 ms, target 50 ms
        └── llm → LLM  /llm  2 replicas
            ├── generate  POST /llm/generate  streams
            └── embedder → Embedder  (above)"""
    assert tree(describe(Search)) == dedent(expected)


def test_mermaid_has_every_service_and_edge() -> None:
    expected = """\
        flowchart LR
            s2["<b>Search</b><br/>/search"]
            s1["<b>LLM</b><br/>/llm<br/>2 replicas"]
            s0["<b>Embedder</b><br/>1 to 4 replicas<br/>gpu 0.5"]
            s2 -->|embedder| s0
            s2 -->|llm| s1
            s1 -->|embedder| s0"""
    assert mermaid(describe(Search)) == dedent(expected)


def test_a_service_alone_is_a_tree() -> None:
    assert tree(describe(Embedder)).splitlines()[1] == (
        "└── embed  POST /embed  batched ≤64, waits ≤4 ms, target 50 ms"
    )


def test_what_shares_a_process_is_drawn_so() -> None:
    @sk.service
    class Words:
        @sk.endpoint
        def split(self, text: str) -> list[str]:
            return text.split()

    @sk.service
    class Both:
        words = sk.depends(Words, colocate=True)
        again = sk.depends(Words, colocate=True, timeout_s=1)

        @sk.endpoint
        def run(self, text: str) -> str:
            return text

    expected = """\
        Both
        ├── run  POST /run
        ├── words → Words  in the same process
        │   └── split  internal
        └── again → Words  in the same process  (above)"""
    assert tree(describe(Both)) == dedent(expected)
    assert mermaid(describe(Both)).splitlines()[1:] == [
        '    s1["<b>Both</b>"]',
        '    s0["<b>Words</b>"]',
        "    s1 ==>|words| s0",
        "    s1 ==>|again| s0",
    ]
