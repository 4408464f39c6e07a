"""Whom a router takes for a pool, from a file that is renewed."""

import pytest

from certificates import Authority, needs_openssl
from kimi_runtime import clock
from kimi_runtime.errors import ConfigError
from kimi_runtime.router.trust import LOOK_S, PoolTrust


@pytest.fixture
def ca(tmp_path):
    file = tmp_path / "ca.crt"
    file.write_bytes(Authority(tmp_path / "authority").certificate.read_bytes())
    return file


def serials(trust):
    return [one["serialNumber"] for one in trust.context().get_ca_certs()]


@needs_openssl
def test_a_renewed_authority_counts_from_the_next_connection_on(tmp_path, ca, monkeypatch, caplog):
    now_s = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now_s)
    caplog.set_level("INFO")
    trust = PoolTrust(ca, "pool")
    before = serials(trust)
    ca.write_bytes(Authority(tmp_path / "next").certificate.read_bytes())
    assert serials(trust) == before  # not looked at yet
    now_s += LOOK_S
    after = serials(trust)
    assert (len(after), after == before) == (1, False)
    assert "authority renewed" in caplog.text


@needs_openssl
@pytest.mark.parametrize("text", ["", " \n", "no certificate", "é", None])
def test_a_file_without_a_certificate_changes_nothing_and_is_told_once(
    ca, monkeypatch, caplog, text
):
    now_s = 100.0
    monkeypatch.setattr(clock, "now_s", lambda: now_s)
    trust = PoolTrust(ca)
    before = serials(trust)
    if text is None:
        ca.unlink()
    else:
        ca.write_text(text)
    for _ in range(3):
        now_s += LOOK_S
        assert serials(trust) == before
    assert caplog.text.count("authority unchanged") == 1


@pytest.mark.parametrize("text", ["", "no certificate", None])
def test_without_a_certificate_to_start_from_there_is_no_router(tmp_path, text):
    file = tmp_path / "ca.crt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"pools_ca: .*ca\.crt"):
        PoolTrust(file)


def test_without_a_file_the_system_s_authorities_count():
    assert PoolTrust().context() is True
