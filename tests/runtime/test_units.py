import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from kimi_runtime.units import (
    Bytes,
    Rate,
    Seconds,
    format_bytes,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_rate,
    parse_seconds,
)

bounded = settings(max_examples=50, deadline=None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512GiB", 512 * 2**30),
        ("512Gi", 512 * 2**30),
        ("1.5GB", 1_500_000_000),
        ("1.15GB", 1_150_000_000),  # 1.15 * 1e9 is no whole float
        ("64k", 64_000),
        ("64Ki", 65_536),
        (" 2 MiB ", 2 * 2**20),
        ("4096", 4096),
        ("0", 0),
        (4096, 4096),
        (4096.0, 4096),
        (10**400, 10**400),  # too large for a float
    ],
)
def test_a_size_is_read_exactly(text, size):
    assert parse_bytes(text) == size


NO_SIZE_TEXTS = [
    "",
    "GiB",
    "-1GiB",
    "1e3",
    "1.5",
    "0.3B",
    "5 parsecs",
    "1GiBs",
    "\u0665GiB",
    "1_000",
]
NO_SIZES = [True, -1, 1.5, float("nan"), float("inf"), None, []]


@pytest.mark.parametrize("text", [*NO_SIZE_TEXTS, *NO_SIZES])
def test_a_size_that_is_none_is_refused_with_its_text(text):
    with pytest.raises(ValueError, match=r"512GiB|whole number of bytes"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("250ms", 0.25),
        ("30s", 30.0),
        ("2h30m", 9000.0),
        ("1d", 86_400.0),
        ("6.7us", 6.7e-6),
        (30, 30.0),
        (0, 0.0),
    ],
)
def test_a_duration_is_read_exactly(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "30", "1h 30m", "s", "-1s", "1e3s", True, -1, float("nan"), float("inf"), None]
)
def test_a_duration_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="duration"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("text", "rate"),
    [("50GB/s", 5e10), ("76.8GB/s", 76.8e9), ("1KiB/s", 1024.0), ("0.5B/s", 0.5), (12, 12.0)],
)
def test_a_rate_is_read_exactly(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["50GB", "/s", "GB/s", True, -1, float("inf"), None, 10**400])
def test_a_rate_that_is_none_is_refused(text):
    with pytest.raises(ValueError, match="rate"):
        parse_rate(text)


def test_written_forms_are_the_short_ones():
    assert format_bytes(512 * 2**30) == "512GiB"
    assert format_bytes(1000) == "1000B"
    assert format_bytes(0) == "0B"
    assert [format_seconds(s) for s in (7200, 90, 0.25, 0, 120, 6.7e-6)] == [
        "2h",
        "90s",
        "250ms",
        "0s",
        "2m",
        "0.0000067s",
    ]
    assert [format_rate(r) for r in (5e10, 76.8e9, 8e12, 0, 0.5)] == [
        "50GB/s",
        "76.8GB/s",
        "8TB/s",
        "0B/s",
        "0.5B/s",
    ]


@bounded
@given(st.integers(0, 2**80))
def test_sizes_survive_being_written_and_read(size):
    assert parse_bytes(format_bytes(size)) == size


@bounded
@given(st.floats(0, 1e30, allow_nan=False))
def test_durations_survive_being_written_and_read(seconds):
    assert parse_seconds(format_seconds(seconds)) == seconds


@bounded
@given(st.floats(0, 1e30, allow_nan=False))
def test_rates_survive_being_written_and_read(rate):
    assert parse_rate(format_rate(rate)) == rate


@pytest.mark.parametrize(
    ("unit", "written", "number"),
    [(Bytes, "64MiB", 64 * 2**20), (Seconds, "2m", 120.0), (Rate, "50GB/s", 5e10)],
)
def test_annotated_units_take_text_hold_a_number_and_write_text(unit, written, number):
    adapter = TypeAdapter(unit)
    assert adapter.validate_python(written) == number
    assert adapter.validate_python(number) == number
    assert json.loads(adapter.dump_json(number)) == written
    assert adapter.json_schema()["type"] == "string"
    with pytest.raises(ValidationError, match="nonsense"):
        adapter.validate_python("nonsense")
