import json
import socket
from pathlib import Path

import pytest

from servekit.cli import doctor
from servekit.cli.main import run
from servekit.settings import Settings


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.10", ">=2.10", True),
        ("2.9.1", ">=2.10", False),
        ("3.0.0rc1", ">=2.10", True),
        ("1.0.0", "==1.0", True),
        ("1.0.1", "==1.0", False),
        ("5", "", True),
        ("0.28.1", ">=0.28,<1", True),
    ],
)
def test_versions(version, wanted, fits):
    assert doctor.satisfies(version, wanted) is fits


def test_this_machine_is_fit_and_the_report_says_so(capsys, monkeypatch):
    monkeypatch.setenv("SERVEKIT_PORT", "0")
    assert run(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ready to serve")
    assert {"python", "platform", "packages", "uvloop", "GPUs", "port"} <= {
        word for line in lines for word in line.split()[1:2]
    }


def test_json_has_every_finding(capsys, monkeypatch):
    monkeypatch.setenv("SERVEKIT_GPUS", "2")
    run(["doctor", "--json"])
    findings = {f["check"]: f for f in json.loads(capsys.readouterr().out)}
    assert findings["GPUs"]["found"] == "2 (0, 1) (SERVEKIT_GPUS says so)"
    assert all(f["level"] in ("ok", "warn", "fail") for f in findings.values())


def test_a_wrong_setting_is_a_failure_not_a_traceback(capsys, monkeypatch):
    monkeypatch.setenv("SERVEKIT_POTR", "1")
    assert run(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "SERVEKIT_PORT" in out
    assert "to fix before apps can run" in out


def test_a_port_in_use_is_a_warning(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        finding = doctor._port(Settings(port=taken.getsockname()[1]))
    assert finding.level == "warn"
    assert "in use" in finding.found


def test_a_runtime_dir_that_is_not_there_fails(tmp_path):
    finding = doctor._runtime_dir(Settings(runtime_dir=tmp_path / "none"))
    assert finding.level == "fail"
    assert finding.fix
    assert doctor._runtime_dir(Settings(runtime_dir=Path("/tmp"))).level == "ok"


@pytest.mark.parametrize(
    ("limit", "level"), [(64, "fail"), (1024, "warn"), (65536, "ok"), (-1, "ok")]
)
def test_file_limits(limit, level, monkeypatch):
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (limit, -1))
    assert doctor._files(Settings()).level == level


def test_packages_that_are_missing_or_old():
    assert doctor._group("x", [("pydantic", ">=2")], fix="f").level == "ok"
    missing = doctor._group("x", [("no-such-package-at-all", "")], fix="f")
    assert (missing.level, missing.fix) == ("fail", "f")
    assert (
        doctor._group("x", [("no-such-package-at-all", "")], fix="f", optional=True).level == "ok"
    )
    old = doctor._group("x", [("pydantic", ">=99")], fix="f", optional=True)
    assert old.level == "warn"
    assert "needs >=99" in old.found


def test_a_driver_that_nothing_can_ask_is_pointed_out(monkeypatch):
    monkeypatch.setattr("servekit.engine.devices.is_not_asked", lambda: True)
    found = {finding.check: finding for finding in doctor.examine()}["GPUs"]
    assert found.level == "warn"
    assert "servekit[gpu]" in found.fix
    monkeypatch.setenv("SERVEKIT_GPUS", "2")
    assert {finding.check: finding.level for finding in doctor.examine()}["GPUs"] == "ok"
