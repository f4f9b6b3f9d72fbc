"""Finding GPUs; nvidia-smi is a script where it has to be there at all."""

import pytest

from servekit.engine import devices
from servekit.engine.devices import detect
from servekit.engine.placement import Device

SMI = """0, GPU-5e1c0000-aaaa, 40960
1, GPU-5e2c0000-bbbb, 81920
10, GPU-77770000-cccc, [N/A]
"""
ZERO = Device(id="0", memory=40 * 2**30)
ONE = Device(id="1", memory=80 * 2**30)
TEN = Device(id="10", memory=0)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (ZERO, ONE, TEN)),
        ("", ()),
        (" ", ()),
        ("1", (ONE,)),
        ("1,0", (ONE, ZERO)),
        (" 10 , 0 ", (TEN, ZERO)),
        ("GPU-5e2c", (ONE,)),
        ("GPU-5e", ()),  # ambiguous
        ("GPU-77770000-cccc,1", (TEN, ONE)),
        ("0,-1,1", (ZERO,)),  # CUDA stops at the first that isn't there
        ("7", ()),
        ("NoDevFiles", ()),
        ("MIG-abc,MIG-def", (Device(id="MIG-abc"), Device(id="MIG-def"))),
    ],
)
def test_visible_devices_are_chosen_as_cuda_does(visible, expected):
    assert detect(visible=visible, query=lambda: SMI) == expected


@pytest.mark.parametrize("text", ["", "No devices were found\n", "a, b, c\n", "0\n", "\n\n"])
def test_other_output_means_no_gpu(text):
    assert detect(query=lambda: text) == ()


def test_declared_devices_need_no_driver():
    def query():
        raise AssertionError

    assert detect(declared=2, visible="5", query=query) == (Device(id="0"), Device(id="1"))
    assert detect(declared=0, query=query) == ()
    assert detect(visible="", query=query) == ()


def script(tmp_path, text):
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('echo "0, GPU-5e1c, 40960"', (ZERO,)),
        ("echo broken >&2; exit 9", ()),
        ("exec sleep 30", ()),
    ],
)
def test_nvidia_smi_is_asked(tmp_path, monkeypatch, text, expected):
    monkeypatch.setattr(devices, "_QUERY", (str(script(tmp_path, text)),))
    monkeypatch.setattr(devices, "_TIMEOUT_S", 2.0 if expected else 0.2)
    assert detect() == expected


def test_a_machine_without_nvidia_smi_has_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(devices, "_QUERY", (str(tmp_path / "nvidia-smi"),))
    assert detect() == ()
