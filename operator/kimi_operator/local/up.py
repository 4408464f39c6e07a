"""`kimistack up`: from a file to a running stack, in this process or in one of its own."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from kimi_operator.api.load import load_deployment, parse_deployment
from kimi_operator.desired.effective import Effective, resolve
from kimi_operator.desired.processes import (
    LOCAL_HOST,
    ROUTER,
    LocalPlan,
    Places,
    ProcessPlan,
    plan_processes,
    process_names,
)
from kimi_operator.local.events import Event, Tell
from kimi_operator.local.folders import Folders, write_private
from kimi_operator.local.inspect import kill_leftovers
from kimi_operator.local.machine import free_ports, measure, require_free
from kimi_operator.local.stack import Command, Stack
from kimi_operator.local.supervisor import Supervisor
from kimi_operator.presets.preset import load_preset
from kimi_runtime.errors import ConfigError, KimistackError
from kimi_runtime.spec.api_keys import read_tenants
from kimi_runtime.spec.config_file import load_config

SUPERVISE = ("-m", "kimi_operator.cli", "supervise")
DEFAULT_EXAMPLE = "kimi-nano.yaml"


class StartFailed(KimistackError):
    """The stack could not start, or ended because a part it cannot do without did."""


@dataclass(frozen=True)
class Front:
    """Where the router listens, as far as the command line overrules the file; `Places.nodes`."""

    host: str = LOCAL_HOST
    port: int | None = None
    api_keys: Path | None = None
    nodes: int = 1


def effective_of(file: Path | None) -> Effective:
    """The effective deployment of a file, or of the packaged kimi-nano example."""
    if file is None:
        text = files("kimi_operator.local").joinpath(DEFAULT_EXAMPLE).read_text("utf-8")
        return resolve(parse_deployment(text, DEFAULT_EXAMPLE), load_preset, DEFAULT_EXAMPLE)
    return resolve(load_deployment(file), load_preset, str(file))


@contextmanager
def prepared(effective: Effective, home: Path, shm: Path, front: Front) -> Iterator["Prepared"]:
    """Everything a stack needs before its first process, and the lock that goes with it.

    Raises ConfigError (it runs already, a port is in use, a file is missing), CapacityError.
    """
    name = effective.deployment.name
    if not shm.is_dir():
        raise ConfigError(f"KIMISTACK_SHM: there is no folder {shm}")
    folders = Folders(home, shm, name)
    lock = folders.lock()
    if lock is None:
        running = folders.read_state()
        where = f" at {running.url}" if running else ""
        raise ConfigError(f"{name} is already running{where}; stop it with: kimistack down {name}")
    try:
        cleaned = kill_leftovers(folders)
        port = front.port or effective.deployment.spec.router.port
        require_free(front.host, port, "set spec.router.port or --port")
        places = _places(effective, folders, front, port)
        plan = plan_processes(effective, places, measure(shm))
        folders.prepare()
        stack = _write_specs(plan, folders)
        yield Prepared(stack, folders, lock, cleaned)
    finally:
        os.close(lock)


@dataclass(frozen=True)
class Prepared:
    """A stack ready to be started by whoever holds the lock."""

    stack: Stack
    folders: Folders
    lock: int
    cleaned: bool

    def run(self, tell: Tell) -> None:
        """Supervise here until SIGINT or SIGTERM. Raises StartFailed with the log's end."""
        supervise(self.stack, self.folders, tell)

    def detach(self, tell: Tell, home: Path, shm: Path) -> None:
        """Supervise in a process of its own; return once the stack serves. Raises StartFailed."""
        stack_file = self.folders.write_stack(self.stack)
        read_end, write_end = os.pipe()
        log = self.folders.logs / "supervisor.log"
        arguments = (str(stack_file), str(home), str(shm), str(write_end))
        with log.open("ab") as output:
            supervisor = subprocess.Popen(
                (sys.executable, *SUPERVISE, *arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(write_end, self.lock),
            )
        os.close(write_end)
        _follow(supervisor, read_end, tell, log)


def _follow(supervisor: "subprocess.Popen[bytes]", read_end: int, tell: Tell, log: Path) -> None:
    """Pass events on until the stack serves; Ctrl-C meanwhile stops it."""
    failure = None
    with os.fdopen(read_end, encoding="utf-8") as events:
        try:
            for line in events:
                event = Event.model_validate_json(line)
                tell(event)
                if event.kind == "serving":
                    supervisor.returncode = 0  # it goes on without us; nobody waits for it
                    return
                if event.kind == "failed":
                    failure = event.text
        except KeyboardInterrupt:
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()
            raise
    supervisor.wait()
    raise StartFailed(failure or f"the supervisor ended before the stack served; see {log}")


def supervise(stack: Stack, folders: Folders, tell: Tell) -> None:
    """Run the stack until a signal. The caller holds the lock. Raises StartFailed."""
    failure: list[str] = []

    def heard(event: Event) -> None:
        if event.kind == "failed":
            failure.append(event.text)
        tell(event)

    async def main() -> bool:
        supervisor = Supervisor(stack, folders, os.getpid(), heard)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, supervisor.request_stop)
        return await supervisor.run()

    try:
        if not asyncio.run(main()):
            raise StartFailed("".join(failure))
    finally:
        folders.remove_state()
        folders.remove_run_dir()


def _places(effective: Effective, folders: Folders, front: Front, port: int) -> Places:
    spec = effective.deployment.spec
    if front.api_keys is not None and not front.api_keys.is_file():
        raise ConfigError(f"--api-key-file: there is no file {front.api_keys}")
    if front.api_keys is not None:
        read_tenants(front.api_keys)  # the router would refuse it only after the workers started
    names = [name for name in process_names(spec, front.nodes) if name != ROUTER]
    ports = dict(zip(names, free_ports(LOCAL_HOST, len(names)), strict=True))
    return Places(
        run_dir=folders.run,
        call_key=folders.call_key,
        ports={**ports, ROUTER: port},
        host=front.host,
        api_keys=front.api_keys.absolute() if front.api_keys else None,
        vocabulary=_model_files(effective),
        explain=folders.explain,
        record=folders.record,
        nodes=front.nodes,
    )


def _model_files(effective: Effective) -> Path | None:
    """Check that the model's files are there and understood; the rank file, where there is one."""
    model = effective.deployment.spec.model
    if model.config is not None:
        if not Path(model.config).is_file():
            raise ConfigError(f"spec.model.config: there is no file {model.config}")
        load_config(model.config)
    if model.vocabulary is not None:
        if not Path(model.vocabulary).is_file():
            raise ConfigError(f"spec.model.vocabulary: there is no file {model.vocabulary}")
        return Path(model.vocabulary).absolute()
    if model.source in ("packaged", "random") or model.path is None:
        return None
    folder = Path(model.path)
    if not (folder / "config.json").is_file():
        there = "has no config.json" if folder.is_dir() else "does not exist"
        raise ConfigError(f"spec.model.path: {folder} {there}; give the model's folder")
    load_config(folder)
    if next(folder.glob("*.safetensors"), None) is None:
        raise ConfigError(f"spec.model.path: {folder} has no .safetensors file with weights")
    ranks = folder / "tiktoken.model"
    return ranks.absolute() if ranks.is_file() else None


def _write_specs(plan: LocalPlan, folders: Folders) -> Stack:
    for process in plan.processes:
        text = process.spec.model_dump_json(indent=1)
        write_private(folders.specs / f"{process.name}.json", text)
    return Stack(
        name=plan.name,
        model=plan.model,
        url=_url(plan.router),
        state_dir=folders.state,
        run_dir=folders.run,
        commands=tuple(_command(process, folders) for process in plan.processes),
    )


def _command(process: ProcessPlan, folders: Folders) -> Command:
    spec = folders.specs / f"{process.name}.json"
    return Command(
        name=process.name,
        kind=process.kind,
        role=process.role,
        argv=(sys.executable, "-m", "kimi_runtime.cli", process.kind, "--spec", str(spec)),
        port=process.port,
        ready_url=f"{_url(process)}/readyz",
        start_s=process.start_s,
        stop_s=process.stop_s,
    )


def _url(process: ProcessPlan) -> str:
    """Where this machine reaches a process: a wildcard address is reached by loopback."""
    host = {"0.0.0.0": LOCAL_HOST, "::": "::1"}.get(process.host, process.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{process.port}"
