"""`kimistack capacity`: what a deployment's GPUs hold and how it bears load, printed.

The command itself belongs to the console script, which can also read a KimiDeployment.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kimi_runtime.errors import ConfigError
from kimi_runtime.spec.capacity import CapacitySpec

if TYPE_CHECKING:  # numpy is loaded once the command runs
    from kimi_runtime.sim.capacity import Capacity

GB = 1e9


def tell_capacity(spec: CapacitySpec, json_file: Path | None) -> None:
    """Print tables, and write the same as JSON. ConfigError and CapacityError as `holdings`."""
    from kimi_runtime.sim.capacity import capacity

    count = len(spec.concurrency)

    def progress(done: int) -> None:
        if sys.stderr.isatty():
            typer.echo(f"\r{done} of {count} loads", nl=done == count, err=True)

    found = capacity(spec, told=progress)
    typer.echo(as_text(found), nl=False)
    if json_file is not None:
        try:
            json_file.write_text(found.model_dump_json(indent=1) + "\n", encoding="utf-8")
        except OSError as exc:
            raise ConfigError(f"{json_file} cannot be written: {exc.strerror}") from exc


def as_text(found: "Capacity") -> str:
    """Memory, then load, then what to know about both."""
    spec = found.spec
    lines = [f"{spec.name or spec.model}: {spec.model} on {spec.gpu}", ""]
    lines += [
        "| role | instances x GPUs | weights GB/GPU | KV GB/GPU | KV bytes/token "
        "| largest context | GB/GPU with it | of memory full |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one.role.value} | {one.replicas} x {one.gpus} | {one.weights.total / GB:.1f} "
        f"| {one.kv_memory / GB:.1f} | {one.token_bytes:.0f} | {one.largest_context} "
        f"| {one.at_largest_context / GB:.1f} | {one.full / GB:.1f} |"
        for one in found.holdings
    ]
    if found.loads:
        low, high = spec.input, spec.output
        lines += [
            "",
            f"Requests of {low[0]} to {low[1]} tokens in, {high[0]} to {high[1]} out:",
            "",
            "| concurrency | total tok/s/GPU | output tok/s/GPU | TTFT | ITL |",
            "| --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {one.concurrency} | {one.total_tokens_per_s_per_gpu:.1f} "
            f"| {one.output_tokens_per_s_per_gpu:.1f} | {one.ttft_s:.3f} s "
            f"| {1e3 * one.itl_s:.2f} ms |"
            for one in found.loads
        ]
    if found.notes:
        lines += ["", *(f"Note: {note}." for note in found.notes)]
    return "\n".join(lines) + "\n"
