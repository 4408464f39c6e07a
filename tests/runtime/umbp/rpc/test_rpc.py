"""Signed calls with deadlines: who is answered, who is refused and what they are told."""

import secrets

import grpc
import pytest

from kimi_runtime import auth, clock
from kimi_runtime.errors import (
    ConfigError,
    DeadlineExceeded,
    PeerGone,
    RequestError,
    Unauthorized,
    Unavailable,
)
from kimi_runtime.umbp.daemon import running
from kimi_runtime.umbp.proto import control_pb2, peers_pb2
from kimi_runtime.umbp.rpc import methods
from kimi_runtime.umbp.rpc.client import RpcClient
from kimi_runtime.umbp.rpc.methods import AUTH_KEY, CLEAR, INSPECT, Method
from kimi_runtime.umbp.rpc.server import RpcServer
from kimi_runtime.umbp.state import DaemonState
from pool_control import SOON_S, control_of
from pool_daemon import CALL_KEY, pool_spec

ALL = [value for value in vars(methods).values() if isinstance(value, Method)]


@pytest.fixture
async def daemon(tmp_path):
    async with running(pool_spec(tmp_path)) as made:
        yield made


async def raw(daemon, method, body, *, signature=None, timeout=SOON_S):
    """A call with whatever metadata; its status and text."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{daemon.grpc_port}") as channel:
        metadata = ((AUTH_KEY, signature),) if signature else ()
        try:
            await channel.unary_unary(method.path)(body, timeout=timeout, metadata=metadata)
        except grpc.aio.AioRpcError as exc:
            return exc.code(), exc.details()
    return grpc.StatusCode.OK, ""


def signed(method, body, *, key=CALL_KEY, off_s=0.0):
    nonce = secrets.token_bytes(16)
    unix_s = clock.unix_s() + off_s
    return auth.sign(key, "GRPC", method.path, body, unix_s=unix_s, nonce=nonce)


@pytest.mark.parametrize("method", ALL, ids=[m.path for m in ALL])
def test_every_method_is_one_of_the_protos_with_its_messages(method):
    _, service, name = method.path.split("/")
    files = (control_pb2.DESCRIPTOR, peers_pb2.DESCRIPTOR)
    found = {s.full_name: s for file in files for s in file.services_by_name.values()}
    described = found[service].methods_by_name[name]
    assert described.input_type is method.asked.DESCRIPTOR
    assert described.output_type is method.answer.DESCRIPTOR
    assert described.server_streaming is method.streams


def test_every_rpc_of_the_protos_is_a_method():
    services = {**control_pb2.DESCRIPTOR.services_by_name, **peers_pb2.DESCRIPTOR.services_by_name}
    described = {f"/{s.full_name}/{m.name}" for s in services.values() for m in s.methods}
    assert described == {method.path for method in ALL}


@pytest.mark.parametrize(
    ("signature", "says"),
    [
        (None, "needs the header"),
        ("v1 1 00 ff", "no valid nonce"),
        (signed(INSPECT, b"", key=b"another key of thirty-two bytes."), "does not match"),
        (signed(CLEAR, b""), "does not match"),
        (signed(INSPECT, b"\x08\x05"), "does not match"),
        (signed(INSPECT, b"", off_s=-90), "synchronise the clocks"),
    ],
    ids=["none", "bad", "another key", "another method", "another body", "old"],
)
async def test_a_call_that_is_not_signed_for_what_it_is_is_unauthenticated(daemon, signature, says):
    code, text = await raw(daemon, INSPECT, b"", signature=signature)
    assert code is grpc.StatusCode.UNAUTHENTICATED
    assert says in text
    assert daemon.state.refused_calls == 1


async def test_a_signature_is_good_for_one_call(daemon):
    signature = signed(INSPECT, b"")
    assert (await raw(daemon, INSPECT, b"", signature=signature))[0] is grpc.StatusCode.OK
    code, text = await raw(daemon, INSPECT, b"", signature=signature)
    assert (code, "used before" in text) == (grpc.StatusCode.UNAUTHENTICATED, True)


async def test_a_call_without_a_deadline_is_refused(daemon):
    signature = signed(INSPECT, b"")
    code, text = await raw(daemon, INSPECT, b"", signature=signature, timeout=None)
    assert (code, "without a deadline" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True)


async def test_a_request_that_is_no_message_is_refused(daemon):
    code, _ = await raw(daemon, INSPECT, b"\xff\xff", signature=signed(INSPECT, b"\xff\xff"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_request_beyond_the_bound_is_refused(daemon):
    body = bytes(methods.MAX_REQUEST_BYTES + 1)
    code, _ = await raw(daemon, INSPECT, body, signature=signed(INSPECT, body))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_in_a_rotation_both_keys_are_accepted_and_then_the_new_one_alone(tmp_path):
    old, new = CALL_KEY, b"the new key has thirty-two bytes"
    async with running(pool_spec(tmp_path)) as daemon:
        daemon.state.call_keys[:] = [new, old]
        for key in (old, new):
            async with control_of(daemon.spec, key) as control:
                assert (await control(INSPECT)).name == "pool"
        daemon.state.call_keys[:] = [new]
        async with control_of(daemon.spec, old) as control:
            with pytest.raises(Unauthorized, match="this deployment's call key"):
                await control(INSPECT)


async def test_a_daemon_that_is_not_there_is_gone_and_one_that_is_silent_is_late(tmp_path):
    async with control_of(pool_spec(tmp_path)) as control:
        with pytest.raises(PeerGone):
            await control(INSPECT)
    server = RpcServer([CALL_KEY])
    state = DaemonState("pool", [CALL_KEY])
    server.unary(INSPECT, lambda asked: until_cancelled())
    socket = tmp_path / "s.control"
    async with server.serving("127.0.0.1", 0, socket, None) as port:
        rpc = RpcClient(f"127.0.0.1:{port}", state.call_keys, what="it")
        with pytest.raises(DeadlineExceeded):
            await rpc.call(INSPECT, INSPECT.asked(), within_s=0.05)
        with pytest.raises(DeadlineExceeded, match="no time is left"):
            await rpc.call(INSPECT, INSPECT.asked(), within_s=0.0)
        await rpc.aclose()
    assert not socket.exists()


async def until_cancelled():
    """Answer never."""
    import asyncio

    await asyncio.Event().wait()


async def test_foreseen_errors_come_back_as_what_they_were_and_others_say_nothing(tmp_path, caplog):
    async def fails(asked):
        raise failure

    server = RpcServer([CALL_KEY])
    server.unary(INSPECT, fails)
    async with server.serving("127.0.0.1", 0, tmp_path / "s", None) as port:
        rpc = RpcClient(f"127.0.0.1:{port}", [CALL_KEY], what="it")
        for failure in (Unavailable("starting"), RequestError("no such tier")):
            with pytest.raises(type(failure), match=str(failure)):
                await rpc.call(INSPECT, INSPECT.asked(), within_s=SOON_S)
        failure = RuntimeError("a secret")
        with pytest.raises(Exception, match="the daemon's log says why") as told:
            await rpc.call(INSPECT, INSPECT.asked(), within_s=SOON_S)
        assert "secret" not in str(told.value)
        assert "a secret" in caplog.text
        await rpc.aclose()


async def test_a_port_that_is_taken_ends_the_start_and_says_which(daemon, tmp_path):
    (tmp_path / "other").mkdir()
    spec = pool_spec(tmp_path / "other", grpc_port=daemon.grpc_port)
    with pytest.raises(ConfigError, match="grpc_port"):
        async with running(spec):
            pass


async def test_the_control_socket_is_the_user_s_alone(daemon):
    assert daemon.spec.control_socket.stat().st_mode & 0o777 == 0o600
