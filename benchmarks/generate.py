"""Generation: ours against transformers and Tunix, at fixed lengths and at log-normal ones.

    python benchmarks/generate.py [MODEL_DIR] [--work fixed lognormal] [--peers transformers tunix]
        [--tunix-python PATH] [--repeats 3] [--cap 512] [--samples 128] [--quick]

Fixed length: 8 and 32 prompts of 64 random tokens, continued by 64 and 256 tokens, no EOS. MODEL_DIR is a
Hugging Face directory of SmolLM2-135M (see make_smollm2.py); without it, random weights of its shapes.

Log-normal lengths: one response to each of `--samples` prompts, at most 32 at once. The lengths are drawn
with median 200 and 99th percentile 2000, cut at `--cap`, and every library generates the same ones: the
weights count (see shapes.py), so each prompt's last token says when EOS comes. Ours is given all prompts;
the other two, which know only whole batches, 32 at a time in the order given.

All sample at temperature 1 from the full vocabulary in float32. Ours and Tunix give log-probs with the
tokens, transformers does not. Measured is the whole call, from token ids to token ids, once everything is
compiled. Each library runs in a process of its own, which waits while the others are measured.

Needs the `bench` extra. Tunix (google-tunix 0.1.7) may live in another environment: --tunix-python.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import PAD, Answer, Worker, alternate, print_table, serve, spread, versions, workers_of
from shapes import SMOLLM2, TINY, write_model

MEDIAN, P99, P99_SCORE = 200, 2000, 2.326
"""Median and 99th percentile of the log-normal lengths; the normal distribution's 99th percentile."""

Generate = Callable[[str, list[list[int]], int, int, int | None, int], list[int]]
"""(model, prompts, batch, max_new_tokens, EOS id, seed) -> length of each response."""


def ours() -> Generate:
    import functools

    import jax

    import vcppo_jax as vc
    from vcppo_jax.models.hf import load_policy

    policy_of = functools.cache(load_policy)

    def generate(
        model: str, prompts: list[list[int]], batch: int, new: int, eos: int | None, seed: int
    ) -> list[int]:
        rollout = vc.generate(
            policy_of(model),
            prompts,
            sampling=vc.Sampling(max_new_tokens=new, temperature=1.0),
            key=jax.random.key(seed),
            eos_ids=() if eos is None else (eos,),
            pad_id=PAD,
            batch_size=batch,
        )
        return np.asarray(rollout.lengths).tolist()

    return generate


def transformers() -> Generate:
    import functools

    import peer_torch
    import torch
    from transformers import AutoModelForCausalLM

    @functools.cache
    def model_of(path: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def generate(
        model: str, prompts: list[list[int]], batch: int, new: int, eos: int | None, seed: int
    ) -> list[int]:
        made = peer_torch.generate(model_of(model), prompts, batch=batch, new=new, eos=eos, seed=seed)
        return [len(response) for response in made]

    return generate


def tunix() -> Generate:
    import functools

    from peer_tunix import Numbers, load_llama
    from tunix.generate.sampler import CacheConfig, Sampler

    llama_of = functools.cache(load_llama)

    @functools.cache
    def sampler_of(path: str, cache_size: int) -> Any:
        llama = llama_of(path)
        shape = {name: getattr(llama.config, name) for name in ("num_layers", "num_kv_heads", "head_dim")}
        return Sampler(llama, Numbers(), CacheConfig(cache_size=cache_size, **shape))

    def generate(
        model: str, prompts: list[list[int]], batch: int, new: int, eos: int | None, seed: int
    ) -> list[int]:
        sampler = sampler_of(model, len(prompts[0]) + new)
        lengths = []
        for start in range(0, len(prompts), batch):
            out = sampler(
                [" ".join(map(str, prompt)) for prompt in prompts[start : start + batch]],
                max_generation_steps=new,
                max_prompt_length=len(prompts[0]),
                temperature=1.0,
                top_p=1.0,
                return_logprobs=True,
                eos_tokens=[-1 if eos is None else eos],
                seed=seed,
            )
            # Tunix leaves out the EOS that it has sampled; where there is none, the row is full.
            lengths += [min(len(tokens) + (eos is not None), new) for tokens in out.tokens]
        return lengths

    return generate


PEERS: dict[str, Callable[[], Generate]] = {"ours": ours, "transformers": transformers, "tunix": tunix}
PACKAGES = {
    "ours": ("vcppo_jax", "jax", "jaxlib"),
    "transformers": ("transformers", "torch"),
    "tunix": ("google-tunix", "jax", "jaxlib", "flax"),
}


def work(name: str) -> None:
    """The process of one library."""
    generate = PEERS[name]()

    def handle(request: Answer) -> Answer:
        if request["do"] == "versions":
            return versions(*PACKAGES[name])
        start = time.perf_counter()
        lengths = generate(
            request["model"],
            request["prompts"],
            request["batch"],
            request["new"],
            request["eos"],
            request["seed"],
        )
        return {"seconds": time.perf_counter() - start, "lengths": lengths}

    serve(handle)


def lognormal_lengths(samples: int, cap: int, median: float = MEDIAN) -> np.ndarray:
    """[samples] response lengths, from 1 to `cap`; the 99th percentile is 10 times the median."""
    sigma = np.log(P99 / MEDIAN) / P99_SCORE
    drawn = np.random.default_rng(0).lognormal(np.log(median), sigma, samples)
    return np.clip(np.rint(drawn), 1, cap).astype(int)


def static_row_steps(lengths: np.ndarray, batch: int) -> int:
    """Decode steps times rows of batches that run until their longest response ends."""
    parts = [lengths[start : start + batch] for start in range(0, len(lengths), batch)]
    return int(sum(len(part) * part.max() for part in parts))


def measure(
    workers: list[Worker], repeats: int, prompts: list[list[int]], expected: list[int], **request: Any
) -> dict[str, list[float]]:
    """Seconds of each worker, in turn, once it has compiled. Raises RuntimeError on other lengths."""

    def asked(worker: Worker, seed: int, count: int) -> float:
        answer = worker.ask(do="generate", seed=seed, prompts=prompts[:count], **request)
        if answer["lengths"] != expected[:count]:
            raise RuntimeError(f"{worker.name}: expected {expected[:count]}, got {answer['lengths']}")
        return answer["seconds"]

    seeds = {worker.name: iter(range(1, repeats + 1)) for worker in workers}
    for worker in workers:
        print(f"{worker.name}: compiling and warming up", file=sys.stderr, flush=True)
        # The peers' batches are all of one shape; ours compiles for each size that it shrinks through.
        asked(worker, 0, len(prompts) if worker.name == "ours" else request["batch"])
    return alternate(
        {worker.name: lambda w=worker: asked(w, next(seeds[w.name]), len(prompts)) for worker in workers},
        repeats,
    )


def rows_of(what: str, seconds: dict[str, list[float]], tokens: int) -> list[list[str]]:
    """One row of the table for each library."""
    ours = float(np.median(seconds["ours"]))
    return [
        [
            what,
            name,
            spread([tokens / s for s in numbers], 1),
            spread(numbers),
            f"{np.median(numbers) / ours:.2f}",
        ]
        for name, numbers in seconds.items()
    ]


def run(args: argparse.Namespace, scratch: Path, workers: list[Worker]) -> None:
    """Measure, and print the table."""
    shapes = TINY if args.quick else SMOLLM2
    rng = np.random.default_rng(1)
    vocab = shapes["vocab_size"]
    rows = []
    if "fixed" in args.work:
        model = args.model or write_model(scratch / "random", shapes, counting=False)
        for batch in (2,) if args.quick else (8, 32):
            for new in (4,) if args.quick else (64, 256):
                prompts = rng.integers(1, vocab, (batch, args.prompt_tokens)).tolist()
                request = {"model": str(model), "batch": batch, "new": new, "eos": None}
                seconds = measure(workers, args.repeats, prompts, [new] * batch, **request)
                rows += rows_of(f"fixed: batch {batch}, {new} new", seconds, batch * new)
    if "lognormal" in args.work:
        model = write_model(scratch / "counting", shapes, counting=True)
        eos, batch = vocab - 1, 4 if args.quick else 32
        lengths = lognormal_lengths(args.samples, args.cap)
        prompts = rng.integers(1, vocab, (args.samples, args.prompt_tokens))
        prompts[:, -1] = eos - lengths
        request = {"model": str(model), "batch": batch, "new": args.cap, "eos": eos}
        seconds = measure(workers, args.repeats, prompts.tolist(), lengths.tolist(), **request)
        steps = static_row_steps(lengths, batch)
        print(
            f"log-normal: {lengths.sum()} tokens in {args.samples} responses, median "
            f"{np.median(lengths):.0f}, longest {lengths.max()}; batches of {batch} take {steps} row-steps, "
            f"of which {100 * lengths.sum() / steps:.0f} % give a token that is kept\n"
        )
        rows += rows_of(f"log-normal: {args.samples} samples, cap {args.cap}", seconds, int(lengths.sum()))
    print_table(["work", "library", "tokens/s: median (min-max)", "seconds", "times ours"], rows)


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR", help="for the fixed lengths")
    parser.add_argument("--work", nargs="+", choices=("fixed", "lognormal"), default=("fixed", "lognormal"))
    parser.add_argument(
        "--peers", nargs="*", choices=("transformers", "tunix"), default=("transformers", "tunix")
    )
    parser.add_argument("--tunix-python", default=sys.executable, help="the Python that has google-tunix")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each (%(default)s)")
    parser.add_argument("--samples", type=int, default=128, help="log-normal responses (%(default)s)")
    parser.add_argument("--cap", type=int, default=512, help="longest log-normal response (%(default)s)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens in a prompt (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and little work: does it run?")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        work(args.worker)
        return 0
    if args.quick:
        args.model, args.repeats, args.samples, args.cap, args.prompt_tokens = None, 2, 8, 32, 8
    with (
        workers_of(__file__, ("ours", *args.peers), args.tunix_python) as workers,
        tempfile.TemporaryDirectory() as scratch,
    ):
        run(args, Path(scratch), workers)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
