"""What the benchmarks share: the head of a report, its table, and peers in processes of their own."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

Answer = dict[str, Any]
PAD = 0

ADAMW = {"learning_rate": 1e-6, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
MAX_GRAD_NORM, CLIP, VALUE_CLIP = 1.0, 0.2, 0.2
GAMMA, LAMBDA = 1.0, 0.95
"""The optimizer of both networks and PPO's numbers, for every library."""


def machine() -> str:
    """Processor, number of cores, memory and system of this machine, in one line."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line.split(":", 1)[1] for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0].strip() if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores, {memory:.0f} GiB, {platform.platform()}; "
        f"load before the run {load:.2f}"
    )


def versions(*packages: str) -> dict[str, str]:
    """Version of each package that is installed here, and of Python."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def print_head(versions_of: Mapping[str, Mapping[str, str]]) -> None:
    """Print the command, the machine, and the versions in each process by its name."""
    print(f"command: {shlex.join(['python', *sys.argv])}")
    print(f"machine: {machine()}")
    for name, found in versions_of.items():
        print(f"versions, {name}: {', '.join(f'{package} {version}' for package, version in found.items())}")
    print(flush=True)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table, its columns aligned."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |")
    print(flush=True)


def spread(numbers: Sequence[float], digits: int = 2) -> str:
    """`median (smallest-largest)`."""
    middle = statistics.median(numbers)
    return f"{middle:.{digits}f} ({min(numbers):.{digits}f}-{max(numbers):.{digits}f})"


def alternate(peers: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """`repeats` numbers of each peer, one of each in turn."""
    numbers: dict[str, list[float]] = {name: [] for name in peers}
    for repeat in range(repeats):
        for name, measure in peers.items():
            numbers[name].append(measure())
        print(f"repeat {repeat + 1} of {repeats} done", file=sys.stderr, flush=True)
    return numbers


def rewards_of(count: int) -> np.ndarray:
    """[count] float32: 1 and -1 in turn, where no verifier is part of the work."""
    return np.where(np.arange(count) % 2 == 0, 1.0, -1.0).astype(np.float32)


def mini_batch_order(count: int) -> np.ndarray:
    """[count]: the order in which an iteration's samples go into mini-batches, ours and every peer's."""
    return np.random.default_rng([0]).permutation(count)


class Stages:
    """Seconds of the stages of some work, by their names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the block's time to `stage`; what it starts on a device must be waited for in it."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Worker:
    """A peer in a process of its own, asked by JSON lines; it waits while others are measured."""

    def __init__(self, python: str, script: str | Path, name: str) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [python, str(script), "--worker", name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, **request: Any) -> Answer:
        """The answer to a request. Raises RuntimeError when the worker ended instead."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        else:
            line = self._process.stdout.readline()
            if line:
                return json.loads(line)
        raise RuntimeError(f"{self.name}: its process ended, exit status {self._process.wait()}; see above")

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()


@contextmanager
def workers_of(script: str, names: Sequence[str], tunix_python: str) -> Iterator[list[Worker]]:
    """A process of `script` for each name, Tunix's with its own Python; the head of the report is printed."""
    workers = [Worker(tunix_python if name == "tunix" else sys.executable, script, name) for name in names]
    try:
        print_head({worker.name: worker.ask(do="versions") for worker in workers})
        yield workers
    finally:
        for worker in workers:
            worker.close()


def serve(handle: Callable[[Answer], Answer]) -> None:
    """The worker's side: answer requests until there are none. What else it prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answers.write(json.dumps(handle(json.loads(line))) + "\n")
        answers.flush()


def peak_memory() -> float:
    """The largest resident memory of this process so far, in GiB (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError("/proc/self/status has no VmHWM")


def forget_peak_memory() -> None:
    """Start `peak_memory` again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")
