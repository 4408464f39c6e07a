"""The gate that no engine starts before: downloads and checks a model's files."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kimi_operator.desired.files import model_gate

SHARD = bytes(range(256)) * 400
INDEX = json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}).encode()
FILES = {
    "config.json": b"{}",
    "model.safetensors.index.json": INDEX,
    "one.safetensors": SHARD,
    "two.safetensors": SHARD[::-1],
    "tiktoken.model": b"ranks",
    "pytorch_model.bin": b"not wanted",
}


class HubServer(ThreadingHTTPServer):
    """A hub with one model; `faults` are answered once each, by path."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = dict(FILES)
        self.faults: dict[str, list[str]] = {}
        self.status = 200
        self.requests: list[tuple[str, str | None]] = []
        self.tokens: set[str | None] = set()


class _Handler(BaseHTTPRequestHandler):
    server: HubServer

    def do_GET(self) -> None:
        hub = self.server
        hub.requests.append((self.path, self.headers["Range"]))
        hub.tokens.add(self.headers["Authorization"])
        if hub.status != 200:
            self.send_error(hub.status)
        elif self.path.startswith("/api/models/org/model/revision/main"):
            siblings = [
                {
                    "rfilename": name,
                    "size": len(data),
                    "lfs": {"sha256": hashlib.sha256(FILES.get(name, data)).hexdigest()},
                }
                for name, data in hub.files.items()
            ]
            self._send(json.dumps({"siblings": siblings}).encode())
        else:
            name = self.path.removeprefix("/org/model/resolve/main/")
            self._file(name)

    def _file(self, name: str) -> None:
        data = self.server.files[name]
        faults = self.server.faults.get(name, [])
        fault = faults.pop(0) if faults else ""
        start = int((self.headers["Range"] or "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if fault == "500":
            self.send_error(500)
        elif fault == "cut":
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2])
            self.close_connection = True
        elif fault == "corrupt":
            self._send(b"x" * len(data))
        elif start and fault != "whole":
            self._send(data[start:], 206)
        else:
            self._send(data)

    def _send(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        del format, args


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setattr(model_gate, "FIRST_PAUSE_S", 0.001)
    server = HubServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def gate(hub: HubServer, folder: Path, *more: str) -> int:
    endpoint = f"http://127.0.0.1:{hub.server_address[1]}"
    return model_gate.main(
        ["--id", "org/model", "--endpoint", endpoint, "--folder", str(folder), *more]
    )


def test_a_model_is_downloaded_whole_once(hub: HubServer, tmp_path: Path):
    assert gate(hub, tmp_path / "m") == 0
    there = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir() if p.name[0] != "."}
    assert there == {k: v for k, v in FILES.items() if k != "pytorch_model.bin"}
    asked = len(hub.requests)
    assert gate(hub, tmp_path / "m") == 0
    assert len(hub.requests) == asked


@pytest.mark.parametrize("fault", ["500", "cut", "corrupt"])
def test_a_faulty_answer_is_asked_for_again(hub: HubServer, tmp_path: Path, fault: str):
    hub.faults["one.safetensors"] = [fault]
    assert gate(hub, tmp_path) == 0
    assert (tmp_path / "one.safetensors").read_bytes() == SHARD


def test_a_part_that_is_there_is_continued(hub: HubServer, tmp_path: Path):
    (tmp_path / "one.safetensors.part").write_bytes(SHARD[:1000])
    assert gate(hub, tmp_path) == 0
    assert ("/org/model/resolve/main/one.safetensors", "bytes=1000-") in hub.requests
    assert (tmp_path / "one.safetensors").read_bytes() == SHARD


def test_a_hub_that_does_not_continue_is_read_from_the_beginning(hub: HubServer, tmp_path: Path):
    (tmp_path / "one.safetensors.part").write_bytes(b"y" * 1000)
    hub.faults["one.safetensors"] = ["whole"]
    assert gate(hub, tmp_path) == 0
    assert (tmp_path / "one.safetensors").read_bytes() == SHARD


def test_a_file_that_never_comes_whole_ends_the_gate(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    hub.faults["one.safetensors"] = ["corrupt"] * model_gate.TRIES
    assert gate(hub, tmp_path) == 1
    assert "one.safetensors could not be downloaded whole" in capsys.readouterr().err
    assert not (tmp_path / "one.safetensors").exists()


def test_a_gated_model_says_what_to_set(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    hub.status = 403
    assert gate(hub, tmp_path) == 1
    assert "set spec.model.tokenSecretRef" in capsys.readouterr().err


def test_the_token_is_sent(hub: HubServer, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("secret\n")
    assert gate(hub, tmp_path / "m", "--token-file", str(token)) == 0
    assert hub.tokens == {"Bearer secret"}


def test_only_one_file_is_fetched_where_only_one_is_wanted(hub: HubServer, tmp_path: Path):
    assert gate(hub, tmp_path, "--only", "tiktoken.model") == 0
    assert [p.name for p in tmp_path.iterdir() if p.name[0] != "."] == ["tiktoken.model"]
    del hub.files["tiktoken.model"]
    assert gate(hub, tmp_path / "other", "--only", "tiktoken.model") == 1


def test_a_hub_cannot_write_outside_the_folder(
    hub: HubServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    hub.files["../evil.json"] = b"x"
    assert gate(hub, tmp_path / "m") == 1
    assert "outside its folder" in capsys.readouterr().err
    assert not (tmp_path / "evil.json").exists()


def test_pods_that_share_a_folder_download_once(hub: HubServer, tmp_path: Path):
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(gate(hub, tmp_path / "m"))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0, 0]
    shards = [path for path, _ in hub.requests if path.endswith("one.safetensors")]
    assert len(shards) == 1


def complete(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    return folder


def checked(folder: Path, *more: str) -> int:
    return model_gate.main(["--folder", str(folder), *more])


def test_the_checksum_is_the_indexes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = complete(tmp_path / "m")
    good = f"sha256:{hashlib.sha256(INDEX).hexdigest()}"
    assert checked(folder, "--checksum", good) == 0
    assert checked(folder, "--checksum", "sha256:" + "0" * 64) == 1
    assert "these are other weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.json", "config.json is missing"),
        ("two.safetensors", "1 of 2 weight files are missing"),
        ("model.safetensors.index.json", "has neither"),
    ],
)
def test_a_missing_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, says: str
):
    folder = complete(tmp_path / "m")
    (folder / name).unlink()
    assert checked(folder) == 1
    assert says in capsys.readouterr().err


def test_an_empty_shard_is_a_missing_one(tmp_path: Path):
    folder = complete(tmp_path / "m")
    (folder / "two.safetensors").write_bytes(b"")
    assert checked(folder) == 1


def test_one_file_of_weights_needs_no_index(tmp_path: Path):
    folder = complete(tmp_path / "m")
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"x")
    assert checked(folder) == 0
