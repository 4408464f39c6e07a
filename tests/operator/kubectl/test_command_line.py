"""The words of `kubectl kimi`: flags in both places, completion, exit codes of what goes wrong."""

from pathlib import Path

import pytest

from kimi_operator.cli import main as kimistack
from kimi_operator.kubectl.cli import candidates, main

KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: "https://127.0.0.1:1"}}]
users: [{name: u, user: {token: t}}]
contexts: [{name: here, context: {cluster: c, user: u, namespace: llm}}]
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster that nobody answers for."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "config"
    file.write_text(KUBECONFIG)
    return file


def said(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    code = ended.value.code
    return (code if isinstance(code, int) else 0), capsys.readouterr().err


@pytest.mark.parametrize("before", [True, False], ids=["before", "behind"])
def test_flags_may_stand_before_and_behind_the_command(
    before: bool, config: Path, capsys: pytest.CaptureFixture[str]
):
    flags = ["--kubeconfig", config]
    words = [*flags, "status"] if before else ["status", *flags]
    code, err = said(capsys, *words)
    assert code == 3
    assert err.startswith("kubectl kimi: the API server cannot be reached")
    assert len(err.splitlines()) == 1
    code, err = said(capsys, *words, "--context", "elsewhere")
    assert (code, "no context elsewhere; there are: here" in err) == (2, True)


def test_without_a_cluster_the_way_to_name_one_is_said(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    code, err = said(capsys, "top")
    assert (code, "--kubeconfig or KUBECONFIG" in err) == (2, True)


def test_wrong_words_are_refused_before_anything_is_asked(
    config: Path, capsys: pytest.CaptureFixture[str]
):
    for words in (
        ("drain", "kimi"),
        ("drain", "kimi", "decode-1a2b3c-0", "--node", "n1"),
        ("drain", "kimi", "decode-1a2b3c-0", "--timeout", "soon"),
        ("undo", "kimi", "--forward", "--to-revision", "1a2b3c"),
    ):
        code, err = said(capsys, *words, "--kubeconfig", config)
        assert code == 2
        assert "reached" not in err


def test_it_is_a_command_of_kimistack_as_well(config: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        kimistack(["kimi", "status", "--kubeconfig", str(config)])
    assert ended.value.code == 3
    assert "the API server cannot be reached" in capsys.readouterr().err


def test_commands_are_completed():
    assert candidates(["p"]) == ["pause"]
    assert candidates([""]) == ["drain", "pause", "resume", "status", "top", "unblock", "undo"]
