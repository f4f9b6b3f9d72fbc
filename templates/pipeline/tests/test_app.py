import numpy as np
import pytest
from app import Prediction, Waves

import servekit as sk


def wave(shape: str, *, periods: float, phase: float, size: int = 256) -> list[float]:
    turn = (np.arange(size) / size * periods + phase) % 1.0
    made = {
        "sine": np.sin(2 * np.pi * turn),
        "square": np.where(turn < 0.5, 1.0, -1.0),
        "sawtooth": 2 * turn - 1,
    }
    return [float(value) for value in made[shape]]


@pytest.fixture(scope="module")
def waves():
    with sk.local(Waves) as app:
        yield app


@pytest.mark.parametrize("periods", [4.0, 7.3])
@pytest.mark.parametrize("phase", [0.0, 0.4])
@pytest.mark.parametrize("shape", ["sine", "square", "sawtooth"])
def test_names_the_shape_at_any_pitch_and_phase(waves, shape, periods, phase):
    found = waves.predict.remote(wave(shape, periods=periods, phase=phase)).result(10)
    assert found.shape == shape
    assert found.confidence > 0.5


def test_refuses_a_signal_that_is_too_short(waves):
    with pytest.raises(TypeError, match="signal"):
        waves.predict.remote([0.0, 1.0])


def test_a_constant_signal_has_no_overtones_and_no_fault(waves):
    assert waves.predict.remote([1.0] * 64).result(10).confidence >= 0


class Fake:
    def classify(self, overtones):
        return Prediction("fake", float(overtones[0]))


def test_the_pipeline_without_its_model():
    with sk.local(Waves, overrides={Waves.shapes: Fake()}) as app:
        found = app.predict.remote(wave("sine", periods=4, phase=0)).result(10)
    assert found == Prediction("fake", 1.0)
