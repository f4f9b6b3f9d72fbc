"""Trains the model that `app.py` serves, and writes it to model.onnx: `python train.py`."""

from pathlib import Path

from skl2onnx import to_onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

MODEL = Path(__file__).with_name("model.onnx")


def train() -> float:
    """Write the model and return its accuracy on digits that it has not seen."""
    images, digits = load_digits(return_X_y=True)
    seen, unseen, seen_digits, unseen_digits = train_test_split(
        images, digits, test_size=0.25, random_state=0
    )
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    model.fit(seen, seen_digits)
    made = to_onnx(
        model,
        initial_types=[("pixels", FloatTensorType([None, 64]))],
        options={"zipmap": False},  # chances as one array, not as a dict for each image
    )
    MODEL.write_bytes(made.SerializeToString())
    return model.score(unseen, unseen_digits)


if __name__ == "__main__":
    print(f"accuracy on unseen digits: {train():.1%}, model in {MODEL.name}")
