"""Random mini-batches of a rollout, packed, with the weight of each token in each term of the loss.

Weights count the whole mini-batch, so that cutting it into micro-batches changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jax.typing import ArrayLike

from vcppo_jax.algos.losses import token_weights
from vcppo_jax.data.packing import Packing, PackShape

MiniBatch = tuple[Packing, dict[str, np.ndarray]]
"""Where the tokens lie, and the fields [B, T] that the loss reads of them."""


class Samples:
    """Prompts with responses, [B, T], that are packed whole or in parts."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        responses: np.ndarray,
        lengths: np.ndarray,
        shape_for: Callable[[int], PackShape],
    ) -> None:
        self.prompts, self.responses, self.lengths = prompts, responses, lengths
        self.mask = np.arange(responses.shape[1])[None] < lengths[:, None]
        self._shape_for = shape_for

    def __len__(self) -> int:
        return len(self.lengths)

    def pack(self, capacity: int | None = None) -> Packing:
        """The packing, in a shape for `capacity` sequences (as many as there are when None)."""
        shape = self._shape_for(len(self) if capacity is None else capacity)
        return Packing(self.prompts, self.responses, self.lengths, shape)

    def take(self, chosen: np.ndarray) -> Samples:
        """The samples of these row numbers, in their order."""
        prompts = [self.prompts[i] for i in chosen.tolist()]
        return Samples(prompts, self.responses[chosen], self.lengths[chosen], self._shape_for)

    def join(self, other: Samples) -> Samples:
        """These samples, then the other's; T is the larger one's."""
        width = max(self.responses.shape[1], other.responses.shape[1])
        responses = np.concatenate([widen(self.responses, width), widen(other.responses, width)])
        lengths = np.concatenate([self.lengths, other.lengths])
        return Samples([*self.prompts, *other.prompts], responses, lengths, self._shape_for)


def widen(x: np.ndarray, width: int) -> np.ndarray:
    """[B, width]: `x` [B, T] filled up with 0 on the right."""
    return np.pad(x, [(0, 0), (0, width - x.shape[1])])


def mini_batches(
    samples: Samples,
    fields: Mapping[str, ArrayLike],
    *,
    epochs: int,
    mini_batch_size: int,
    aggregation: str,
    norm_length: int,
    seed: Sequence[int],
    loss_mask: np.ndarray | None = None,
    kl_coef: float | None = None,
    positive: np.ndarray | None = None,
    demonstrations: Callable[[int], Samples] | None = None,
) -> Iterator[MiniBatch]:
    """`epochs` passes over the samples in random order, which follows from `seed` alone.

    To the `fields` [B, T] come `weights`, those of `aggregation`, and `token_mean`, both over the
    mini-batch's part of `loss_mask` [B, T] (all response tokens when None); with `kl_coef`, `kl_weights`,
    which are `kl_coef` times `weights`; with `positive` [B], `positive_weights`, the plain mean over the
    tokens of the positive responses; and with `demonstrations`, a function from the number of the mini-batch
    (from 0) to samples that join it, `sft_weights`, the plain mean over their tokens. `norm_length`: see
    `token_weights`. A mini-batch without a token in `loss_mask` and without demonstrations is left out.
    """
    rng = np.random.default_rng(list(seed))
    mask = samples.mask if loss_mask is None else loss_mask
    count = 0
    for _ in range(epochs):
        order = rng.permutation(len(samples))
        for start in range(0, len(order), mini_batch_size):
            chosen = order[start : start + mini_batch_size]
            part, valid = samples.take(chosen), mask[chosen]
            if demonstrations is None and not valid.any():
                continue  # nothing to learn, and momentum alone should not move the weights
            parts = {name: np.asarray(field)[chosen] for name, field in fields.items()}
            parts["weights"] = np.asarray(
                token_weights(valid, aggregation=aggregation, norm_length=norm_length)
            )
            parts["token_mean"] = _token_mean(valid)
            if kl_coef is not None:
                parts["kl_weights"] = kl_coef * parts["weights"]
            if positive is not None:
                parts["positive_weights"] = _token_mean(valid & positive[chosen][:, None])
            capacity = mini_batch_size
            if demonstrations is not None:
                extra = demonstrations(count)
                part, parts = _with_demonstrations(part, parts, extra)
                capacity += len(extra)
            yield part.pack(capacity), parts
            count += 1


def _with_demonstrations(
    samples: Samples, fields: dict[str, np.ndarray], extra: Samples
) -> tuple[Samples, dict[str, np.ndarray]]:
    joined = samples.join(extra)
    shape = joined.responses.shape
    fields = {
        name: np.pad(widen(field, shape[1]), [(0, len(extra)), (0, 0)]) for name, field in fields.items()
    }
    only_extra = joined.mask & (np.arange(shape[0]) >= len(samples))[:, None]
    return joined, fields | {"sft_weights": _token_mean(only_extra)}


def _token_mean(valid: np.ndarray) -> np.ndarray:
    return np.asarray(token_weights(valid, aggregation="token-mean"))
