"""`kimistack up` as a command with a state folder of its own, and the API it serves."""

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_S = 60.0


class Stack:
    """The command line with a state folder of its own, and the API it serves."""

    def __init__(self, home: Path, port: int) -> None:
        paths = f"{ROOT / 'operator'}:{ROOT / 'runtime'}"
        self.env = {**os.environ, "KIMISTACK_HOME": str(home), "PYTHONPATH": paths}
        self.port = port
        self.home = home
        self.said = ""

    def command(
        self, *arguments: str, within_s: float = START_S
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "kimi_operator.cli", *arguments],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=within_s,
        )

    def processes(self) -> dict[str, dict[str, Any]]:
        found = json.loads(self.command("status", "--json").stdout)
        return {line["process"]: line for report in found for line in report["processes"]}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as refused:
            with refused:
                return refused.code, json.load(refused)

    def chat(self, messages: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        body = {"model": "kimi-nano", "messages": messages, "max_tokens": 24, "temperature": 0}
        status, answer = self.post("/v1/chat/completions", {**body, **more})
        assert status == 200, answer
        return answer

    def metric(self, process: str, name: str) -> float:
        port = self.processes()[process]["port"]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def until(self, state: Callable[[], bool], within_s: float = 3 * START_S) -> None:
        """Ask until it is so."""
        end_s = time.monotonic() + within_s
        while not state():
            assert time.monotonic() < end_s
            time.sleep(0.1)
