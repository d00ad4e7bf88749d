"""The `vcppo` command as one process of a job under test; it notes what it verifies and what it logs.

Notes are lines of JSON in the file that NOTES names: ["verified", count] and ["step", phase, step, metrics].
"""

import json
import os
import sys

from vcppo_jax.cli import main
from vcppo_jax.phases import collect
from vcppo_jax.phases.loop import PhaseLoop

VARYING = ("timing_s/", "perf/")


def note(*values):
    with open(os.environ["NOTES"], "a", encoding="utf-8") as file:
        file.write(json.dumps(values) + "\n")


def watch():
    """Note what is verified and logged from now on."""
    verify, log = collect.verify, PhaseLoop._log

    def noted_verify(responses, golds, **options):
        note("verified", len(responses))
        return verify(responses, golds, **options)

    def noted_log(self, writers, step, row, samples):
        note("step", self.phase, step, {k: v for k, v in row.items() if not k.startswith(VARYING)})
        return log(self, writers, step, row, samples)

    collect.verify, PhaseLoop._log = noted_verify, noted_log


if __name__ == "__main__":
    watch()
    sys.exit(main(sys.argv[1:]))
