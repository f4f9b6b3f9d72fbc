"""One renderer for every line."""

import io
import json
import logging
import re
import warnings
from contextvars import copy_context

import pytest

from servekit.core.context import CURRENT, RequestContext
from servekit.observe import log
from tests.calls import make_call

CLOCK = r"\d\d:\d\d:\d\d\.\d\d\d "


@pytest.fixture
def lines():
    """Configure logs into a list of lines, and undo it afterwards."""
    root, stream = logging.getLogger(), io.StringIO()
    handlers, level = root.handlers[:], root.level
    root.handlers.clear()

    def start(style, level="info", role="gateway"):
        log.configure(style, level, role, stream=stream)
        return lambda: stream.getvalue().splitlines()

    yield start
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def test_console_is_one_line_for_people(lines):
    read = lines("console")
    log.get_logger("servekit.x").info("replica ready", replica="A-0", took_s=1.5, path="a b")
    (line,) = read()
    expected = "info     replica ready replica=A-0 took_s=1.5 path='a b' role=gateway"
    assert re.fullmatch(CLOCK + re.escape(expected) + " logger=servekit.x", line)


def test_json_is_one_object_a_line(lines):
    read = lines("json", role="replica A-0")
    log.get_logger("servekit.x").warning("replica lost", replica="A-0", exit=-9, ratio=float("nan"))
    (line,) = read()
    fields = json.loads(line)
    assert list(fields)[:3] == ["time", "level", "event"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", fields.pop("time"))
    assert fields == {
        "level": "warning",
        "event": "replica lost",
        "replica": "A-0",
        "exit": -9,
        "ratio": None,
        "role": "replica A-0",
        "logger": "servekit.x",
    }


def test_levels_are_kept_and_dropped(lines):
    read = lines("json", level="warning")
    logger = log.get_logger("servekit.x")
    logger.debug("no")
    logger.info("no")
    logger.warning("yes")
    logger.error("yes")
    assert [json.loads(line)["level"] for line in read()] == ["warning", "error"]


@pytest.mark.parametrize("style", ["console", "json"])
def test_tracebacks_are_plain_text(lines, style):
    read = lines(style)
    try:
        raise ValueError("bad input")
    except ValueError as error:
        log.get_logger("servekit.x").exception("call failed", endpoint="f")
        kept = error
    log.get_logger("servekit.x").exception("later", error=kept)
    if style == "json":
        first, second = (json.loads(line) for line in read())
        for fields in (first, second):
            assert fields["level"] == "error"
            assert fields["exception"].startswith("Traceback (most recent call last):\n")
            assert fields["exception"].endswith("ValueError: bad input")
            assert "exc_info" not in fields
    else:
        text = read()
        assert "error    call failed endpoint=f role=gateway" in text[0]
        assert text[1] == "Traceback (most recent call last):"
        assert text.count("ValueError: bad input") == 2


def test_the_request_id_is_on_every_line_of_its_context(lines):
    read = lines("json")

    def work():
        CURRENT.set(RequestContext(make_call("S", "e", request_id="r-1")))
        log.get_logger("servekit.x").info("ours")
        logging.getLogger("some.library").warning("theirs %d", 7)
        logging.getLogger("user.code").info("the user's")

    copy_context().run(work)
    log.get_logger("servekit.x").info("outside")
    fields = [json.loads(line) for line in read()]
    assert [f.get("request_id") for f in fields] == ["r-1", "r-1", "r-1", None]
    assert [f["event"] for f in fields] == ["ours", "theirs 7", "the user's", "outside"]
    assert [f["logger"] for f in fields][:3] == ["servekit.x", "some.library", "user.code"]


def test_uvicorn_loggers_go_the_same_way(lines):
    uvicorn = logging.getLogger("uvicorn")
    own = logging.StreamHandler(io.StringIO())
    uvicorn.addHandler(own)
    uvicorn.propagate = False
    read = lines("json")
    logging.getLogger("uvicorn.error").error("Exception in app %d", 7)
    assert json.loads(read()[0])["event"] == "Exception in app 7"
    assert uvicorn.handlers == []


def test_warnings_are_lines_too(lines):
    read = lines("json")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    (line,) = read()
    assert "DeprecationWarning: old" in json.loads(line)["event"]


FORGED = "x\n12:00:00.000 error    forged"


@pytest.mark.parametrize("style", ["console", "json"])
def test_input_cannot_forge_a_line(lines, style):
    read = lines(style)
    log.get_logger("servekit.x").info(FORGED, path=FORGED, thing=[FORGED], escape="\x1b[31m")
    logging.getLogger("lib").warning(FORGED)
    assert len(read()) == 2
    assert "\x1b" not in "".join(read())


def test_facts_cannot_pose_as_the_head(lines):
    read = lines("json")
    log.get_logger("servekit.x").info("true", level="error", event="false", time=0)
    fields = json.loads(read()[0])
    assert (fields["level"], fields["event"]) == ("info", "true")
    assert fields["time"] != 0


class Unprintable:
    def __repr__(self):
        return "<two\nlines>"


@pytest.mark.parametrize(
    "fact", ["\ud800", 2**100, {1: object}, Unprintable(), b"\xff", {"a": [1]}]
)
@pytest.mark.parametrize("style", ["console", "json"])
def test_any_fact_leaves_the_line_whole(lines, style, fact):
    read = lines(style)
    log.get_logger("servekit.x").info("event", fact=fact)
    (line,) = read()
    line.encode()
    if style == "json":
        assert "fact" in json.loads(line)


def test_before_configure_it_is_a_library_like_any_other(caplog):
    with caplog.at_level("INFO"):
        log.get_logger("servekit.x").info("replica ready", replica="A-0")
    (record,) = caplog.records
    assert record.getMessage() == "replica ready replica=A-0"
    assert record.filename == "test_log.py"
    assert record.name == "servekit.x"


def test_configuring_twice_writes_once(lines):
    lines("json")
    read = lines("json")
    log.get_logger("servekit.x").info("once")
    assert len(read()) == 1
