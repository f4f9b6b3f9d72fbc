"""Train a model on scikit-learn's 1797 scanned digits, and write it as ONNX for the service.

`python examples/digits/train.py` takes a few seconds and prints how well it reads digits that it
was not trained on.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from skl2onnx import to_onnx
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

MODEL = Path(__file__).parent / "models" / "digits.onnx"

Data = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]


def data() -> Data:
    """Return images to train on, images to test with `(n, 8, 8) float32`, and the digits of both."""
    digits = load_digits()
    images = digits.images.astype(np.float32)
    parts: Data = train_test_split(images, digits.target, test_size=0.25, random_state=0)
    return parts


def train(path: Path = MODEL) -> float:
    """Train, write the model, and return its accuracy on the images kept aside."""
    seen, unseen, seen_digits, unseen_digits = data()
    model = make_pipeline(StandardScaler(), LogisticRegression())
    model.fit(rows(seen), seen_digits)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(to_onnx(model, rows(seen)[:1]).SerializeToString())
    return float(model.score(rows(unseen), unseen_digits))


def rows(images: NDArray[np.float32]) -> NDArray[np.float32]:
    """Lay each image out as the 64 numbers that the model was made for."""
    return images.reshape(len(images), 64)


if __name__ == "__main__":
    print(f"accuracy {train():.3f}, written to {MODEL}")
