"""Signatures of internal calls."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_runtime.auth import (
    FRESH_S,
    ReplayGuard,
    read_call_key,
    read_call_keys,
    sign,
    verify,
)
from kimi_runtime.errors import ConfigError, Unauthorized

OLD, NEW = b"o" * 32, b"n" * 32
NONCE = bytes(range(16))


def signed(key=NEW, method="POST", path="/generate", body=b"{}", at=1000.0):
    return sign(key, method, path, body, unix_s=at, nonce=NONCE)


def test_a_signed_request_is_accepted_and_gives_its_nonce():
    assert verify([NEW], signed(), "POST", "/generate", b"{}", unix_s=1000.0) == NONCE


def test_both_keys_are_accepted_during_a_rotation():
    for key in (OLD, NEW):
        verify([NEW, OLD], signed(key), "POST", "/generate", b"{}", unix_s=1001.0)


@pytest.mark.parametrize(
    "changed",
    [
        {"method": "GET"},
        {"path": "/generate?x=1"},
        {"body": b"{ }"},
        {"unix_s": 1000.0 + FRESH_S + 1},
        {"unix_s": 1000.0 - FRESH_S - 1},
        {"call_keys": [OLD]},
        {"call_keys": []},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_any_change_to_a_signed_request_is_refused(changed):
    call = {
        "call_keys": [NEW],
        "header": signed(),
        "method": "POST",
        "path": "/generate",
        "body": b"{}",
        "unix_s": 1000.0,
    }
    with pytest.raises(Unauthorized):
        verify(**(call | changed))


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=200) | st.none())
def test_no_made_up_header_is_accepted_or_crashes(header):
    with pytest.raises(Unauthorized):
        verify([NEW], header, "GET", "/feed", b"", unix_s=0.0)


def test_a_header_with_other_characters_is_refused_not_a_crash():
    version, seconds, nonce, _ = signed().split(" ")
    for bad in (f"{version} ² {nonce} é", f"{version} {seconds} zz é", f"v2 {seconds} {nonce} a"):
        with pytest.raises(Unauthorized):
            verify([NEW], bad, "POST", "/generate", b"{}", unix_s=1000.0)


def test_a_replayed_nonce_is_refused_while_it_is_fresh_and_forgotten_later():
    guard = ReplayGuard()
    guard.accept(NONCE, unix_s=1000.0)
    with pytest.raises(Unauthorized, match="used before"):
        guard.accept(NONCE, unix_s=1000.0 + FRESH_S)
    guard.accept(NONCE, unix_s=1001.0 + 2 * FRESH_S)


def test_the_guard_is_bounded():
    guard = ReplayGuard(limit=3)
    for number in range(10):
        guard.accept(number.to_bytes(16, "big"), unix_s=1.0)
    assert len(guard._seen) == 3


def test_a_call_key_file_gives_its_keys_newest_first(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(NEW + b"\n" + OLD + b"\n")
    path.chmod(0o600)
    assert read_call_keys(path) == (NEW, OLD)
    assert read_call_key(path) == NEW


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (None, 0, "cannot be read"),
        (b"", 0o600, "0 bytes"),
        (b"short", 0o600, "5 bytes"),
        (NEW + b"\nshort", 0o600, "5 bytes"),
        (NEW, 0o644, "every user"),
    ],
    ids=["missing", "empty", "short", "second short", "world-readable"],
)
def test_a_bad_call_key_file_says_what_to_change(tmp_path, content, mode, says):
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
        os.chmod(path, mode)
    with pytest.raises(ConfigError, match=says):
        read_call_key(path)
