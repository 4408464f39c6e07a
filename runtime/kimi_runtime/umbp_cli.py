"""`kimistack umbp …`: looking into a running pool daemon, and telling it what to do.

The daemon is the one that `--spec` describes, else that of `kimistack up`; its own socket is
called, or with `--address` its port.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kimi_connect.wire import KEY_BYTES
from kimi_runtime.errors import KimistackError, NotFound
from kimi_runtime.settings import pool_specs, quiet_grpc
from kimi_runtime.spec.file import read_spec
from kimi_runtime.spec.umbp import UmbpSpec
from kimi_runtime.units import parse_bytes, parse_rate, parse_seconds

if TYPE_CHECKING:  # gRPC is loaded once a command runs
    from kimi_runtime.umbp.rpc.client import RpcClient

app = typer.Typer(
    add_completion=False,
    help="Run the KV-cache pool's daemon of this node, or look into one that runs.",
)

CALL_S = 30.0
VERIFY_S = 24 * 3600.0
SPARE_S = 10.0
"""Beyond the time a drain is given, for its answer."""

MOST = 2**53
"""Of bytes, seconds or bytes a second: what a call can name, with room for milliseconds."""

SpecOption = Annotated[
    Path | None,
    typer.Option("--spec", metavar="FILE", help="Its file; none: the newest of `kimistack up`."),
]
SocketOption = Annotated[
    Path | None, typer.Option("--socket", metavar="PATH", help="Its socket, if not the file's.")
]
AddressOption = Annotated[
    str | None, typer.Option("--address", metavar="HOST:PORT", help="Its gRPC port instead.")
]
KeyOption = Annotated[
    Path | None, typer.Option("--call-key", metavar="FILE", help="If not the file's.")
]
Output = Annotated[
    Literal["text", "json"], typer.Option("--output", "-o", help="For people, or for programs.")
]


@app.command()
def inspect(
    spec: SpecOption = None,
    socket: SocketOption = None,
    address: AddressOption = None,
    call_key: KeyOption = None,
    hottest: Annotated[
        int, typer.Option("--hottest", min=0, max=1000, help="Blocks to list.")
    ] = 10,
    output: Output = "text",
) -> None:
    """Show what it holds, for whom, what is used most, how peers fare, and where lookups end."""
    from kimi_runtime.umbp.control.tables import as_dict, inspected
    from kimi_runtime.umbp.rpc.methods import INSPECT

    async def ask(rpc: "RpcClient") -> None:
        answer = await rpc.call(INSPECT, INSPECT.asked(hottest=hottest), within_s=CALL_S)
        _show(as_dict(answer), inspected(answer), output)

    _run(ask, spec, socket, address, call_key)


@app.command()
def verify(
    spec: SpecOption = None,
    socket: SocketOption = None,
    address: AddressOption = None,
    call_key: KeyOption = None,
    tiers: Annotated[
        list[str] | None, typer.Option("--tier", help="memory or ssd; none: both.")
    ] = None,
    rate: Annotated[
        str, typer.Option("--rate", help="Most that is read a second, e.g. 1GiB/s.")
    ] = "256MiB/s",
    output: Output = "text",
) -> None:
    """Check every block against its tag, and drop damaged ones; exit with 1 if there were any."""
    from kimi_runtime.umbp.control.tables import as_dict, verified
    from kimi_runtime.umbp.rpc.methods import VERIFY

    async def ask(rpc: "RpcClient") -> None:
        asked = VERIFY.asked(tiers=tiers or [], bytes_per_s=int(_parsed(parse_rate, rate)))
        damaged: list[str] = []
        done: list[dict[str, Any]] = []
        async for progress in rpc.stream(VERIFY, asked, within_s=VERIFY_S):
            told = as_dict(progress)
            damaged += told.pop("damaged")
            done += [told] if progress.done else []
        _show({"tiers": done, "damaged": damaged}, verified(done, damaged), output)
        if damaged:
            raise typer.Exit(1)

    _run(ask, spec, socket, address, call_key)


@app.command()
def evict(
    spec: SpecOption = None,
    socket: SocketOption = None,
    address: AddressOption = None,
    call_key: KeyOption = None,
    tenant: Annotated[str | None, typer.Option("--tenant", help="All blocks of a tenant.")] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", metavar="HEX", help="A block; repeat it for more.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every block.")] = False,
    until_free: Annotated[
        str | None,
        typer.Option("--until-free", metavar="SIZE", help="The least worth, until 8GiB are free."),
    ] = None,
    memory_only: Annotated[
        bool, typer.Option("--memory-only", help="Leave what is on SSD.")
    ] = False,
    output: Output = "text",
) -> None:
    """Forget blocks that nobody reads."""
    from kimi_runtime.umbp.control.tables import as_dict, evicted
    from kimi_runtime.umbp.rpc.methods import EVICT

    free = None if until_free is None else _parsed(parse_bytes, until_free)
    which: dict[str, Any] = {
        "tenant": tenant,
        "keys": {"keys": [_parsed(_key, key) for key in keys]} if keys else None,
        "all": everything or None,
        "until_free_bytes": free,
    }
    chosen = {name: value for name, value in which.items() if value is not None}
    if len(chosen) != 1:
        raise typer.BadParameter("say one of --tenant, --key, --all and --until-free")

    async def ask(rpc: "RpcClient") -> None:
        epoch = await _epoch_of(rpc)
        asked = EVICT.asked(**chosen, memory_only=memory_only, epoch=epoch)
        answer = await rpc.call(EVICT, asked, within_s=CALL_S)
        _show(as_dict(answer), evicted(answer), output)

    _run(ask, spec, socket, address, call_key)


@app.command()
def drain(
    spec: SpecOption = None,
    socket: SocketOption = None,
    address: AddressOption = None,
    call_key: KeyOption = None,
    within: Annotated[str, typer.Option("--within", help="How long it may take.")] = "60s",
    output: Output = "text",
) -> None:
    """Take no more blocks, bring the valuable ones to peers, and wait for readers."""
    from kimi_runtime.umbp.control.tables import as_dict, drained
    from kimi_runtime.umbp.rpc.methods import DRAIN

    within_s = _parsed(parse_seconds, within)

    async def ask(rpc: "RpcClient") -> None:
        within_ms = max(1, int(1e3 * within_s))
        asked = DRAIN.asked(within_ms=within_ms, epoch=await _epoch_of(rpc))
        answer = await rpc.call(DRAIN, asked, within_s=within_s + SPARE_S)
        _show(as_dict(answer), drained(answer), output)

    _run(ask, spec, socket, address, call_key)


@app.command("reload")
def reload_(
    spec: SpecOption = None,
    socket: SocketOption = None,
    address: AddressOption = None,
    call_key: KeyOption = None,
    output: Output = "text",
) -> None:
    """Have it read its file again; exit with 1 if the file is refused."""
    from kimi_runtime.umbp.control.tables import as_dict, reloaded
    from kimi_runtime.umbp.rpc.methods import RELOAD

    async def ask(rpc: "RpcClient") -> None:
        answer = await rpc.call(RELOAD, RELOAD.asked(), within_s=CALL_S)
        _show(as_dict(answer), reloaded(answer), output)
        if answer.refused:
            raise typer.Exit(1)

    _run(ask, spec, socket, address, call_key)


async def _epoch_of(rpc: "RpcClient") -> int:
    """Of the daemon as it is now, so that what is asked is done by no other."""
    from kimi_runtime.umbp.rpc.methods import INSPECT

    return int((await rpc.call(INSPECT, INSPECT.asked(), within_s=CALL_S)).epoch)


def _run(
    ask: Callable[["RpcClient"], Awaitable[None]],
    spec: Path | None,
    socket: Path | None,
    address: str | None,
    call_key: Path | None,
) -> None:
    """Call the daemon; what was foreseen becomes one line and an exit status."""

    async def run() -> None:
        async with _connected(spec, socket, address, call_key) as rpc:
            await ask(rpc)

    try:
        asyncio.run(run())
    except KimistackError as exc:
        typer.echo(f"kimistack: {' '.join(str(exc).split())}", err=True)
        raise SystemExit(exc.exit_code) from exc


@asynccontextmanager
async def _connected(
    spec: Path | None, socket: Path | None, address: str | None, call_key: Path | None
) -> AsyncIterator["RpcClient"]:
    quiet_grpc()
    from kimi_runtime.auth import read_call_keys
    from kimi_runtime.umbp.rpc.client import RpcClient
    from kimi_runtime.umbp.rpc.tls import Tls

    known = None
    if spec is not None or call_key is None or (socket is None and address is None):
        known = _spec_of(spec)
    if known is not None and socket is None:
        socket = known.socket
    keys = read_call_keys(call_key or _given(known).call_key)
    tls = Tls(known.tls) if address and known and known.tls else None
    target = address or f"unix:{socket}.control"
    rpc = RpcClient(
        target,
        keys,
        what=f"the pool daemon at {address or socket}",
        credentials=None if tls is None else tls.channel_credentials(),
        server_name=None if tls is None else tls.files.name,
    )
    try:
        yield rpc
    finally:
        await rpc.aclose()


def _given(spec: UmbpSpec | None) -> UmbpSpec:
    assert spec is not None  # it was looked for wherever anything of it is needed
    return spec


def _spec_of(path: Path | None) -> UmbpSpec:
    if path is None:
        known = pool_specs()
        if not known:
            raise NotFound(
                "no pool of `kimistack up` is known here; name a daemon's file by --spec, or "
                "--socket or --address with --call-key"
            )
        path = known[0]
    return read_spec(path, UmbpSpec)


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    try:
        value = parse(text)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    if isinstance(value, int | float) and value > MOST:
        raise typer.BadParameter(f"{text!r} is more than any daemon has or waits for")
    return value


def _key(text: str) -> bytes:
    """A block's whole key; a table shows the beginnings of keys."""
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ValueError(
            f"{text!r} is no key, which has {2 * KEY_BYTES} hexadecimal digits: inspect -o json "
            "lists whole keys"
        )
    return key


def _show(told: dict[str, Any], text: str, output: str) -> None:
    try:
        typer.echo(json.dumps(told) if output == "json" else text)
    except BrokenPipeError:  # the reader has seen enough, which is no error
        raise
    except OSError as exc:
        # what Python still has of it would fail again when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise KimistackError(
            f"the answer can't be written to standard output: {exc.strerror}"
        ) from exc
