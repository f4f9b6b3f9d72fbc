"""The reference and the playground, in a real browser in front of a real server."""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from servekit.gateway.keys import new_key
from servekit.gateway.site import _text

ROOT = Path(__file__).parents[2]

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PATIENCE_S = 30.0

needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")

APP = '''
import asyncio
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

import servekit as sk

Row = Annotated[NDArray[np.float32], sk.Array["float32", "4"]]
Picture = Annotated[NDArray[np.uint8], sk.Array["uint8", "3 224 224"]]


class Lang(StrEnum):
    en = "en"
    de = "de"


class Point(BaseModel):
    """A place in the picture."""

    x: float = Field(ge=0, le=1, description="Share of the `width`.")
    y: float = Field(gt=0, lt=1)


class Options(BaseModel):
    """How to search."""

    lang: Lang = Lang.en
    kind: Literal["fast", "exact"] = "fast"
    weights: dict[str, float]
    boxes: Annotated[list[Point], Field(min_length=1, max_length=4)]


class Hit(BaseModel):
    id: int
    score: float
    at: Point | None = None


class Node(BaseModel):
    name: str
    next: "Node | None"
    children: list["Node"] = []


@sk.service(prefix="/vision")
class Vision:
    """Looks at pictures."""

    @sk.endpoint
    def classify(self, image: Picture, /) -> list[float]:
        return [float(image.mean())]

    @sk.endpoint
    def size(self, data: bytes, /) -> int:
        return len(data)

    @sk.endpoint
    def mix(self, data: bytes, a: sk.Array["float32", "2 2"], n: int | None = None) -> bytes:
        return data

    @sk.batched(max_size=8)
    def label(self, rows: list[Row]) -> list[str]:
        """Label a row."""
        return ["cat" for _ in rows]

    @sk.batched(max_size=8)
    def upper(self, texts: list[str]) -> list[str]:
        return [text.upper() for text in texts]


@sk.service
class Search:
    """Semantic <b>search</b>.

    Finds things by meaning, with `care`:

    - fast
    - exact
    """

    vision = sk.depends(Vision)

    @sk.endpoint(tags=["reading"])
    def query(
        self,
        text: Annotated[str, Field(min_length=1, max_length=200)],
        k: Annotated[int, Field(ge=1, le=50)] = 3,
        options: Options | None = None,
    ) -> list[Hit]:
        """Find the nearest documents.

        It escapes <img src=x onerror="document.title='owned'"> as it should.
        """
        return [Hit(id=2**60 + i, score=1 / (i + 1)) for i in range(k)]

    @sk.endpoint
    def configure(self, options: Options, point: tuple[float, float], on: bool) -> Options:
        return options

    @sk.endpoint
    async def answer(self, text: str, n: int = 5, pause: float = 0.0) -> AsyncIterator[str]:
        """Answer a question, token by token."""
        for i in range(n):
            await asyncio.sleep(pause)
            if text == "fail" and i == 2:
                raise ValueError(text)
            yield f"token{i} "

    @sk.endpoint(method="GET")
    def status(self, name: str, n: int = 1, lang: Lang = Lang.en, deep: bool = False) -> dict[str, str]:
        """How one index is doing."""
        return {"name": name, "lang": lang}

    @sk.endpoint
    def tree(self, root: Node) -> Node:
        return root

    @sk.endpoint
    def ping(self) -> None: ...

    @sk.task
    def report(self, pages: int = 2) -> list[int]:
        return list(range(pages))
'''

SERVE = """
import sys, uvloop
from servekit.engine.serve import serve
from servekit.settings import Settings

def ready(supervisor):
    print("READY", supervisor.url, flush=True)

uvloop.run(serve(sys.argv[1], Settings.load(port=0), dev=True, on_ready=ready))
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Run the app; the address of its gateway."""
    with running(tmp_path_factory.mktemp("pages")) as url:
        yield url


@contextlib.contextmanager
def running(folder: Path, **settings: str) -> Iterator[str]:
    """Run the app with these in its environment; yields the address of its gateway."""
    (folder / "pages_app.py").write_text(APP, "utf-8")
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "pages_app:Search"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", **settings},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        give_up = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"^READY (\S+)", log.read_text("utf-8"), re.MULTILINE)):
            assert process.poll() is None, log.read_text("utf-8")
            assert time.monotonic() < give_up, log.read_text("utf-8")
            time.sleep(0.05)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)


class Navigated(Exception):
    """The page gave way to another while a command was under way in it."""


class Browser:
    """A headless Chromium, driven by the DevTools protocol over a pair of pipes.

    Attributes:
        complaints: Uncaught exceptions and console errors since `open`.
    """

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # It wants the pipes at 3 and 4, which may be taken here.
        command = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        options += ["--disable-dev-shm-usage", "--remote-debugging-pipe"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, BROWSER, *options, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._ids = itertools.count(1)
        self._rest = b""
        self._session = ""
        self.complaints: list[str] = []
        target = self.tell("Target.createTarget", url="about:blank")["targetId"]
        attached = self.tell("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Runtime", "Log", "Page", "DOM"):
            self.tell(f"{domain}.enable")

    def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == number:
                if "navigated" in reply.get("error", {}).get("message", ""):
                    raise Navigated(reply)
                assert "error" not in reply, reply
                return reply["result"]
            self._note(reply.get("method", ""), reply.get("params", {}))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._in, 2**20)
            assert data, "the browser ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.complaints.append(str(params["args"]))
        elif event == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])

    def open(self, url: str, *, width: int = 1440, theme: str = "light") -> None:
        """Show a page, from the start."""
        self.tell(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": theme}
        self.tell("Emulation.setEmulatedMedia", features=[scheme])
        self.tell("Page.navigate", url="about:blank")
        self.complaints.clear()
        self.tell("Page.navigate", url=url)
        self.until("document.querySelector('.op, #send, #content table, .fatal, .ask') !== null")

    def run(self, script: str) -> Any:
        """Return what an expression, awaited if need be, comes to."""
        told = self.tell(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def until(self, condition: str) -> None:
        """Wait for an expression to be true, in whichever page is shown by then."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(Navigated):
                if self.run(f"Boolean({condition})"):
                    return
            assert time.monotonic() < give_up, f"{condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)

    def text(self, selector: str = "body") -> str:
        """Return what a person sees of an element."""
        return str(self.run(f"document.querySelector({selector!r})?.innerText ?? ''"))

    def choose_file(self, selector: str, path: Path) -> None:
        """Pick a file in a file input."""
        root = self.tell("DOM.getDocument")["root"]["nodeId"]
        node = self.tell("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.tell("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(AssertionError, OSError):
            self._session = ""
            self.tell("Browser.close")
        os.close(self._out)
        os.close(self._in)
        self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="module")
def operations(url: str) -> dict[str, dict[str, Any]]:
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    return {op["operationId"]: op for item in paths.values() for op in item.values()}


# ---- the files


def page(name: str) -> str:
    return _text(name)


@pytest.mark.parametrize("name", ["docs.html", "playground.html", "debug.html"])
def test_a_page_parses_nothing_as_html_and_asks_nobody_else(name: str) -> None:
    text = page(name)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//|@import|url\(\s*["']?http""", text)


def test_the_reference_is_small() -> None:
    assert len(page("docs.html").encode()) < 40_000


# ---- the reference


@needs_browser
def test_the_reference_shows_all_there_is(
    url: str, browser: Browser, operations: dict[str, Any]
) -> None:
    browser.open(f"{url}/docs")
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    ids = browser.run("[...document.querySelectorAll('.op')].map(e => e.id)")
    assert ids == [*operations, "errors", "headers"]
    seen = browser.text("#content")
    for text in (
        "Semantic <b>search</b>.",
        "Find the nearest documents",
        "<img src=x onerror=\"document.title='owned'\">",
        "1 – 200 characters",
        "default 3",
        "A place in the picture.",
        "uint8 array (3 × 224 × 224)",
        "batched, up to 8",
        "text/event-stream",
        "retry-after",
        "x-servekit-timeout",
        "A job's result, or the error that it ended with",
    ):
        assert text in seen, text
    assert browser.run("document.title") == "Search API"
    assert browser.run("document.querySelectorAll('img, b a, .op script').length") == 0
    assert browser.complaints == []


@needs_browser
@pytest.mark.parametrize("width", [360, 820, 1180, 1600])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_page_fits_its_window(url: str, browser: Browser, width: int, theme: str) -> None:
    grounds = set()
    for name in ("docs", "playground", "debug"):
        browser.open(f"{url}/{name}", width=width, theme=theme)
        assert browser.run("document.documentElement.scrollWidth") <= width
        grounds.add(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert grounds == {"rgb(20, 20, 18)" if theme == "dark" else "rgb(252, 252, 250)"}
    assert browser.complaints == []


@needs_browser
def test_the_filter_leaves_what_matches(url: str, browser: Browser) -> None:
    browser.open(f"{url}/docs")
    browser.run("document.dispatchEvent(new KeyboardEvent('keydown', {key: '/', bubbles: true}))")
    assert browser.run("document.activeElement.id") == "filter"
    browser.run("const f = $('#filter'); f.value = 'stat'; f.dispatchEvent(new Event('input'))")
    shown = "[...document.querySelectorAll('#nav li')].filter(e => !e.hidden).map(e => e.innerText)"
    assert [text.split()[0] for text in browser.run(shown)] == ["Search", "status"]


def snippets(browser: Browser, url: str, language: str) -> dict[str, str]:
    browser.open(f"{url}/docs")
    browser.run(f"choose({language!r})")
    found = browser.run(
        "Object.fromEntries([...document.querySelectorAll('.op')]"
        ".filter(e => e.querySelector('[role=tabpanel]'))"
        ".map(e => [e.id, e.querySelector('[role=tabpanel]').textContent]))"
    )
    assert "Search.query" in found
    return found


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Make the files that snippets speak of."""
    import numpy as np

    (tmp_path / "input.bin").write_bytes(b"hello")
    np.save(tmp_path / "input.npy", np.zeros((3, 224, 224), np.uint8))
    return tmp_path


@needs_browser
def test_the_python_snippets_work(
    url: str, browser: Browser, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    job = httpx.post(f"{url}/report", json={}).json()["id"]
    for name, code in snippets(browser, url, "Python").items():
        scope: dict[str, Any] = {"id": job}
        if name.endswith((".cancel", ".retry")):
            continue  # it has succeeded
        exec(compile(code, name, "exec"), scope)
        if response := scope.get("response"):
            assert response.status_code == 200, name


@needs_browser
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_curl_snippets_work(url: str, browser: Browser, inputs: Path) -> None:
    job = httpx.post(f"{url}/report", json={}).json()["id"]
    for name, command in snippets(browser, url, "curl").items():
        if name.endswith((".cancel", ".retry")):
            continue  # it has succeeded
        failing = command.replace("curl ", "curl --fail-with-body -sS ", 1)
        ran = subprocess.run(
            ["bash", "-c", failing],
            cwd=inputs,
            env=os.environ | {"ID": job},
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert ran.returncode == 0, (name, command, ran.stdout, ran.stderr)


# ---- an app that asks who calls


@needs_browser
def test_pages_ask_for_a_key_and_keep_it_for_the_tab(browser: Browser, tmp_path: Path) -> None:
    keys, (id_, key, digest) = tmp_path / "keys.toml", new_key()
    keys.write_text(f'[[key]]\nname = "a"\nid = "{id_}"\nhash = "{digest}"\n', "utf-8")

    def enter(text: str) -> None:
        browser.run(f"document.querySelector('#credential').value = {text!r}")
        with contextlib.suppress(Navigated):  # the click reloads the page, maybe before its answer
            browser.run("document.querySelector('.ask button').click()")

    with running(tmp_path, SERVEKIT_API_KEYS=str(keys)) as url:
        browser.open(f"{url}/docs")
        assert "Search" not in browser.text()  # nothing of the app is told before
        assert "This app asks who calls." in browser.text("#content")
        enter("sk_wrong")
        browser.until("document.querySelector('.ask')?.innerText.includes('not accepted')")
        assert "Search" not in browser.text()
        enter(f" {key}\t")
        browser.until("document.querySelector('.op')")
        assert browser.run("localStorage.length") == 0
        browser.complaints.clear()  # it has told of the 401s

        browser.tell("Page.navigate", url=f"{url}/playground#Search.status")
        browser.until("document.querySelector('#send')")
        browser.run("document.querySelector('#send').click()")
        browser.until("document.querySelector('#answer .good')")
        browser.run("document.querySelector('#token').value = 'x'")
        browser.run("document.querySelector('#token').dispatchEvent(new Event('input'))")
        browser.run("document.querySelector('#send').click()")
        browser.until("document.querySelector('#answer')?.innerText.includes('is not known here')")
        document = httpx.get(f"{url}/openapi.json", headers={"x-api-key": key}).json()
        assert document["security"] == [{"apiKey": []}, {"bearer": []}]


# ---- the debug page

EVIL_ID = "<img/src=x/onerror=document.title='owned'>{{document}}</script>"


@needs_browser
def test_the_debug_page_tells_what_runs_and_goes_on(url: str, browser: Browser) -> None:
    httpx.post(f"{url}/query", json={"text": ""}, headers={"x-request-id": EVIL_ID})
    stream = {"text": "a", "n": 600, "pause": 0.1}
    headers = {"x-request-id": f"runs-{EVIL_ID}"}
    with httpx.stream("POST", f"{url}/answer", json=stream, headers=headers) as answer:
        chunks = answer.iter_bytes()  # held, as the stream ends with it
        next(chunks)
        browser.open(f"{url}/debug")
        seen = browser.text("#content")
        for text in (
            "pages_app:Search",
            "Vision-",
            "Search-",
            "ready",
            EVIL_ID,
            "422",
            "invalid_input",
        ):
            assert text in seen, text
        assert f"runs-{EVIL_ID}" in seen
        assert "/answer" in seen
        assert browser.run("document.title") == "Debug"
        assert browser.run("document.querySelectorAll('img').length") == 0
        assert "\t499" not in seen
    browser.until("document.body.innerText.includes('\\t499')")  # it looks again by itself
    assert browser.complaints == []


@needs_browser
def test_a_debug_page_that_was_saved_is_whole(url: str, browser: Browser, tmp_path: Path) -> None:
    """A browser sends no credential by itself; curl does."""
    saved = tmp_path / "debug.html"
    saved.write_bytes(httpx.get(f"{url}/debug").content)
    browser.open(saved.as_uri())
    seen = browser.text("#content")
    for text in ("pages_app:Search", "saved", "Settings", "runtime_dir"):
        assert text in seen, text
    assert browser.complaints == []


# ---- the playground


def try_out(browser: Browser, url: str, name: str, **fields: str) -> None:
    """Open an endpoint, fill its form, and send it."""
    browser.open(f"{url}/playground#{name}")
    for field, value in fields.items():
        put(browser, f"#field-{field}", value)
    send(browser)


def put(browser: Browser, selector: str, value: str) -> None:
    browser.run(
        f"(() => {{ const e = document.querySelector({selector!r}); e.value = {value!r};"
        " e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change')); })()"
    )


def send(browser: Browser) -> None:
    browser.run("document.querySelector('#send').click()")


def answered(browser: Browser) -> str:
    browser.until("!document.querySelector('#send').disabled && $('.status')")
    return browser.text("#answer")


@needs_browser
def test_every_endpoint_can_be_sent_as_it_is_shown(
    url: str, browser: Browser, operations: dict[str, Any]
) -> None:
    for name, operation in operations.items():
        if operation["x-servekit"]["kind"] == "job":
            continue
        browser.open(f"{url}/playground")
        browser.run(f"sessionStorage.clear(); location.hash = {name!r}")
        browser.until(f"document.title.startsWith({name!r})")
        mode = browser.run("document.querySelector('.modes [aria-selected=true]')?.innerText")
        if mode != "File":
            send(browser)
            expected = "202 Accepted" if "202" in operation["responses"] else "200 OK"
            assert expected in answered(browser), name
            assert "Replica" in browser.text("#answer .meta")
        assert browser.complaints == [], name


@needs_browser
def test_an_answer_is_shown_with_its_numbers_as_they_are(url: str, browser: Browser) -> None:
    try_out(browser, url, "Search.query", k="2")
    shown = answered(browser)
    assert str(2**60 + 1) in shown
    assert '"score": 1.0' in shown
    for label in ("Version", "Replica", "Request id", "application/json"):
        assert label in shown
    assert re.search(r"[\d.]+ ms", shown)


@needs_browser
def test_a_wrong_field_is_marked(url: str, browser: Browser) -> None:
    try_out(browser, url, "Search.query", k="99")
    shown = answered(browser)
    assert "422" in shown
    assert "invalid_input" in shown
    assert browser.run("$('#field-k').getAttribute('aria-invalid')") == "true"
    assert "50" in browser.text("#field-k-wrong")
    put(browser, "#field-k", "4")
    send(browser)
    browser.until("$('.status')?.innerText.includes('200')")
    assert browser.text("#field-k-wrong") == ""


@needs_browser
def test_text_that_is_no_number_is_not_sent(url: str, browser: Browser) -> None:
    try_out(browser, url, "Search.query", k="many")
    assert "no number" in browser.text("#field-k-wrong")
    assert browser.run("document.activeElement.id") == "field-k"
    assert "Send a request" in browser.text("#answer")


@needs_browser
def test_the_last_input_comes_back(url: str, browser: Browser) -> None:
    browser.open(f"{url}/playground#Search.query")
    put(browser, "#field-text", "a <i>text</i> of mine")
    browser.open(f"{url}/playground#Search.status")
    assert browser.run("$('#field-name').value") == "hello"
    browser.open(f"{url}/playground#Search.query")
    assert browser.run("$('#field-text').value") == "a <i>text</i> of mine"
    browser.run(
        "[...document.querySelectorAll('button')].find(b => b.innerText === 'Reset').click()"
    )
    assert browser.run("$('#field-text').value") == "hello"


@needs_browser
def test_the_json_is_that_of_the_form(url: str, browser: Browser) -> None:
    browser.open(f"{url}/playground#Search.query")
    put(browser, "#field-k", "7")
    tab = "[...document.querySelectorAll('.modes button')].find(b => b.innerText === '{}').click()"
    browser.run(tab.format("JSON"))
    assert json.loads(browser.run("$('textarea.tall').value"))["k"] == 7
    put(browser, "textarea.tall", '{"text": "x", "k": 2}')
    browser.run(tab.format("Form"))
    assert browser.run("$('#field-k').value") == "2"
    browser.run("sessionStorage.clear()")


@needs_browser
def test_a_stream_is_shown_as_it_comes(url: str, browser: Browser) -> None:
    try_out(browser, url, "Search.answer", n="8", pause="0.05")
    browser.until("document.querySelectorAll('.chunks li').length >= 2")
    assert browser.run("document.querySelectorAll('.chunks li').length") < 8
    assert not browser.run("$('#stop').hidden")
    shown = answered(browser)
    assert "token0 token1 token2" in browser.text(".spoken")
    assert "8 chunks" in shown
    assert re.search(r"[1-9][\d.]* tokens/s", shown)
    assert browser.complaints == []


@needs_browser
def test_a_stream_can_be_stopped(url: str, browser: Browser) -> None:
    try_out(browser, url, "Search.answer", n="1000", pause="0.05")
    browser.until("document.querySelectorAll('.chunks li').length >= 2")
    browser.run("$('#stop').click()")
    assert "Stopped" in answered(browser)
    count = browser.run("document.querySelectorAll('.chunks li').length")
    assert count < 100
    send(browser)
    browser.until("document.querySelectorAll('.chunks li').length >= 1")
    browser.run("location.hash = 'Search.ping'")
    browser.until("document.title.startsWith('Search.ping')")
    send(browser)
    assert "200 OK" in answered(browser)
    assert "Stopped" not in browser.text("#answer")
    assert browser.complaints == []


@needs_browser
def test_a_stream_that_fails_says_so(url: str, browser: Browser) -> None:
    try_out(browser, url, "Search.answer", text="fail", n="5", pause="0")
    shown = answered(browser)
    assert "Failed after 2 chunks" in shown
    assert "execution_error" in shown


@needs_browser
def test_a_file_is_sent_as_it_is(url: str, browser: Browser, inputs: Path) -> None:
    browser.open(f"{url}/playground#Vision.size")
    send(browser)
    assert "Choose a file first" in answered(browser)
    browser.choose_file("#file", inputs / "input.bin")
    send(browser)
    browser.until("!$('#send').disabled && $('.status')?.innerText.includes('200')")
    assert browser.text("#answer pre") == "5"

    browser.open(f"{url}/playground#Vision.classify")
    browser.choose_file("#file", inputs / "input.npy")
    browser.until("$('#as').value === 'application/x-npy'")
    send(browser)
    browser.until("!$('#send').disabled && $('.status')?.innerText.includes('200')")
    assert browser.text("#answer pre") == "[0.0]"


@needs_browser
def test_a_file_in_a_form_becomes_base64(url: str, browser: Browser, inputs: Path) -> None:
    browser.open(f"{url}/playground#Vision.mix")
    (inputs / "other.bin").write_bytes(b"\x89PNG and more")
    browser.choose_file("#field-data", inputs / "other.bin")
    browser.until("state.value.data.startsWith('iVBO')")
    send(browser)
    assert "13 bytes" in answered(browser)
    assert browser.run("$('#answer img') !== null")


def test_the_pages_have_a_strict_policy(url: str) -> None:
    for name in ("docs", "playground"):
        response = httpx.get(f"{url}/{name}")
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
