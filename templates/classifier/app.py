"""__project__ reads handwritten digits: a scikit-learn model, served as ONNX."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

import servekit as sk

Image = Annotated[NDArray[np.float32], sk.Array["float32", "8 8"]]


@dataclass
class Prediction:
    digit: int
    confidence: float


@sk.service
class Digits:
    model = sk.model("model.onnx")  # python train.py makes it

    def __init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1  # replicas share the machine; add more of them instead
        self.session = ort.InferenceSession(self.model, options, providers=["CPUExecutionProvider"])

    @sk.warmup
    def warm_up(self) -> None:
        self.run(np.zeros((64, 8, 8), np.float32))

    @sk.batched(max_size=64)
    def predict(self, images: list[Image]) -> list[Prediction]:
        """Read a digit from 8 by 8 pixels, 0 (paper) to 16 (ink)."""
        chances = self.run(np.stack(images))
        best = chances.argmax(axis=1)
        return [
            Prediction(digit=int(index), confidence=round(float(row[index]), 3))
            for index, row in zip(best, chances, strict=True)
        ]

    def run(self, images: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the chance of each digit, (batch, 10) float32, for (batch, 8, 8) float32."""
        (chances,) = self.session.run(["probabilities"], {"pixels": images.reshape(-1, 64)})
        return chances
