"""Hugging Face directories in and out: the public names of `hf_load` and `hf_export`."""

from vcppo_jax.models.hf_export import export_policy, export_value_model
from vcppo_jax.models.hf_files import CheckpointError
from vcppo_jax.models.hf_load import HeadInfo, load_policy, load_value_model

__all__ = [
    "CheckpointError",
    "HeadInfo",
    "export_policy",
    "export_value_model",
    "load_policy",
    "load_value_model",
]
