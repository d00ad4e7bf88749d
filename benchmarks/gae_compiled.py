"""GAE compiled for accelerators that need not be here: sequential turns, bytes, and the time of both.

    python benchmarks/gae_compiled.py [--topology v5p:2x2x1 h100:1x1] [--batch 64] [--length 16384]

Nothing is run. A scan of T turns waits on each turn for the one before, however little it computes; blocks
are matrix products, and the sums of 128 blocks of 128 tokens are one more. Bytes are those that the compiled
program reads and writes, loops counted as often as they run. Needs the extras `bench`, and `plan-tpu` or
`plan-gpu`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
from common import print_head, print_table, versions
from gae import GAMMA, LAM, rlax_scan

import vcppo_jax as vc
from vcppo_jax.aot.hlo import Module, parse_module
from vcppo_jax.aot.topology import topology
from vcppo_jax.aot.traffic import traffic


def turns(module: Module) -> int:
    """Turns of the program's loops, one after another."""
    entry = module.computations[module.entry]
    return sum(module.trip_count(i) or 0 for i in entry.instructions.values() if i.opcode == "while")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--topology", nargs="+", default=["v5p:2x2x1", "h100:1x1"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=16384)
    args = parser.parse_args()
    print_head({"all": versions("jax", "jaxlib", "libtpu", "jax-cuda12-plugin")})
    shape = (args.batch, args.length)
    programs: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
        # Every token valid, which the compiler sees: the form for masks with gaps is left out.
        "ours: vc.gae_blocked, blocks of 128": lambda rewards, values: vc.gae_blocked(
            rewards, values, jnp.ones(shape), gamma=GAMMA, lam=LAM, block_size=128
        ),
        "rlax's scan, vmap": rlax_scan,
    }
    rows = []
    for name in args.topology:
        described = topology(name)
        sharding = jax.sharding.SingleDeviceSharding(described.devices[0])
        array = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for label, function in programs.items():
            compiled = jax.jit(function).lower(array, array).compile()
            module = parse_module(compiled.as_text())
            moved = traffic(module, devices=1, unknown_trips=1).bytes
            temporary = compiled.memory_analysis().temp_size_in_bytes
            rows.append(
                [
                    name,
                    label,
                    f"{turns(module):,}",
                    f"{moved / 1e6:.1f}",
                    f"{1e6 * moved / (described.chip.memory_gbps * 1e9):.0f}",
                    f"{temporary / 1e6:.1f}",
                ]
            )
    print_table(
        ["compiled for", "what", "turns one after another", "MB moved", "us for them", "temporary MB"], rows
    )


if __name__ == "__main__":
    main()
