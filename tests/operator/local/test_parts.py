"""The small parts of local supervision, each by itself."""

import itertools
import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from kimi_operator.local.child import exit_text, roll_over, tail
from kimi_operator.local.display import shown
from kimi_operator.local.events import Event
from kimi_operator.local.folders import Folders, write_private
from kimi_operator.local.inspect import the_one
from kimi_operator.local.logs import follow, log_files
from kimi_operator.local.machine import free_ports, measure, require_free, started_ticks
from kimi_operator.local.restarts import LAST_DELAY_S, MOST_RAPID, RAPID_S, Restarts
from kimi_runtime.errors import ConfigError
from stand_in_stack import stack_of


def test_delays_double_up_to_a_limit_and_then_it_is_given_up():
    restarts = Restarts()
    delays = [restarts.after(0.1, was_ready=False) for _ in range(MOST_RAPID + 1)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, None]
    assert all(delay is None or delay <= LAST_DELAY_S for delay in delays)


def test_a_process_that_served_long_enough_starts_its_count_anew():
    restarts = Restarts()
    delays = [restarts.after(RAPID_S + 1, was_ready=True) for _ in range(20)]
    assert (set(delays), restarts.total) == ({0.5}, 20)


def test_a_slow_start_that_fails_is_no_long_life():
    restarts = Restarts(most_rapid=1)
    assert restarts.after(RAPID_S + 1, was_ready=False) == 0.5
    assert restarts.after(RAPID_S + 1, was_ready=False) is None


def test_ports_are_free_and_distinct():
    ports = free_ports("127.0.0.1", 50)
    assert len(set(ports)) == 50
    for port in ports[:5]:
        require_free("127.0.0.1", port, "change it")


def test_a_host_that_is_not_ours_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:8000"):
        require_free("192.0.2.1", 8000, "change it")


def test_a_port_just_closed_counts_as_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            server.accept()[0].close()
    require_free("127.0.0.1", port, "change it")


def test_the_machine_has_memory(tmp_path: Path):
    machine = measure(tmp_path)
    assert 0 < machine.memory_bytes < 2**50
    assert machine.shm_bytes > 0


def test_a_process_is_told_from_a_later_one_by_its_start():
    assert started_ticks(os.getpid()) == started_ticks(os.getpid())
    assert started_ticks(2**22 - 1) is None


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (-9, "signal SIGKILL"), (-70, "signal 70")]
)
def test_exit_codes_are_said_in_words(code: int, text: str):
    assert exit_text(code) == text


def test_the_tail_of_a_log_survives_any_bytes(tmp_path: Path):
    log = tmp_path / "a.log"
    log.write_bytes(b"one\n\xff\xfe\nthree\n")
    assert tail(log, 2) == ["\ufffd\ufffd", "three"]
    assert tail(tmp_path / "none.log", 2) == []


def test_only_a_large_log_is_rolled_over(tmp_path: Path):
    log = tmp_path / "a.log"
    log.write_text("1234")
    roll_over(log, cap_bytes=4)
    assert log.exists()
    log.write_text("12345")
    roll_over(log, cap_bytes=4)
    assert not log.exists()
    assert (tmp_path / "a.log.1").read_text() == "12345"


def test_a_private_file_replaces_another_as_a_whole(tmp_path: Path):
    path = tmp_path / "key"
    path.write_text("old")
    path.chmod(0o644)
    write_private(path, "new")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_the_call_key_is_made_once(folders: Folders):
    first = folders.call_key.read_text()
    folders.prepare()
    assert folders.call_key.read_text() == first
    assert len(first.strip()) == 64


def test_a_run_folder_of_somebody_else_is_not_touched(folders: Folders, tmp_path: Path):
    (tmp_path / "precious").mkdir()
    folders.remove_run_dir()
    folders.run.symlink_to(tmp_path / "precious")
    with pytest.raises(ConfigError, match="is no folder of yours"):
        folders.prepare()
    assert (tmp_path / "precious").exists()
    folders.run.unlink()


def test_a_state_that_cannot_be_read_is_no_state(folders: Folders):
    assert folders.read_state() is None
    (folders.state / "state.json").write_text("{")
    assert folders.read_state() is None


def test_two_homes_share_no_memory(tmp_path: Path):
    runs = {Folders(tmp_path / home, tmp_path, "nano").run for home in ("a", "b")}
    assert len(runs) == 2


def test_the_only_deployment_needs_no_name(folders: Folders):
    home, shm = folders.home, folders.run.parent
    assert the_one(home, shm, None) == "nano"
    with pytest.raises(ConfigError, match="there is no deployment other; there are nano"):
        the_one(home, shm, "other")
    lock = Folders(home, shm, "second").lock()
    assert lock is not None
    os.close(lock)
    with pytest.raises(ConfigError, match="2 deployments are here; name one of nano, second"):
        the_one(home, shm, None)
    with pytest.raises(ConfigError, match="name one of nano, second by --name"):
        the_one(home, shm, None, "--name")


def test_logs_are_followed_from_their_end_in_whole_lines(folders: Folders):
    log = folders.logs / "decode-0.log"
    log.write_text("old\n")
    writer = subprocess.Popen(
        ["sh", "-c", f"while :; do printf 'fir'; printf 'st\n'; done >> '{log}'"]
    )
    try:
        lines = follow(log_files(folders, "decode-0"))
        found = [line for _, line in itertools.islice(lines, 1, 5)]  # the first may be cut
    finally:
        writer.kill()
        writer.wait()
    assert found == ["first"] * 4


def test_a_log_that_is_not_there_names_those_that_are(folders: Folders):
    (folders.logs / "router-0.log").touch()
    with pytest.raises(ConfigError, match="there are: router-0"):
        log_files(folders, "decode-9")


EVENTS = (
    Event(kind="starting", process="decode-0"),
    Event(kind="loading", process="decode-0", text="loading layer 3"),
    Event(kind="ready", process="decode-0", seconds=1.25),
    Event(kind="serving", text="http://127.0.0.1:1"),
    Event(kind="died", process="decode-0", text="ended (signal SIGKILL)"),
)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_start_is_shown(folders: Folders, tmp_path: Path, *, terminal: bool):
    stack = stack_of(folders, tmp_path, decode_0="", router="")
    stack.log("decode-0").write_text(json.dumps({"event": "reading weights"}) + "\n")
    console = Console(file=(tmp_path / "out").open("w"), force_terminal=terminal, width=100)
    with shown(stack, console) as tell:
        for event in EVENTS:
            tell(event)
    console.file.close()
    text = (tmp_path / "out").read_text()
    for said in ("decode-0", "ready", "1.2s", "ended (signal SIGKILL)"):
        assert said in text


def test_a_file_that_cannot_be_written_is_one_line_and_leaves_nothing(tmp_path):
    (tmp_path / "call-key" / "inside").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"call-key cannot be written \(.*\); make room"):
        write_private(tmp_path / "call-key", "text")
    assert [entry.name for entry in tmp_path.iterdir()] == ["call-key"]
