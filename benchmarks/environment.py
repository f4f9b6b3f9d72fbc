"""Virtual environments of the contenders, and a description of the machine."""

import json
import os
import platform
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.contenders import ROOT, Contender

STAMP = "requirements.stamp"
_LIST_VERSIONS = """
import json, importlib.metadata as m
print(json.dumps({d.metadata["Name"]: d.version for d in m.distributions()}))
"""


class UnavailableError(Exception):
    """A contender can't take part on this machine right now."""


def prepare(contender: Contender) -> None:
    """Create the contender's environment, unless a stamp says that it is there already."""
    if contender.venv == ROOT / ".venv":
        _check_servekit(contender)
        return
    wanted = "".join(f"{requirement}\n" for requirement in contender.requirements)
    stamp = contender.venv / STAMP
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    print(f"creating {contender.venv.relative_to(ROOT)} ...", flush=True)
    shutil.rmtree(contender.venv, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", contender.venv], check=True)
    install = [str(contender.python), "-m", "pip", "install", "--quiet", *contender.requirements]
    done = subprocess.run(install, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise UnavailableError(f"pip install failed: {done.stderr.strip()[-500:]}")
    stamp.write_text(wanted)


def _check_servekit(contender: Contender) -> None:
    if not contender.python.exists():
        raise UnavailableError("no .venv in the repository root")
    command = [str(contender.python), "-m", "servekit", "serve", "--help"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode != 0:
        raise UnavailableError("`python -m servekit serve` does not run yet")


def versions(contender: Contender) -> dict[str, str]:
    """Every package in the contender's environment."""
    command = [str(contender.python), "-c", _LIST_VERSIONS]
    found = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    packages: dict[str, str] = json.loads(found.stdout)
    return dict(sorted(packages.items(), key=lambda item: item[0].lower()))


def machine() -> dict[str, str | int | None]:
    """What the figures were measured on, and when."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_average": f"{os.getloadavg()[0]:.2f}",
    }


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or "unknown"
