"""GAE: ours against verl's and TRL's loops, rlax's scan, and NumPy.

    python benchmarks/gae.py [--batch 64] [--length 16384] [--repeats 9] [--quick]

The loops are written anew from their formulas: over T in Python, over B in one array operation. Those of
verl carry masked slots through; those of TRL and rlax know no mask and get rewards and values of 0 behind
the end of each response. Responses are between T / 2 and T tokens long. Every peer gets its arrays in its
own library's form beforehand, and makes advantages alone.

Needs torch (the `bench` extra). rlax is used where it is installed, else its scan is written out here.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from common import alternate, print_head, print_table, spread, versions

import vcppo_jax as vc

try:
    import rlax
except ImportError:
    rlax = None

GAMMA, LAM = 1.0, 0.95
BLOCK_SIZES = (16, 32, 64, 128)


def make_data(batch: int, length: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    rewards, values = rng.normal(size=(2, batch, length)).astype(np.float32)
    mask = np.arange(length) < rng.integers(length // 2, length + 1, size=(batch, 1))
    return {"rewards": rewards * mask, "values": values * mask, "mask": mask.astype(np.float32)}


def verl_loop(rewards: Any, values: Any, mask: Any, stack: Callable[..., Any]) -> Any:
    """verl's `compute_gae_advantage_return`, without the whitening; for torch tensors and NumPy arrays."""
    next_values, last, advantages = 0.0, 0.0, []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        advantage = delta + GAMMA * LAM * last
        next_values = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_values
        last = advantage * mask[:, t] + (1 - mask[:, t]) * last
        advantages.append(last)
    return stack(advantages[::-1], 1)


def trl_loop(rewards: Any, values: Any, stack: Callable[..., Any]) -> Any:
    """The loop of TRL's PPO trainer."""
    length, last, advantages = rewards.shape[1], 0.0, []
    for t in reversed(range(length)):
        next_values = values[:, t + 1] if t < length - 1 else 0.0
        delta = rewards[:, t] + GAMMA * next_values - values[:, t]
        last = delta + GAMMA * LAM * last
        advantages.append(last)
    return stack(advantages[::-1], 1)


def numpy_loop(rewards: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The best of NumPy: deltas in one operation, and a loop over rows that lie together, [T, B]."""
    next_values = np.concatenate([values[:, 1:], np.zeros_like(values[:, :1])], 1)
    advantages = np.ascontiguousarray((rewards + GAMMA * next_values - values).T)
    for t in range(len(advantages) - 2, -1, -1):
        advantages[t] += GAMMA * LAM * advantages[t + 1]
    return advantages.T


def rlax_scan(rewards: jax.Array, values: jax.Array) -> jax.Array:
    """`rlax.truncated_generalized_advantage_estimation` of each sequence, with vmap."""

    def one(rewards: jax.Array, values: jax.Array) -> jax.Array:
        discounts = jnp.full_like(rewards, GAMMA)
        values = jnp.append(values, 0.0)
        if rlax is not None:
            return rlax.truncated_generalized_advantage_estimation(rewards, discounts, LAM, values)
        deltas = rewards + discounts * values[1:] - values[:-1]

        def step(last: jax.Array, token: Any) -> Any:
            delta, discount, lam = token
            last = delta + discount * lam * last
            return last, last

        return jax.lax.scan(step, 0.0, (deltas, discounts, LAM * jnp.ones_like(deltas)), reverse=True)[1]

    return jax.vmap(one)(rewards, values)


def make_peers(data: dict[str, np.ndarray]) -> dict[str, Callable[[], Any]]:
    """Name -> a function that makes the advantages and returns when they are there."""
    on_device = {name: jnp.asarray(x) for name, x in data.items()}
    tensors = {name: torch.from_numpy(x) for name, x in data.items()}
    unmasked = {name: on_device[name] for name in ("rewards", "values")}
    gap = data["mask"].copy()
    gap[:, 1] = 0
    with_gap = on_device | {"mask": jnp.asarray(gap)}

    def jitted(function: Callable[..., Any], arrays: dict[str, jax.Array], **fixed: Any) -> Callable[[], Any]:
        compiled = jax.jit(lambda **arrays: function(**arrays, **fixed)).lower(**arrays).compile()
        return lambda: jax.block_until_ready(compiled(**arrays))

    def stacked(arrays: list[np.ndarray], axis: int) -> np.ndarray:
        return np.stack(arrays, axis)

    def torch_verl() -> torch.Tensor:
        return verl_loop(tensors["rewards"], tensors["values"], tensors["mask"], torch.stack)

    peers: dict[str, Callable[[], Any]] = {
        "ours: vc.gae": jitted(vc.gae, on_device, gamma=GAMMA, lam=LAM),
    }
    for size in BLOCK_SIZES:
        peers[f"ours: vc.gae_blocked, blocks of {size}"] = jitted(
            vc.gae_blocked, on_device, gamma=GAMMA, lam=LAM, block_size=size
        )
    peers |= {
        "ours: vc.gae, with a gap in each row": jitted(vc.gae, with_gap, gamma=GAMMA, lam=LAM),
        f"rlax's scan, vmap{'' if rlax else ', from the formula'}": jitted(rlax_scan, unmasked),
        "NumPy, loop over [T, B]": lambda: numpy_loop(data["rewards"], data["values"]),
        "TRL's loop, NumPy": lambda: trl_loop(data["rewards"], data["values"], stacked),
        "TRL's loop, torch": lambda: trl_loop(tensors["rewards"], tensors["values"], torch.stack),
        "verl's loop, NumPy": lambda: verl_loop(data["rewards"], data["values"], data["mask"], stacked),
        "verl's loop, torch": torch_verl,
    }
    return peers


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=64, help="sequences, B (%(default)s)")
    parser.add_argument("--length", type=int, default=16_384, help="response tokens, T (%(default)s)")
    parser.add_argument("--repeats", type=int, default=9, help="measurements of each (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="4 x 256 and 2 repeats, to see that it runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.batch, args.length, args.repeats = 4, 256, 2
    packages = versions("jax", "jaxlib", "numpy", "torch", "rlax")
    print_head(
        {"all": packages | {"backend": jax.default_backend(), "torch threads": torch.get_num_threads()}}
    )
    print(f"work: B = {args.batch}, T = {args.length}, gamma {GAMMA}, lambda {LAM}, float32\n")

    data = make_data(args.batch, args.length)
    peers = make_peers(data)
    expected = verl_loop(*(data[name].astype(float) for name in ("rewards", "values", "mask")), np.stack)
    valid = data["mask"] > 0
    errors = {name: np.abs(np.asarray(run()) - expected)[valid].max() for name, run in peers.items()}

    def timed(run: Callable[[], Any]) -> Callable[[], float]:
        def measure() -> float:
            start = time.perf_counter()
            run()
            return 1e3 * (time.perf_counter() - start)

        return measure

    times = alternate({name: timed(run) for name, run in peers.items()}, args.repeats)
    ours = float(np.median(times["ours: vc.gae"]))
    rows = []
    for name, milliseconds in times.items():
        error = "other mask" if "gap" in name else f"{errors[name]:.1e}"
        rows.append([name, spread(milliseconds), f"{np.median(milliseconds) / ours:.2f}", error])
    print_table(["what", "ms: median (min-max)", "times ours", "largest error to float64"], rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
