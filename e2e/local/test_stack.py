"""`kimistack up` for real: every process, one small model, requests over HTTP."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kimi_operator.local.machine import free_ports
from local_stack import START_S, Stack

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["unit"],
        },
    },
}


ALONE = """
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {name: alone}
spec: {preset: kimi-nano/cpu, decode: {}, kvPool: {enabled: false}}
"""


BY_TCP = """
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {name: by-tcp}
spec: {preset: kimi-nano/cpu, transfer: {backend: tcp}, kvPool: {enabled: false}}
"""


ON_SSD = """
apiVersion: kimistack.dev/v1alpha1
kind: KimiDeployment
metadata: {{name: on-ssd}}
spec:
  preset: kimi-nano/cpu
  kvPool: {{dram: 64MiB, ssd: {{path: {folder}, capacity: 256MiB}}}}
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The packaged example, up and detached."""
    made = Stack(tmp_path_factory.mktemp("home"), free_ports("127.0.0.1", 1)[0])
    started = made.command("up", "--detach", "--port", str(made.port))
    try:
        assert started.returncode == 0, started.stderr
        assert f"http://127.0.0.1:{made.port}/v1" in started.stdout
        made.said = started.stdout
        yield made
    finally:
        made.command("down")


def test_every_process_is_ready(stack: Stack):
    processes = stack.processes()
    assert list(processes) == ["umbp-0", "prefill-0", "decode-0", "router-0"]
    assert all(line["ready"] and line["restarts"] == 0 for line in processes.values())


def test_the_printed_curl_line_works(stack: Stack):
    (line,) = (line for line in stack.said.splitlines() if line.startswith("curl "))
    answer = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60)
    message = json.loads(answer.stdout)["choices"][0]["message"]
    assert (message["role"], "9932" in message["content"]) == ("assistant", True)


def test_a_second_up_says_that_it_runs(stack: Stack):
    again = stack.command("up", "--port", str(stack.port))
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
    assert "already running" in again.stderr


def test_the_next_turn_finds_the_one_before_it(stack: Stack):
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You answer in one short sentence. " * 20},
        {"role": "user", "content": "What is the weather?"},
    ]
    first = stack.chat(messages, tools=[TOOL], tool_choice="required")
    (call,) = first["choices"][0]["message"]["tool_calls"][:1]
    assert json.loads(call["function"]["arguments"])["unit"] in ("celsius", "fahrenheit")
    messages += [
        first["choices"][0]["message"],
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    second = stack.chat(messages, tools=[TOOL])
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_prefill_and_decode_are_different_workers(stack: Stack):
    stack.chat([{"role": "user", "content": "Who computes this?"}])
    assert stack.metric("prefill-0", 'kimistack_worker_finished_total{how="handed_off"}') > 0
    assert stack.metric("decode-0", "kimistack_worker_hand_offs_taken_total") > 0


def test_one_worker_without_cache_says_the_same(stack: Stack, tmp_path: Path):
    port = free_ports("127.0.0.1", 1)[0]
    alone = Stack(tmp_path / "home", port)
    (tmp_path / "alone.yaml").write_text(ALONE)
    prompts = ["Hello", "List the files of this folder. " * 30]
    try:
        up = alone.command(
            "up", "--detach", "-f", str(tmp_path / "alone.yaml"), "--port", str(port)
        )
        assert up.returncode == 0, up.stderr
        for prompt in [*prompts, prompts[1]]:  # the last time from the stack's cache
            messages = [{"role": "user", "content": prompt}]
            both = [each.chat(messages)["choices"][0]["message"] for each in (stack, alone)]
            assert both[0] == both[1]
    finally:
        alone.command("down")


def test_tcp_between_processes_hands_over_the_same_as_shared_memory(stack: Stack, tmp_path: Path):
    port = free_ports("127.0.0.1", 1)[0]
    by_tcp = Stack(tmp_path / "home", port)
    (tmp_path / "by-tcp.yaml").write_text(BY_TCP)
    text = "List the files of this folder, and say what is in each. " * 8
    try:
        up = by_tcp.command(
            *("up", "--detach", "-f", str(tmp_path / "by-tcp.yaml"), "--port", str(port)),
            within_s=4 * START_S,
        )
        assert up.returncode == 0, up.stderr
        messages: list[dict[str, Any]] = [{"role": "user", "content": text}]
        for turn in ("first", "second"):
            before = {
                source: by_tcp.metric(
                    "decode-0", f'kimistack_worker_prompt_tokens_total{{source="{source}"}}'
                )
                for source in ("hand_off", "computed", "hbm")
            }
            both = [each.chat(messages) for each in (stack, by_tcp)]
            answers = [answer["choices"][0]["message"] for answer in both]
            assert answers[0] == answers[1]
            got = {
                source: by_tcp.metric(
                    "decode-0", f'kimistack_worker_prompt_tokens_total{{source="{source}"}}'
                )
                - count
                for source, count in before.items()
            }
            assert got["computed"] == 1
            assert got["hand_off"] > 0
            assert (got["hbm"] > 0) is (turn == "second")
            # the opening of the answer, which the client does not pay for, is in the prompt as well
            assert sum(got.values()) >= both[1]["usage"]["prompt_tokens"]
            messages += [answers[1], {"role": "user", "content": "And then?"}]
        used = 'kimistack_worker_hand_off_transports_total{transport="tcp"}'
        assert by_tcp.metric("decode-0", used) >= 2
        assert by_tcp.metric("decode-0", "kimistack_worker_hand_off_failures_total") == 0
        assert stack.metric("decode-0", used.replace("tcp", "shm")) > 0
        folder = next(Path("/dev/shm").glob("kimistack-*-by-tcp-*"))
        assert not list(folder.glob("*.kv"))
    finally:
        by_tcp.command("down")


def test_a_killed_worker_is_restarted_and_served_again(stack: Stack):
    killed = stack.processes()["decode-0"]["pid"]
    os.kill(killed, signal.SIGKILL)
    log = stack.home / "kimi-nano" / "logs" / "supervisor.log"
    _read_until(log, r'"kind":"ready","process":"decode-0"', count=2)
    assert stack.processes()["decode-0"]["restarts"] == 1
    assert stack.chat([{"role": "user", "content": "Still there?"}])["choices"]


def test_what_two_turns_used_is_found_on_ssd_by_a_new_pool_and_a_new_worker(tmp_path: Path):
    port = free_ports("127.0.0.1", 1)[0]
    own = Stack(tmp_path / "home", port)
    (tmp_path / "on-ssd.yaml").write_text(ON_SSD.format(folder=tmp_path / "ssd"))
    log = own.home / "on-ssd" / "logs" / "supervisor.log"
    try:
        up = own.command(
            *("up", "--detach", "-f", str(tmp_path / "on-ssd.yaml"), "--port", str(port)),
            within_s=4 * START_S,
        )
        assert up.returncode == 0, up.stderr
        messages = [{"role": "user", "content": "Tell me about solid state disks. " * 40}]
        first = own.chat(messages)["choices"][0]["message"]
        messages += [first, {"role": "user", "content": "And about memory?"}]
        before = own.chat(messages)
        own.until(lambda: own.metric("umbp-0", "kimistack_umbp_ssd_blocks") > 0)
        own.until(lambda: own.metric("umbp-0", "kimistack_umbp_ssd_write_queue_blocks") == 0)
        for arena in Path("/dev/shm").glob("kimistack-*-on-ssd-*/*.arena"):
            arena.unlink()  # with it the next daemon would have the blocks in memory at once
        for name in ("umbp-0", "prefill-0"):
            os.kill(own.processes()[name]["pid"], signal.SIGKILL)
            _read_until(log, f'"kind":"ready","process":"{name}"', count=2)
        assert own.metric("umbp-0", "kimistack_umbp_ssd_recovered_blocks_total") > 0
        after = own.chat(messages)
        assert after["choices"][0]["message"] == before["choices"][0]["message"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        landed = 'kimistack_umbp_ssd_promoted_blocks_total{how="landed"}'
        assert own.metric("umbp-0", landed) > 0
        from_pool = 'kimistack_worker_prompt_tokens_total{source="pool"}'
        assert own.metric("prefill-0", from_pool) > 0
    finally:
        own.command("down")


def _read_until(log: Path, pattern: str, count: int) -> None:
    """Follow a log until the pattern was written so often."""
    follower = subprocess.Popen(["tail", "-n", "+1", "-F", log], stdout=subprocess.PIPE, text=True)
    try:
        assert follower.stdout is not None
        for line in follower.stdout:
            count -= bool(re.search(pattern, line))
            if count == 0:
                return
    finally:
        follower.kill()
        follower.wait()
        assert follower.stdout is not None
        follower.stdout.close()


def test_ctrl_c_ends_a_stack_in_the_foreground_and_leaves_nothing(tmp_path: Path):
    port = free_ports("127.0.0.1", 1)[0]
    own = Stack(tmp_path / "home", port)
    foreground = subprocess.Popen(
        [sys.executable, "-m", "kimi_operator.cli", "up", "--port", str(port)],
        env=own.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert foreground.stdout is not None
    for line in foreground.stdout:
        if line.startswith("stop it with: Ctrl-C"):
            break
    pids = [line["pid"] for line in own.processes().values()]
    foreground.send_signal(signal.SIGINT)
    foreground.communicate(timeout=60)
    assert foreground.returncode == 0
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert json.loads(own.command("status", "--json").stdout) == []


def test_down_stops_everything_and_can_be_said_twice(tmp_path: Path):
    port = free_ports("127.0.0.1", 1)[0]
    own = Stack(tmp_path / "home", port)
    assert own.command("up", "--detach", "--port", str(port)).returncode == 0
    pids = [line["pid"] for line in own.processes().values()]
    shared = json.loads((tmp_path / "home" / "kimi-nano" / "state.json").read_text())["run_dir"]
    assert own.command("down").stdout == "kimi-nano is stopped\n"
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert not Path(shared).exists()
    assert own.command("down").stdout == "nothing is running\n"
