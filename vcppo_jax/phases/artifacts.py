"""Where models come from: Hugging Face directories, phases of runs, and the models the package ships.

A phase directory holds `checkpoints/STEP`, and beside them what the weights need to be read and exported:
`model` (the policy's config.json and tokenizer) and `value_model` (the value model's).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vcppo_jax.config_load import ConfigError
from vcppo_jax.data.tokenizer import builtin_model_dir, eos_ids, load_tokenizer
from vcppo_jax.models import hf
from vcppo_jax.models.config import ModelConfig, model_config
from vcppo_jax.models.hf_export import COPIED_FILES
from vcppo_jax.models.networks import Policy, ValueModel
from vcppo_jax.models.reshard import reshard
from vcppo_jax.models.specs import init_params, is_spec, param_shardings, weight_specs
from vcppo_jax.run.checkpoint import read_params
from vcppo_jax.run.files import writing
from vcppo_jax.run.processes import is_main
from vcppo_jax.sharding import DEFAULT_LAYOUT

BUILTIN = "builtin:"
PARTS = {"actor": "model", "critic": "value_model"}
PHASES_WITH = {"actor": ("rl", "sft"), "critic": ("rl", "value", "reward")}


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded: its config and tokenizer, and where its weights are."""

    model_dir: Path
    """config.json, tokenizer files and, unless `checkpoint` is set, *.safetensors."""
    checkpoint: Path | None
    """A checkpoint's directory, or one of several checkpoints of which the newest counts."""


def find_model(path: str | Path, network: str = "actor") -> ModelSource:
    """What `path` names: builtin:NAME, a Hugging Face directory, a run, its phase, or one checkpoint of it.

    `network` is "actor" or "critic". Of a run, the last phase that trained that network counts. Raises
    ValueError saying what was expected when it is none of these.
    """
    if str(path).startswith(BUILTIN):
        return ModelSource(builtin_model_dir(str(path)[len(BUILTIN) :]), None)
    path, part = Path(path), PARTS[network]
    if (path / "config.json").is_file():
        return ModelSource(path, None)
    for phase in (path, *(path / name for name in PHASES_WITH[network])):
        if (phase / part / "config.json").is_file():
            return ModelSource(phase / part, phase / "checkpoints")
    if path.parent.name == "checkpoints" and (path.parent.parent / part / "config.json").is_file():
        if not path.is_dir():
            steps = sorted(p.name for p in path.parent.iterdir() if p.name.isdigit())
            raise ValueError(f"{path}: no such checkpoint; there are {', '.join(steps) or 'none'}")
        return ModelSource(path.parent.parent / part, path)
    state = "has neither" if path.is_dir() else "does not exist; expected a directory with"
    kind = "policy" if network == "actor" else "value model"
    raise ValueError(
        f"{path}: {state} a config.json (a Hugging Face directory) or a trained {kind} (a run, a phase of "
        "it, or PHASE/checkpoints/STEP)"
    )


def save_model_files(phase_dir: Path, network: str, model_dir: Path, extra: dict[str, Any]) -> None:
    """Put config.json and the tokenizer of `model_dir` beside the phase's checkpoints, with `extra` facts.

    Process 0 does so. Raises WriteError.
    """
    if not is_main():
        return
    target = phase_dir / PARTS[network]
    with writing(target):
        target.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", *COPIED_FILES):
        if (model_dir / name).is_file():
            with writing(target / name):
                shutil.copyfile(model_dir / name, target / name)
    with writing(target / "vcppo.json"):
        (target / "vcppo.json").write_text(json.dumps(extra) + "\n", encoding="utf-8")


def abstract_params(specs: Any, mesh: Mesh | None, layout: str) -> Any:
    """Shapes and shardings of the float32 parameters of `specs`."""
    shapes = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, np.float32), specs, is_leaf=is_spec)
    if mesh is None:
        return shapes
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        param_shardings(specs, mesh, layout),
    )


def with_all_eos(config: ModelConfig, model_dir: Path) -> ModelConfig:
    """`config` with the EOS ids of config.json, generation_config.json and the tokenizer together."""
    return dataclasses.replace(config, eos_token_ids=eos_ids(model_dir, load_tokenizer(model_dir)))


def load_policy(
    path: str | Path,
    *,
    compute_dtype: str = "float32",
    remat: str = "none",
    attention: str = "auto",
    mesh: Mesh | None = None,
    layout: str = DEFAULT_LAYOUT,
) -> Policy:
    """The policy of a Hugging Face directory, or of a run, a phase of it, or one of its checkpoints.

    Weights are float32 and sharded over `mesh` (default device when None) as `layout` says; `compute_dtype`
    ("float32", "bfloat16"), `remat` ("none", "full", "dots") and `attention` ("auto" or one of
    `attention.IMPLEMENTATIONS`) are run-time choices. The config's `eos_token_ids` are the union of the
    model's and the tokenizer's. Raises ValueError when there is no complete policy.
    """
    source = find_model(path)
    if source.checkpoint is None:
        policy = hf.load_policy(
            source.model_dir,
            compute_dtype=compute_dtype,
            remat=remat,
            attention=attention,
            mesh=mesh,
            layout=layout,
        )
    else:
        config = model_config(source.model_dir, compute_dtype=compute_dtype, remat=remat, attention=attention)
        abstract = abstract_params(weight_specs(config, head="lm"), mesh, layout)
        policy = Policy(read_params(source.checkpoint, abstract, subtree="actor/params"), config)
    return policy.replace(config=with_all_eos(policy.config, source.model_dir))  # type: ignore[attr-defined]


def load_value_model(
    path: str | Path,
    *,
    compute_dtype: str = "float32",
    remat: str = "none",
    attention: str = "auto",
    mesh: Mesh | None = None,
    layout: str = DEFAULT_LAYOUT,
) -> ValueModel:
    """The value model of a Hugging Face directory (reward model, critic, or causal LM: then with a new head),
    or of a run, a phase of it, or one of its checkpoints.

    Arguments and errors as in `load_policy`.
    """
    return value_model_and_origin(
        path,
        compute_dtype=compute_dtype,
        remat=remat,
        attention=attention,
        mesh=mesh,
        layout=layout,
        head_bias=False,
    )[0]


def value_model_and_origin(
    path: str | Path,
    *,
    compute_dtype: str,
    remat: str,
    attention: str,
    mesh: Mesh | None,
    layout: str,
    head_bias: bool,
) -> tuple[ValueModel, str]:
    """`load_value_model`, and a line that says where its head came from."""
    source = find_model(path, "critic")
    if source.checkpoint is None:
        model, head = hf.load_value_model(
            source.model_dir,
            compute_dtype=compute_dtype,
            remat=remat,
            attention=attention,
            mesh=mesh,
            layout=layout,
            head_bias=head_bias,
        )
        return model, f"value model from {path}; head {head}"
    config = model_config(source.model_dir, compute_dtype=compute_dtype, remat=remat, attention=attention)
    facts = json.loads((source.model_dir / "vcppo.json").read_text(encoding="utf-8"))
    specs = weight_specs(config, head="value", head_bias=facts["head_bias"])
    params = read_params(source.checkpoint, abstract_params(specs, mesh, layout), subtree="critic/params")
    return ValueModel(params, config), f"value model from {source.checkpoint}; head loaded"


def check_tokenizer(path: str | Path, model_dir: Path, tokenizer: Any) -> None:
    """Raise ConfigError where the model at `path` reads other token ids than the policy's `tokenizer` writes.

    A directory without a tokenizer of its own passes.
    """
    if not (model_dir / "tokenizer_config.json").is_file():
        return
    theirs = load_tokenizer(model_dir).get_vocab()
    for token, number in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        if theirs.get(token) != number:
            raise ConfigError(
                f"{path}: expected a model with the policy's tokenizer, whose token {token!r} is {number}; "
                f"here it is {theirs.get(token, 'unknown')}"
            )


def value_model_from_policy(
    policy: Policy, mesh: Mesh, *, layout: str, head_bias: bool
) -> tuple[ValueModel, str]:
    """A value model with copies of the policy's decoder weights and a new head (zero, so that V is 0)."""
    specs = weight_specs(policy.config, head="value", head_bias=head_bias)
    decoder = {name: policy.params[name] for name in specs if name != "score"}
    params = resharded(decoder, specs, mesh, layout=layout, dtype="float32")
    params["score"] = init_params(specs["score"], jax.random.key(0), mesh, layout=layout)
    return ValueModel(params, policy.config), "value model from the policy's weights; head new"


def resharded(params: Any, specs: Any, mesh: Mesh, *, layout: str, dtype: str) -> Any:
    """A copy of the parameters in another layout and type; see `models.reshard`."""
    with jax.set_mesh(mesh):
        return jax.jit(functools.partial(reshard, specs=specs, layout=layout, dtype=dtype))(params)


def export(path: str | Path, out_dir: str | Path, *, dtype: str = "float32", network: str = "actor") -> Path:
    """Write the policy (network "critic": the value model) of `path` as a Hugging Face directory.

    `path` as in `load_policy`. Raises ValueError where it holds no trained model or `out_dir` is in use,
    WriteError where `out_dir` cannot be written; then nothing is left there.
    """
    source = find_model(path, network)
    if network == "critic":
        value_model = load_value_model(path)
        with writing(out_dir):
            return hf.export_value_model(value_model, out_dir, source_dir=source.model_dir, dtype=dtype)
    policy = load_policy(path)
    with writing(out_dir):
        return hf.export_policy(policy, out_dir, source_dir=source.model_dir, dtype=dtype)
