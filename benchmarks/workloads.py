"""What is asked of every contender, and what it has to answer."""

import http.client
import json
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass

TOKENS = 100
HOST = "127.0.0.1"


class AnswerError(Exception):
    """A contender answered something else than the workload asks for."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One request, the check of its answer, and how many units one answer counts for."""

    name: str
    title: str
    body: bytes
    content_type: str
    check: Callable[[bytes], bool]
    unit: str = "req/s"
    units_per_request: int = 1

    def verify(self, port: int, path: str) -> int:
        """Send the request once and check the answer; returns the chunks it came in."""
        connection = http.client.HTTPConnection(HOST, port, timeout=10)
        try:
            headers = {"Content-Type": self.content_type}
            connection.request("POST", path, self.body, headers)
            response = connection.getresponse()
            chunks = _read_chunks(response)
        finally:
            connection.close()
        answer = b"".join(chunks)
        if not 200 <= response.status < 300 or not self.check(answer):
            raise AnswerError(f"{self.name}: {response.status} {answer[:300]!r}")
        return len(chunks)


def _read_chunks(response: http.client.HTTPResponse) -> list[bytes]:
    """The body split as the server split it (`http.client` would hide the seams)."""
    if not response.chunked or response.fp is None:
        return [response.read()]
    chunks: list[bytes] = []
    while size := int(response.fp.readline().split(b";")[0], 16):
        chunks.append(response.fp.read(size))
        response.fp.readline()
    return chunks


def _is_number(expected: float) -> Callable[[bytes], bool]:
    def check(answer: bytes) -> bool:
        try:
            value = json.loads(answer)
        except ValueError:
            return False
        return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=1e-5)

    return check


def _has_tokens(answer: bytes) -> bool:
    """Every token once, in order, whatever frames it."""
    end = 0
    for i in range(TOKENS):
        end = answer.find(f"token{i}".encode(), end)
        if end < 0:
            return False
    return answer.count(b"token") == TOKENS


_VALUES = [0.5, 1.25, -3.0, 4.75, 8.125, 16.5, -32.25, 64.0]
_NUMBERS = json.dumps({"values": _VALUES}).encode()
_IMAGE = array("f", ((i % 251) / 251 for i in range(3 * 224 * 224)))
_JSON = "application/json"

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("sum", "one service, 8 floats in JSON", _NUMBERS, _JSON, _is_number(sum(_VALUES))),
        Workload(
            "pipeline",
            "two services, the second batched (64)",
            _NUMBERS,
            _JSON,
            _is_number(sum(_VALUES)),
        ),
        Workload(
            "mean",
            "1x3x224x224 float32, binary body (588 KiB)",
            _IMAGE.tobytes(),
            "application/octet-stream",
            _is_number(math.fsum(_IMAGE) / len(_IMAGE)),
        ),
        Workload(
            "tokens",
            f"{TOKENS} streamed tokens per request",
            json.dumps({"n": TOKENS}).encode(),
            _JSON,
            _has_tokens,
            unit="tokens/s",
            units_per_request=TOKENS,
        ),
    )
}
