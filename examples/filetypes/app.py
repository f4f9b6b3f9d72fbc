"""What is this file? Google's Magika model tells 214 types of content apart, by bytes alone.

Two services: `FileType` turns a file into 2048 numbers and the model's answer into words;
`Classifier` runs the model, on as many files at once as are waiting.
"""

import asyncio
import json
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path
from typing import Annotated

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

import servekit as sk

Rows = Annotated[NDArray[np.int32], sk.Array["int32", "N 2048"]]
Scores = Annotated[NDArray[np.float32], sk.Array["float32", "N types"]]

MAGIKA = Path(str(distribution("magika").locate_file("magika")))
MODEL = MAGIKA / "models" / "standard_v3_3"

BLOCK = 4096  # bytes looked at from each end of a file,
EDGE = 1024  # of which the model sees this many, white space stripped
PADDING = 256  # stands where a short file has no byte
FEWEST = 8  # a file with fewer bytes tells the model nothing


@dataclass(frozen=True)
class Answer:
    """What a file is."""

    label: str
    mime: str
    group: str
    score: float


@sk.service
class Classifier:
    """The model: rows of bytes in, one score per known type out."""

    def __init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1  # batches keep a core busy; more threads would fight
        self.session = ort.InferenceSession(MODEL / "model.onnx", options)

    @sk.warmup
    def warm(self) -> None:
        self.classify(np.zeros((1, 2 * EDGE), np.int32))

    @sk.batched(axis=0, max_size=64)
    def classify(self, rows: Rows) -> Scores:
        scores: Scores = self.session.run(["target_label"], {"bytes": rows})[0]
        return scores


@sk.service
class FileType:
    """The front: a file in, its type out."""

    classifier = sk.depends(Classifier)

    def __init__(self) -> None:
        config = json.loads((MODEL / "config.min.json").read_text())
        self.labels: list[str] = config["target_labels_space"]
        self.renamed: dict[str, str] = config["overwrite_map"]
        self.thresholds: dict[str, float] = config["thresholds"]
        self.threshold: float = config["medium_confidence_threshold"]
        self.known = json.loads((MAGIKA / "config" / "content_types_kb.min.json").read_text())

    @sk.endpoint
    async def identify(self, data: bytes, /) -> Answer:
        """Tell what one file is; the request body is the file."""
        row = features(data)
        if row is None:
            return self.trivial(data)
        [scores] = await self.classifier.classify.remote(row[np.newaxis])
        return self.decide(scores)

    @sk.endpoint
    async def identify_many(self, files: dict[str, bytes]) -> dict[str, Answer]:
        """Tell what each of many files is: base64 in JSON, by name."""
        answers = await asyncio.gather(*(self.identify(data) for data in files.values()))
        return dict(zip(files, answers, strict=True))

    def trivial(self, data: bytes) -> Answer:
        """Answer for a file that is empty, or too short for the model."""
        if not data:
            return self.answer("empty", 1.0)
        try:
            data[:BLOCK].decode()
        except UnicodeDecodeError:
            return self.answer("unknown", 1.0)
        return self.answer("txt", 1.0)

    def decide(self, scores: NDArray[np.float32]) -> Answer:
        """Take the best type, or a general one where the model is not sure enough of it."""
        best = int(scores.argmax())
        score, label = float(scores[best]), self.labels[best]
        sure = score >= self.thresholds.get(label, self.threshold)
        label = self.renamed.get(label, label)
        if not sure:
            label = "txt" if self.known[label]["is_text"] else "unknown"
        return self.answer(label, score)

    def answer(self, label: str, score: float) -> Answer:
        about = self.known[label]
        mime = about["mime_type"] or (
            "text/plain" if about["is_text"] else "application/octet-stream"
        )
        return Answer(label, mime, about["group"] or "unknown", score)


def features(data: bytes) -> NDArray[np.int32] | None:
    """Return what the model sees of a file, `(2048,) int32`; None if that is too little.

    Its first and last 1024 bytes, as Magika takes them: the start filled up at its end, the end at
    its start.
    """
    start = data[:BLOCK].lstrip()[:EDGE]
    end = data[-BLOCK:].rstrip()[-EDGE:]
    if len(data) < FEWEST or len(start) < FEWEST:
        return None
    row = np.full(2 * EDGE, PADDING, np.int32)
    row[: len(start)] = np.frombuffer(start, np.uint8)
    row[row.size - len(end) :] = np.frombuffer(end, np.uint8)
    return row
