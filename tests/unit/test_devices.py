"""Finding GPUs, with a module in the place of pynvml."""

import threading
from types import SimpleNamespace

import pytest

from servekit.engine import devices
from servekit.engine.devices import detect
from servekit.engine.placement import Device

GIB = 2**30


class Failed(Exception):
    """What NVML raises."""


class Gpu:
    def __init__(self, uuid, bus, memory=40 * GIB, slices=None, can_slice=True):
        self.uuid = uuid
        self.bus = bus
        self.memory = memory
        self.slices = slices
        self.can_slice = can_slice


class Nvml:
    """As much of the module as is used; devices come in any order, as NVML promises none."""

    NVMLError = Failed
    NVML_DEVICE_MIG_ENABLE = 1

    def __init__(self, *gpus, broken=()):
        self.gpus = gpus
        self.broken = broken
        self.running = 0

    def __getattribute__(self, name):
        if name.startswith("nvml") and name in self.broken:
            raise Failed(name)
        return super().__getattribute__(name)

    def nvmlInit(self):
        self.running += 1

    def nvmlShutdown(self):
        self.running -= 1

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(domain=0, bus=gpu.bus, device=0)

    def nvmlDeviceGetUUID(self, gpu):
        return gpu.uuid

    def nvmlDeviceGetMemoryInfo(self, gpu):
        if not gpu.memory:
            raise Failed("not supported")
        return SimpleNamespace(total=gpu.memory, free=1, used=1)

    def nvmlDeviceGetMigMode(self, gpu):
        if not gpu.can_slice:
            raise Failed("not supported")
        return [int(gpu.slices is not None), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, gpu):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, gpu, index):
        found = gpu.slices.get(index)
        if found is None:
            raise Failed("not found")
        return found


FIRST = Gpu(b"GPU-5e1c0000-aaaa", 1)
SECOND = Gpu("GPU-5e2c0000-bbbb", 2, memory=80 * GIB, can_slice=False)
THIRD = Gpu("GPU-77770000-cccc", 3, memory=0)
PLAIN = (THIRD, FIRST, SECOND)
ZERO, ONE = Device(id="0", memory=40 * GIB), Device(id="1", memory=80 * GIB)
TWO = Device(id="2")

CUT = Gpu(
    "GPU-99990000-dddd",
    2,
    slices={0: Gpu("MIG-aaaa", 0, 10 * GIB), 3: Gpu("MIG-abbb", 0, 20 * GIB)},
)
SLICES = (
    Device(id="MIG-aaaa", memory=10 * GIB, is_slice=True),
    Device(id="MIG-abbb", memory=20 * GIB, is_slice=True),
)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (ZERO, ONE, TWO)),
        ("", ()),
        (" ", ()),
        ("1", (ONE,)),
        ("1,0", (ONE, ZERO)),
        ("1,1,0,1", (ONE, ZERO)),
        (" 2 , 0 ", (TWO, ZERO)),
        ("GPU-5e2c", (ONE,)),
        ("GPU-5e", ()),  # ambiguous
        ("GPU-77770000-cccc,1", (TWO, ONE)),
        ("0,-1,1", (ZERO,)),  # CUDA stops at the first that isn't there
        ("0,,1", (ZERO,)),
        ("7", ()),
        ("NoDevFiles", ()),
        ("MIG-aaaa", ()),
    ],
)
def test_visible_devices_are_chosen_as_cuda_does(visible, expected):
    nvml = Nvml(*PLAIN)
    assert detect(visible=visible, nvml=nvml) == expected
    assert not nvml.running


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (ZERO, *SLICES, TWO)),
        ("1", SLICES),
        ("GPU-9999,0", (*SLICES, ZERO)),
        ("MIG-abbb", SLICES[1:]),
        ("MIG-abbb,MIG-aaaa,MIG-abbb", SLICES[::-1]),
        ("MIG-abbb,1", SLICES[::-1]),
        ("MIG-a", ()),  # ambiguous
    ],
)
def test_slices_stand_in_for_their_device(visible, expected):
    assert detect(visible=visible, nvml=Nvml(THIRD, CUT, FIRST)) == expected


def test_a_device_that_is_to_be_cut_but_is_not_is_none():
    assert detect(nvml=Nvml(FIRST, Gpu("GPU-1", 2, slices={}))) == (ZERO,)


def test_declared_devices_need_no_driver():
    nvml = Nvml(broken=["nvmlInit"])
    assert detect(declared=2, visible="5", nvml=nvml) == (Device(id="0"), Device(id="1"))
    assert detect(declared=0, nvml=nvml) == ()
    assert detect(visible="", nvml=nvml) == ()


def test_no_driver_is_no_gpu(caplog):
    assert detect(nvml=Nvml(FIRST, broken=["nvmlInit"])) == ()
    assert not caplog.records


@pytest.mark.parametrize(
    "broken", ["nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"]
)
def test_a_driver_that_fails_is_no_gpu_and_says_so(broken, caplog):
    nvml = Nvml(FIRST, broken=[broken])
    assert detect(nvml=nvml) == ()
    assert not nvml.running
    assert "the GPU driver fails" in caplog.text
    assert broken in caplog.text


def test_a_driver_that_hangs_is_waited_for_so_long_and_not_longer(monkeypatch, caplog):
    monkeypatch.setattr(devices, "_TIMEOUT_S", 0.05)
    released = threading.Event()

    class Hanging(Nvml):
        def nvmlInit(self):
            released.wait(10)
            super().nvmlInit()

    assert detect(nvml=Hanging(FIRST)) == ()
    assert "does not answer" in caplog.text
    released.set()
    for thread in threading.enumerate():
        if thread.name == "servekit-nvml":
            thread.join(10)


@pytest.mark.parametrize("driver", [True, False])
def test_without_nvidia_ml_py_there_is_no_gpu_and_a_driver_is_pointed_out(
    driver, monkeypatch, caplog, tmp_path
):
    monkeypatch.setattr(devices, "find_spec", lambda _: None)
    monkeypatch.setattr(devices, "_DRIVER", (tmp_path if driver else tmp_path / "none",))
    assert detect() == ()
    assert devices.is_not_asked() is driver
    assert ("pip install 'servekit[gpu]'" in caplog.text) is driver
    assert detect(declared=1) == (Device(id="0"),)


def test_this_machines_own_driver_is_asked():
    assert isinstance(detect(), tuple)
