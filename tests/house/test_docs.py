"""The documentation tells the truth: what it shows is run here, and its site builds without a warning.

CONTRIBUTING.md, "Documentation that runs", has the convention. Each page is worked through from top
to bottom in a process and a folder of its own: files are written, Python is executed, commands are
run against real servers, and what they print is compared with what the page shows.

`python tests/house/test_docs.py PAGE` runs one page and prints what it does.
"""

import contextlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
import tomllib
import traceback
import types
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BIN = Path(sys.executable).parent

RUN = {"python", "console"}
WRITTEN = {"toml", "yaml", "json"}
SHOWN = {"text", "shell"}
NOT_RUN = re.compile(r"(\w+=\w+ )?(make( \w+)+|\. \.venv/bin/activate|mkdocs serve)(\s+#.*)?")
"""The commands a page may show without running them: they install things, or run these tests."""

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<lang>[^\s`]*)(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)
_RAISES = re.compile(r"<!-- raises (\w+) -->\s*\Z")
_SERVE = re.compile(r"servekit (serve|dev) ")
_LIMIT_S = 40.0


# ---- pages


@dataclass(frozen=True)
class Block:
    """One fenced block.

    Attributes:
        title: The file that it is, or "".
        raises: The exception that running it must raise, or "".
        line: Its first line in the page.
    """

    lang: str
    title: str
    raises: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found: list[Block] = []
    for match in _FENCE.finditer(text):
        title = re.search(r'title="([^"]+)"', match["info"])
        raises = _RAISES.search(text[: match.start()])
        found.append(
            Block(
                match["lang"],
                title[1] if title else "",
                raises[1] if raises else "",
                textwrap.dedent(match["body"]),
                text[: match.start("body")].count("\n") + 1,
            )
        )
    return found


def commands_of(text: str) -> list[tuple[str, str]]:
    """Return the commands of a console block, each with the output that is shown for it."""
    found: list[tuple[str, list[str]]] = []
    more = False
    for line in text.splitlines():
        if more:
            command, shown = found[-1]
            found[-1] = (f"{command}\n{line.lstrip('> ')}", shown)
        elif line.startswith("$ "):
            found.append((line[2:], []))
        else:
            assert found, f"a console block starts with a command, '$ …', not with {line!r}"
            found[-1][1].append(line)
            continue
        more = line.endswith("\\")
    return [(command, "\n".join(shown).rstrip()) for command, shown in found]


def matches(shown: str, actual: str) -> bool:
    """Whether an output is what a page shows; `…` stands for anything, alone for any lines."""
    pattern = ""
    for line in shown.rstrip().splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*".join(map(re.escape, line.rstrip().split("…"))) + r"[ ]*\n"
    lines = [line.rstrip() for line in actual.replace("\r\n", "\n").rstrip().splitlines()]
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)) is not None


class PageError(AssertionError):
    """A page shows what isn't so."""


class Runner:
    """Works through one page, in the current folder."""

    def __init__(self, page: Path) -> None:
        self.page = page
        self.port = _free_port()
        self.printed = ""
        self.server: subprocess.Popen[bytes] | None = None
        self.log = Path("server.log")
        self.module = types.ModuleType("page")
        self.env = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("SERVEKIT_", "PYTEST_", "PYTHONWARNINGS"))
        } | {
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTEST_ADDOPTS": "-p no:kmock",  # as in tests/conftest.py
            "SERVEKIT_PORT": str(self.port),
            "SERVEKIT_RUNTIME_DIR": str(Path.cwd()),
            "SERVEKIT_CACHE_DIR": str(Path.cwd() / ".cache"),
            "TERM": "dumb",
            "COLUMNS": "100",
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def run(self) -> None:
        sys.modules["page"] = self.module
        sys.path.insert(0, str(Path.cwd()))
        os.environ.clear()
        os.environ.update(self.env)
        try:
            before: Block | None = None
            for block in blocks_of(self.page):
                try:
                    self._block(block, before)
                except PageError as error:
                    raise PageError(f"{self.page}:{block.line}: {error}{self._log()}") from None
                before = block
        finally:
            self._stop()

    def _block(self, block: Block, before: Block | None) -> None:
        if block.title:
            path = Path(block.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._here(block.text), "utf-8")
            if block.lang == "python":
                compile(block.text, block.title, "exec")
        elif block.lang == "python":
            self.printed = self._python(block)
        elif block.lang == "console":
            for command, shown in commands_of(block.text):
                self._command(command, shown)
        elif (
            block.lang == "text"
            and before is not None
            and (before.lang, before.title) == ("python", "")
            and not matches(block.text, self.printed)
        ):
            raise PageError(f"the page shows\n{block.text}\nand Python wrote\n{self.printed}")

    def _python(self, block: Block) -> str:
        """Run a block in the page's one namespace; returns what it printed, or raised."""
        code = compile("\n" * (block.line - 1) + self._here(block.text), str(self.page), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                exec(code, vars(self.module))  # our own documentation
            except Exception as error:
                if type(error).__name__ != block.raises:
                    raise PageError(traceback.format_exc()) from None
                return self._there(f"{out.getvalue()}{type(error).__name__}: {error}")
        if block.raises:
            raise PageError(f"nothing raised {block.raises}")
        return self._there(out.getvalue())

    def _command(self, command: str, shown: str) -> None:
        fails = re.search(r"^(error|Traceback|FAILED)\b", shown, re.MULTILINE) is not None
        sys.stdout.write(f"$ {command}\n")
        if _SERVE.match(command) and not fails:
            code, output = 0, self._serve(command)
        else:
            done = subprocess.run(
                ["bash", "-c", self._here(re.sub(r"(^|[|] )curl ", r"\1curl -sS ", command))],
                env=self.env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT_S,
                check=False,
            )
            code, output = done.returncode, done.stdout.decode()
        output = self._there(output)
        if (code != 0) != fails:
            raise PageError(f"$ {command}\nended with {code} and wrote\n{output}")
        if shown and not matches(shown, output):
            raise PageError(f"the page shows for\n$ {command}\n{shown}\nbut it wrote\n{output}")

    def _serve(self, command: str) -> str:
        """Start a server, instead of the one before, and wait until it is ready."""
        self._stop()
        with self.log.open("wb") as log, Path("server.out").open("wb") as out:
            self.server = subprocess.Popen(
                shlex.split(command), env=self.env, stdout=out, stderr=log, cwd=Path.cwd()
            )
        give_up = time.monotonic() + _LIMIT_S
        while time.monotonic() < give_up:
            if self.server.poll() is not None:
                raise PageError(f"$ {command}\nended with {self.server.returncode}")
            printed = Path("server.out").read_text("utf-8")
            if re.search(r"^ *docs ", printed, re.MULTILINE) and self._is_ready():
                return printed
            time.sleep(0.05)
        raise PageError(f"$ {command}\nwas not ready after {_LIMIT_S} s")

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.port}/readyz", timeout=5
            ) as answer:
                return answer.status == 200
        except OSError:
            return False

    def _stop(self) -> None:
        server, self.server = self.server, None
        if server is not None and server.poll() is None:
            server.send_signal(signal.SIGINT)
            try:
                code = server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                raise
            assert code == 0, f"the server of {self.page} ended with {code}{self._log()}"

    def _log(self) -> str:
        return f"\n\nserver's log:\n{self.log.read_text()[-4000:]}" if self.log.exists() else ""

    def _here(self, text: str) -> str:
        return re.sub(r"(?<=:)3000\b", str(self.port), text)

    def _there(self, text: str) -> str:
        return text.replace(f":{self.port}", ":3000").replace(str(Path.cwd()), ".")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_page(page: Path) -> None:
    """Run a page in a process and a folder of its own."""
    # Unix sockets are made in it, so its path must be short: pytest's own are not.
    with tempfile.TemporaryDirectory(prefix="skdoc-", dir="/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-W", "error", __file__, str(page)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=110,
            check=False,
        )
    assert done.returncode == 0, done.stdout.decode()


def main() -> int:
    try:
        Runner(Path(sys.argv[1])).run()
    except PageError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


# ---- tests


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _all_pages() -> list[Path]:
    return [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def _running() -> list[Path]:
    return [p for p in sorted(DOCS.rglob("*.md")) if RUN & {b.lang for b in blocks_of(p)}]


@pytest.mark.slow
@pytest.mark.parametrize("page", _running(), ids=_name)
def test_page_runs(page: Path) -> None:
    run_page(page)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "```python\n1 / 0\n```\n",
        "```python\nprint(1)\n```\n\n```text\n2\n```\n",
        "<!-- raises ValueError -->\n\n```python\nlen([])\n```\n",
        "<!-- raises ValueError -->\n\n```python\nlen(3)\n```\n",
        "```console\n$ echo 1\n2\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ echo error: no\nerror: no\n```\n",
        '```python title="app.py"\nx = 1\n```\n\n```python\nfrom app import y\n```\n',
        "```console\n$ servekit serve nothing.py\nserving …\n```\n",
    ],
    ids=[
        "raises",
        "prints",
        "no-raise",
        "other-raise",
        "output",
        "code",
        "no-error",
        "file",
        "serve",
    ],
)
def test_wrong_page_fails(tmp_path: Path, text: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(AssertionError):
        run_page(page)


def test_outputs_are_compared() -> None:
    assert matches("a\n…\nd", "a\nb\nc\nd\n")
    assert matches("a … d", "a b c d  ")
    assert matches("…\nd", "d")
    assert not matches("a\nd", "a\nb\nd")
    assert not matches("a … d", "a b c\nd")
    assert not matches("a", "a\nb")


@pytest.mark.parametrize("page", _all_pages(), ids=_name)
def test_blocks_are_of_a_known_kind(page: Path) -> None:
    text = page.read_text("utf-8")
    assert len(_FENCE.findall(text)) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE))
    for block in blocks_of(page):
        where = f"{_name(page)}:{block.line}"
        assert block.lang in RUN | WRITTEN | SHOWN, (
            f"{where}: a {block.lang!r} block is not checked"
        )
        if block.lang == "json":
            json.loads(block.text)
        elif block.lang == "toml":
            tomllib.loads(block.text)
        elif block.lang == "shell":
            for line in block.text.splitlines():
                assert NOT_RUN.fullmatch(line), f"{where}: {line!r} belongs into a console block"


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=_name)
def test_links_outside_of_the_site_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        assert "://" not in target, f"{target}: the repository stands alone"
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{_name(page)}: {target}"
        if anchor:
            assert anchor in _anchors(file), f"{_name(page)}: {target}"


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", _all_pages(), ids=_name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = _FENCE.sub("", page.read_text("utf-8"))
    folders = "servekit|tests|examples|docs|benchmarks|templates"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", text):
        assert (ROOT / path).exists(), f"{_name(page)}: there is no {path}"


@pytest.mark.slow
def test_site_builds_strictly(tmp_path: Path) -> None:
    site = tmp_path / "site"
    done = subprocess.run(
        [BIN / "mkdocs", "build", "--strict", "--quiet", "--site-dir", site],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout.decode()
    pages = list(site.rglob("*.html"))
    assert len(pages) >= len(list(DOCS.rglob("*.md")))
    for page in pages:
        html = page.read_text("utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)[^>]*\ssrc=\"?([^\"\s>]+)", html)
        loaded += re.findall(r"<link[^>]*\shref=\"?([^\"\s>]+)", html)
        assert not [url for url in loaded if "//" in url], f"{page} loads from elsewhere"


def _files() -> Iterator[Path]:
    """Yield the repository's files, without what is built or installed."""
    apart = {"__pycache__", "build", "dist", "site", "results", "models", "node_modules"}
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [f for f in folders if f not in apart and (f == ".ci" or f[0] != ".")]
        yield from (Path(folder, name) for name in names)


def test_repository_names_no_registry_and_no_place_of_its_makers() -> None:
    hosts = ("pypi.org", "pythonhosted.org", "npmjs.", "anaconda.org", "conda.io", "ghcr.io")
    words = [word.encode() for word in (*hosts, "/work" + "/", "/opt/" + "pypi")]
    own = Path(__file__).resolve()
    for path in _files():
        if path.resolve() == own or path.is_symlink():
            continue
        data = path.read_bytes()
        for word in words:
            assert word not in data, f"{_name(path)} contains {word.decode()}"


def test_changelog_has_the_version() -> None:
    about: dict[str, Any] = {}
    exec((ROOT / "servekit" / "version.py").read_text(), about)
    heads = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert about["__version__"] in heads
    assert shutil.which("mkdocs", path=str(BIN)), "the docs extra is not installed"


if __name__ == "__main__":
    sys.exit(main())
