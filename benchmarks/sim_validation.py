"""What the simulator predicts against what happens: the same sessions on this machine and on paper.

Starts `kimistack up` with two aggregated kimi-nano workers, times lone requests, the same requests
again when their KV is there, and lone batches, fits step times and what the front end takes to
those, plays sessions of coding agents (lengths divided by 64), and simulates the
same sessions: prompts, answers and pauses as they were played, times from the fit. The sessions
take no part in the fit. Prints predicted beside measured.

    python benchmarks/sim_validation.py [--sessions 12] [--turns 5] [--kv-memory 32MiB]

The machine is part of what is measured: it is timed before the sessions are played and once more
after, the fit is to both, and how far they lie apart is how far the machine itself changed
meanwhile. Of the workers' processor seconds, which other programs lengthen less than times, as many
are predicted as a second of lone steps took, and as the idle workers do in the same time.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pool_replay import Arm, Stack, running

from kimi_runtime.bench.replay.client import Endpoint
from kimi_runtime.bench.replay.outcome import Outcome
from kimi_runtime.bench.replay.play import play
from kimi_runtime.bench.replay.report import summary
from kimi_runtime.bench.replay.texts import Scale, Texts
from kimi_runtime.protocol.vocabulary import open_vocabulary
from kimi_runtime.sim.cluster import ClusterSpec
from kimi_runtime.sim.measured import MeasuredStep, MeasuredTiming, measured_timing
from kimi_runtime.sim.report import spread
from kimi_runtime.sim.sessions import Session, Turn, Workload
from kimi_runtime.sim.tasks import policy_of
from kimi_runtime.sim.workload import AgentMix, agents
from kimi_runtime.sim.world import Run, World
from kimi_runtime.spec.published import published
from kimi_runtime.spec.sizes import kv_bytes_per_token
from kimi_runtime.units import parse_bytes

WORKERS, BLOCK_TOKENS, STEP_TOKENS, MAX_RUNNING = 2, 64, 512, 64
POOL = "1GiB"
PROMPTS = (32, 96, 192, 384, 640, 960)
LANES, CONTEXTS = (4, 12), (32, 768)
ANSWER = 32
IDLE_S = 3.0

Pair = tuple[float, float]
Decoded = tuple[float, float, float]
"""Rows of a worker's steps, tokens that each held, seconds between tokens."""
Prompted = tuple[int, int, float]
"""Tokens of a prompt, those of them whose KV was there, seconds to the first token."""


@dataclass(frozen=True)
class Fit:
    """Step times, and what is around them.

    The front end takes `front_s`, and `front_token_s` for each token of a prompt, computed or not:
    it is sent, rendered, tokenised, hashed and looked up. The workers take `processor_share`
    processor seconds in a second of steps, and `idle_share` in any second.
    """

    step: MeasuredStep
    front_s: float
    front_token_s: float
    processor_share: float
    idle_share: float

    def before(self, prompt_tokens: int) -> float:
        """Seconds of the front end before a prompt is at a worker."""
        return self.front_s + self.front_token_s * prompt_tokens


@dataclass(frozen=True)
class Timed:
    """What lone answers, answers together and lone prompts took."""

    alone: tuple[Decoded, ...]
    together: tuple[Decoded, ...]
    prompts: tuple[Prompted, ...]
    processor_s: float
    """Of the workers, for `alone` and `prompts`, which took `span_s`."""
    span_s: float
    idle_share: float

    def fit(self) -> Fit:
        """Decoding first, then prompts with what decoding told."""
        decode = self.alone + self.together
        sizes = [(1.0, rows, rows * held) for rows, held, _ in decode]
        fixed_s, row_s, kv_token_s = _fitted(sizes, [took_s for *_, took_s in decode])
        sizes = [
            (1.0, tokens, tokens - held, (tokens - held) * (tokens + held) / 2)
            for tokens, held, _ in self.prompts
        ]
        steps = [-(-(tokens - held) // STEP_TOKENS) for tokens, held, _ in self.prompts]
        rest = [s - fixed_s * count for (*_, s), count in zip(self.prompts, steps, strict=True)]
        front_s, front_token_s, token_s, pair_s = _fitted(sizes, [max(s, 1e-3) for s in rest])
        step = MeasuredStep(
            fixed_s=fixed_s, row_s=row_s, token_s=token_s, kv_token_s=kv_token_s, pair_s=pair_s
        )
        steps_s = sum(took_s for *_, took_s in self.alone) * ANSWER
        steps_s += sum(s - front_s - front_token_s * tokens for tokens, _, s in self.prompts)
        busy_s = self.processor_s - self.idle_share * self.span_s
        return Fit(step, front_s, front_token_s, max(busy_s, 0.0) / steps_s, self.idle_share)

    def __add__(self, other: "Timed") -> "Timed":
        """Both."""
        return Timed(
            self.alone + other.alone,
            self.together + other.together,
            self.prompts + other.prompts,
            self.processor_s + other.processor_s,
            self.span_s + other.span_s,
            (self.idle_share + other.idle_share) / 2,
        )


class Calibration:
    """Lone requests and lone batches against a running stack."""

    def __init__(self, endpoint: Endpoint, workers: "Workers", seed: int) -> None:
        self._endpoint, self._workers, self._seed = endpoint, workers, seed
        self._texts = Texts.of(open_vocabulary(), seed=seed)
        self._number = 0

    def timed(self) -> Timed:
        """All of them, once."""
        idle_share = self._workers.idle_share()
        began_s, since_s = self._workers.processor_s(), time.perf_counter()
        alone = tuple(self._decode(1, tokens) for tokens in CONTEXTS)
        prompts = [one for tokens in PROMPTS for one in self._prompts(tokens)]
        busy_s = self._workers.processor_s() - began_s
        span_s = time.perf_counter() - since_s
        together = [self._decode(lanes, tokens) for lanes in LANES for tokens in CONTEXTS]
        return Timed(alone, tuple(together), tuple(prompts), busy_s, span_s, idle_share)

    def _decode(self, lanes: int, tokens: int) -> Decoded:
        """So many answers at a time, each after so many tokens."""
        done = self._ask([(tokens, ANSWER)] * lanes, lanes)
        pauses = [
            (one.ended_s - one.first_s) / (one.output_tokens - 1)
            for one in done
            if one.ended_s is not None and one.first_s is not None and one.output_tokens > 1
        ]
        return max(lanes / WORKERS, 1.0), tokens + ANSWER / 2, float(np.median(pauses))

    def _prompts(self, tokens: int) -> list[Prompted]:
        """Three prompts, and each once more, when the workers have its KV."""
        first = self._number
        done = self._ask([(tokens, 1)] * 3, lanes=1)
        self._number = first
        done += self._ask([(tokens, 1)] * 3, lanes=1)
        return [
            (one.prompt_tokens, one.cached_tokens, one.ttft_s)
            for one in done
            if one.ttft_s is not None
        ]

    def _ask(self, requests: Sequence[tuple[int, int]], lanes: int) -> list[Outcome]:
        sessions = []
        for prompt, answer in requests:
            self._number += 1
            name, text = f"c{self._seed}-{self._number}", (self._number + 1) << 20
            sessions.append(Session(name, text, (Turn(prompt, answer),)))
        load = Workload("calibration", tuple(sessions), lanes)
        return asyncio.run(play(load, self._endpoint, self._texts))


class Workers:
    """The stack's worker processes."""

    def __init__(self, stack: Stack) -> None:
        found = stack.processes().items()
        self._pids = [one["pid"] for name, one in found if name.startswith("decode-")]

    def processor_s(self) -> float:
        """Processor seconds so far, of all together."""
        ticks = 0
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    def idle_share(self) -> float:
        """Processor seconds in a second in which nobody asks anything."""
        began_s = self.processor_s()
        time.sleep(IDLE_S)
        return (self.processor_s() - began_s) / IDLE_S


def _fitted(columns: Sequence[tuple[float, ...]], seconds: Sequence[float]) -> list[float]:
    """Least squares of relative errors with no factor below zero."""
    left, right = np.array(columns), np.array(seconds)
    weights = 1.0 / right
    used = list(range(left.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(left[:, used] * weights[:, None], right * weights, rcond=None)
        if (found >= 0).all() or len(used) == 1:
            break
        del used[int(found.argmin())]
    factors = [0.0] * left.shape[1]
    for place, factor in zip(used, found.tolist(), strict=True):
        factors[place] = max(factor, 0.0)
    return factors


def played(load: Workload, outcomes: Sequence[Outcome], fit: Fit) -> Workload:
    """The sessions as they came about: tokens as they were counted, pauses as they were."""
    by_session: dict[str, list[Outcome]] = {}
    for one in outcomes:
        by_session.setdefault(one.session, []).append(one)
    sessions = []
    for session in load.sessions:
        turns, length = [], 0
        prefix = min(round(session.prefix_tokens / 64), by_session[session.name][0].prompt_tokens)
        asked = by_session[session.name]
        following = [*asked[1:], asked[-1]]
        for turn, one, after in zip(session.turns, asked, following, strict=True):
            append = max(one.prompt_tokens - (length or prefix), 0)
            output = max(one.output_tokens, 1)
            # what the front end adds to the next request comes before it
            pause_s = turn.pause_s + fit.before(after.prompt_tokens)
            turns.append(replace(turn, append_tokens=append, output_tokens=output, pause_s=pause_s))
            length = one.prompt_tokens + output
        sessions.append(replace(session, turns=tuple(turns), prefix_tokens=prefix))
    return Workload(load.name, tuple(sessions), load.lanes)


def simulated(load: Workload, fit: Fit, kv_memory: str) -> Run:
    """The same sessions on paper."""
    cluster = ClusterSpec(
        model="kimi-nano",
        gpu="cpu",
        tensor=1,
        workers=WORKERS,
        workers_per_node=WORKERS,
        block_tokens=BLOCK_TOKENS,
        step_tokens=STEP_TOKENS,
        max_running=MAX_RUNNING,
        max_context_tokens=4096,
        pool=parse_bytes(POOL),
        hbm_tokens=parse_bytes(kv_memory) // kv_bytes_per_token(published("kimi-nano"), "bf16"),
        measured=fit.step,
        speed_spread=0.0,
    )
    return World(cluster, load, policy_of("longest_prefix", cluster), seed=1).run()


def figures(outcomes: Sequence[Outcome], run: Run, fit: Fit, busy_s: float) -> dict[str, Pair]:
    """Measured and predicted, by name."""
    real, records = summary(outcomes), run.records
    before = [fit.before(one.prompt_tokens) for one in records]
    pairs = list(zip(records, before, strict=True))
    ttft = spread(one.ttft_s + front_s for one, front_s in pairs if one.ttft_s is not None)
    e2e = spread(one.e2e_s + front_s for one, front_s in pairs if one.e2e_s is not None)
    prompt = sum(one.prompt_tokens for one in records)
    computed = sum(one.computed_tokens for one in records)
    steps_s = sum(worker.busy_s for worker in run.cluster.workers.values())
    return {
        "TTFT p50, s": (real.ttft.p50, ttft.p50),
        "TTFT p90, s": (real.ttft.p90, ttft.p90),
        "end to end p50, s": (real.e2e.p50, e2e.p50),
        "end to end p90, s": (real.e2e.p90, e2e.p90),
        "requests/s": (real.requests_per_s, len(records) / run.makespan_s),
        "hit ratio": (real.cached_share, 1 - computed / prompt),
        "workers' processor s": (
            busy_s,
            fit.processor_share * steps_s + fit.idle_share * run.makespan_s,
        ),
    }


def main() -> None:
    """Calibrate, play, calibrate again, simulate, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--kv-memory", default="32MiB", help="of each worker")
    arguments = parser.parse_args()
    mix = AgentMix(turns=arguments.turns, gap_cap_s=2.0, start_over_s=15.0, output_cap=4096)
    load = agents(arguments.sessions, 1, mix)
    with running(Arm("validation", f"{{dram: {POOL}}}"), arguments.kv_memory) as stack:
        endpoint = Endpoint(f"http://127.0.0.1:{stack.port}/v1", "kimi-nano", timeout_s=300)
        workers = Workers(stack)
        Calibration(endpoint, workers, seed=4).timed()  # whatever is done once is done now
        before = Calibration(endpoint, workers, seed=2).timed()
        texts, began_s = Texts.of(open_vocabulary(), seed=1), workers.processor_s()
        outcomes = asyncio.run(play(load, endpoint, texts, scale=Scale(tokens=64.0)))
        busy_s = workers.processor_s() - began_s
        after = Calibration(endpoint, workers, seed=3).timed()
    fit = (before + after).fit()
    run = simulated(played(load, outcomes, fit), fit, arguments.kv_memory)
    print("| | measured | predicted | error |\n| --- | --- | --- | --- |")
    for name, (real, predicted) in figures(outcomes, run, fit, busy_s).items():
        print(f"| {name} | {real:.3g} | {predicted:.3g} | {predicted / real - 1:+.0%} |")
    print(f"\n{fit}\na prompt of 300 tokens, then 8 rows' step, by the fit before and after:")
    for one in (before.fit(), after.fit()):
        prompt_s = one.before(300) + measured(one).step_s(0, 0.0, 300, 300**2 / 2)
        print(f"{prompt_s:.3f} s, {measured(one).step_s(8, 0.0):.4f} s")


def measured(fit: Fit) -> MeasuredTiming:
    """The fit as the simulator uses it."""
    return measured_timing("kimi-nano", "cpu", tensor=1, step=fit.step)


if __name__ == "__main__":
    main()
