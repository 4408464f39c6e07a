"""`examples/agent.py` where it finds no server, or one that refuses it."""

import asyncio
import socket
import sys
from pathlib import Path

from kimi_runtime.engine.adapters.scripts import Reply
from scripted_stack import Part, ids_of, running_stack

AGENT = Path(__file__).parents[3] / "examples" / "agent.py"


async def run_agent(base_url):
    """Its exit code and what it wrote to stderr."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, AGENT, "--base-url", base_url, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    return process.returncode, errors.decode()


async def test_without_a_server_it_says_how_to_start_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nothing listens, and nobody else can
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        code, errors = await run_agent(url)
    assert (code, "Traceback" in errors) == (1, False)
    assert f"nothing answers at {url}" in errors
    assert "make up" in errors


async def test_what_a_server_refuses_is_said_in_its_words(tmp_path):
    worker = Part("w", lambda _: Reply(ids_of("Yes.<|im_end|>")))
    async with running_stack(tmp_path, [worker]) as stack:
        code, errors = await run_agent(f"{stack.url}/v2")
    assert (code, "Traceback" in errors) == (1, False)
    assert "answers 404: " in errors
    assert "there is no GET '/v2/models' here" in errors
