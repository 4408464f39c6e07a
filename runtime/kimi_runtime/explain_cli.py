"""`kimistack explain`: why a request went where it went, and how well that was predicted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from pydantic import TypeAdapter

from kimi_runtime.errors import ConfigError, KimistackError, NotFound
from kimi_runtime.settings import explain_logs
from kimi_runtime.spec.router import POLICY_KINDS, PolicySpec

if TYPE_CHECKING:
    from kimi_runtime.router.explain.record import Record

What = Annotated[
    str | None,
    typer.Argument(
        metavar="[REQUEST|FILE]",
        help="A request's id, as its X-Request-ID says; with --worst and --replay, or if it is "
        "the path of a file, the log.",
    ),
]
LogFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="FILE",
        help="The router's log; none: the newest of `kimistack up`, in a router's pod its own.",
    ),
]
Output = Annotated[
    Literal["table", "json"], typer.Option("--output", "-o", help="For people, or for programs.")
]


def explain(
    what: What = None,
    file: LogFile = None,
    worst_count: Annotated[
        int | None,
        typer.Option("--worst", min=1, help="So many decisions that turned out latest."),
    ] = None,
    replaying: Annotated[
        bool, typer.Option("--replay", help="Make the log's decisions again by --policy.")
    ] = False,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help=f"One of {', '.join(POLICY_KINDS)}.")
    ] = "cost",
    output: Output = "table",
) -> None:
    """Show a request's decision with every plan's price and what came of it.

    Without a request: how well first tokens were predicted.
    """
    request = what
    if what is not None and (worst_count or replaying or Path(what).is_file()):
        file, request = Path(what), None
    try:
        records = _records(file)
        if replaying:
            told = _replayed(records, policy, output)
        elif worst_count is not None or request is not None:
            told = _shown(records, request, worst_count, output)
        else:
            told = _summed(records, output)
    except KimistackError as exc:
        typer.echo(f"kimistack: {' '.join(str(exc).split())}", err=True)
        raise SystemExit(exc.exit_code) from exc
    typer.echo(told, nl=False)


def _shown(records: Sequence["Record"], request: str | None, count: int | None, output: str) -> str:
    from kimi_runtime.router.explain.record import line_of
    from kimi_runtime.router.explain.table import explained, worst

    found = worst(records, count) if count is not None else _of(request or "", records)
    if output == "json":
        return "".join(line_of(record).decode() for record in found)
    return "\n".join(map(explained, found))


def _summed(records: Sequence["Record"], output: str) -> str:
    from kimi_runtime.router.explain.table import summary, summary_text

    return json.dumps(summary(records)) + "\n" if output == "json" else summary_text(records)


def _replayed(records: Sequence["Record"], policy: str, output: str) -> str:
    from kimi_runtime.router.explain.replay import replay
    from kimi_runtime.router.explain.table import replayed_text

    told = replay(records, _policy(policy, records))
    return json.dumps(told.as_json()) + "\n" if output == "json" else replayed_text(told)


def _records(file: Path | None) -> list["Record"]:
    """All of the log, the older file first."""
    from kimi_runtime.router.explain.record import older, read_records

    if file is None:
        known = explain_logs()
        if not known:
            raise NotFound(
                "no router has written an explain log here; one of `kimistack up`, or in its own "
                "pod, does so with `router: {policy: cost}` in the deployment's file, from its "
                "first request on; or name a log by --file"
            )
        file = known[0]
    parts = [part for part in (older(file), file) if part.exists()] or [file]
    return [record for part in parts for record in read_records(part)]


def _of(request: str, records: Sequence["Record"]) -> list["Record"]:
    found = [record for record in records if record.request == request]
    if not found:
        raise NotFound(
            f"no decision of request {request!r} is among the {len(records)} of the log; it is "
            "still running, another router had it, or its line was already replaced by newer ones"
        )
    return found


def _policy(name: str, records: Sequence["Record"]) -> PolicySpec:
    if name not in POLICY_KINDS:
        raise ConfigError(f"no policy {name!r} is known; use one of {', '.join(POLICY_KINDS)}")
    for record in records:
        if record.policy.kind == name:
            return record.policy
    spec: PolicySpec = TypeAdapter(PolicySpec).validate_python({"kind": name})
    return spec
