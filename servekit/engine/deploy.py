"""`deploy`: run an app on a Ray cluster from Python, also one whose classes a notebook has."""

import asyncio
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from servekit.core.background import loop_in_thread
from servekit.errors import ConfigError
from servekit.settings import Settings
from servekit.spec.describe import describe
from servekit.spec.graph import ServiceRef, definition_of
from servekit.spec.own import OwnModules

if TYPE_CHECKING:
    from servekit.engine.ray.deploy import Deployment


def deploy(
    service: type | ServiceRef[Any], /, *, name: str = "", timeout_s: float = 600.0, **settings: Any
) -> "Deployment":
    """Run an app on a Ray cluster, also one whose classes are written in a notebook.

    Those go to the cluster by value; classes of modules go as their modules' source.

    Args:
        service: The root service.
        name: What it is deployed as; "" takes the root's name.
        timeout_s: Longest wait for everything to be ready.
        **settings: As `servekit deploy` takes them: `ray_address`, `host`, `port`, …

    Returns:
        A handle to it: `url`, `status()`, `scale({…})`, `delete()`.

    Raises:
        SpecError: The graph can't work as written.
        ConfigError: There is no such cluster, or a setting can't be used.
        ResourceError: The cluster has less than it asks for.
        SetupError: A replica does not start; what ran before goes on.
    """
    needs_ray()
    from servekit.engine.ray import cluster  # noqa: PLC0415
    from servekit.engine.ray.code import archive  # noqa: PLC0415
    from servekit.engine.ray.deploy import Deployment, by_value, order_of  # noqa: PLC0415
    from servekit.engine.ray.orders import Revision  # noqa: PLC0415

    found = Settings.load(**settings)
    own = OwnModules()
    app = describe(service, own)
    root = definition_of(service)
    code = archive(map(str, own.files()), tuple(path or str(Path.cwd()) for path in sys.path))
    code = msgspec.structs.replace(code, classes=by_value(root))
    cluster.join(found.ray_address or "auto")
    wanted = order_of(root.name, Revision(app=app, code=code), found, name=name)
    deployment = Deployment(wanted.common.app)
    order, _ = deployment.next(wanted, deployment.order())
    with loop_in_thread("servekit-deploy") as loop:
        work = deployment.carry_out(order, timeout_s=timeout_s)
        asyncio.run_coroutine_threadsafe(work, loop).result()
    return deployment


def needs_ray() -> None:
    """Refuse to go on without Ray.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        importlib.import_module("ray.serve")
    except ImportError as error:
        raise ConfigError(f"this needs Ray ({error}): pip install 'servekit[ray]'") from error
