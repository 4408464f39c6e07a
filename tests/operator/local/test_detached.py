"""A supervisor in a process of its own: detached, killed, taken down."""

import os
import signal
import sys
from pathlib import Path

import pytest

from kimi_operator.local.events import Event
from kimi_operator.local.folders import Folders
from kimi_operator.local.inspect import reports, take_down
from kimi_operator.local.stack import ProcessState, StackState
from kimi_operator.local.up import Prepared, StartFailed
from stand_in_stack import ended, handle_of, stack_of

ROOTS = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _sources_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOTS / 'operator'}:{ROOTS / 'runtime'}")


def detach(folders: Folders, tmp_path: Path, **what: str) -> list[Event]:
    lock = folders.lock()
    assert lock is not None
    stack = stack_of(folders, tmp_path, **what)
    heard: list[Event] = []
    try:
        Prepared(stack, folders, lock, False).detach(heard.append, folders.home, folders.run.parent)
    finally:
        os.close(lock)
    return heard


def state_of(folders: Folders) -> StackState:
    state = folders.read_state()
    assert state is not None
    return state


def test_it_goes_on_after_the_command_returned_and_down_stops_it(folders: Folders, tmp_path: Path):
    heard = detach(folders, tmp_path, pool="", decode_0="", router="")
    assert heard[-1].kind == "serving"
    (report,) = reports(folders.home, folders.run.parent, ("nano",))
    assert report.phase == "ready"
    assert [line.ready for line in report.processes] == [True, True, True]
    assert all(line.memory_bytes and line.uptime_s is not None for line in report.processes)
    handles = [handle_of(line.pid) for line in report.processes if line.pid]
    assert take_down(folders)
    assert all(ended(handle, 0.0) for handle in handles)
    assert (folders.run.exists(), folders.read_state(), folders.is_running()) == (
        False,
        None,
        False,
    )
    assert not take_down(folders)


def test_one_that_takes_itself_out_of_service_leaves_a_deployment_that_is_not_ready(
    folders: Folders, tmp_path: Path
):
    detach(folders, tmp_path, pool="leaves", router="")
    (tmp_path / "left").touch()  # as a drained pool does
    (report,) = reports(folders.home, folders.run.parent, ("nano",))
    take_down(folders)
    assert report.phase == "degraded"
    assert [line.phase for line in report.processes] == ["unready", "ready"]


def test_a_killed_supervisor_takes_its_processes_with_it(folders: Folders, tmp_path: Path):
    detach(folders, tmp_path, pool="", decode_0="stubborn", router="")
    state = state_of(folders)
    handles = [handle_of(process.pid) for process in state.processes if process.pid]
    assert len(handles) == 3
    os.kill(state.pid, signal.SIGKILL)
    assert all(ended(handle) for handle in handles)


def test_what_a_killed_supervisor_left_is_seen_and_cleaned_up(folders: Folders, tmp_path: Path):
    detach(folders, tmp_path, router="")
    supervisor = handle_of(state_of(folders).pid)
    os.kill(state_of(folders).pid, signal.SIGKILL)
    assert ended(supervisor)
    (report,) = reports(folders.home, folders.run.parent, ("nano",))
    assert report.phase == "killed"
    assert folders.run.exists()
    assert not take_down(folders)
    assert not folders.run.exists()


def test_a_failed_start_is_reported_to_the_command(folders: Folders, tmp_path: Path):
    with pytest.raises(StartFailed, match=r"decode-0 ended while starting \(exit code 3\)"):
        detach(folders, tmp_path, decode_0="crash", router="")
    assert not folders.is_running()
    assert not folders.run.exists()


def test_only_one_supervisor_has_the_lock(folders: Folders, tmp_path: Path):
    detach(folders, tmp_path, router="")
    try:
        assert folders.lock() is None
    finally:
        take_down(folders)
    lock = folders.lock()
    assert lock is not None
    os.close(lock)


def test_a_pid_that_was_given_to_another_process_is_not_signalled(folders: Folders):
    victim = os.posix_spawn(
        sys.executable, [sys.executable, "-c", "import signal; signal.pause()"], {}
    )
    handle = handle_of(victim)
    try:
        state = StackState(
            name="nano",
            model="m",
            url="http://127.0.0.1:1",
            run_dir=folders.run,
            pid=victim,
            started_ticks=1,
            processes=(
                ProcessState(
                    name="router",
                    kind="router",
                    role="router",
                    port=1,
                    ready_url="http://127.0.0.1:1/readyz",
                    phase="ready",
                    pid=victim,
                    started_ticks=1,
                ),
            ),
        )
        folders.write_state(state)
        take_down(folders)
        assert not ended(os.dup(handle), 0.0)
    finally:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        os.waitpid(victim, 0)
        os.close(handle)
