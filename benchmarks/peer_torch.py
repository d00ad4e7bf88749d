"""A plain PPO on transformers' models in torch: right-padded rows, so that causal attention needs no mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from common import (
    ADAMW,
    CLIP,
    GAMMA,
    LAMBDA,
    MAX_GRAD_NORM,
    PAD,
    VALUE_CLIP,
    Answer,
    Stages,
    mini_batch_order,
    rewards_of,
)
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    GenerationConfig,
)

Batch = dict[str, torch.Tensor]
"""`tokens` [R, P + T] int64; `mask` [R, T] float32, 1 on response tokens; and what a loss reads, [R, T]."""


def load_models(path: str, remat: str) -> dict[str, Any]:
    """`actor`, and `critic` with the same decoder and a scalar head of zeros, in float32."""
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
    return models


def logprobs(actor: Any, tokens: torch.Tensor, responses: int) -> torch.Tensor:
    """[R, responses]: the log-probs of the last `responses` tokens of each row."""
    logits = actor(tokens, use_cache=False, logits_to_keep=responses + 1).logits[:, :-1]
    chosen = logits.gather(-1, tokens[:, -responses:, None])[..., 0]
    return chosen - logits.logsumexp(-1)


def values(critic: Any, tokens: torch.Tensor, responses: int) -> torch.Tensor:
    """[R, responses]: the values of the states before these tokens."""
    return critic(tokens, use_cache=False).logits[:, -responses - 1 : -1, 0]


def actor_loss(actor: Any, batch: Batch, count: float) -> torch.Tensor:
    """The clipped objective, a sum over tokens divided by `count`; reads old_logprobs and advantages."""
    advantages = batch["advantages"]
    new = logprobs(actor, batch["tokens"], advantages.shape[1])
    ratio = (new - batch["old_logprobs"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    losses = torch.maximum(-ratio * advantages, -clipped * advantages)
    return (losses * batch["mask"]).sum() / count


def critic_loss(critic: Any, batch: Batch, count: float) -> torch.Tensor:
    """The clipped value loss, a sum over tokens divided by `count`; reads old_values and returns."""
    old, returns = batch["old_values"], batch["returns"]
    new = values(critic, batch["tokens"], returns.shape[1])
    clipped = old + (new - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    losses = torch.maximum((new - returns) ** 2, (clipped - returns) ** 2)
    return 0.5 * (losses * batch["mask"]).sum() / count


LOSSES = {"actor": actor_loss, "critic": critic_loss}


def make_update(name: str, model: Any) -> Callable[[Sequence[Batch]], tuple[float, float]]:
    """From micro-batches to (loss, gradient norm before clipping) of one optimizer step on all of them."""
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=ADAMW["learning_rate"],
        betas=(ADAMW["beta1"], ADAMW["beta2"]),
        eps=ADAMW["eps"],
        weight_decay=ADAMW["weight_decay"],
        fused=True,
    )

    def update(batches: Sequence[Batch]) -> tuple[float, float]:
        total, count = 0.0, sum(float(batch["mask"].sum()) for batch in batches)
        for batch in batches:
            loss = LOSSES[name](model, batch, count)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total, norm.item()

    return update


def generate(
    model: Any, prompts: list[list[int]], *, batch: int, new: int, eos: int | None, seed: int
) -> list[np.ndarray]:
    """The response to each prompt, EOS included, by `model.generate` on `batch` prompts at a time.

    Temperature 1 over the whole vocabulary; at most `new` tokens; all prompts have one length.
    """
    model.generation_config = GenerationConfig(
        max_new_tokens=new,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=eos,
        pad_token_id=PAD,
    )
    torch.manual_seed(seed)
    responses = []
    for start in range(0, len(prompts), batch):
        tokens = torch.tensor(prompts[start : start + batch])
        with torch.inference_mode():
            out = model.generate(tokens, attention_mask=torch.ones_like(tokens))
        for row in out[:, tokens.shape[1] :].numpy():
            ended = np.flatnonzero(row == eos) if eos is not None else []
            responses.append(row[: ended[0] + 1] if len(ended) else row)
    return responses


def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(whitened advantages, returns), [B, T], by the usual loop; `mask` has no gaps."""
    advantages, last, following = torch.zeros_like(values), torch.zeros(len(values)), torch.zeros(len(values))
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + GAMMA * following - values[:, t]
        last = torch.where(mask[:, t] > 0, delta + GAMMA * LAMBDA * last, 0.0)
        following = torch.where(mask[:, t] > 0, values[:, t], 0.0)
        advantages[:, t] = last
    valid = advantages[mask > 0]
    return (advantages - valid.mean()) / (valid.std() + 1e-8), advantages + values


def make_iteration(path: str, work: Answer) -> Callable[[list[list[int]], int, Stages], Answer]:
    """From (prompts, seed, stages) to what iteration.py wants to know of an iteration."""
    torch.set_flush_denormal(True)  # as XLA does
    models = load_models(path, work["remat"])
    updates = {name: make_update(name, model) for name, model in models.items()}

    def iterate(prompts: list[list[int]], seed: int, stage: Stages) -> Answer:
        with stage("generate"):
            models["actor"].eval()
            made = generate(
                models["actor"],
                prompts,
                batch=work["batch"],
                new=work["cap"],
                eos=work["eos"],
                seed=seed,
            )
            models["actor"].train()
        lengths = torch.tensor([len(response) for response in made])
        width = int(lengths.max())
        fields = {"tokens": torch.full((len(prompts), len(prompts[0]) + width), PAD)}
        for i, response in enumerate(made):
            row = np.concatenate([prompts[i], response])
            fields["tokens"][i, : len(row)] = torch.from_numpy(row)
        fields["mask"] = (torch.arange(width) < lengths[:, None]).float()

        def micro_batches(rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, Batch]]:
            """(rows, their fields), each padded to its own longest response."""
            for part in rows.split(work["micro_batch"]):
                beyond = width - int(lengths[part].max())
                yield part, {name: x[part, : x.shape[1] - beyond] for name, x in fields.items()}

        def read(function: Any, model: Any) -> torch.Tensor:
            out = torch.zeros(len(prompts), width)
            with torch.inference_mode():
                for part, batch in micro_batches(torch.arange(len(prompts))):
                    size = batch["mask"].shape[1]
                    out[part, :size] = function(model, batch["tokens"], size) * batch["mask"]
            return out

        with stage("old_log_prob"):
            fields["old_logprobs"] = read(logprobs, models["actor"])
        with stage("values"):
            fields["old_values"] = read(values, models["critic"])
        with stage("adv"):
            rewards = torch.zeros(len(prompts), width)
            rewards[torch.arange(len(prompts)), lengths - 1] = torch.from_numpy(rewards_of(len(prompts)))
            fields["advantages"], fields["returns"] = gae(rewards, fields["old_values"], fields["mask"])
        order = torch.from_numpy(mini_batch_order(len(prompts)))
        losses, positions = {}, 0
        for name in ("critic", "actor"):
            losses[name] = []
            with stage(f"update_{name}"):
                for rows in order.split(work["mini_batch"]):
                    batches = [batch for _, batch in micro_batches(rows)]
                    positions += sum(batch["tokens"].numel() for batch in batches)
                    losses[name].append(updates[name](batches)[0])
        return {"lengths": lengths.tolist(), "losses": losses, "positions": positions / 2}

    return iterate
