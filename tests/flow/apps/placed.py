"""Services with GPUs of all kinds; each says what it sees."""

import os
import sys

import servekit as sk


class Sees:
    @sk.endpoint(idempotent=True)
    async def sees(self) -> tuple[int, str]:
        return os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES", "unset")

    @sk.endpoint
    async def interpreter(self) -> str:
        return sys.executable


@sk.service(gpu=0.5, replicas=3)
class Half(Sees):
    pass


@sk.service(gpu=2)
class Pair(Sees):
    pass


@sk.service(cpu=0.5, placement=sk.Placement(python=os.environ.get("OTHER_PYTHON", "")))
class Without(Sees):
    pass


@sk.service(
    gpu=1,
    placement=sk.Placement(bundles=({"CPU": 0.5, "GPU": 1}, {"CPU": 0.5}), strategy="STRICT_PACK"),
)
class Group(Sees):
    pass


@sk.service(placement=sk.Placement(resources={"licence": 1}, labels={"zone": "a"}))
class Bound(Sees):
    pass


@sk.service
class Root:
    half = sk.depends(Half)
    pair = sk.depends(Pair)
    without = sk.depends(Without)
    group = sk.depends(Group)
    bound = sk.depends(Bound)

    @sk.endpoint
    async def all(self) -> dict[str, list[tuple[int, str]]]:
        handles = {"half": self.half, "pair": self.pair, "without": self.without}
        handles |= {"group": self.group, "bound": self.bound}
        return {name: [await one.sees.remote() for _ in range(12)] for name, one in handles.items()}

    @sk.endpoint
    async def interpreters(self) -> list[str]:
        return [await one.interpreter.remote() for one in (self.without, self.bound)]


@sk.service(gpu=8)
class TooMany(Sees):
    pass


@sk.service(placement=sk.Placement(labels={"zone": "moon"}))
class Nowhere(Sees):
    pass


@sk.service(placement=sk.Placement(python=os.environ.get("BARE_PYTHON", "")))
class Bare(Sees):
    pass
