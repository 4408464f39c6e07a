"""When a certificate ends: read from its file, warned of in time, and said plainly by peers."""

import base64
import logging
import subprocess
import time
from contextlib import suppress

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from certificates import Authority, needs_openssl
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.rpc.tls import Tls
from kimi_runtime.umbp.rpc.validity import DAY_S, Validity, validity_of
from pool_daemon import pool_spec
from pool_peers import peer, until

pytestmark = needs_openssl


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path / "authority")


@pytest.mark.parametrize("days", [1, 30, 20_000])  # the last is of after 2050, written otherwise
def test_both_dates_are_read_as_openssl_prints_them(tmp_path, authority, days):
    pem = authority.issue(tmp_path / "one", days=days).certificate
    found = validity_of(pem.read_bytes())
    assert found.ends_s - found.begins_s == days * DAY_S
    assert abs(found.begins_s - time.time()) < 600
    left = subprocess.run(
        ["openssl", "x509", "-noout", "-enddate", "-dateopt", "iso_8601", "-in", pem],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    said = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(found.ends_s))
    assert left == f"notAfter={said}"


def test_of_a_chain_what_ends_first_counts(tmp_path, authority):
    long, short = (
        authority.issue(tmp_path / str(days), days=days).certificate.read_bytes()
        for days in (30, 3)
    )
    assert validity_of(long + short) == validity_of(short)


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_what_is_no_certificate_is_a_value_error_and_nothing_else(pem, data):
    der = bytearray(base64.b64decode(b"".join(pem.split(b"\n")[1:-2])))
    cut = data.draw(st.integers(0, len(der)))
    at = data.draw(st.integers(0, len(der) - 1))
    der[at] ^= data.draw(st.integers(1, 255))
    text = b"-----BEGIN CERTIFICATE-----\n%b\n-----END CERTIFICATE-----\n" % base64.b64encode(
        der[:cut]
    )
    with suppress(ValueError):
        assert isinstance(validity_of(text), Validity)


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certificate")
    return Authority(folder / "ca").issue(folder / "one").certificate.read_bytes()


def test_soon_is_two_weeks_or_a_quarter_of_a_short_life():
    year, day = Validity(0, 365 * DAY_S), Validity(0, DAY_S)
    assert not year.ends_soon(350 * DAY_S)
    assert year.ends_soon(352 * DAY_S)
    assert not day.ends_soon(0.7 * DAY_S)
    assert day.ends_soon(0.8 * DAY_S)
    assert year.days_left(366 * DAY_S) == -1
    assert (year.days, day.days) == (365, 1)


def test_an_expired_certificate_is_told_once_a_day_and_a_good_one_never(
    tmp_path, authority, caplog
):
    good = Tls(authority.issue(tmp_path / "good"))
    good.refresh()
    assert not caplog.records
    assert 0.99 < good.days_left <= 1
    with caplog.at_level(logging.INFO):
        expired = Tls(authority.issue(tmp_path / "expired", days=-1))
        expired.refresh()
    (line,) = caplog.records
    assert line.levelno == logging.ERROR
    assert "has expired on" in line.getMessage()
    assert expired.days_left < -0.9
    caplog.clear()
    authority.issue(tmp_path / "expired")
    expired.refresh()
    assert expired.days_left > 0
    expired.refresh()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


async def test_a_daemon_tells_its_days_left_and_its_peers_that_it_has_expired(
    tmp_path, authority, caplog
):
    expired, good = (
        authority.issue(tmp_path / name, days=days) for name, days in (("old", -1), ("new", 1))
    )
    async with running(pool_spec(tmp_path, tls=expired)) as daemon, aiohttp.ClientSession() as http:
        async with http.get(f"{daemon.url}/metrics", ssl=False) as response:
            told = dict(
                line.split()
                for line in (await response.text()).splitlines()
                if line.startswith("kimistack_umbp_certificate_days")
            )
        assert -2 < float(told["kimistack_umbp_certificate_days_left"]) < 0
        assert "kimistack_umbp_certificate_days" in told
        async with peer(tmp_path, "b", [("a", daemon.url)], tls=good):
            await until(lambda: "the feed of a is lost" in caplog.text)
    assert "shows a certificate that has expired" in caplog.text
