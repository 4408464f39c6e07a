"""The one thread of a verbs transport that takes completions."""

import threading

from kimi_runtime.transfer.verbs_queues import Queues


class CompletionThread(threading.Thread):
    """Polls the queues of every session while something is under way, and sleeps otherwise.

    pyverbs waits for a completion event with the interpreter locked and does not show the channel's
    descriptor, so this thread looks by itself: at once after a completion, then ever more rarely.
    """

    _FIRST_S, _LAST_S = 20e-6, 1e-3

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._wake = threading.Condition()
        self._watched: tuple[Queues, ...] = ()
        self._ending = False

    def watch(self, queues: Queues) -> None:
        """Poll these too."""
        with self._wake:
            self._watched = (*self._watched, queues)

    def forget(self, queues: Queues) -> None:
        """Poll these no more."""
        with self._wake:
            self._watched = tuple(other for other in self._watched if other is not queues)

    def rouse(self) -> None:
        """Something was posted."""
        with self._wake:
            self._wake.notify()

    def end(self) -> None:
        """End and wait for that."""
        with self._wake:
            self._ending = True
            self._wake.notify()
        self.join()

    def run(self) -> None:
        """Until `end`."""
        pause_s = self._FIRST_S
        while not self._ending:
            watched = self._watched
            if sum(queues.poll() for queues in watched):
                pause_s = self._FIRST_S
                continue
            with self._wake:
                if self._ending:
                    return
                busy = any(queues.busy for queues in self._watched)
                if self._wake.wait(pause_s if busy else None):
                    pause_s = self._FIRST_S
                else:
                    pause_s = min(self._LAST_S, 2 * pause_s)
