"""One step of an image on an engine: a container that runs, ends, and is committed.

Whatever happens, neither the container is left nor the volume with its secrets.
"""

import io
import secrets
import tarfile
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, Final

from servekit.errors import SetupError
from servekit.packaging.docker.output import Output
from servekit.packaging.docker.step import LABEL, SECRETS, BuildStep

if TYPE_CHECKING:
    from docker import DockerClient
    from docker.models.containers import Container
    from docker.types import Mount

_NAME: Final = "servekit-build-"
_ROOT: Final = ("", "0", "root", "0:0", "root:root")


class Builder:
    """Makes images from images.

    Args:
        client: The engine.
        network: Of the containers; "" is what the engine gives them.
        logged: Called with each line that they print.
    """

    def __init__(
        self, client: "DockerClient", *, network: str, logged: Callable[[str], None]
    ) -> None:
        self._client = client
        self._network = network
        self._logged = logged

    def layers(self, image: str) -> list[str]:
        """Return the digests of an image's layers, before compression."""
        return list(self._client.images.get(image).attrs["RootFS"]["Layers"])

    def known(self, before: str, step: BuildStep) -> str | None:
        """Return the image that a step has made before, if the engine still has it."""
        below = self.layers(before)
        label = f"{LABEL}={step.key(before)}"
        for image in self._client.images.list(all=True, filters={"label": label}):
            assert image.id is not None
            layers = self.layers(image.id)  # who builds on such an image has its labels too
            if layers[: len(below)] == below and len(layers) <= len(below) + 1:
                return image.id
        return None

    def make(self, before: str, step: BuildStep, values: Mapping[str, str]) -> str:
        """Run a step, and return the image that it makes.

        Args:
            before: Id of the image that it starts from.
            step: What runs.
            values: Of its secrets.

        Raises:
            SetupError: It can't start, or doesn't end with exit code 0; has the end of its log.
        """
        from docker.errors import APIError  # noqa: PLC0415

        try:
            return self._make(before, step, values)
        except APIError as error:
            raise SetupError(f"{step.title}: can't run: {error.explanation}") from None

    def _make(self, before: str, step: BuildStep, values: Mapping[str, str]) -> str:
        config: dict[str, Any] = self._client.images.get(before).attrs["Config"]
        with ExitStack() as stack:
            mounts = _mounts(step)
            if values:
                mounts.append(stack.enter_context(self._mounted(before, values)))
            name = _new_name()
            stack.callback(self._remove, name)
            container = self._client.containers.create(
                before,
                name=name,
                entrypoint=list(step.argv),
                user="" if config.get("User", "") in _ROOT else "0",
                network_mode=self._network or None,
                mounts=mounts,
                tmpfs=dict.fromkeys(step.scratch, "exec,mode=1777"),
            )
            self._run(container, step, Output(values.values(), self._logged))
            conf = _committed(config, step.key(before))
            made = container.commit(conf=conf)  # pyright: ignore[reportUnknownMemberType]
        assert made.id is not None
        return made.id

    def _run(self, container: "Container", step: BuildStep, output: Output) -> None:
        with _attached(container) as frames:  # before it starts: all lines come
            container.start()
            for stream, chunk in frames:
                output.feed(*(chunk if stream == one else None for one in (1, 2)))
        output.close()
        code: int = container.wait()["StatusCode"]
        if code:
            trace = "\n".join(output.tail)
            raise SetupError(f"{step.title}: ended with exit code {code}", trace=trace)

    @contextmanager
    def _mounted(self, image: str, values: Mapping[str, str]) -> Generator["Mount"]:
        """Have secrets in a volume; a container that never runs writes them, wherever the engine is."""
        from docker.types import Mount  # noqa: PLC0415

        name = _new_name()
        with ExitStack() as stack:
            stack.callback(self._remove_volume, name)
            self._client.volumes.create(name)
            with ExitStack() as writing:
                writing.callback(self._remove, name)
                mount = Mount(SECRETS, name, no_copy=True)
                helper = self._client.containers.create(
                    image, name=name, entrypoint=["true"], network_mode="none", mounts=[mount]
                )
                files = _archive(values)
                helper.put_archive(SECRETS, files)  # pyright: ignore[reportUnknownMemberType]
            yield Mount(SECRETS, name, no_copy=True, read_only=True)

    def _remove(self, name: str) -> None:
        from docker.errors import NotFound  # noqa: PLC0415

        try:
            self._client.api.remove_container(name, force=True, v=True)
        except NotFound:
            return

    def _remove_volume(self, name: str) -> None:
        for volume in self._client.volumes.list(filters={"name": name}):
            volume.remove(force=True)


@contextmanager
def _attached(container: "Container") -> Generator[Iterator[tuple[int, bytes]]]:
    """Yield what a container prints: 1 for stdout or 2 for stderr, and bytes."""
    from docker.utils import socket as frames  # noqa: PLC0415

    untyped: Any = container
    socket = untyped.attach_socket(params={"stdout": 1, "stderr": 1, "stream": 1})
    read: Any = frames
    with closing(getattr(socket, "_response", socket)):  # docker-py hangs it there: its owner
        yield read.frames_iter(socket, tty=False)


def _new_name() -> str:
    return f"{_NAME}{secrets.token_hex(6)}"


def _mounts(step: BuildStep) -> list["Mount"]:
    from docker.types import Mount  # noqa: PLC0415

    return [Mount(path, None, no_copy=True) for path in step.spool]


def _committed(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the settings of an image's successor: its own.

    The engine fills in the container's where they are empty, but for lists that are there.
    """
    return {
        **config,
        "Entrypoint": config.get("Entrypoint") or [],
        "Cmd": config.get("Cmd") or [],
        "Labels": {**(config.get("Labels") or {}), LABEL: key},
    }


def _archive(values: Mapping[str, str]) -> bytes:
    """Return a tar of files that only root reads."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, value in values.items():
            data = value.encode(errors="surrogateescape")
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o400
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()
