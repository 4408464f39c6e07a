"""The processes themselves: exit status, the one line of an error, and the drain on SIGTERM."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest

from kimi_runtime.engine.adapters.scripted import Pace
from kimi_runtime.engine.adapters.scripts import Reply
from kimi_runtime.server.serve import bind
from kimi_runtime.settings import read_settings
from kimi_runtime.spec.router import RouterSpec
from scripted_stack import MODEL, Part, call_key_file, ids_of, running_worker

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT / 'runtime'}:{ROOT / 'operator'}"}
HELLO = ids_of("Hello from a slow worker.<|im_end|>")


def command(part, spec):
    return [sys.executable, "-m", "kimi_runtime.cli", part, "--spec", str(spec)]


def router_spec(folder, **fields):
    spec = {
        "port": 0,
        "model_name": MODEL,
        "workers": [],
        "call_key": str(folder / "call.key"),
        "thinking": False,
    }
    path = folder / "router.json"
    path.write_text(json.dumps(spec | fields))
    return path


def fails(part, spec, env=ENVIRONMENT):
    """Run it; check for exit status 2 and a single line; return the line."""
    done = subprocess.run(command(part, spec), env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("kimistack: ")
    return done.stderr


def test_a_wrong_file_ends_with_status_2_and_one_line(tmp_path):
    call_key_file(tmp_path)
    assert "cannot be read" in fails("worker", tmp_path / "missing.json")
    assert "port" in fails("router", router_spec(tmp_path, port=-1))
    assert "colour" in fails("router", router_spec(tmp_path, colour="red"))


def test_a_port_in_use_ends_with_status_2_and_names_it(tmp_path):
    call_key_file(tmp_path)
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in fails("router", router_spec(tmp_path, port=port))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"call_key": "/nowhere/call.key"}, "call key"),
        ({"api_keys": "/nowhere/keys"}, "API keys"),
        ({"vocabulary": "/nowhere/tiktoken.model"}, "vocabulary"),
        ({"family": "k3"}, "family"),
    ],
    ids=["call-key", "api-keys", "vocabulary", "family"],
)
def test_a_missing_part_ends_with_status_2_and_names_it(tmp_path, fields, says):
    call_key_file(tmp_path)
    assert says in fails("router", router_spec(tmp_path, **fields))


def test_a_worker_without_torch_names_the_extra_that_brings_it(tmp_path):
    call_key_file(tmp_path)
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "torch.py").write_text("raise ModuleNotFoundError(name='torch')\n")
    limits = {"kv_bytes": "1MiB", "max_running": 1, "step_tokens": 64}
    spec = {
        "name": "w",
        "role": "both",
        "port": 0,
        "weights": {"kind": "random"},
        "limits": limits,
        "run_dir": str(tmp_path),
        "call_key": str(tmp_path / "call.key"),
    }
    path = tmp_path / "worker.json"
    path.write_text(json.dumps(spec))
    env = {**ENVIRONMENT, "PYTHONPATH": f"{hidden}:{ENVIRONMENT['PYTHONPATH']}"}
    assert "kimistack[engine]" in fails("worker", path, env)


async def test_sigterm_lets_the_running_answer_finish_and_exits_with_0(tmp_path):
    part = Part("w", lambda request: Reply(HELLO), pace=Pace(output_ids_per_s=30.0))
    with bind("127.0.0.1", 0) as probe:
        port = probe.getsockname()[1]
    async with running_worker(part, call_key_file(tmp_path)) as worker:
        endpoints = [{"name": "w", "role": "both", "url": worker.url}]
        process = await asyncio.create_subprocess_exec(
            *command("router", router_spec(tmp_path, port=port, workers=endpoints)),
            env=ENVIRONMENT,
            stderr=asyncio.subprocess.PIPE,
        )
        logs = asyncio.ensure_future(process.stderr.read())
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http:
            async with asyncio.timeout(30):
                while not await ready(http):
                    await asyncio.sleep(0.05)
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "hi"}],
                "stream": True,
            }
            async with http.post("/v1/chat/completions", json=body) as answer:
                await answer.content.readline()
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(10):
                    text = (await answer.content.read()).decode()
        assert "[DONE]" in text
        assert '"finish_reason":"stop"' in text
        async with asyncio.timeout(10):
            assert await process.wait() == 0
        lines = [json.loads(line) for line in (await logs).splitlines()]
        assert lines[-1]["event"] == "stopped"
        assert any(line["event"] == "request" for line in lines)


async def ready(http):
    try:
        async with http.get("/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectorError:
        return False


def test_the_environment_names_a_replica_of_a_shared_file():
    spec = RouterSpec(port=0, model_name="m", workers=(), call_key="k")
    settings = read_settings({"KIMISTACK_NAME": "router-7", "KIMISTACK_LOG_LEVEL": "debug"})
    assert (settings.onto(spec).name, settings.onto(spec).log_level) == ("router-7", "debug")
    assert read_settings({}).onto(spec) is spec
    with pytest.raises(ValueError, match="log_level"):
        read_settings({"KIMISTACK_LOG_LEVEL": "loud"}).onto(spec)
