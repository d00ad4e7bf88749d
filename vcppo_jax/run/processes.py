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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

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


def share_out(items: Sequence[T], work: Callable[[Sequence[T]], list[R]]) -> Callable[[], list[R]]:
    """Start `work`, in a thread, on the part of the items that falls to this process.

    What comes back waits for the results of all processes, one per item; all processes must call it at the
    same point. It raises what `work` raised here. Later calls cost nothing. An exit does not wait for the
    thread.
    """
    count, index = jax.process_count(), jax.process_index()
    start, stop = (len(items) * i // count for i in (index, index + 1))
    mine: Future[list[R]] = Future()

    def run() -> None:
        try:
            mine.set_result(work(items[start:stop]))
        except BaseException as error:
            mine.set_exception(error)

    threading.Thread(target=run, name="share_out", daemon=True).start()
    return functools.cache(lambda: [result for part in gather(mine.result()) for result in part])


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
