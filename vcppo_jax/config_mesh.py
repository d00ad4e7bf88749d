"""The sections of the configuration that say how the devices are divided."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from vcppo_jax.config_objective import Positive, Section

Layout = Literal["fsdp", "full", "tensor", "replicated"]


class LayoutSection(Section):
    """How the weights of each network lie on the mesh: fsdp, full, tensor or replicated."""

    actor: Layout = Field(
        "fsdp",
        description="Policy in training, with its gradients and optimizer states. fsdp: split over fsdp, "
        "sequence and tensor, one copy for each part of data. full: over data too (FULL_SHARD, ZeRO-3). "
        "tensor: over tensor alone. replicated: each device has all.",
    )
    critic: Layout = Field("fsdp", description="Value model in training, likewise.")
    reference: Layout = Field(
        "fsdp",
        description="Networks that are only read: the reference policy, which is held in "
        "model.compute_dtype, and a reward model. tensor saves the gathering of their weights.",
    )


class MeshSection(Section):
    """Sizes of the device mesh; with those over slices, their product is the number of devices."""

    data: int = Field(
        1, description="Copies of the model that share the batch. -1 takes the devices left over."
    )
    fsdp: int = Field(-1, description="Parts into which weights, optimizer states and the batch are split.")
    sequence: int = Field(
        1,
        description="Parts into which the rows' length is split (sequence parallelism of Ulysses, context "
        "parallelism), for activations too long for a device; weights are split by it as by fsdp.",
    )
    tensor: int = Field(1, description="Parts into which each matmul is split (tensor parallelism).")
    dcn_data: int = Field(
        1,
        description="Slices (or GPU hosts) with a copy of the model each; mesh.data is then the number "
        "inside a slice. -1 takes the slices left over.",
    )
    dcn_fsdp: int = Field(1, description="Slices (or GPU hosts) over which weights are split, likewise.")
    decode_tensor: Positive | None = Field(
        None,
        description="Parts into which each matmul is split in generation (verl's "
        "rollout.tensor_model_parallel_size); the rows are split over all other devices. As mesh.tensor when "
        "null.",
    )
    layout: LayoutSection = LayoutSection()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the axes by name."""
        return self.model_dump(exclude={"decode_tensor", "layout"})

    @model_validator(mode="after")
    def _sizes(self) -> MeshSection:
        over_slices = ("dcn_data", "dcn_fsdp")
        for inside in (False, True):
            sizes = {name: size for name, size in self.sizes.items() if (name in over_slices) == inside}
            if any(size < 1 and size != -1 for size in sizes.values()) or list(sizes.values()).count(-1) > 1:
                spelled = ", ".join(f"{name}={size}" for name, size in sizes.items())
                raise ValueError(f"mesh: expected positive sizes, at most one of them -1, got {spelled}")
        return self
