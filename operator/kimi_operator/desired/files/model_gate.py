"""Wait until a model's files are there, whole and the right ones; download them from a hub first.

Runs as an init container in the image of any engine: standard library only, Python 3.10 or newer.
Exit status 0 when the folder can be served from, 1 with one line on standard error otherwise.

Several pods may share the folder: one downloads under a lock, the others wait for it. A file counts
once it has the size, and for large files the sha256, that the hub names; a part that is there is
continued. `.complete` in the folder says that all of it was checked.
"""

import argparse
import fcntl
import hashlib
import json
import os
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MARK = ".complete"
LOCK = ".lock"
CHUNK = 1 << 22
TRIES = 8
FIRST_PAUSE_S, MAX_PAUSE_S = 0.2, 30.0
WANTED = (".json", ".safetensors", ".model", ".jinja", ".txt", ".py")

now_s = time.monotonic  # noqa: TID251 - nothing of this project is in the image it runs in


class GateError(Exception):
    """The model cannot be served from this folder; the message says what to change."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gate."""
    args = _arguments(argv)
    try:
        if args.id:
            _download(args)
        if not args.only:
            check(args.folder, args.checksum)
        elif not os.path.isfile(os.path.join(args.folder, args.only)):
            raise GateError(f"{args.folder} has no file {args.only}")
    except (GateError, OSError, ValueError) as exc:
        _say(str(exc))
        return 1
    _say(f"{args.folder} is complete")
    return 0


def _say(text: str) -> None:
    sys.stderr.write(f"model gate: {text}\n")


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Wait for a model's files.", allow_abbrev=False)
    parser.add_argument("--folder", required=True)
    parser.add_argument("--id", help="Download this model if it is not there.")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--endpoint", default="https://huggingface.co")
    parser.add_argument("--token-file")
    parser.add_argument("--checksum", help="sha256:HEX of the safetensors index.")
    parser.add_argument("--only", help="Want this file alone and check no weights.")
    parser.add_argument("--within-s", type=float, default=7200.0)
    return parser.parse_args(argv)


def check(folder: str, checksum: str | None) -> None:
    """Raise GateError unless config, index and every file the index names are there."""
    config = os.path.join(folder, "config.json")
    if not os.path.isfile(config):
        raise GateError(f"{config} is missing: is this the model's folder?")
    index = os.path.join(folder, INDEX)
    if not os.path.isfile(index):
        index = os.path.join(folder, SINGLE)
        if not os.path.isfile(index):
            raise GateError(f"{folder} has neither {INDEX} nor {SINGLE}")
    if checksum:
        found = "sha256:" + _sha256(index)
        if found != checksum:
            raise GateError(
                f"{index} has checksum {found}, but spec.model.checksum is {checksum}: these are "
                "other weights"
            )
    if index.endswith(INDEX):
        with open(index, encoding="utf-8") as file:
            shards = sorted(set(json.load(file)["weight_map"].values()))
        absent = [name for name in shards if not _size(os.path.join(folder, name))]
        if absent:
            raise GateError(
                f"{len(absent)} of {len(shards)} weight files are missing in {folder}, first "
                f"{absent[0]}"
            )


def _size(path: str) -> int | None:
    try:
        return os.path.getsize(path)
    except OSError:
        return None


def _sha256(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _download(args: argparse.Namespace) -> None:
    """Have the wanted files of the revision in the folder."""
    end_s = now_s() + args.within_s
    try:
        os.makedirs(args.folder, exist_ok=True)
        lock = os.open(os.path.join(args.folder, LOCK), os.O_RDWR | os.O_CREAT, 0o644)
    except PermissionError as exc:
        raise GateError(
            f"user {os.getuid()} cannot write to {args.folder} ({exc.strerror}): give the cache's "
            "folder to that user"
        ) from exc
    try:
        _take(lock, end_s, args.folder)
        mark = os.path.join(args.folder, MARK)
        wanted = {"id": args.id, "revision": args.revision, "only": args.only}
        if _marked(mark) == wanted:
            return
        hub = Hub(args.endpoint, args.id, args.revision, _token(args.token_file))
        for name, size, sha256 in hub.files():
            if args.only is None or name == args.only:
                _fetch(hub, args.folder, (name, size, sha256), end_s)
        with open(mark + ".new", "w", encoding="utf-8") as file:
            json.dump(wanted, file)
        os.replace(mark + ".new", mark)
    finally:
        os.close(lock)


def _take(lock: int, end_s: float, folder: str) -> None:
    """Lock the folder; the system drops the lock of a pod that dies."""
    said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if now_s() > end_s:
                raise GateError(f"another pod still downloads to {folder}") from None
            if not said:
                _say(f"another pod downloads to {folder}")
                said = True
            time.sleep(0.5)
        else:
            return


def _marked(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _token(path: str | None) -> str | None:
    if not path:
        return None
    with open(path, encoding="utf-8") as file:
        return file.read().strip()


class Hub:
    """One revision of one model at a hub that speaks Hugging Face's HTTP API."""

    def __init__(self, endpoint: str, model: str, revision: str, token: str | None) -> None:
        self._base, self._model = endpoint.rstrip("/"), model
        self._revision = urllib.parse.quote(revision, safe="")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def files(self) -> Iterator[tuple[str, int | None, str | None]]:
        """Name, size and sha256 (None for small files) of every file that serving needs."""
        url = f"{self._base}/api/models/{self._model}/revision/{self._revision}?blobs=true"
        with self.open(url) as answer:
            siblings = json.load(answer)["siblings"]
        for sibling in sorted(siblings, key=lambda s: str(s["rfilename"])):
            name = sibling["rfilename"]
            if name.startswith("/") or ".." in name.split("/"):
                raise GateError(f"{self._model} names a file outside its folder: {name}")
            if name.endswith(WANTED):
                yield name, sibling.get("size"), (sibling.get("lfs") or {}).get("sha256")

    def file(self, name: str, offset: int) -> Any:
        """The bytes of a file, from a byte on where the hub can continue (status 206)."""
        name = urllib.parse.quote(name)
        return self.open(f"{self._base}/{self._model}/resolve/{self._revision}/{name}", offset)

    def open(self, url: str, offset: int = 0) -> Any:
        """The answer to a GET. GateError for an answer that trying again will not change."""
        headers = dict(self._headers)
        if offset:
            headers["Range"] = f"bytes={offset}-"
        try:
            return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
        except urllib.error.HTTPError as exc:
            if exc.code in (401, 403):
                raise GateError(
                    f"{self._model} refuses access ({exc.code}): the model is gated, set "
                    "spec.model.tokenSecretRef"
                ) from exc
            if exc.code == 404:
                raise GateError(f"{url} is not there") from exc
            raise


def _fetch(hub: Hub, folder: str, wanted: tuple[str, int | None, str | None], end_s: float) -> None:
    """Have a file whole in `folder`; what is there already is kept."""
    name, size, sha256 = wanted
    target = os.path.join(folder, name)
    if size is not None and _size(target) == size:
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    part = target + ".part"
    why = ""
    for attempt in range(TRIES):
        try:
            _append(hub, name, part, end_s)
        except OSError as exc:
            why = str(exc)
            _say(f"{name}: {why}; trying again")
            time.sleep(min(FIRST_PAUSE_S * 2**attempt, MAX_PAUSE_S))
            continue
        if size is not None and _size(part) != size:
            why = f"{_size(part)} bytes of {size} came"
        elif sha256 and _sha256(part) != sha256:
            why = "its sha256 is another than the hub's"
        else:
            os.replace(part, target)
            return
        if (_size(part) or 0) >= (size or 0):
            os.unlink(part)
    raise GateError(f"{name} could not be downloaded whole in {TRIES} tries: {why}")


def _append(hub: Hub, name: str, part: str, end_s: float) -> None:
    have = _size(part) or 0
    with hub.file(name, have) as answer:
        # a hub that does not continue sends the file from its beginning
        mode = "ab" if have and answer.status == 206 else "wb"
        _copy(answer, part, mode, end_s)


def _copy(answer: Any, part: str, mode: str, end_s: float) -> None:
    with open(part, mode) as file:
        while chunk := answer.read(CHUNK):
            if now_s() > end_s:
                raise GateError(f"{part} was not downloaded in time")
            file.write(chunk)


if __name__ == "__main__":
    sys.exit(main())
