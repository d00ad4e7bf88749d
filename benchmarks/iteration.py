"""One whole iteration of PPO: generate, log-probs, values, advantages, update; ours against torch and Tunix.

    python benchmarks/iteration.py [--peers torch tunix] [--tunix-python PATH] [--repeats 2] [--remat none]
        [--samples 32] [--batch 16] [--cap 384] [--mini-batch 16] [--micro-batch 4] [--layers 30] [--quick]

Work: one response to each of `--samples` prompts of 32 tokens, at most `--batch` at once; old log-probs and
values of all of them; advantages; then one epoch over mini-batches of `--mini-batch` samples, an AdamW step
of the critic and one of the actor for each, gradients clipped by global norm. Float32, SmolLM2-135M's shapes
in two networks. The lengths are log-normal in the proportions of median 200, 99th percentile 2000 and limit
2048, scaled to the limit `--cap`; weights that count (see shapes.py) give every library the same ones. The
reward is 1 and -1 in turn: the verifier is not part of it. Lambda is 0.95 for both networks.

ours     all prompts at once into the engine's slots; scoring and updates on packed rows
torch    transformers' `generate` on batches in the order given, each until its longest response ends; then
         micro-batches padded to their own longest row, losses and loops as in peer_torch.py
tunix    Tunix's sampler, log-prob, value, GAE and loss functions and its trainers, in the order of its
         `PPOLearner`, everything padded to the limit as there

Each library runs in a process of its own, which waits while the others are measured. Before the measured
iterations each does one on responses of 4 tokens, which compiles; ours also generates the real lengths once,
for it has more shapes. The losses of that iteration must agree, else the benchmark stops: they then weigh
every token alike. The weights go on from iteration to iteration. Memory is the largest resident memory of the
process over the measured iterations.

Needs the `bench` extra. Tunix (google-tunix 0.1.7) may live in another environment: --tunix-python.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Answer,
    Stages,
    Worker,
    alternate,
    forget_peak_memory,
    peak_memory,
    print_table,
    serve,
    spread,
    versions,
    workers_of,
)
from generate import MEDIAN, lognormal_lengths, static_row_steps
from shapes import SMOLLM2, TINY, write_model

LIMIT = 2048
"""The limit that goes with the median and 99th percentile of generate.py."""
STAGES = ("generate", "old_log_prob", "values", "adv", "update_critic", "update_actor")
SHORT = 4
"""Tokens in each response of the iteration that compiles."""

Iterate = Callable[[list[list[int]], int, Stages], Answer]
"""(prompts, seed, stages) -> lengths of the responses, losses of each update, positions in an update."""


def ours(path: str, work: Answer) -> Iterate:
    from ours import make_iteration

    return make_iteration(path, work)


def plain_torch(path: str, work: Answer) -> Iterate:
    from peer_torch import make_iteration

    return make_iteration(path, work)


def tunix(path: str, work: Answer) -> Iterate:
    from peer_tunix import make_iteration

    return make_iteration(path, work)


PEERS: dict[str, Callable[[str, Answer], Iterate]] = {"ours": ours, "torch": plain_torch, "tunix": tunix}
PACKAGES = {
    "ours": ("vcppo_jax", "jax", "jaxlib", "optax"),
    "torch": ("torch", "transformers"),
    "tunix": ("google-tunix", "jax", "jaxlib", "flax"),
}


def work(name: str) -> None:
    """The process of one library."""
    iterate: list[Iterate] = []

    def handle(request: Answer) -> Answer:
        if request["do"] == "versions":
            return versions(*PACKAGES[name])
        if request["do"] == "load":
            iterate.append(PEERS[name](request["model"], request["work"]))
            return {}
        if request["do"] == "measure":
            forget_peak_memory()
            return {}
        stages = Stages()
        answer = iterate[0](request["prompts"], request["seed"], stages)
        return answer | {"seconds": stages.seconds, "peak": peak_memory()}

    serve(handle)


def ask(worker: Worker, prompts: np.ndarray, lengths: np.ndarray, eos: int, seed: int) -> Answer:
    """One iteration. Raises RuntimeError on other lengths than those prescribed."""
    prompts = prompts.copy()
    prompts[:, -1] = eos - lengths
    answer = worker.ask(do="iterate", prompts=prompts.tolist(), seed=seed)
    if answer["lengths"] != lengths.tolist():
        raise RuntimeError(f"{worker.name}: expected {lengths.tolist()}, got {answer['lengths']}")
    return answer


def compile_all(workers: list[Worker], prompts: np.ndarray, lengths: np.ndarray, work: Answer) -> None:
    """The iteration before the measured ones. Raises RuntimeError where the losses do not agree."""
    first: Answer = {}
    for worker in workers:
        print(f"{worker.name}: loading, compiling, a short iteration", file=sys.stderr, flush=True)
        worker.ask(do="load", model=work["model"], work=work)
        losses = ask(worker, prompts, np.full_like(lengths, SHORT), work["eos"], 0)["losses"]
        first = first or losses
        for network, found in losses.items():
            if not np.allclose(found, first[network], rtol=1e-3, atol=1e-4):
                raise RuntimeError(
                    f"{worker.name}: losses of the {network}: expected those of {workers[0].name}, "
                    f"{first[network]}, got {found}"
                )
        if worker.name == "ours":
            ask(worker, prompts, lengths, work["eos"], 0)
        worker.ask(do="measure")


def measure(
    workers: list[Worker], repeats: int, prompts: np.ndarray, lengths: np.ndarray, eos: int
) -> list[list[str]]:
    """The rows of the table."""
    answers: dict[str, list[Answer]] = {worker.name: [] for worker in workers}

    def once(worker: Worker) -> float:
        answer = ask(worker, prompts, lengths, eos, len(answers[worker.name]) + 1)
        answers[worker.name].append(answer)
        return sum(answer["seconds"].values())

    seconds = alternate({worker.name: lambda w=worker: once(w) for worker in workers}, repeats)
    ours = float(np.median(seconds["ours"]))
    real = int(lengths.sum()) + prompts.size
    rows = []
    for name, numbers in seconds.items():
        found = answers[name]
        stages = [float(np.median([answer["seconds"][stage] for answer in found])) for stage in STAGES]
        rows.append(
            [
                name,
                spread(numbers, 1),
                f"{np.median(numbers) / ours:.2f}",
                *(f"{stage:.2f}" for stage in stages),
                f"{real / found[0]['positions']:.0%}",
                f"{max(answer['peak'] for answer in found):.2f}",
            ]
        )
    return rows


def run(args: argparse.Namespace, scratch: Path, workers: list[Worker]) -> None:
    """Measure, and print the table."""
    shapes = TINY if args.quick else SMOLLM2 | {"num_hidden_layers": args.layers}
    eos = shapes["vocab_size"] - 1
    model = write_model(scratch / "counting", shapes, counting=True)
    lengths = lognormal_lengths(args.samples, args.cap, args.cap * MEDIAN / LIMIT)
    prompts = np.random.default_rng(1).integers(1, eos, (args.samples, args.prompt_tokens))
    names = ("samples", "batch", "cap", "mini_batch", "micro_batch", "remat", "prompt_tokens")
    request: dict[str, Any] = {name: getattr(args, name) for name in names}
    compile_all(workers, prompts, lengths, request | {"model": str(model), "eos": eos})
    steps = static_row_steps(lengths, args.batch)
    print(
        f"{lengths.sum()} tokens in {args.samples} responses, median {np.median(lengths):.0f}, longest "
        f"{lengths.max()}; batches of {args.batch} take {steps} row-steps, of which "
        f"{lengths.sum() / steps:.0%} give a token that is kept; {shapes['num_hidden_layers']} layers, "
        f"remat {args.remat}\n"
    )
    rows = measure(workers, args.repeats, prompts, lengths, eos)
    head = ["library", "s: median (min-max)", "times ours", *STAGES, "real positions", "peak GiB"]
    print_table(head, rows)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--peers", nargs="*", choices=("torch", "tunix"), default=("torch", "tunix"))
    parser.add_argument("--tunix-python", default=sys.executable, help="the Python that has google-tunix")
    parser.add_argument("--repeats", type=int, default=2, help="iterations of each (%(default)s)")
    parser.add_argument("--remat", choices=("none", "full"), default="none", help="(%(default)s)")
    parser.add_argument("--samples", type=int, default=32, help="responses (%(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="responses at once (%(default)s)")
    parser.add_argument("--cap", type=int, default=384, help="the length limit (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="tokens in a prompt (%(default)s)")
    parser.add_argument("--mini-batch", type=int, default=16, help="samples in an update (%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="the peers', in samples (%(default)s)")
    parser.add_argument("--layers", type=int, default=30, help="SmolLM2-135M has 30 (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and little work: does it run?")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        work(args.worker)
        return 0
    if args.quick:
        args.repeats, args.samples, args.batch, args.mini_batch, args.micro_batch = 1, 8, 4, 4, 2
        args.cap, args.prompt_tokens = 32, 8
    sizes = (args.samples, args.batch, args.mini_batch, args.micro_batch)
    if args.samples % args.batch or args.samples % args.mini_batch or args.mini_batch % args.micro_batch:
        parser.error(
            "expected --batch and --mini-batch to divide --samples, and --micro-batch to divide "
            f"--mini-batch; got samples, batch, mini-batch, micro-batch {sizes}"
        )
    with (
        workers_of(__file__, ("ours", *args.peers), args.tunix_python) as workers,
        tempfile.TemporaryDirectory() as scratch,
    ):
        run(args, Path(scratch), workers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
