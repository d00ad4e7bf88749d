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

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-6, (0.9, 0.999), 1e-8, 0.01, 1.0
CLIP, VALUE_CLIP = 0.2, 0.2

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
    from vcppo_jax.data.packing import PackShape
    from vcppo_jax.models.hf import load_policy
    from vcppo_jax.models.specs import weight_specs
    from vcppo_jax.phases.artifacts import value_model_from_policy
    from vcppo_jax.sharding import make_mesh
    from vcppo_jax.train.learner import Learner, Scorer
    from vcppo_jax.train.minibatches import Samples, mini_batches
    from vcppo_jax.train.objectives import LogprobScore, PolicyObjective, ValueObjective
    from vcppo_jax.train.optimizer import learning_rate_schedule, make_optimizer

    mesh = make_mesh({})
    policy = load_policy(path, remat=remat, mesh=mesh)
    config = policy.config
    value_model, _ = value_model_from_policy(policy, mesh, head_bias=False)
    count, length = data["responses"].shape
    shape = PackShape(count // micro_batch, micro_batch, data["prompts"].shape[1] + length)
    samples = Samples(data["prompts"].tolist(), data["responses"], np.full(count, length), lambda _: shape)
    old_logprobs = Scorer(LogprobScore(config, temperature=1.0), mesh)(policy.params, samples.pack())
    schedule = learning_rate_schedule(
        learning_rate=LEARNING_RATE, warmup_steps=0, schedule="constant", updates=1
    )
    optimizer = make_optimizer(
        schedule,
        beta1=BETAS[0],
        beta2=BETAS[1],
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=MAX_GRAD_NORM,
    )
    actor_objective = PolicyObjective(
        config=config,
        temperature=1.0,
        policy_loss="ppo",
        clip_low=CLIP,
        clip_high=CLIP,
        dual_clip=None,
        importance=False,
        kl_kind=None,
        entropy_coef=0.0,
        positive_nll_coef=0.0,
        sft_coef=0.0,
    )
    critic_objective = ValueObjective(config=config, clip=VALUE_CLIP)
    fields = {
        "actor": {"old_logprobs": old_logprobs, "advantages": data["advantages"]},
        "critic": {"old_values": data["old_values"], "returns": data["returns"]},
    }

    def stepper(name: str, params: Any, specs: Any, objective: Any) -> Step:
        learner = Learner(name, specs, objective, optimizer, mesh, max_skipped=1)
        state = learner.new_state(params)
        ((packing, chosen),) = mini_batches(
            samples,
            fields[name],
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
        "actor": stepper("actor", policy.params, weight_specs(config, head="lm"), actor_objective),
        "critic": stepper(
            "critic",
            value_model.params,
            weight_specs(config, head="value", head_bias=False),
            critic_objective,
        ),
    }


def plain_torch(path: str, data: Data, micro_batch: int, remat: str) -> dict[str, Step]:
    """A plain step on transformers' model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForTokenClassification

    config = AutoConfig.from_pretrained(path, num_labels=1)
    models = {
        "actor": AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        "critic": AutoModelForTokenClassification.from_pretrained(path, config=config, dtype=torch.float32),
    }
    models["critic"].dropout = torch.nn.Identity()  # 10 % by default
    for parameter in models["critic"].score.parameters():
        torch.nn.init.zeros_(parameter)
    for model in models.values():
        model.train()
        if remat == "full":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tensors = {name: torch.from_numpy(x) for name, x in data.items()}
    tokens = torch.cat([tensors["prompts"], tensors["responses"]], 1).long()
    prompt = tensors["prompts"].shape[1]
    micro_batches = torch.arange(len(tokens)).split(micro_batch)
    count = tensors["responses"].numel()

    def read(model: Any, rows: Any) -> Any:
        """[R, T, V] or [R, T, 1]: what is read where each response token is predicted."""
        return model(tokens[rows], use_cache=False).logits[:, prompt - 1 : -1]

    def logprobs(rows: Any) -> Any:
        logits = read(models["actor"], rows)
        chosen = logits.gather(-1, tokens[rows, prompt:, None])[..., 0]
        return chosen - logits.logsumexp(-1)

    with torch.no_grad():
        old_logprobs = torch.cat([logprobs(rows) for rows in micro_batches])

    def actor_loss(rows: Any) -> Any:
        ratio = (logprobs(rows) - old_logprobs[rows]).exp()
        advantages = tensors["advantages"][rows]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        return torch.maximum(-ratio * advantages, -clipped * advantages).sum() / count

    def critic_loss(rows: Any) -> Any:
        values, old = read(models["critic"], rows)[..., 0], tensors["old_values"][rows]
        clipped = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
        returns = tensors["returns"][rows]
        return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2).sum() / count

    def stepper(model: Any, loss_of: Callable[[Any], Any]) -> Step:
        options = {"lr": LEARNING_RATE, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY}
        optimizer = torch.optim.AdamW(model.parameters(), **options, fused=True)

        def step() -> tuple[float, float]:
            total = 0.0
            for rows in micro_batches:
                loss = loss_of(rows)
                loss.backward()
                total += loss.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return total, norm.item()

        return step

    return {"actor": stepper(models["actor"], actor_loss), "critic": stepper(models["critic"], critic_loss)}


def tunix(path: str, data: Data, micro_batch: int, remat: str) -> dict[str, Step]:
    """Tunix's trainer; the gradient norm is the mean of the micro-batches' norms."""
    from peer_tunix import make_trainers

    optimizer = {"b1": BETAS[0], "b2": BETAS[1], "eps": EPS, "weight_decay": WEIGHT_DECAY}
    return make_trainers(
        path,
        data,
        micro_batch=micro_batch,
        remat=remat,
        learning_rate=LEARNING_RATE,
        adamw=optimizer,
        max_grad_norm=MAX_GRAD_NORM,
        clip=CLIP,
        value_clip=VALUE_CLIP,
    )


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
