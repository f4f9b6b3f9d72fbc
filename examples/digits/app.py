"""Reads digits from 8 x 8 pixels, with the model that `train.py` wrote.

`images` is any number of them. What the type says is checked before the method runs: a wrong dtype
or shape is an error that names both, and nothing is reshaped or cast to fit.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

import servekit as sk

MODEL = Path(__file__).parent / "models" / "digits.onnx"

Images = Annotated[NDArray[np.float32], sk.Array["float32", "N 8 8"]]
Labels = Annotated[NDArray[np.int64], sk.Array["int64", "N"]]


@sk.service
class Digits:
    def __init__(self) -> None:
        if not MODEL.exists():
            raise FileNotFoundError(f"{MODEL}: run `python examples/digits/train.py` first")
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(MODEL, options)

    @sk.warmup
    def warm(self) -> None:
        self.read(np.zeros((1, 8, 8), np.float32))

    @sk.batched(axis=0, max_size=256)
    def read(self, images: Images) -> Labels:
        """Tell which digits the images show; grey values go from 0 to 16."""
        digits: Labels = self.session.run(["output_label"], {"X": images.reshape(-1, 64)})[0]
        return digits
