import pytest

from kimi_runtime import errors


def all_errors():
    pending, found = [errors.KimistackError], []
    while pending:
        kind = pending.pop()
        found.append(kind)
        pending.extend(kind.__subclasses__())
    return found


def test_a_capacity_error_says_need_place_what_is_there_and_what_to_change():
    error = errors.CapacityError(
        "KV cache for 8 sequences of 131072 tokens",
        need="91.2 GiB",
        have="74.0 GiB free",
        where="GPU 3 of kimi-decode-0",
        fix="lower maxSequences to 6 or set kvDtype: fp8",
    )
    assert str(error) == (
        "KV cache for 8 sequences of 131072 tokens needs 91.2 GiB, but GPU 3 of kimi-decode-0 "
        "has 74.0 GiB free; lower maxSequences to 6 or set kvDtype: fp8"
    )
    assert (error.need, error.have) == ("91.2 GiB", "74.0 GiB free")


def test_a_request_error_names_the_field_as_openai_does():
    error = errors.RequestError("top_k must be at least 0", param="top_k", code="invalid_value")
    assert (str(error), error.param, error.code) == (
        "top_k must be at least 0",
        "top_k",
        "invalid_value",
    )
    assert (error.status, error.type) == (400, "invalid_request_error")


def test_an_overload_says_when_to_try_again():
    error = errors.Overloaded("256 requests are waiting", retry_after_s=1.5)
    assert (error.status, error.type, error.retry_after_s) == (429, "rate_limit_error", 1.5)


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        (errors.ConfigError, 400),
        (errors.BodyTooLarge, 413),
        (errors.NotFound, 404),
        (errors.Unauthorized, 401),
        (errors.Unavailable, 503),
        (errors.DeadlineExceeded, 504),
        (errors.CapacityError, 503),
        (errors.TransferError, 500),
        (errors.TransferLate, 504),
        (errors.ProtocolError, 400),
    ],
)
def test_each_kind_has_its_http_status(kind, status):
    assert kind.status == status


def test_every_error_of_the_tree_can_be_answered_over_http_and_ends_a_command():
    for kind in all_errors():
        assert 400 <= kind.status <= 599, kind
        assert kind.type, kind
        assert 1 <= kind.exit_code <= 125, kind
        assert kind.__doc__, kind


def test_a_late_transfer_is_caught_as_a_transfer_and_as_a_deadline():
    late = errors.TransferLate("the read took longer than 5 s")
    assert isinstance(late, errors.TransferError)
    assert isinstance(late, errors.DeadlineExceeded)
