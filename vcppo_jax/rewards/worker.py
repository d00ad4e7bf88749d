"""The verifier's server process: forks evaluators, kills the ones that hang, replaces the ones that die.

One server imports Math-Verify once and forks its evaluators from itself, so that a replacement for a
killed one costs milliseconds rather than another import of sympy. The server never evaluates anything
itself. It reads requests from stdin, one JSON object a line
(``{"tasks": [[answer, gold], ...], "timeout_s": seconds}``), and writes one ``[index, reason]`` a line
to stdout, in order of completion. It ends, and its evaluators with it, when stdin closes: a trainer
that dies, in whatever way, leaves no process behind. POSIX only.

Started by `pool` as ``python -c``, never imported by the trainer. It must not import JAX: a process that
does may claim the accelerator.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import logging
import os
import resource
import selectors
import signal
import socket
import sys
import time
from typing import NoReturn

from vcppo_jax.rewards.equality import answers_equal, math_verify_equal

TASKS_PER_EVALUATOR = 500  # then replaced: sympy's caches only grow
PARENT_CHECK_SECONDS = 1.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

# Read before the first fork, so that every evaluator inherits a parser whose caches are warm.
_WARM_UP = (
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt3}"),
    (r"x^2+2x+1", "(x+1)^2"),
    (r"\frac{\pi}{6}", r"\pi/6"),
    (r"[2,\infty)", r"x \ge 2"),
    (r"1+\sqrt{19},1-\sqrt{19}", r"1 \pm \sqrt{19}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}"),
)


class _Evaluator:
    """A forked process that answers one task at a time, and the server's end of the socket to it."""

    def __init__(self, inherited: list[int], memory_bytes: int) -> None:
        self.socket, theirs = socket.socketpair()
        server_pid = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _evaluate_forever(theirs, [self.socket.fileno(), *inherited], memory_bytes, server_pid)
        theirs.close()
        self.task: int | None = None
        self.deadline = 0.0
        self.tasks_done = 0

    def give(self, task: int, answer: str, gold: str, timeout_s: float) -> None:
        """Send a task; its time runs from here."""
        self.task = task
        self.deadline = time.monotonic() + timeout_s
        with contextlib.suppress(OSError):  # already dead: the closed socket says so in the next select
            self.socket.sendall(json.dumps([answer, gold]).encode() + b"\n")

    def end(self) -> None:
        """Kill the process at once and reap it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.socket.close()


def _evaluate_forever(
    channel: socket.socket, inherited: list[int], memory_bytes: int, server_pid: int
) -> NoReturn:
    """An evaluator's whole life: limits, then one task after the other until its socket closes."""
    try:
        for (
            descriptor
        ) in inherited:  # else neither the trainer nor the server would see the other's end close
            os.close(descriptor)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server_pid:
            os._exit(1)
        with contextlib.suppress(ValueError, OSError):  # not enforceable on every system
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
        with channel.makefile("r") as tasks:
            for line in tasks:
                answer, gold = json.loads(line)
                channel.sendall(_reason(answer, gold))
        os._exit(0)
    finally:  # whatever went wrong, MemoryError included: never run the server's code in the child
        os._exit(1)


def _reason(answer: str, gold: str) -> bytes:
    try:
        equal = answers_equal(answer, gold, math_verify_equal)
    except MemoryError:
        raise  # the heap is full: this process ends, and the server replaces it
    except Exception:
        return b"error\n"
    return b"correct\n" if equal else b"wrong\n"


class _Server:
    """Evaluators, and the loop that feeds them, watches their deadlines and notices when stdin closes."""

    def __init__(self, evaluators: int, memory_bytes: int, results: int) -> None:
        self.size = evaluators
        self.memory_bytes = memory_bytes
        self.results = results
        self.parent = os.getppid()
        self.evaluators: list[_Evaluator] = []
        self.selector = selectors.DefaultSelector()
        self.selector.register(sys.stdin.fileno(), selectors.EVENT_READ, None)
        self.unread = b""

    def serve(self) -> None:
        """Answer requests until stdin closes."""
        try:
            self._write({"ready": True})
            while (request := self._next_request()) is not None:
                self._run(request["tasks"], request["timeout_s"])
        finally:
            for evaluator in self.evaluators:
                evaluator.end()

    def _write(self, message: object) -> None:
        line = json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(self.results, line) :]

    def _next_request(self) -> dict | None:
        while b"\n" not in self.unread:
            for key in self._wait(PARENT_CHECK_SECONDS):
                if key.data is not None:
                    self._collect(key.data)  # died while idle
                elif not self._read_stdin():
                    return None
        line, _, self.unread = self.unread.partition(b"\n")
        return json.loads(line)

    def _read_stdin(self) -> bool:
        chunk = os.read(sys.stdin.fileno(), 1 << 20)
        self.unread += chunk
        return bool(chunk)

    def _wait(self, seconds: float) -> list:
        """The files that are ready; ends the server if the trainer is gone although stdin is still open."""
        if os.getppid() != self.parent:
            raise SystemExit
        return [key for key, _ in self.selector.select(max(0.0, min(seconds, PARENT_CHECK_SECONDS)))]

    def _run(self, tasks: list[list[str]], timeout_s: float) -> None:
        waiting = list(range(len(tasks)))[::-1]
        while True:
            while waiting and (evaluator := self._idle()) is not None:
                task = waiting.pop()
                answer, gold = tasks[task]
                evaluator.give(task, answer, gold, timeout_s)
            busy = [evaluator for evaluator in self.evaluators if evaluator.task is not None]
            if not busy:
                return
            soonest = min(evaluator.deadline for evaluator in busy)
            for key in self._wait(soonest - time.monotonic()):
                if key.data is None:
                    if not self._read_stdin():
                        raise SystemExit
                else:
                    self._collect(key.data)
            now = time.monotonic()
            for evaluator in busy:
                if evaluator.task is not None and evaluator.deadline <= now:
                    self._finish(evaluator, "timeout")
                    self._drop(evaluator)

    def _idle(self) -> _Evaluator | None:
        for evaluator in self.evaluators:
            if evaluator.task is None:
                return evaluator
        if len(self.evaluators) == self.size:
            return None
        inherited = [sys.stdin.fileno(), self.results, *(other.socket.fileno() for other in self.evaluators)]
        evaluator = _Evaluator(inherited, self.memory_bytes)
        self.evaluators.append(evaluator)
        self.selector.register(evaluator.socket, selectors.EVENT_READ, evaluator)
        return evaluator

    def _collect(self, evaluator: _Evaluator) -> None:
        """Take an evaluator's answer; one that died instead (out of memory, a crash) gives `error`."""
        try:
            reply = evaluator.socket.recv(64)
        except OSError:
            reply = b""
        alive = reply.endswith(b"\n")
        if evaluator.task is not None:
            self._finish(evaluator, reply.decode().strip() if alive else "error")
        if not alive or evaluator.tasks_done >= TASKS_PER_EVALUATOR:
            self._drop(evaluator)

    def _finish(self, evaluator: _Evaluator, reason: str) -> None:
        self._write([evaluator.task, reason])
        evaluator.task = None
        evaluator.tasks_done += 1

    def _drop(self, evaluator: _Evaluator) -> None:
        self.selector.unregister(evaluator.socket)
        self.evaluators.remove(evaluator)
        evaluator.end()


def main(evaluators: int, memory_bytes: int) -> None:
    """Run the server on this process's stdin and stdout until stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    results = os.dup(1)
    os.dup2(2, 1)  # what a library prints must not end up between the results
    logging.disable(logging.CRITICAL)
    for answer, gold in _WARM_UP:
        answers_equal(answer, gold, math_verify_equal)
    gc.collect()
    gc.freeze()
    _Server(evaluators, memory_bytes, results).serve()
