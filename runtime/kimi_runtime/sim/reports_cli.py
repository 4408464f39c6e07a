"""`kimistack sim experiment` and `compare`: what many runs show together."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import TypeAdapter

from kimi_runtime.sim.command import clear, foreseen, show, write

if TYPE_CHECKING:  # numpy and the planner are loaded once a command runs
    from kimi_runtime.sim.experiments.cells import Cells
    from kimi_runtime.sim.experiments.findings import Findings
    from kimi_runtime.sim.experiments.regime import Cell, Regime
    from kimi_runtime.sim.html import Section
    from kimi_runtime.sim.pictures import Picture
    from kimi_runtime.sim.saved import SavedRun

HtmlFile = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Write a page with charts.")
]


def experiment(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="pool, migration, overall, peers, pd, or a file.")
    ],
    seeds: Annotated[
        str | None, typer.Option("--seeds", help="101-110, or 1,3,7-9; none: the regime's own.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Processes.")] = 1,
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", help="Repeat it; none: all of the regime.")
    ] = None,
    arm: Annotated[
        list[str] | None, typer.Option("--arm", help="Repeat it; none: all of the regime.")
    ] = None,
    cells: Annotated[
        Path | None,
        typer.Option(
            "--cells", metavar="FOLDER", help="Where finished runs are kept; none: beside the JSON."
        ),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Figures and every request; compressed if named .gz."
        ),
    ] = None,
    html_file: HtmlFile = None,
) -> None:
    """Run an experiment whose regime stands in a file, and print what it shows.

    Finished runs are kept, so that a command that was ended goes on where it was.
    """
    with foreseen():
        from kimi_runtime.sim.experiments.cells import Cells, code_digest
        from kimi_runtime.sim.experiments.findings import findings
        from kimi_runtime.sim.experiments.regime import cells_of, load, seeds_of
        from kimi_runtime.sim.experiments.tables import markdown

        regime, digest = load(name)
        asked = cells_of(
            regime,
            seeds=None if seeds is None else seeds_of(seeds),
            scenarios=scenario or (),
            arms=arm or (),
        )
        kept = Cells(cells or _beside(json_file, regime.name))
        missing = kept.missing(asked)
        with _bar(len(missing), f"{regime.name}: {len(asked)} runs") as step:
            kept.fill(asked, jobs, told=lambda _: step(1))
        found = findings(
            regime,
            asked,
            kept.read,
            regime_digest=digest,
            code_digest=code_digest(),
            told=lambda done: show(f"reading {done} of {len(asked)} runs"),
        )
        clear()
        typer.echo(markdown(found), nl=False)
        if json_file is not None:
            _write_json(json_file, regime, found, asked, kept)
        if html_file is not None:
            write(html_file, _page(regime, found, asked, kept).encode())


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Of `run` or `experiment`.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Held against the first.")],
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write figures and ratios.")
    ] = None,
    html_file: HtmlFile = None,
) -> None:
    """Hold two files of runs against each other: ratios above 1 say that the second is better."""
    with foreseen():
        from kimi_runtime.sim.compare import Compared, compared, markdown
        from kimi_runtime.sim.html import Section, page
        from kimi_runtime.sim.saved import read_runs

        ours, theirs = read_runs(first), read_runs(second)
        made = compared(ours, theirs)
        text = markdown(made)
        typer.echo(text, nl=False)
        if json_file is not None:
            adapter = TypeAdapter(list[Compared])
            write(json_file, adapter.dump_json(list(made), indent=1) + b"\n")
        if html_file is not None:
            sections = [Section("", text)]
            for one in made:
                drawn = _drawn(ours, one.first, f"first: {one.first}")
                drawn += _drawn(theirs, one.second, f"second: {one.second}")
                sections.append(Section(one.second, pictures=drawn))
            write(html_file, page(f"{second.name} against {first.name}", sections).encode())


def sections_of(text: str, runs: "Sequence[SavedRun]") -> "list[Section]":
    """A table, and charts of every policy's runs."""
    from kimi_runtime.sim.html import Section

    labels = dict.fromkeys(run.label for run in runs)
    pictures = [picture for label in labels for picture in _drawn(runs, label, label)]
    return [Section("", text), Section("All seeds of each policy", pictures=pictures)]


def _drawn(runs: "Sequence[SavedRun]", label: str, name: str) -> "list[Picture]":
    from kimi_runtime.sim.pictures import mean_of, picture_of

    chosen = [run for run in runs if run.label == label]
    terms = mean_of([run.summary["terms"] for run in chosen])
    return [picture_of(name, [run.requests for run in chosen], terms)]


def _page(regime: "Regime", found: "Findings", asked: "Sequence[Cell]", kept: "Cells") -> str:
    from kimi_runtime.sim.experiments.tables import markdown
    from kimi_runtime.sim.html import Section, page
    from kimi_runtime.sim.pictures import mean_of, picture_of

    sections = [Section("", markdown(found))]
    for scenario, arms in regime.drawn.items():
        pictures = []
        for arm in arms:
            cells = [cell for cell in asked if (cell.scenario, cell.arm) == (scenario, arm)]
            runs = [kept.read(cell) for cell in cells]
            if runs:
                terms = mean_of([run["summary"]["terms"] for run in runs])
                pictures.append(picture_of(arm, [run["requests"] for run in runs], terms))
        if pictures:
            says = f"{regime.scenarios[scenario].says}"
            sections.append(Section(scenario, says, pictures))
    return page(f"Experiment {regime.name}", sections)


def _write_json(
    path: Path, regime: "Regime", found: "Findings", asked: "Sequence[Cell]", kept: "Cells"
) -> None:
    from kimi_runtime.sim.saved import written

    head = {
        "experiment": regime.name,
        "ratios": {name: one.model_dump(mode="json") for name, one in found.ratios.items()},
        "findings": found.model_dump(mode="json"),
        "regime": regime.model_dump(mode="json"),
    }
    with written(path) as file:
        file.write(json.dumps(head, indent=1)[:-2].encode() + b',\n "runs": [\n')  # it goes on
        for number, cell in enumerate(asked):
            names = json.dumps({"scenario": cell.scenario, "arm": cell.arm}).encode()
            file.write((b",\n" if number else b"") + names[:-1] + b", " + kept.text(cell)[1:])
        file.write(b"\n]}\n")


def _beside(json_file: Path | None, name: str) -> Path:
    if json_file is None:
        return Path(f"{name}.cells")
    return json_file.with_name(json_file.name.removesuffix(".gz").removesuffix(".json") + ".cells")


@contextmanager
def _bar(count: int, label: str) -> Iterator[Callable[[int], None]]:
    """A progress bar with the time that is left, on a terminal; one line elsewhere."""
    hidden = not sys.stderr.isatty()
    if hidden:
        typer.echo(f"{label}, {count} of them still to be made", err=True)
    with typer.progressbar(
        length=count, label=label, file=sys.stderr, show_eta=True, show_pos=True, hidden=hidden
    ) as bar:
        yield bar.update
