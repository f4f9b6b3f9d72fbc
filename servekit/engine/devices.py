"""Which GPUs this machine has, asked of the driver (NVML) once before anything is placed.

NVML is asked through nvidia-ml-py, the extra `gpu`; without it there is no GPU.

Devices are numbered by PCI bus, as nvidia-smi does; so whoever hands a replica its numbers in
`CUDA_VISIBLE_DEVICES` also sets `CUDA_DEVICE_ORDER=PCI_BUS_ID`, as CUDA's own default order is by
speed. A device that is cut into slices (MIG) is not there itself: its slices are, by their UUIDs.
"""

import contextlib
import importlib
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from servekit.engine.placement import Device, Inventory
from servekit.observe.log import get_logger

_log = get_logger("servekit.devices")

_DRIVER = (Path("/proc/driver/nvidia"), Path("/dev/nvidiactl"))
NOT_ASKED = "pip install 'servekit[gpu]', or say how many there are with SERVEKIT_GPUS"
"""What to do where `is_not_asked`."""
_TIMEOUT_S = 20.0
"""A driver that nobody keeps loaded takes a second or two per device to come up."""


def is_not_asked() -> bool:
    """Return whether there is a driver, but nothing that could ask it which GPUs it drives."""
    return find_spec("pynvml") is None and any(path.exists() for path in _DRIVER)


class _Found(NamedTuple):
    """A device with the UUIDs that name it: its own, and that of the whole one a slice is of."""

    device: Device
    number: str
    uuid: str
    whole: str


def detect(
    *, declared: int | None = None, visible: str | None = None, nvml: Any = None
) -> Inventory:
    """Return the GPUs that replicas may use.

    No driver means no GPU. So does a driver that nvidia-ml-py is missing for, that fails, or that
    doesn't answer in 20 s; then a log line says so.

    Args:
        declared: Act as if there were so many, of unknown size (`SERVEKIT_GPUS`).
        visible: `CUDA_VISIBLE_DEVICES`; None is all, "" none.
        nvml: Stands in for the module `pynvml`, for tests.
    """
    if declared is not None:
        return tuple(Device(id=str(index)) for index in range(declared))
    if visible is not None and not visible.strip():
        return ()
    found = _in_time(nvml)
    if visible is not None:
        found = list(_select(found, visible))
    return tuple(one.device for one in found)


def _in_time(nvml: Any) -> list[_Found]:
    """Ask the driver in a thread, which is left behind when it hangs."""
    found: list[_Found] = []
    if nvml is None and find_spec("pynvml") is None:
        if is_not_asked():
            _log.warning("there is a GPU driver, but not nvidia-ml-py to ask it", fix=NOT_ASKED)
        return found

    def ask() -> None:
        try:
            found.extend(_query(nvml or importlib.import_module("pynvml")))
        except Exception as error:  # noqa: BLE001  (what a broken driver raises is not our affair)
            _log.warning("the GPU driver fails", why=f"{type(error).__name__}: {error}")

    asking = threading.Thread(target=ask, name="servekit-nvml", daemon=True)
    asking.start()
    asking.join(_TIMEOUT_S)
    if asking.is_alive():
        _log.warning("the GPU driver does not answer", waited_s=_TIMEOUT_S)
        return []
    return found


def _query(nvml: Any) -> list[_Found]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []  # no driver, or no GPU for it to drive
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(n) for n in range(nvml.nvmlDeviceGetCount())]
        handles.sort(key=lambda handle: _bus(nvml.nvmlDeviceGetPciInfo(handle)))
        return [
            found
            for index, handle in enumerate(handles)
            for found in _devices(nvml, handle, str(index))
        ]
    finally:
        nvml.nvmlShutdown()


def _bus(pci: Any) -> tuple[int, int, int]:
    return pci.domain, pci.bus, pci.device


def _devices(nvml: Any, handle: Any, index: str) -> Iterator[_Found]:
    """Yield a device, or its slices."""
    uuid = _text(nvml.nvmlDeviceGetUUID(handle))
    try:
        sliced = nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE
    except nvml.NVMLError:
        sliced = False  # a model that can't be cut
    if not sliced:
        yield _Found(Device(id=index, memory=_memory(nvml, handle)), index, uuid, uuid)
        return
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):  # nothing is at this place
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
            name = _text(nvml.nvmlDeviceGetUUID(part))
            device = Device(id=name, memory=_memory(nvml, part), is_slice=True)
            yield _Found(device, index, name, uuid)


def _memory(nvml: Any, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetMemoryInfo(handle).total)
    except nvml.NVMLError:
        return 0  # it shares the machine's


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _select(devices: list[_Found], visible: str) -> Iterator[_Found]:
    """Yield devices as CUDA would: by index or start of a UUID, up to the first that isn't there.

    One that is cut into slices stands for all of them, as each replica gets one of its own.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables"; MIG User Guide, "CUDA Device
    Enumeration".
    """
    taken: set[str] = set()
    for name in map(str.strip, visible.split(",")):
        found = [one for one in devices if _is_named(one, name)]
        if len({one.uuid if name.startswith("MIG-") else one.whole for one in found}) != 1:
            return
        for one in found:
            if one.uuid not in taken:
                taken.add(one.uuid)
                yield one


def _is_named(one: _Found, name: str) -> bool:
    if name.startswith("MIG-"):
        return one.uuid.startswith(name)
    return one.number == name or (name.startswith("GPU-") and one.whole.startswith(name))
