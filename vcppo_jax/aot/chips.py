"""What one accelerator can do: peak of its matrix units, memory, and the links to other chips.

TPU: https://cloud.google.com/tpu/docs (v4, v5e, v5p, v6e: peak, memory, bandwidth); links, one way, from
https://jax-ml.github.io/scaling-book/tpus (table of chips). Memory is what a program may use: the limit in
the compiler's message when one does not fit. NVIDIA: data sheets of the SXM modules (dense bfloat16,
memory bandwidth, NVLink), a network card of 400 Gbit/s for each GPU as in DGX H100; memory is what the driver
reports (`device_memory_size`).
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX counts them (v4 and later TPUs: a chip, both cores together)."""

    name: str
    tflops: float
    """Dense bfloat16 peak, 10^12 operations a second."""
    memory_gib: float
    """What programs may use."""
    memory_gbps: float
    """Bandwidth of the memory, 10^9 bytes a second."""
    link_gbps: float
    """One link of a TPU's torus, or a GPU's NVLink altogether; 10^9 bytes a second, one way."""
    network_gbps: float
    """Between hosts (GPU) or slices (TPU), per chip, one way."""
    wraps: int
    """TPU: sizes of a dimension that are a multiple of this are rings, others lines; 0 for GPUs.

    Of three dimensions either all are rings or none: slices smaller than a cube of 4 x 4 x 4 are no torus.
    """


CHIPS = {
    "TPU v4": Chip("v4", 275.0, 30.75, 1228.0, 45.0, 6.25, 4),
    "TPU v5 lite": Chip("v5e", 197.0, 15.75, 819.0, 45.0, 3.125, 16),
    "TPU v5p": Chip("v5p", 459.0, 95.74, 2765.0, 90.0, 6.25, 4),
    "TPU v5": Chip("v5p", 459.0, 95.74, 2765.0, 90.0, 6.25, 4),
    "TPU v6 lite": Chip("v6e", 918.0, 31.25, 1638.0, 90.0, 12.5, 16),
    "A100": Chip("a100", 312.0, 79.1, 2039.0, 300.0, 25.0, 0),
    "H100": Chip("h100", 989.0, 79.1, 3352.0, 450.0, 50.0, 0),
    "H200": Chip("h200", 989.0, 139.8, 4800.0, 450.0, 50.0, 0),
    "B200": Chip("b200", 2250.0, 178.4, 8000.0, 900.0, 50.0, 0),
}
"""By a part of `jax.Device.device_kind`; the first match counts."""


def chip_of(device_kind: str) -> Chip | None:
    """The chip of a device; None for one that is not in the table."""
    return next((chip for name, chip in CHIPS.items() if name in device_kind), None)
