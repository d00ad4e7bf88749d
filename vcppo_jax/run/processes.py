"""The processes of one job: what they tell one another, decide as one, and split between them.

All processes run the same host program on the same numbers, so they compile and start the same programs in
the same order. What may differ between them (a clock, a signal, a file that is there or not) is decided by
process 0, or gathered, before anything depends on it. Every function here that is given a value or a function
must be called by all processes, at the same point. In a job of one process none of them costs anything.
"""

from __future__ import annotations

import functools
import pickle
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
R = TypeVar("R")

_SMALLEST_MESSAGE = 1 << 10
"""Messages are padded to powers of two from here up, so that few exchanges are compiled."""


def is_main() -> bool:
    """Whether this is process 0, which writes metrics, samples, reports and progress."""
    return jax.process_index() == 0


def from_main(make: Callable[[], T]) -> T:
    """What `make()` gives in process 0, in every process; it runs in no other.

    An exception that it raises there is raised in all of them. The value has to be one that pickle takes.
    """
    if jax.process_count() == 1:
        return make()
    outcome: tuple[Any, Exception | None] = (None, None)
    original: Exception | None = None
    if is_main():
        try:
            outcome = (make(), None)
        except Exception as error:
            original = error
            outcome = (None, _portable(error))
    value, raised = pickle.loads(_exchange(pickle.dumps(outcome) if is_main() else b"")[0])
    if original is not None:
        raise original  # with its traceback
    if raised is not None:
        raise raised
    return value


def gather(value: T) -> list[T]:
    """The value of each process, by process; it has to be one that pickle takes."""
    if jax.process_count() == 1:
        return [value]
    return [pickle.loads(message) for message in _exchange(pickle.dumps(value))]


def largest(number: int) -> int:
    """The largest of the processes' numbers, from 0 to 2**31 - 1."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


class Shares(Generic[R]):
    """Work on items 0, 1, ... that become ready one after another, split between the processes.

    It goes on in a thread, for which an exit does not wait; what is ready at one time goes to `work` as one.
    """

    def __init__(self, total: int, work: Callable[[list[int]], list[R]], *, together: int = 1) -> None:
        """`work(items)` gives one result per item; `together` consecutive items fall to one process."""
        count, index = jax.process_count(), jax.process_index()
        self._total, self._work = total, work
        self._mine = {item for item in range(total) if item // together % count == index}
        self._ready: list[int] = []
        self._done: dict[int, R] = {}
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def give(self, items: Iterable[int]) -> None:
        """These are ready. All processes give the same ones, each item once."""
        with self._lock:
            self._ready += [item for item in items if item in self._mine]
            if self._ready and self._thread is None and self._error is None:
                self._thread = threading.Thread(target=self._run, name="shares", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._lock:
                items, self._ready = self._ready, []
                if not items:
                    self._thread = None
                    return
            try:
                self._done.update(zip(items, self._work(items), strict=True))
            except BaseException as error:
                with self._lock:
                    self._error, self._thread = error, None
                return

    @functools.cached_property
    def results(self) -> list[R]:
        """Of all items, in their order; all of them have been given.

        The first time all processes must ask for it, at the same point, and it waits. Raises what `work`
        raised here.
        """
        while (thread := self._thread) is not None:
            thread.join()
        if self._error is not None:
            raise self._error
        done = {item: result for part in gather(self._done) for item, result in part.items()}
        return [done[item] for item in range(self._total)]


def _portable(error: Exception) -> Exception:
    """The error if it survives pickle, else a RuntimeError with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(str(error))
    return error


def _exchange(message: bytes) -> list[bytes]:
    """The message of each process, by process."""
    lengths = multihost_utils.process_allgather(np.int32(len(message))).reshape(-1)
    width = max(_SMALLEST_MESSAGE, 1 << (int(lengths.max()) - 1).bit_length())
    padded = np.zeros(width, np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    messages = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(messages, lengths)]
