"""__project__ tells sine, square and sawtooth waves apart, with two services.

`Waves` takes a signal and turns it into its overtones; `Shapes` compares the overtones of many
signals at once with those of known shapes. Each can have as many replicas as it needs.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

import servekit as sk

OVERTONES = 6

Signal = Annotated[list[float], Field(min_length=32, max_length=65536)]
Overtones = Annotated[NDArray[np.float32], sk.Array["float32", "6"]]


@dataclass
class Prediction:
    shape: str
    confidence: float


@sk.service
class Shapes:
    """The model: one matrix product for a whole batch."""

    def __init__(self) -> None:
        n = np.arange(1, OVERTONES + 1)
        odd = n % 2 == 1
        self.names = ["sine", "square", "sawtooth"]
        self.known = np.stack([n == 1, odd / n, 1 / n]).astype(np.float32)

    @sk.batched(max_size=64)
    def classify(self, overtones: list[Overtones]) -> list[Prediction]:
        batch = np.stack(overtones)  # (batch, 6) float32
        distance = np.square(batch[:, None] - self.known).sum(axis=-1)
        score = np.exp(-20 * distance)
        score /= score.sum(axis=-1, keepdims=True)
        best = score.argmax(axis=-1)
        return [
            Prediction(self.names[index], round(float(row[index]), 3))
            for index, row in zip(best, score, strict=True)
        ]


@sk.service(image=sk.Image().env(OMP_NUM_THREADS="1"))  # replicas share the machine
class Waves:
    """The pipeline: from a signal to its overtones, and on to the model."""

    shapes = sk.depends(Shapes)

    @sk.endpoint
    async def predict(self, signal: Signal) -> Prediction:
        """Name the shape of a signal of at least two periods, at any pitch and phase."""
        return await self.shapes.classify.remote(overtones(np.array(signal)))


def overtones(signal: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the strength of the first overtones, that of the ground tone being 1: (6,) float32."""
    wave = signal - signal.mean()
    spectrum = np.abs(np.fft.rfft(wave * np.hanning(len(wave)), n=4 * len(wave)))
    ground = int(spectrum.argmax()) or 1
    around = max(1, ground // 4)
    peaks = [
        spectrum[n * ground - around : n * ground + around + 1].max(initial=0.0)
        for n in range(1, OVERTONES + 1)
    ]
    return np.array(peaks, np.float32) / np.float32(peaks[0] or 1.0)
