"""The command line: what it prints, and the exit code and the one line for what is wrong."""

import json
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from config_files import FILES
from kimi_operator.cli import main
from rule_cases import document

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture(autouse=True)
def _folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Folders of its own; whatever a command says, no shared memory is left behind."""
    with tempfile.TemporaryDirectory() as shm:
        monkeypatch.setenv("KIMISTACK_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("KIMISTACK_SHM", shm)
        yield
        assert list(Path(shm).iterdir()) == []


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    said = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), said.out, said.err


def file_of(tmp_path: Path, spec: dict[str, object]) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document(spec, "mine")))
    return path


@pytest.mark.parametrize("command", ["up", "spec"])
@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"preset": "kimi-nano/cpu", "prefil": {}}, "spec.prefil: unknown field; did you mean"),
        ({"preset": "kimi-nano/cpu", "kvPool": {"dram": "1XB"}}, "'1XB' is no size"),
        (
            {"preset": "kimi-nano/cpu", "decode": {"parallelism": {"tp": 3}, "gpu": {"perPod": 3}}},
            "heads 4 % 3 = 1",
        ),
        ({"preset": "kimi-k9"}, "there is no preset 'kimi-k9'"),
    ],
)
def test_a_wrong_file_is_one_line_and_exit_code_2(
    command: str,
    spec: dict[str, object],
    says: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    code, out, err = run(capsys, command, "-f", file_of(tmp_path, spec))
    assert (code, out) == (2, "")
    assert says in err
    assert err.startswith("kimistack: ")
    assert len(err.splitlines()) == 1


def test_a_port_in_use_is_named_with_what_to_change(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run(capsys, "up", "--port", port)
    assert (code, out) == (2, "")
    assert err == (
        f"kimistack: port {port} of 127.0.0.1 is in use; stop what listens there, or set "
        "spec.router.port or --port\n"
    )


def test_a_missing_model_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    model = {"source": "local", "path": str(tmp_path / "none")}
    path = file_of(tmp_path, {"preset": "kimi-nano/cpu", "model": model})
    code, _, err = run(capsys, "up", "-f", path, "--port", 18999)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"spec.model.path: {tmp_path / 'none'} does not exist" in err


@pytest.mark.parametrize(
    ("config", "says"), [("{", "config.json"), ('{"model_type": "llama"}', "is 'llama'")]
)
def test_a_model_nobody_here_can_run_is_refused_before_anything_starts(
    config: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(config)
    for model in (
        {"source": "local", "path": str(tmp_path)},
        {"source": "random", "config": str(tmp_path / "config.json")},
    ):
        path = file_of(tmp_path, {"preset": "kimi-nano/cpu", "model": model})
        code, _, err = run(capsys, "up", "-f", path, "--port", 18999)
        assert (code, len(err.splitlines())) == (2, 1)
        assert says in err


def test_a_model_folder_without_weights_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "config.json").write_text(json.dumps(FILES["k2"]))
    model = {"source": "local", "path": str(tmp_path)}
    path = file_of(tmp_path, {"preset": "kimi-nano/cpu", "model": model})
    code, _, err = run(capsys, "up", "-f", path, "--port", 18999)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"{tmp_path} has no .safetensors file" in err


def test_a_missing_key_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "up", "--port", 18999, "--api-key-file", tmp_path / "keys")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "--api-key-file: there is no file" in err


@pytest.mark.parametrize(("text", "says"), [("", "has no key"), ("short", "line 1: a key of")])
def test_a_key_file_without_usable_keys_is_refused_before_anything_starts(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "keys").write_text(text)
    code, _, err = run(capsys, "up", "--port", 18999, "--api-key-file", tmp_path / "keys")
    assert (code, len(err.splitlines())) == (2, 1)
    assert says in err


def test_more_replicas_than_ports_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    spec = {"preset": "kimi-nano/cpu", "prefill": {"replicas": 100_000}, "decode": {}}
    code, _, err = run(capsys, "up", "-f", file_of(tmp_path, spec), "--port", 18999)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "lower the replicas" in err


def test_a_state_folder_that_cannot_be_made_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KIMISTACK_HOME", str(tmp_path / "file"))
    code, _, err = run(capsys, "up", "--port", 18999)
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"the state folder {tmp_path / 'file' / 'kimi-nano'} cannot be made" in err


def test_a_model_too_large_for_the_machine_is_told_in_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = file_of(tmp_path, {"preset": "kimi-nano/cpu", "kvPool": {"dram": "900TiB"}})
    code, _, err = run(capsys, "up", "-f", path, "--port", 18999)
    assert (code, len(err.splitlines())) == (2, 1)
    assert "the deployment needs 921" in err


def test_without_a_file_it_is_kimi_nano(capsys: pytest.CaptureFixture[str]):
    _, packaged, _ = run(capsys, "spec")
    _, example, _ = run(capsys, "spec", "-f", EXAMPLES / "kimi-nano.yaml")
    assert packaged == example
    assert yaml.safe_load(packaged)["spec"]["preset"] == "kimi-nano/cpu"


def test_the_packaged_example_is_the_one_in_examples():
    packaged = ROOT / "operator" / "kimi_operator" / "local" / "kimi-nano.yaml"
    assert packaged.read_text() == (EXAMPLES / "kimi-nano.yaml").read_text()


@pytest.mark.parametrize("example", ["kimi-nano.yaml", "kimi-k26.yaml"])
def test_the_effective_spec_of_an_example_names_origins(
    example: str, capsys: pytest.CaptureFixture[str]
):
    code, out, err = run(capsys, "spec", "--effective", "-f", EXAMPLES / example)
    assert (code, err) == (0, "")
    for origin in ("user", "preset", "default"):
        assert f"  # {origin}" in out


def test_nothing_running_is_no_error(capsys: pytest.CaptureFixture[str]):
    assert run(capsys, "status")[:2] == (0, "nothing is running; start with: kimistack up\n")
    assert run(capsys, "status", "--json")[:2] == (0, "[]\n")
    assert run(capsys, "down")[:2] == (0, "nothing is running\n")


def test_down_of_a_file_that_never_ran_is_no_error(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "down", "-f", EXAMPLES / "kimi-nano.yaml")
    assert (code, out) == (0, "kimi-nano was not running\n")


def test_an_unknown_deployment_is_named(capsys: pytest.CaptureFixture[str]):
    code, _, err = run(capsys, "logs", "--name", "other")
    assert (code, err) == (2, "kimistack: there is no deployment other\n")


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--version")
    assert (code, out.split()[0]) == (0, "kimistack")


def test_the_runtimes_commands_are_there(capsys: pytest.CaptureFixture[str]):
    _, out, _ = run(capsys, "--help")
    for command in ("up", "down", "status", "logs", "spec", "worker", "router", "umbp"):
        assert f" {command} " in out
    assert "supervise" not in out


@pytest.mark.parametrize("server", ["1.20", "current"])
def test_render_prints_every_object_and_says_what_keeps_it_from_serving(
    server: str, capsys: pytest.CaptureFixture[str]
):
    code, out, err = run(capsys, "render", "-f", EXAMPLES / "kimi-k26.yaml", "--server", server)
    kinds = {one["kind"] for one in yaml.safe_load_all(out)}
    assert code == 0
    assert {"StatefulSet", "DaemonSet", "Deployment", "NetworkPolicy"} <= kinds
    assert "cannot serve: NotInThisVersion" in err
