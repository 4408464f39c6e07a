"""Every error this project raises on purpose, in one tree.

A message says what was asked, what is there, and what to change. Where an error reaches a client it
carries the HTTP status and the OpenAI error `type`; where it reaches the command line, `exit_code`.
Library errors are mapped into this tree once per boundary, `from exc`.
"""

from typing import ClassVar


class KimistackError(Exception):
    """Base of the tree: an error that a person can act on."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    exit_code: ClassVar[int] = 1


class ConfigError(KimistackError):
    """A spec, file or flag is wrong; nothing was started."""

    status = 400
    type = "invalid_request_error"
    exit_code = 2


class CapacityError(KimistackError):
    """What was asked does not fit: says the need, what there is, where, and what to change."""

    status = 503
    exit_code = 2

    def __init__(self, what: str, *, need: str, have: str, where: str, fix: str) -> None:
        super().__init__(f"{what} needs {need}, but {where} has {have}; {fix}")
        self.need, self.have, self.where, self.fix = need, have, where, fix


class RequestError(KimistackError):
    """A client's request is wrong (HTTP 400). `param` names the field, as OpenAI's API does."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


class BodyTooLarge(RequestError):
    """The request body passes the limit (HTTP 413)."""

    status = 413


class BodyLate(RequestError):
    """The client stopped sending in the middle of its request body (HTTP 408)."""

    status = 408


class NotFound(RequestError):
    """The named model, route or object is not here (HTTP 404)."""

    status = 404


class Unauthorized(KimistackError):
    """No valid credential (HTTP 401)."""

    status = 401
    type = "authentication_error"


class Overloaded(KimistackError):
    """The request was refused to protect others (HTTP 429); try again after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Unavailable(KimistackError):
    """Nobody can serve the request now (HTTP 503)."""

    status = 503
    type = "service_unavailable"


class StillStarting(Unavailable):
    """Nothing ran when the request came, and what is being started took too long (HTTP 503)."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerFailed(Unavailable):
    """A worker can't be reached, broke off its answer or sent nonsense: another one may serve."""


class DeadlineExceeded(KimistackError):
    """A wait ended by its deadline (HTTP 504)."""

    status = 504
    type = "timeout"


class TransferError(KimistackError):
    """Moving bytes between memories failed; the bytes at the target are undefined."""


class RegionGone(TransferError):
    """The region was released, or its owner restarted (another epoch): look the blocks up again."""


class PeerGone(TransferError):
    """The peer cannot be reached."""


class TransferLate(TransferError, DeadlineExceeded):
    """The transfer did not finish by its deadline. Its target memory may still be written to."""


class TransferCancelled(TransferError):
    """The transfer was cancelled by its owner."""


class KvCorrupt(KimistackError):
    """KV bytes do not match their tag: they must not be used (a miss, and counted)."""


class KernelUnavailable(KimistackError):
    """A kernel was asked to run where there is no GPU or no Triton: the reference runs anywhere."""


class ProtocolError(KimistackError):
    """A peer sent something its wire format does not allow."""

    status = 400
    type = "invalid_request_error"


class ClusterError(KimistackError):
    """The Kubernetes API did not do what was asked. `code` is the HTTP status, 0 for none."""

    exit_code = 3

    def __init__(self, message: str, *, code: int = 0, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.code, self.retry_after_s = code, retry_after_s


class ClusterBusy(ClusterError):
    """It cannot be reached, is overloaded or failed (429, 5xx): the same request may pass later."""


class ClusterConflict(ClusterError):
    """Something else was written in between, or another manager owns the field (409)."""


class ClusterRefused(ClusterError):
    """The request itself is refused (400, 403, 422): asking again changes nothing."""
