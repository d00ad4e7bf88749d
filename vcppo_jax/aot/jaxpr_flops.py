"""Operations of a traced program: its matrix products and fused attention kernels, counted through loops.

Counted on the whole program before it is cut into devices, so that nothing is counted twice that a mesh makes
several devices compute. Recomputation in the backward pass is counted: it is work that is done.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr


@dataclasses.dataclass(frozen=True)
class Flops:
    """Operations; a multiplication and an addition count as two."""

    products: float = 0.0
    """Of matrix products outside of kernels, over all devices."""
    kernels: float = 0.0
    """Of fused attention kernels, over all devices."""

    @property
    def total(self) -> float:
        """Both."""
        return self.products + self.kernels

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.products + other.products, self.kernels + other.kernels)

    def times(self, count: float) -> Flops:
        """So many runs."""
        return Flops(self.products * count, self.kernels * count)


def jaxpr_flops(jaxpr: Any, *, unknown_trips: float) -> Flops:
    """The operations of a jaxpr; while loops, whose turns only the run knows, count `unknown_trips` times.

    Of a `cond` the branch with a kernel counts, else the dearest.
    """
    total = Flops()
    for equation in _open(jaxpr).eqns:
        total += _equation(equation, unknown_trips)
    return total


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def _equation(equation: Any, trips: float) -> Flops:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        return Flops(products=_dot(equation))
    if name == "scan":
        return jaxpr_flops(params["jaxpr"], unknown_trips=trips).times(params["length"])
    if name == "while":
        body = jaxpr_flops(params["body_jaxpr"], unknown_trips=trips)
        return (body + jaxpr_flops(params["cond_jaxpr"], unknown_trips=trips)).times(trips)
    if name == "cond":
        branches = [jaxpr_flops(branch, unknown_trips=trips) for branch in params["branches"]]
        return max(branches, key=lambda flops: (flops.kernels > 0, flops.total))
    if name == "shard_map":
        # Inside, shapes are those of one device.
        return jaxpr_flops(params["jaxpr"], unknown_trips=trips).times(params["mesh"].size)
    if name == "pallas_call":
        return Flops(kernels=_pallas(equation))
    if "dot_product_attention_fwd" in name:
        return Flops(kernels=_cudnn(equation, products=2))
    if "dot_product_attention_bwd" in name:
        return Flops(kernels=_cudnn(equation, products=5))
    total = Flops()
    for inner in _inner_jaxprs(params):
        total += jaxpr_flops(inner, unknown_trips=trips)
    return total


def _inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    """Jaxprs that an equation calls once: of jit, checkpoint, custom derivatives."""
    found = []
    for name, value in params.items():
        if name in ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun"):
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                found.append(item)
    return found


def _dot(equation: Any) -> float:
    (left, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(shape[axis] for axis in left)


def _pallas(equation: Any) -> float:
    """The kernel's products times its grid's turns; splash attention skips what the causal mask hides."""
    grid = equation.params["grid_mapping"].grid
    turns = math.prod(int(n) for n in grid)
    each = jaxpr_flops(equation.params["jaxpr"], unknown_trips=1.0).total
    name = str(equation.params.get("name_and_src_info", equation.params.get("name", "")))
    blocks = int(grid[-1])
    causal = (blocks + 1) / (2 * blocks) if "splash" in name else 1.0
    return each * turns * causal


def _cudnn(equation: Any, *, products: int) -> float:
    """`products` products of [L, L, H] per head and row, of which the causal mask leaves half."""
    batch, length, heads, width = equation.invars[0].aval.shape
    return products * 2.0 * batch * heads * length * length * width / 2
