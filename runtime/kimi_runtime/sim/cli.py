"""`kimistack sim`: deployments on paper, from the command line."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import TypeAdapter

from kimi_runtime.sim.command import clear, foreseen, read_json, show, write
from kimi_runtime.sim.reports_cli import HtmlFile, compare, experiment, sections_of

if TYPE_CHECKING:  # numpy and the planner are loaded once a command runs
    from kimi_runtime.sim.features import Features
    from kimi_runtime.sim.saved import SavedRun
    from kimi_runtime.sim.tasks import Outcome, Task

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Simulate deployments: production's decisions over virtual time.",
)

app.command()(experiment)
app.command()(compare)

JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write figures and all requests.")
]


@app.command()
def run(
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Repeat it to compare; `all`: ours and all baselines."),
    ] = None,
    sessions: Annotated[int, typer.Option("--sessions", min=1)] = 128,
    turns: Annotated[
        int | None, typer.Option("--turns", min=1, help="Of a session; none: drawn.")
    ] = None,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", help="Repeat it for more runs of each policy.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 1,
    cluster: Annotated[
        Path | None, typer.Option("--cluster", metavar="FILE", help="A ClusterSpec as JSON.")
    ] = None,
    events: Annotated[
        Path | None,
        typer.Option("--events", metavar="FILE", help="A JSON list of ClusterEvents."),
    ] = None,
    mix: Annotated[
        Path | None, typer.Option("--mix", metavar="FILE", help="An AgentMix as JSON.")
    ] = None,
    everything: Annotated[
        bool,
        typer.Option("--everything", help="People, subagents, compaction, aborts, tenants too."),
    ] = False,
    gap_cap: Annotated[
        float | None, typer.Option("--gap-cap", help="No pause is longer, in seconds.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="In place of drawn sessions.")
    ] = None,
    trace_format: Annotated[
        str, typer.Option("--format", help="See docs/simulator.md: mooncake and six others.")
    ] = "mooncake",
    trace_block: Annotated[
        int | None,
        typer.Option("--trace-block", min=1, help="Tokens of a Mooncake hash id; none: 512."),
    ] = None,
    lanes: Annotated[
        int | None, typer.Option("--lanes", min=1, help="Sessions at a time; none: all.")
    ] = None,
    hints: Annotated[
        bool, typer.Option("--hints", help="Pools are told where sessions stand.")
    ] = False,
    features: Annotated[
        Path | None, typer.Option("--features", metavar="FILE", help="Features as JSON.")
    ] = None,
    json_file: JsonFile = None,
    html_file: HtmlFile = None,
) -> None:
    """Run sessions of coding agents, or a trace, on a simulated cluster, and print what came."""
    with foreseen():
        from kimi_runtime.sim.cluster import ClusterEvent, ClusterSpec
        from kimi_runtime.sim.html import page
        from kimi_runtime.sim.report import markdown
        from kimi_runtime.sim.tasks import BASELINES, OURS, Task, policy_of
        from kimi_runtime.sim.workload import AgentMix

        shape = read_json(mix, TypeAdapter(AgentMix)) if mix is not None else AgentMix()
        if everything:
            shape = shape.everything()
        changes = {"turns": turns, "gap_cap_s": gap_cap}
        shape = AgentMix.model_validate(
            shape.model_dump() | {name: to for name, to in changes.items() if to is not None}
        )
        base = Task.model_validate(
            {
                "cluster": read_json(cluster, TypeAdapter(ClusterSpec))
                if cluster
                else ClusterSpec(),
                "sessions": sessions,
                "mix": shape,
                "trace": None if trace is None else _trace(trace, trace_format, trace_block),
                "lanes": lanes,
                "events": (
                    ()
                    if events is None
                    else read_json(events, TypeAdapter(tuple[ClusterEvent, ...]))
                ),
                "features": _features(features, hints=hints),
            }
        )
        names = list(policy or [OURS])
        if "all" in names:
            names = [OURS, *BASELINES]
        for name in names:
            policy_of(name, base.cluster)
        tasks = [
            base.model_copy(update={"policy": name, "seed": number})
            for number in seed or [1]
            for name in names
        ]
        kept = json_file is not None or html_file is not None
        outcomes = _all(tasks, jobs, keep=kept)
        text = markdown([one.summary for one in outcomes])
        typer.echo(text, nl=False)
        runs = _saved(tasks, outcomes) if kept else []
        if json_file is not None:
            _write_json(json_file, runs)
        if html_file is not None:
            write(html_file, page("Simulated runs", sections_of(text, runs)).encode())


@app.command()
def calibrate(
    most: Annotated[
        int, typer.Option("--up-to", min=1, help="Concurrency up to which points are simulated.")
    ] = 256,
    json_file: JsonFile = None,
) -> None:
    """Simulate every published MI355X point, and print how far off each is: fitted and held out."""
    with foreseen():
        from kimi_runtime.sim.calibration import Compared, compared, errors

        typer.echo("| series | concurrency | tok/s | error | TTFT | error | TPOT | error |")
        typer.echo("| --- | --- | --- | --- | --- | --- | --- | --- |")

        def tell(one: Compared) -> None:
            ours = one.simulated
            kind = "fitted" if one.fitted else "held out"
            typer.echo(
                f"| {one.series} ({kind}) | {ours.concurrency} "
                f"| {ours.total_tokens_per_s:.0f} | {one.error('total_tokens_per_s'):+.1%} "
                f"| {ours.ttft_s:.3f} s | {one.error('ttft_s'):+.1%} "
                f"| {1e3 * ours.tpot_s:.2f} ms | {one.error('tpot_s'):+.1%} |"
            )

        made = compared(most=most, told=tell)
        groups = {"fitted": True, "held out": False}
        for name, fitted in groups.items():
            some = errors(one for one in made if one.fitted is fitted)
            if some is not None:
                typer.echo(
                    f"{name}: {some.points} points; mean error of TPOT {some.tpot:.1%} "
                    f"(worst {some.worst_tpot:.1%}), of throughput {some.throughput:.1%} "
                    f"(worst {some.worst_throughput:.1%}), of TTFT {some.ttft:.1%}"
                )
        if json_file is not None:
            text = TypeAdapter(list[Compared]).dump_json(made, indent=1)
            write(json_file, text + b"\n")


def _features(file: Path | None, *, hints: bool) -> "Features":
    from kimi_runtime.sim.features import Features

    chosen = Features() if file is None else read_json(file, TypeAdapter(Features))
    return chosen.model_copy(update={"hints": hints or chosen.hints})


def _trace(path: Path, form: str, block_tokens: int | None) -> dict[str, object]:
    fields: dict[str, object] = {"path": path, "format": form}
    return fields if block_tokens is None else fields | {"block_tokens": block_tokens}


def _all(tasks: "Sequence[Task]", jobs: int, *, keep: bool) -> "list[Outcome]":
    """Run the tasks, `jobs` at a time, in their order."""
    from kimi_runtime.sim.tasks import simulate

    act = partial(simulate, keep=keep)
    made = []
    if jobs == 1 or len(tasks) == 1:
        for number, task in enumerate(tasks):
            made.append(simulate(task, keep=keep, progress=_progress(task, number, len(tasks))))
        clear()
        return made
    with ProcessPoolExecutor(min(jobs, len(tasks)), mp_context=get_context("spawn")) as pool:
        for one in pool.map(act, tasks):
            made.append(one)
            show(f"{len(made)} of {len(tasks)} runs")
    clear()
    return made


def _progress(task: "Task", number: int, of: int) -> Callable[[int], None]:
    def tell(requests: int) -> None:
        show(f"run {number + 1} of {of} ({task.policy}, seed {task.seed}): {requests} requests")

    return tell


def _saved(tasks: "Sequence[Task]", outcomes: "Sequence[Outcome]") -> "list[SavedRun]":
    from kimi_runtime.sim.saved import SavedRun, rounded

    return [
        SavedRun(
            task=task,
            summary=outcome.summary.model_dump(mode="json"),
            requests=[rounded(one) for one in outcome.requests],
        )
        for task, outcome in zip(tasks, outcomes, strict=True)
    ]


def _write_json(path: Path, runs: "Sequence[SavedRun]") -> None:
    from kimi_runtime.sim.saved import written

    made = [run.model_dump(mode="json", exclude={"scenario", "arm"}) for run in runs]
    with written(path) as file:
        file.write(json.dumps({"runs": made}).encode() + b"\n")
