"""One PPO update of actor and critic: ours against a plain torch step and Tunix's trainer.

    python benchmarks/update.py [MODEL_DIR] [--remat none full] [--peers torch tunix]
        [--tunix-python PATH] [--sequences 8] [--micro-batch 4] [--repeats 3] [--quick]

Work: 8 sequences of 512 tokens, a prompt of 64 and a response of 448, nothing padded, in micro-batches of 4
whose gradients add up to one AdamW step with clipping by global norm, for each of the two networks, in
float32. MODEL_DIR is a Hugging Face directory of SmolLM2-135M (see make_smollm2.py); without it, random
weights of its shapes. The critic has the same decoder and a scalar head of zeros. Advantages, returns and
old values are given; the old log-probs are those of the first weights, made by each library beforehand.

    none    every activation is kept
    full    each layer is computed again in the backward pass: remat "full" here, gradient checkpointing in
            transformers, RematConfig.DECODER in Tunix

ours     `Learner.step` with `PolicyObjective` and `ValueObjective`, as the RL phase builds them; it reports
         the entropy too
torch    transformers' model, PPO's clipped losses, `torch.optim.AdamW(fused=True)`
tunix    `tunix.rl.trainer.Trainer` with Tunix's own PPO losses (Tunix 0.1.7 passes the critic an argument
         that its Llama does not take; here the critic takes and drops it)

Ours is measured with one peer at a time, each in a process of its own and the two in turn: more would not
fit into 24 GiB. Memory is the largest resident memory of the process over the measured updates, with the
weights and optimizer states of both networks in it.

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
from common import (
    Answer,
    Worker,
    alternate,
    forget_peak_memory,
    peak_memory,
    print_head,
    print_table,
    serve,
    spread,
    versions,
)
from shapes import SMOLLM2, TINY, write_model

Data = dict[str, np.ndarray]
"""prompts [B, P], responses [B, T], and advantages, returns, old_values [B, T]."""
Step = Callable[[], tuple[float, float]]
"""One update; (loss, gradient norm before clipping)."""


def make_data(vocab: int, sequences: int, prompt: int, response: int) -> Data:
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, vocab, (sequences, prompt + response), dtype=np.int32)
    advantages, returns, noise = rng.standard_normal((3, sequences, response), np.float32)
    return {
        "prompts": tokens[:, :prompt],
        "responses": tokens[:, prompt:],
        "advantages": advantages,
        "returns": returns,
        "old_values": 0.1 * noise,
    }


def ours(path: str, data: Data, micro_batch: int, remat: str) -> dict[str, Step]:
    """Our two updates, compiled when they are first called."""
    from ours import make_networks

    from vcppo_jax.data.packing import PackShape
    from vcppo_jax.train.minibatches import Samples, mini_batches

    networks = make_networks(path, remat)
    count, length = data["responses"].shape
    shape = PackShape(count // micro_batch, micro_batch, data["prompts"].shape[1] + length)
    samples = Samples(data["prompts"].tolist(), data["responses"], np.full(count, length), lambda _: shape)
    old_logprobs = networks.score_logprobs(networks.policy.params, samples.pack())
    fields = {
        "actor": {"old_logprobs": old_logprobs, "advantages": data["advantages"]},
        "critic": {"old_values": data["old_values"], "returns": data["returns"]},
    }

    def stepper(learner: Any, params: Any) -> Step:
        state = learner.new_state(params)
        ((packing, chosen),) = mini_batches(
            samples,
            fields[learner.name],
            epochs=1,
            mini_batch_size=count,
            aggregation="token-mean",
            norm_length=length,
            seed=(0,),
        )

        def step() -> tuple[float, float]:
            nonlocal state
            state, info = learner.step(state, packing, chosen, "benchmark")
            return info["loss"], info["grad_norm"]

        return step

    return {
        "actor": stepper(networks.actor, networks.policy.params),
        "critic": stepper(networks.critic, networks.value_model.params),
    }


def plain_torch(path: str, data: Data, micro_batch: int, remat: str) -> dict[str, Step]:
    """A plain step on transformers' model."""
    import torch
    from peer_torch import load_models, logprobs, make_update

    models = load_models(path, remat)
    tensors = {name: torch.from_numpy(x) for name, x in data.items()}
    fields = {name: tensors[name] for name in ("advantages", "returns", "old_values")}
    fields["tokens"] = torch.cat([tensors["prompts"], tensors["responses"]], 1).long()
    fields["mask"] = torch.ones_like(fields["advantages"])
    batches = [
        {name: x[rows] for name, x in fields.items()}
        for rows in torch.arange(len(fields["tokens"])).split(micro_batch)
    ]
    with torch.no_grad():
        for batch in batches:
            batch["old_logprobs"] = logprobs(models["actor"], batch["tokens"], batch["mask"].shape[1])
    updates = {name: make_update(name, model) for name, model in models.items()}
    return {name: lambda u=update: u(batches) for name, update in updates.items()}


def tunix(path: str, data: Data, micro_batch: int, remat: str) -> dict[str, Step]:
    """Tunix's trainer; the gradient norm is the mean of the micro-batches' norms."""
    from peer_tunix import make_trainers

    return make_trainers(path, data, micro_batch=micro_batch, remat=remat)


PEERS = {"ours": ours, "torch": plain_torch, "tunix": tunix}
PACKAGES = {
    "ours": ("vcppo_jax", "jax", "jaxlib", "optax"),
    "torch": ("torch", "transformers"),
    "tunix": ("google-tunix", "jax", "jaxlib", "flax"),
}


def work(name: str) -> None:
    """The process of one library."""
    steps: dict[str, Step] = {}

    def handle(request: Answer) -> Answer:
        if request["do"] == "versions":
            return versions(*PACKAGES[name])
        if request["do"] == "load":
            with np.load(request["data"]) as arrays:
                data = dict(arrays)
            steps.update(PEERS[name](request["model"], data, request["micro_batch"], request["remat"]))
            first = {network: step() for network, step in steps.items()}
            forget_peak_memory()
            return {network: {"loss": loss, "grad_norm": norm} for network, (loss, norm) in first.items()}
        seconds = {}
        for network, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[network] = time.perf_counter() - start
        return {"seconds": seconds, "peak": peak_memory()}

    serve(handle)


def compare(
    pair: list[Worker], args: argparse.Namespace, remat: str, request: Answer, tokens: int
) -> list[list[str]]:
    """Rows of the table: the two of a pair, updated in turn."""
    first = {}
    for worker in pair:
        print(f"remat {remat}: {worker.name}: loading, compiling, first update", file=sys.stderr, flush=True)
        first[worker.name] = worker.ask(do="load", remat=remat, **request)
    answers: dict[str, list[Answer]] = {worker.name: [] for worker in pair}

    def both(worker: Worker) -> float:
        answer = worker.ask(do="update")
        answers[worker.name].append(answer)
        return sum(answer["seconds"].values())

    seconds = alternate({worker.name: lambda w=worker: both(w) for worker in pair}, args.repeats)
    ours = float(np.median(seconds["ours"]))
    rows = []
    for name, numbers in seconds.items():
        parts = [[answer["seconds"][network] for answer in answers[name]] for network in ("actor", "critic")]
        rows.append(
            [
                remat,
                name,
                *(spread(part) for part in parts),
                spread([tokens / s for s in numbers], 1),
                f"{np.median(numbers) / ours:.2f}",
                f"{max(answer['peak'] for answer in answers[name]):.2f}",
                f"{first[name]['actor']['grad_norm']:.4f}",
            ]
        )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--remat", nargs="+", choices=("none", "full"), default=("none", "full"))
    parser.add_argument("--peers", nargs="+", choices=("torch", "tunix"), default=("torch", "tunix"))
    parser.add_argument("--tunix-python", default=sys.executable, help="the Python that has google-tunix")
    parser.add_argument("--sequences", type=int, default=8, help="of 512 tokens (%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences in one (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="updates of each (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short rows: does it run?")
    parser.add_argument("--worker", choices=PEERS, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker is not None:
        work(args.worker)
        return 0
    if args.sequences % args.micro_batch:
        parser.error(f"--sequences {args.sequences} is not a multiple of --micro-batch {args.micro_batch}")
    shapes, prompt, response = SMOLLM2, 64, 448
    if args.quick:
        shapes, prompt, response, args.model, args.repeats = TINY, 4, 12, None, 1
    pythons = {"ours": sys.executable, "torch": sys.executable, "tunix": args.tunix_python}
    rows: list[list[str]] = []
    described = set()
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or write_model(Path(scratch) / "random", shapes, counting=False)
        file = Path(scratch) / "data.npz"
        np.savez(file, **make_data(shapes["vocab_size"], args.sequences, prompt, response))
        request = {"model": str(model), "data": str(file), "micro_batch": args.micro_batch}
        for remat in args.remat:
            for peer in args.peers:
                pair = [Worker(pythons[name], __file__, name) for name in ("ours", peer)]
                try:
                    if peer not in described:
                        print_head({worker.name: worker.ask(do="versions") for worker in pair})
                        described.add(peer)
                    tokens = args.sequences * (prompt + response)
                    rows += compare(pair, args, remat, request, tokens)
                finally:
                    for worker in pair:
                        worker.close()
    print_table(
        [
            "remat",
            "library",
            "actor, s: median (min-max)",
            "critic, s",
            "tokens/s, both",
            "times ours",
            "peak GiB",
            "first grad norm",
        ],
        rows,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
