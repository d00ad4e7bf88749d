"""Time from the start of Python to the first finished PPO update, nothing compiled before.

    python benchmarks/first_update.py [MODEL_DIR] [--peers tunix torch] [--tunix-python PATH]
        [--remat full] [--repeats 3] [--quick]

The work is that of update.py: import the library, load the weights, take the old log-probs, update actor and
critic once. Each repeat of each library is a new process; JAX's persistent compilation cache is off.

Needs the `bench` extra. Tunix (google-tunix 0.1.7) may live in another environment: --tunix-python.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import Worker, alternate, print_head, print_table, spread
from shapes import SMOLLM2, TINY, write_model
from update import make_data

UPDATE = Path(__file__).with_name("update.py")


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--peers", nargs="+", choices=("torch", "tunix"), default=("tunix",))
    parser.add_argument("--tunix-python", default=sys.executable, help="the Python that has google-tunix")
    parser.add_argument("--remat", choices=("none", "full"), default="full", help="(%(default)s)")
    parser.add_argument("--sequences", type=int, default=8, help="of 512 tokens (%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences in one (%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="starts of each (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model and short rows: does it run?")
    args = parser.parse_args(argv)
    shapes, prompt, response = SMOLLM2, 64, 448
    if args.quick:
        shapes, prompt, response, args.model, args.repeats = TINY, 4, 12, None, 1
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    pythons = {"ours": sys.executable, "torch": sys.executable, "tunix": args.tunix_python}
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = args.model or write_model(Path(scratch) / "random", shapes, counting=False)
        file = Path(scratch) / "data.npz"
        np.savez(file, **make_data(shapes["vocab_size"], args.sequences, prompt, response))

        def start(name: str) -> float:
            began = time.perf_counter()
            worker = Worker(pythons[name], UPDATE, name)
            try:
                worker.ask(
                    do="load",
                    model=str(model),
                    data=str(file),
                    micro_batch=args.micro_batch,
                    remat=args.remat,
                )
                seconds = time.perf_counter() - began
                found[name] = worker.ask(do="versions")
            finally:
                worker.close()
            return seconds

        names = ("ours", *args.peers)
        seconds = alternate({name: lambda n=name: start(n) for name in names}, args.repeats)
    print_head(found)
    ours = float(np.median(seconds["ours"]))
    rows = [
        [name, spread(numbers, 1), f"{np.median(numbers) / ours:.2f}"] for name, numbers in seconds.items()
    ]
    print_table(["library", "s to the first update: median (min-max)", "times ours"], rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
