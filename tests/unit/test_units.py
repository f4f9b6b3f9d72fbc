"""Sizes and durations as text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.core.units import parse_bytes, parse_rate, parse_seconds
from servekit.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (17, 17),
        ("17", 17),
        ("17B", 17),
        ("1KB", 1000),
        ("1kb", 1000),
        ("1KiB", 1024),
        ("64MiB", 64 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (" 2 TB ", 2 * 10**12),
        ("1TiB", 2**40),
    ],
)
def test_sizes(text, size):
    assert parse_bytes(text, where="here") == size


@pytest.mark.parametrize(
    "text", ["", "MiB", "-1", "1 parsec", "1e3", "1MiBs", "١KB", "0x10", "1,5MB"]
)
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match=r"^Limits\(max_body\): .*no size"):
        parse_bytes(text, where="Limits(max_body)")


def test_a_negative_size():
    with pytest.raises(ConfigError, match="^here: -1 is negative"):
        parse_bytes(-1, where="here")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(3, 3.0), (0.5, 0.5), ("250ms", 0.25), ("30s", 30.0), ("1.5m", 90.0), (" 2 h ", 7200.0)],
)
def test_durations(text, seconds):
    assert parse_seconds(text, where="here") == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "5", "-5s", "5 S", "5MS", "1e3s", "five", "infs", "nans"]
)
def test_what_is_no_duration(text):
    with pytest.raises(ConfigError, match="^timeout: .*no duration"):
        parse_seconds(text, where="timeout")


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_a_config_error(text):
    for parse in (parse_bytes, parse_seconds):
        try:
            assert parse(text, where="here") >= 0
        except ConfigError as error:
            assert str(error).startswith("here: ")


@pytest.mark.parametrize(
    ("text", "per_s"),
    [("10/s", 10), ("600/m", 10), ("1800/h", 0.5), (" 1.5 / s ", 1.5)],
)
def test_rates(text, per_s):
    assert parse_rate(text, where="key") == per_s


@pytest.mark.parametrize(
    "text",
    [
        "",
        "10",
        "/s",
        "10/",
        "10/d",
        "10/ms",
        "-1/s",
        "0/s",
        "0.0/h",
        "1e3/s",
        "10/s/s",
        "9" * 400 + "/s",
    ],
)
def test_what_is_no_rate(text):
    with pytest.raises(ConfigError, match=r"^key: .* is no rate above 0; write it like '10/s'"):
        parse_rate(text, where="key")
