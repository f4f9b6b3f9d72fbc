"""`servekit call`: one request to a running app, and its answer on stdout."""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from servekit.cli.console import fail, is_terminal, print_json, write
from servekit.errors import CallError, ConfigError
from servekit.settings import Settings

if TYPE_CHECKING:
    import httpx

    from servekit.client.request import Outgoing

_ACCEPT = "application/json, text/event-stream;q=0.9, */*;q=0.1"
_RETRIES = 2
_GRACE_S = 1.0  # the server answers 504 itself at the deadline


def call(
    endpoint: Annotated[str, typer.Argument(help="Path below --url, or a whole URL.")],
    *,
    data: Annotated[
        str | None,
        typer.Option("--data", "-d", metavar="JSON|@FILE|-", help="JSON body; - reads stdin."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help="Send a file as it is: .npy, .json, .msgpack, or raw bytes."),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Where the app listens; else as the settings say.")
    ] = None,
    method: Annotated[str, typer.Option("--method", "-X", help="HTTP method.")] = "POST",
    header: Annotated[
        list[str] | None,
        typer.Option("--header", "-H", metavar="NAME:VALUE", help="May be repeated."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the answer to a file.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Print text without quotes; a stream's chunks joined.")
    ] = False,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="The call's deadline.")
    ] = 60.0,
) -> None:
    """Call an endpoint of a running app.

    Prints the answer as JSON, and a stream's chunks as they come, one a line.
    """
    content_type, content = _body(data, file)
    headers = {"accept": _ACCEPT, "content-type": content_type} | _headers(header or ())
    target = _url(endpoint, url)
    import httpx  # noqa: PLC0415  (0.2 s, which a wrong command line doesn't pay)

    from servekit.client.exchange import unreachable  # noqa: PLC0415
    from servekit.client.request import Outgoing  # noqa: PLC0415
    from servekit.core.call import now  # noqa: PLC0415

    sent = Outgoing(method.upper(), target, headers, content, now() + timeout, _RETRIES)
    try:
        with httpx.Client(timeout=timeout + _GRACE_S) as client:
            response = _send(client, sent)
            try:
                _print(response, output, raw=raw)
            finally:
                response.close()
    except httpx.InvalidURL as error:
        raise ConfigError(f"{target} is no URL: {error}") from None
    except httpx.ReadTimeout:
        fail(f"no answer within {timeout:g} s")
        raise typer.Exit(1) from None
    except httpx.TransportError as error:
        parts = urlsplit(target)
        base = f"{parts.scheme}://{parts.netloc}"
        hint = "servekit status shows what runs on this machine"
        fail(str(unreachable(error, base)), hint=hint)
        raise typer.Exit(1) from None


def _send(client: "httpx.Client", call: "Outgoing") -> "httpx.Response":
    """Send a call, once more if it was refused before it ran, and return what came of it.

    Raises:
        TransportError: It got no answer.
    """
    import httpx  # noqa: PLC0415

    from servekit.client.exchange import failure, unreachable  # noqa: PLC0415
    from servekit.core.call import now  # noqa: PLC0415
    from servekit.resilience.retry import Attempts, RetryBudget  # noqa: PLC0415

    with Attempts(
        RetryBudget(), retries=call.retries, idempotent=False, deadline=call.deadline
    ) as attempts:
        while True:
            request = client.build_request(
                call.method, call.path, content=call.content, headers=call.headers_now()
            )
            try:
                response = client.send(request, stream=True)
            except httpx.TransportError as error:
                pause = attempts.pause(unreachable(error, call.path), now())
                if pause is None:
                    raise
            else:
                if response.is_success:
                    return response
                refusal = failure(response.status_code, response.read(), response.headers)
                pause = attempts.pause(refusal, now())
                if pause is None:
                    return response
            time.sleep(pause)


def _body(data: str | None, file: Path | None) -> tuple[str, bytes]:
    """Return the body's media type and bytes."""
    import msgspec  # noqa: PLC0415

    if data is not None and file is not None:
        raise ConfigError("--data and --file are two bodies; give one")
    if file is not None:
        from servekit.client.request import file_type  # noqa: PLC0415

        return file_type(file.name), _read(file)
    if data is None:
        return "application/json", b""
    if data == "-":
        content = sys.stdin.buffer.read()
    else:
        content = _read(Path(data[1:])) if data.startswith("@") else data.encode()
    try:
        msgspec.json.decode(content)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--data is no JSON: {error}; write text in quotes: '\"like this\"'"
        ) from None
    return "application/json", content


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"can't read {file}: {error.strerror}") from None


def _headers(given: "list[str] | tuple[()]") -> dict[str, str]:
    headers: dict[str, str] = {}
    for text in given:
        name, colon, value = text.partition(":")
        if not colon or not name.strip():
            raise ConfigError(f"--header {text!r}: write NAME:VALUE")
        headers[name.strip().lower()] = value.strip()
    return headers


def _url(endpoint: str, base: str | None) -> str:
    if endpoint.startswith(("http://", "https://")):
        if base is not None:
            raise ConfigError(f"{endpoint} is a whole URL already; leave --url out")
        return endpoint
    return f"{app_url(base)}/{endpoint.lstrip('/')}"


def app_url(given: str | None) -> str:
    """Return where an app listens: as given, else as the settings say."""
    if given is None:
        settings = Settings.load()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
        scheme = "http" if settings.tls_cert is None else "https"
        given = f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"
    elif "://" not in given:
        given = f"http://{given}"
    return given.rstrip("/")


def _print(response: "httpx.Response", output: Path | None, *, raw: bool) -> None:
    from servekit.client.exchange import failure  # noqa: PLC0415

    if not response.is_success:
        error = failure(response.status_code, response.read(), response.headers)
        _fail(error, response)
    kind = response.headers.get("content-type", "").partition(";")[0]
    if output is not None:
        with output.open("wb") as sink:
            sink.writelines(response.iter_bytes())
    elif kind == "text/event-stream":
        for chunk in _chunks(response):
            _print_value(chunk, raw=raw, pretty=False)
        if raw and is_terminal():
            write([])
    elif kind == "application/json":
        _print_value(response.read(), raw=raw, pretty=is_terminal())
    elif is_terminal() and not kind.startswith("text/"):
        size = len(response.read())
        fail(
            f"the answer is {size} bytes of {kind or 'unknown type'}, not for a terminal",
            hint="add --output FILE, or pipe it on",
        )
        raise typer.Exit(1)
    else:
        for data in response.iter_bytes():
            sys.stdout.buffer.write(data)
        sys.stdout.flush()
        if is_terminal():
            write([])


def _chunks(response: "httpx.Response") -> Iterator[bytes]:
    from servekit.client.exchange import EventReader  # noqa: PLC0415

    reader = EventReader()
    try:
        for data in response.iter_bytes():
            for chunk in reader.feed(data):
                yield bytes(chunk.segments[0])
        reader.end()
    except CallError as error:
        _fail(error, response)


def _print_value(document: bytes, *, raw: bool, pretty: bool) -> None:
    """Print a JSON document: text bare, if so wished, everything else as it is or indented."""
    import msgspec  # noqa: PLC0415

    if raw and document.startswith(b'"'):
        sys.stdout.write(msgspec.json.decode(document, type=str))
        sys.stdout.flush()
    elif pretty:
        print_json(document)
    else:
        sys.stdout.write(f"{document.decode()}\n")
        sys.stdout.flush()


def _fail(error: CallError, response: "httpx.Response") -> None:
    """Say why a call failed, and end.

    Raises:
        Exit: Always.
    """
    status = error.status if response.is_success else response.status_code
    lines = [f"{status} {error.code}: {error.message}"]
    fail(lines[0])
    for field in error.fields:
        write(
            [
                ("  ", ""),
                (str(field.get("path") or "body"), "bold"),
                (f"  {field.get('message')}", ""),
            ],
            stream=sys.stderr,
        )
    if error.retry_after_s is not None:
        write([(f"  try again in {error.retry_after_s:g} s", "dim")], stream=sys.stderr)
    if request_id := response.headers.get("x-request-id"):
        write([(f"  request {request_id}", "dim")], stream=sys.stderr)
    raise typer.Exit(1)
