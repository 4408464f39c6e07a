"""`kimistack bench`: sessions of coding agents against a live endpoint."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kimi_runtime.errors import ConfigError
from kimi_runtime.sim.command import clear, foreseen, read_json, show, write

if TYPE_CHECKING:  # the vocabulary and the HTTP client are loaded once the command runs
    from kimi_runtime.bench.replay.client import Endpoint
    from kimi_runtime.bench.replay.outcome import Outcome
    from kimi_runtime.bench.replay.texts import Scale
    from kimi_runtime.sim.sessions import Workload


def bench(
    url: Annotated[str, typer.Option("--url", help="OpenAI base URL.")] = (
        "http://127.0.0.1:8000/v1"
    ),
    model: Annotated[str, typer.Option("--model", help="The name to ask for.")] = "kimi-nano",
    api_key: Annotated[str, typer.Option("--api-key", envvar="OPENAI_API_KEY")] = "none",
    sessions: Annotated[int, typer.Option("--sessions", min=1)] = 16,
    turns: Annotated[int | None, typer.Option("--turns", min=1, help="None: drawn.")] = 8,
    lanes: Annotated[
        int | None, typer.Option("--lanes", min=1, help="Sessions at a time; none: all.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Which sessions, and their texts.")] = 1,
    mix: Annotated[
        Path | None, typer.Option("--mix", metavar="FILE", help="An AgentMix as JSON.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="In place of drawn sessions.")
    ] = None,
    trace_format: Annotated[
        str, typer.Option("--format", help="Of the trace, as for `kimistack sim run`.")
    ] = "kimistack",
    divide: Annotated[
        float, typer.Option("--divide", min=1, help="Every length by this: small machines.")
    ] = 64.0,
    pace: Annotated[
        float, typer.Option("--pace", min=0, help="Every pause is multiplied by this.")
    ] = 1.0,
    gap_cap: Annotated[
        float | None, typer.Option("--gap-cap", help="No pause is longer, in seconds.")
    ] = None,
    vocabulary: Annotated[
        Path | None,
        typer.Option("--vocabulary", metavar="FILE", help="Rank file; none: the test vocabulary."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds for one request.")] = 120.0,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write figures and all requests.")
    ] = None,
) -> None:
    """Replay coding sessions against a live endpoint, greedily, and print how it did.

    The sessions are those of `kimistack sim run` with the same seed. Exit status 1 if a request
    failed.
    """
    with foreseen():
        from kimi_runtime.bench.replay.client import Endpoint
        from kimi_runtime.bench.replay.report import markdown, rows, summary
        from kimi_runtime.bench.replay.texts import Scale

        load = _workload(sessions, turns, lanes, seed, mix, trace, trace_format, gap_cap)
        endpoint = Endpoint(url.rstrip("/"), model, api_key, timeout)
        outcomes = asyncio.run(
            _replayed(load, endpoint, vocabulary, Scale(tokens=divide, pauses=pace), seed)
        )
        figures = summary(outcomes)
        typer.echo(markdown({load.name: figures}), nl=False)
        if json_file is not None:
            data = {"summary": figures.model_dump(), "requests": rows(outcomes)}
            write(json_file, json.dumps(data, indent=1).encode())
        for one in [one for one in outcomes if not one.ok][:10]:
            typer.echo(f"{one.session} turn {one.turn}: {one.error}", err=True)
        if figures.failed:
            raise SystemExit(1)


def _workload(
    sessions: int,
    turns: int | None,
    lanes: int | None,
    seed: int,
    mix: Path | None,
    trace: Path | None,
    trace_format: str,
    gap_cap_s: float | None,
) -> "Workload":
    from pydantic import TypeAdapter

    from kimi_runtime.sim.traces import Format, read_trace
    from kimi_runtime.sim.workload import AgentMix, agents

    if trace is not None:
        kind = TypeAdapter[Format](Format).validate_python(trace_format)
        try:
            with trace.open(encoding="utf-8") as lines:
                load = read_trace(lines, kind, name=str(trace), limit=sessions, gap_cap_s=gap_cap_s)
        except OSError as exc:
            raise ConfigError(f"{trace} cannot be read: {exc.strerror}") from exc
        return replace(load, lanes=lanes)
    chosen = AgentMix() if mix is None else read_json(mix, TypeAdapter(AgentMix))
    update = {"turns": turns or chosen.turns, "gap_cap_s": gap_cap_s or chosen.gap_cap_s}
    return agents(sessions, seed, chosen.model_copy(update=update), lanes=lanes)


async def _replayed(
    load: "Workload", endpoint: "Endpoint", vocabulary: Path | None, scale: "Scale", seed: int
) -> "list[Outcome]":
    from kimi_runtime.bench.replay.play import play
    from kimi_runtime.bench.replay.texts import Texts
    from kimi_runtime.protocol.vocabulary import open_vocabulary

    done = failed = 0

    def told(outcome: "Outcome") -> None:
        nonlocal done, failed
        done, failed = done + 1, failed + (not outcome.ok)
        show(f"{done} of {load.turns} requests, {failed} failed")

    texts = Texts.of(open_vocabulary(vocabulary), seed=seed)
    try:
        return await play(load, endpoint, texts, scale=scale, on_outcome=told)
    finally:
        clear()
