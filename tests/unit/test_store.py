"""Models: pinned when they are named, fetched once, known by content, safe whoever wrote them."""

import functools
import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import servekit as sk
from servekit.errors import ConfigError, SpecError
from servekit.spec.describe import describe
from servekit.spec.model import ModelSpec
from servekit.store.store import File, Kept, Store

WEIGHTS = b"weights" * 1000


class Web(http.server.BaseHTTPRequestHandler):
    """A web server of files in memory; also the few routes of a hub that a download needs."""

    files: dict[str, bytes] = {}
    asked: list[str] = []

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(path)
        data = self.files.get(path)
        self.send_response(404 if data is None else 200)
        data = data or b""
        self.send_header("content-length", str(len(data)))
        self.send_header("x-repo-commit", "c" * 40)
        self.send_header("etag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    do_HEAD = do_GET

    def log_message(self, *_):
        pass


@pytest.fixture
def web():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
    thread = threading.Thread(target=functools.partial(server.serve_forever, 0.02))
    thread.start()
    Web.files = {"/m/model.onnx": WEIGHTS}
    Web.asked = []
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "models")


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def spec(source: str, **given) -> ModelSpec:
    return sk.model(source, **given).spec


# -- what authors write -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "given", "said"),
    [
        ("", {}, "name a path or a URL"),
        ("https://x/m.onnx", {}, "give its sha256="),
        ("https://x/m.onnx", {"sha256": "abc"}, "need 64 hex digits"),
        ("hf://org/name", {}, "give revision="),
        ("hf://org/name@main", {"revision": "v1"}, "given twice"),
        ("m.onnx", {"revision": "v1"}, "is for hf:// repositories"),
        ("m.onnx", {"include": ["*"]}, "choose among several"),
    ],
)
def test_what_is_not_pinned_is_refused(source, given, said):
    with pytest.raises(SpecError, match="^sk.model: ") as refused:
        sk.model(source, **given)
    assert said in str(refused.value)


def test_an_instance_that_nobody_runs():
    @sk.service
    class Classifier:
        weights = sk.model("hf://org/name@v1")

    with pytest.raises(AttributeError, match="Classifier.weights is there in a service that runs"):
        _ = Classifier().weights
    plain = Classifier()
    plain.weights = Path("fake")
    assert plain.weights == Path("fake")
    assert Classifier.weights.spec == ModelSpec(source="hf://org/name", revision="v1")


def test_an_app_as_data_names_its_models_from_the_current_folder(monkeypatch):
    @sk.service
    class Classifier:
        weights = sk.model("data/weights.bin")
        words = sk.model("hf://org/name@v1", include=["*.txt"])

    monkeypatch.chdir(Path(__file__).parents[1])
    [service] = describe(Classifier).services
    assert service.models["weights"] == ModelSpec(source="unit/data/weights.bin")
    assert service.models["words"].include == ("*.txt",)


async def test_a_replica_has_its_models_before_init(start, tmp_path, monkeypatch, web):
    monkeypatch.setenv("SERVEKIT_MODELS_DIR", str(tmp_path))

    @sk.service
    class Classifier:
        here = sk.model(Path(__file__).name)
        fetched = sk.model(f"{web}/m/model.onnx", sha256=digest(WEIGHTS))

        def __init__(self) -> None:
            self.read = self.here.read_bytes(), self.fetched.read_bytes()

    replica = await start(Classifier)
    assert replica._instance.read == (Path(__file__).read_bytes(), WEIGHTS)


async def test_a_model_that_is_not_there(start):
    @sk.service
    class Classifier:
        weights = sk.model("nowhere.bin")

    with pytest.raises(sk.errors.SetupError, match="Classifier.weights: nowhere.bin: there is no"):
        await start(Classifier)


# -- fetching -----------------------------------------------------------------------------------


def test_a_file_is_fetched_once(store, web, tmp_path):
    asked = spec(f"{web}/m/model.onnx", sha256=digest(WEIGHTS))
    path = store.path(asked, tmp_path)
    assert path.name == "model.onnx"
    assert path.read_bytes() == WEIGHTS
    assert path.stat().st_mode & 0o777 == 0o444
    assert store.path(asked, tmp_path) == path
    assert Web.asked == ["/m/model.onnx"]
    offline = Store(store.folder, offline=True)
    assert offline.path(asked, tmp_path) == path


def test_what_comes_is_not_what_was_asked_for(store, web, tmp_path):
    asked = spec(f"{web}/m/model.onnx", sha256="0" * 64)
    with pytest.raises(ConfigError, match=f"its sha256 is {digest(WEIGHTS)}, not 0000"):
        store.path(asked, tmp_path)
    assert store.kept() == []
    assert not [*store.folder.rglob("model.onnx")]
    with pytest.raises(ConfigError, match="can't be fetched: Not Found|404"):
        store.path(spec(f"{web}/none", sha256="0" * 64), tmp_path)


def test_offline_fetches_nothing(tmp_path, web):
    offline = Store(tmp_path / "models", offline=True)
    with pytest.raises(ConfigError, match="is not on this machine, and `offline` is set"):
        offline.path(spec(f"{web}/m/model.onnx", sha256=digest(WEIGHTS)), tmp_path)
    assert Web.asked == []


def test_a_repository_of_a_hub(store, web, tmp_path):
    """By the client that everybody has, from a server that answers as the hub does."""
    commit = "c" * 40
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS, "model.bin": b"pickle"}
    listing = [
        {"type": "file", "path": name, "size": len(data), "oid": digest(data)[:40]}
        for name, data in files.items()
    ]
    info = {"id": "org/name", "sha": commit, "siblings": [{"rfilename": name} for name in files]}
    for revision in ("v1", commit):
        Web.files[f"/api/models/org/name/revision/{revision}"] = json.dumps(info).encode()
    Web.files[f"/api/models/org/name/tree/{commit}"] = json.dumps(listing).encode()
    for name, data in files.items():
        Web.files[f"/org/name/resolve/{commit}/{name}"] = data
    script = (
        "import sys, pathlib, servekit as sk\n"
        "from servekit.store.store import Store\n"
        "spec = sk.model('hf://org/name@v1', exclude=['*.bin']).spec\n"
        "store = Store(pathlib.Path(sys.argv[1]))\n"
        "print(store.path(spec, pathlib.Path()), store.kept()[0].revision)\n"
    )
    done = subprocess.run(  # the client reads its environment as it is imported
        [sys.executable, "-c", script, store.folder],
        env={**os.environ, "HF_ENDPOINT": web, "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path, revision = done.stdout.split()
    assert revision == commit
    assert {p.name: p.read_bytes() for p in Path(path).rglob("*")} == {
        "config.json": b"{}",
        "model.safetensors": WEIGHTS,
    }


def test_artifacts_of_mlflow(store, tmp_path):
    """Logged and fetched by MLflow itself, without a server."""
    script = (
        "import sys, pathlib, mlflow, servekit as sk\n"
        "from servekit.store.store import Store\n"
        "home = pathlib.Path(sys.argv[1])\n"
        "(home / 'm/deep').mkdir(parents=True)\n"
        "(home / 'm/w.bin').write_bytes(b'w')\n"
        "(home / 'm/deep/x.txt').write_bytes(b'x')\n"
        "(home / 'm/deep/x.tmp').write_bytes(b'')\n"
        "with mlflow.start_run() as run: mlflow.log_artifacts(str(home / 'm'), 'model')\n"
        "spec = sk.model(f'runs:/{run.info.run_id}/model', exclude=['*.tmp']).spec\n"
        "print(Store(home / 'models').path(spec, home))\n"
        "try: Store(home / 'models').pull(sk.model('runs:/none/model').spec)\n"
        "except sk.errors.ConfigError as error: print(error)\n"
    )
    uri = (tmp_path / "runs").as_uri()
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        env={**os.environ, "MLFLOW_TRACKING_URI": uri, "MLFLOW_ALLOW_FILE_STORE": "true"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    path, error = done.stdout.splitlines()
    found = {p.relative_to(path).as_posix() for p in Path(path).rglob("*") if p.is_file()}
    assert found == {"w.bin", "deep/x.txt"}
    assert error.startswith("runs:/none/model can't be fetched: ")


def test_what_fsspec_knows(store, tmp_path):
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe({"/m/a/config.json": b"{}", "/m/a/deep/w.bin": WEIGHTS, "/m/a/x.tmp": b""})
    folder = store.path(spec("memory://m/a", exclude=["*.tmp"]), tmp_path)
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} == {
        "config.json",
        "deep/w.bin",
    }
    file = store.path(spec("memory://m/a/deep/w.bin"), tmp_path)
    assert file.read_bytes() == WEIGHTS
    assert file.samefile(folder / "deep/w.bin")  # kept once
    with pytest.raises(ConfigError, match="can't be fetched|no files"):
        store.path(spec("memory://m/none"), tmp_path)
    with pytest.raises(ConfigError, match="can't be fetched"):
        store.path(spec("nosuchscheme://m"), tmp_path)


def test_a_remote_name_that_leads_elsewhere(store, tmp_path, monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(MemoryFileSystem, "find", lambda self, root: [f"{root}/../../out"])
    with pytest.raises(ConfigError, match="has a file '../../out', which leads elsewhere"):
        store.path(spec("memory://evil"), tmp_path)


@given(name=st.text(max_size=20))
def test_no_reference_leads_out_of_its_folder(name):
    """Those of a bundle are a stranger's."""
    try:
        kept = Kept(spec=spec("memory://m"), files={name: File(sha256="0" * 64, size=1)})
    except ValueError:
        return
    path = Path(os.path.normpath(Path("/store/trees") / kept.tree / name))
    assert path.is_relative_to(f"/store/trees/{kept.tree}")
    assert path != Path(f"/store/trees/{kept.tree}")


# -- keeping ------------------------------------------------------------------------------------


@pytest.fixture
def two(store, web, tmp_path) -> tuple[ModelSpec, ModelSpec]:
    """Two sources with one content."""
    Web.files["/m/copy.onnx"] = WEIGHTS
    specs = [spec(f"{web}/m/{name}.onnx", sha256=digest(WEIGHTS)) for name in ("model", "copy")]
    for asked in specs:
        store.path(asked, tmp_path)
    return specs[0], specs[1]


def blobs(store) -> list[Path]:
    return [*(store.folder / "blobs").glob("*/*")]


def test_what_nobody_asks_for_is_removed(store, two, tmp_path):
    assert len(blobs(store)) == 1
    assert store.collect() == 0
    first, _ = two
    ref = next(p for p in (store.folder / "refs").iterdir() if b"copy.onnx" in p.read_bytes())
    os.utime(ref, (time.time() - 1000, time.time() - 1000))
    assert store.collect(500) == 0  # its file is the other one's, too
    assert [kept.spec for kept in store.kept()] == [first]
    assert store.path(first, tmp_path).read_bytes() == WEIGHTS
    assert store.collect(0) == len(WEIGHTS)
    assert blobs(store) == store.kept() == []


def test_what_has_changed_is_dropped_and_fetched_again(store, two, tmp_path):
    assert store.verify() == []
    path = store.path(two[0], tmp_path)
    same_tree = spec(f"{two[0].source}?again", sha256=two[0].sha256)
    assert store.path(same_tree, tmp_path) == path
    path.chmod(0o644)
    path.write_bytes(b"rotten")
    assert len(store.verify()) == 3
    assert store.kept() == []
    assert store.path(two[0], tmp_path).read_bytes() == WEIGHTS
    assert store.verify() == []


def test_a_bundle_has_them(store, two, tmp_path):
    """In a folder that is looked at first, with the same bytes wherever it was made."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        for asked in two:
            store.export(asked, folder)
    one, other = (
        {p.relative_to(f).as_posix(): p.read_bytes() for p in f.rglob("*") if p.is_file()}
        for f in folders
    )
    assert one == other
    elsewhere = Store(tmp_path / "elsewhere", folders[0], offline=True)
    assert elsewhere.path(two[1], tmp_path).read_bytes() == WEIGHTS
    assert not elsewhere.folder.exists()


def test_a_note_that_can_not_be_read_is_none(store, two, tmp_path):
    for ref in (store.folder / "refs").iterdir():
        ref.write_bytes(b"{")
    assert store.kept() == []
    assert store.path(two[0], tmp_path).read_bytes() == WEIGHTS


def test_many_processes_fetch_it_once(store, web):
    """Threads stand for them; the lock is the file's."""
    asked = spec(f"{web}/m/model.onnx", sha256=digest(WEIGHTS))
    threads = [threading.Thread(target=store.pull, args=(asked,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Web.asked == ["/m/model.onnx"]


def test_data_survives_its_own_serialisation(store, two):
    for kept in store.kept():
        assert msgspec.json.decode(msgspec.json.encode(kept), type=Kept) == kept
