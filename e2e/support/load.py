"""Clients that ask without a pause, each on a connection of its own, and how every answer ended."""

import itertools
import threading
import time
from dataclasses import dataclass

import openai


@dataclass(frozen=True)
class Failure:
    """A request that was not answered to its end. `began_s` is on the monotonic clock."""

    began_s: float
    after_tokens: bool
    what: str


class Load:
    """Streams of chat completions from several clients, for as long as the block runs."""

    def __init__(self, url: str, model: str, *, clients: int = 4, max_tokens: int = 24) -> None:
        self.url, self.model, self.max_tokens = url, model, max_tokens
        self.failures: list[Failure] = []
        self.served = 0
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._clients = [
            threading.Thread(target=self._ask, args=(number,)) for number in range(clients)
        ]

    def __enter__(self) -> "Load":
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join(120)

    def _ask(self, client: int) -> None:
        with openai.OpenAI(
            base_url=self.url, api_key="none", max_retries=0, timeout=60
        ) as connection:
            for number in itertools.count():
                if self._over.is_set():
                    return
                failed = self._one(connection, f"Client {client} asks for the {number}th time.")
                with self._lock:
                    self.served += failed is None
                    if failed is not None:
                        self.failures.append(failed)

    def _one(self, connection: openai.OpenAI, text: str) -> Failure | None:
        began_s, chunks, finish = time.monotonic(), 0, None
        try:
            stream = connection.chat.completions.create(
                model=self.model,
                messages=[{"role": "user", "content": text}],
                max_tokens=self.max_tokens,
                stream=True,
            )
            for chunk in stream:
                chunks += bool(chunk.choices)
                finish = chunk.choices[0].finish_reason if chunk.choices else finish
        except Exception as exc:  # a stream is cut in ways that openai does not wrap
            return Failure(began_s, chunks > 0, f"{type(exc).__name__}: {exc}")
        if finish not in ("stop", "length"):
            return Failure(began_s, chunks > 0, f"ended with {finish} after {chunks} chunks")
        return None
