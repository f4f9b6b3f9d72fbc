"""The files for production are what their programs take, and what the guide shows."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "production"
UNIT = FOLDER / "servekit.service"
SITE = FOLDER / "nginx.conf"

SYSTEMD = shutil.which("systemd-analyze")
NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/sbin:/usr/local/sbin")


def checked(*words: str | Path) -> str:
    done = subprocess.run(
        words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize("file", [UNIT, SITE], ids=lambda file: file.name)
def test_the_guide_shows_the_file(file: Path) -> None:
    guide = (ROOT / "docs" / "guides" / "production.md").read_text("utf-8")
    assert f"```text\n{file.read_text('utf-8')}```" in guide


@pytest.mark.skipif(SYSTEMD is None, reason="systemd-analyze is not here")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    """As it is, but for the program, which must exist for systemd to be content."""
    text = UNIT.read_text("utf-8")
    program = "/srv/app/.venv/bin/servekit"
    assert program in text
    unit = tmp_path / UNIT.name
    unit.write_text(text.replace(program, sys.executable))
    assert SYSTEMD is not None
    assert checked(SYSTEMD, "verify", "--man=no", unit) == ""
    unit.write_text(unit.read_text("utf-8").replace("KillMode=mixed", "KillMode=maxed"))
    with pytest.raises(AssertionError, match="maxed"):
        assert checked(SYSTEMD, "verify", "--man=no", unit) == ""


@pytest.mark.skipif(NGINX is None, reason="nginx is not here")
def test_nginx_takes_the_site(tmp_path: Path) -> None:
    """As it is, but for the port, which is not everybody's to take."""
    text = SITE.read_text("utf-8")
    assert "listen 80;" in text
    site = tmp_path / SITE.name
    site.write_text(text.replace("listen 80;", f"listen unix:{tmp_path}/s;"))
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f"{kind}_temp_path {tmp_path}/{kind}; " for kind in kinds)
    main = tmp_path / "main.conf"
    main.write_text(
        f"pid {tmp_path}/pid; error_log stderr; events {{}}\n"
        f"http {{ access_log off; {temporary} include {site}; }}\n"
    )
    assert NGINX is not None
    assert "test is successful" in checked(NGINX, "-t", "-c", main)
    site.write_text(site.read_text("utf-8").replace("proxy_buffering off", "proxy_buffering of"))
    with pytest.raises(AssertionError, match="proxy_buffering"):
        checked(NGINX, "-t", "-c", main)
