import json
from pathlib import Path

import numpy as np
import pytest
from app import Digits
from sklearn.datasets import load_digits
from train import MODEL, train

import servekit as sk

SAMPLE = Path(__file__).parents[1] / "sample.json"


@pytest.fixture(scope="module")
def digits():
    if not MODEL.exists():
        train()
    with sk.local(Digits) as app:
        yield app


def test_reads_the_sample(digits):
    image = np.array(json.loads(SAMPLE.read_text()), np.float32)
    found = digits.predict.remote(image).result(10)
    assert found.digit == 7
    assert found.confidence > 0.5


def test_reads_most_digits(digits):
    data = load_digits()
    images, truth = data.images[-200:].astype(np.float32), data.target[-200:]
    calls = [digits.predict.remote(image) for image in images]
    found = [call.result(30).digit for call in calls]
    assert np.mean(found == truth) > 0.9


def test_refuses_an_image_of_another_size(digits):
    with pytest.raises(TypeError, match="8, 8"):
        digits.predict.remote(np.zeros((28, 28), np.float32))
