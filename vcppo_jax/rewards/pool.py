"""A pool of processes that compare answers by computer algebra and are killed when they hang.

sympy can hang in C loops where neither Math-Verify's own SIGALRM timeout nor any Python exception reaches it,
and it can eat a host's memory. So every comparison runs in a process of its own kind, with a wall-clock
deadline after which it gets SIGKILL, and with a memory limit.

The processes are started by ``subprocess`` and not by ``multiprocessing``, nor by a library upon it (pebble
5.2 was tried). The trainer has JAX's threads, so its memory must not be forked; and spawn and forkserver
both import the trainer's ``__main__`` again, which breaks in a script without a ``__main__`` guard and would
import JAX, and claim the accelerator, in each worker. See `worker` for the other side.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Literal

MEMORY_BYTES = 1 << 30  # of address space, per evaluator; sympy and its caches take about a quarter of it
WORKERS_PER_CPU = 2  # most comparisons are short: a few that hang should not hold up the rest
MAX_WORKERS = 32
START_SECONDS = 120.0  # importing sympy from a cold network disk
GRACE_SECONDS = 30.0  # on top of the tasks' own deadlines, before the server itself counts as hung
ATTEMPTS = 2  # of a batch whose server died
CLOSE_SECONDS = 0.05  # between two looks at whether the batch of another thread has ended

Outcome = Literal["correct", "wrong", "timeout", "error"]

_BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[3:]; from vcppo_jax.rewards.worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)


class VerifierPool:
    """Compares answers in killable processes; starts them at first use and keeps them for later batches.

    Safe to call from several threads (one batch at a time). Closed at exit, on Ctrl-C, by ``close`` or as a
    context manager; usable again afterwards.
    """

    def __init__(self, workers: int | None = None, *, memory_bytes: int = MEMORY_BYTES) -> None:
        """``workers``: processes that compare; None for two per usable CPU, at most 32."""
        if workers is not None and workers < 1:
            raise ValueError(f"VerifierPool: workers must be at least 1, got {workers}")
        self.workers = min(WORKERS_PER_CPU * _usable_cpus(), MAX_WORKERS) if workers is None else workers
        self.memory_bytes = memory_bytes
        self._lock = threading.RLock()
        self._server: _ServerProcess | None = None
        self._closings = 0

    def start(self) -> None:
        """Start the processes without waiting for them: a trainer may do so while it compiles."""
        with self._lock:
            if self._server is not None and not self._server.usable():
                self._server = None  # died, or belongs to the process that this one was forked from
            if self._server is None:
                self._server = _ServerProcess(self.workers, self.memory_bytes)

    def run(self, tasks: Sequence[tuple[str, str]], *, timeout_s: float) -> list[Outcome]:
        """For each (answer, gold), in order: ``correct``, ``wrong``, ``timeout`` or ``error``.

        ``timeout_s`` is wall-clock seconds per task. A task whose process dies is an ``error``; the others
        are not touched by it. What is left when another thread calls `close` is an ``error`` too. Raises
        RuntimeError where the processes cannot be started.
        """
        if not timeout_s > 0:
            raise ValueError(f"VerifierPool.run: timeout_s must be positive, got {timeout_s}")
        reasons: dict[int, Outcome] = {}
        closings = self._closings
        with self._lock:
            try:
                for _ in range(ATTEMPTS):
                    left = [index for index in range(len(tasks)) if index not in reasons]
                    if not left or closings != self._closings:
                        break
                    self.start()
                    assert self._server is not None
                    done = self._server.run([tasks[index] for index in left], timeout_s)
                    reasons.update((left[position], reason) for position, reason in done.items())
                    if len(done) < len(left):
                        self._discard()
            except BaseException:
                self._discard()  # Ctrl-C: no answer of this batch may turn up in the next
                raise
        return [reasons.get(index, "error") for index in range(len(tasks))]

    def close(self) -> None:
        """Kill the processes, also under the batch of another thread; a later call starts new ones."""
        self._closings += 1
        while not self._lock.acquire(timeout=CLOSE_SECONDS):
            if (server := self._server) is not None:
                server.interrupt()
        try:
            self._discard()
        finally:
            self._lock.release()

    def _discard(self) -> None:
        """Kill the processes; the lock is held."""
        if self._server is not None:
            self._server.kill()
        self._server = None

    def __enter__(self) -> VerifierPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ServerProcess:
    """The started server: a process group of its own, and the two pipes to it."""

    def __init__(self, workers: int, memory_bytes: int) -> None:
        self.owner = os.getpid()
        self.messages = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        paths = [os.path.abspath(entry) for entry in sys.path]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP, str(workers), str(memory_bytes), *paths],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.messages,
            start_new_session=True,  # a group that can be killed whole, and that Ctrl-C does not reach
        )
        self.workers = workers
        self.ready = False
        self.unread = b""
        # Not the process object's own finalizer: the group must go even if the server is dead already.
        self._finalizer = weakref.finalize(self, _kill_group, self.process, self.owner)

    def usable(self) -> bool:
        """Whether this process started the server and it still runs."""
        return self.owner == os.getpid() and self.process.poll() is None

    def interrupt(self) -> None:
        """Kill as `kill` does, but leave the pipes to the thread that reads them and now finds their end."""
        if self.usable():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the server and its evaluators, if this process is the one that started them."""
        self._finalizer()
        self.messages.close()

    def run(self, tasks: list[tuple[str, str]], timeout_s: float) -> dict[int, Outcome]:
        """Reasons by position in ``tasks``; incomplete where the server died or hung."""
        if not self.ready:
            self._await_ready()
        reasons: dict[int, Outcome] = {}
        request = json.dumps({"tasks": tasks, "timeout_s": timeout_s}).encode() + b"\n"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request)
            self.process.stdin.flush()
        except OSError:
            return reasons
        rounds = -(-len(tasks) // self.workers)
        deadline = time.monotonic() + rounds * (timeout_s + 1.0) + GRACE_SECONDS
        while len(reasons) < len(tasks) and (line := self._line(deadline)) is not None:
            position, reason = json.loads(line)
            reasons[position] = reason
        return reasons

    def _await_ready(self) -> None:
        line = self._line(time.monotonic() + START_SECONDS)
        if line is None:
            self.messages.seek(0)
            last = self.messages.read().decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(
                "the verifier's process did not start: "
                + (last[0] if last else f"no answer within {START_SECONDS:.0f} s")
                + f"; try `{sys.executable} -c 'import math_verify'`"
            )
        self.ready = True

    def _line(self, deadline: float) -> bytes | None:
        """The next line from the server, or None where it closed its end or the deadline passed."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.unread:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                chunk = os.read(self.process.stdout.fileno(), 1 << 16)
                if not chunk:
                    return None
                self.unread += chunk
        line, _, self.unread = self.unread.partition(b"\n")
        return line


def _kill_group(process: subprocess.Popen, owner: int) -> None:
    if os.getpid() != owner:
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with contextlib.suppress(OSError):
                stream.close()


def _usable_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


_default_pool: VerifierPool | None = None
_default_pool_lock = threading.Lock()


def default_pool() -> VerifierPool:
    """The process-wide pool that `score.verify` uses unless it is given one."""
    global _default_pool
    with _default_pool_lock:
        if _default_pool is None:
            _default_pool = VerifierPool()
            atexit.register(_default_pool.close)
        return _default_pool
