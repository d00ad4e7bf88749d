"""Which part of the package may import which, read from the source (docs: design, layout)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import vcppo_jax

ROOT = Path(vcppo_jax.__file__).parent
FILES = sorted(p for p in ROOT.rglob("*.py") if p.parent != ROOT or p.name != "__init__.py")

# Part -> the other parts that it may import; a part may always import itself.
ALLOWED = {
    "algos": set(),
    "sharding": set(),
    "types": set(),
    "config": {"config_checks", "config_mesh", "config_objective"},
    "config_checks": {"config"},  # a type only
    "config_mesh": {"config_objective"},
    "config_objective": set(),
    "models": {"sharding", "types"},
    "rollout": {"models", "types", "sharding"},
    "rewards": set(),
    "data": {"types"},
    "train": {"algos", "data", "models", "sharding", "types"},
    "run": set(),
    "aot": set(),
    "config_load": {"config"},
    "config_study": {"config", "config_load", "config_objective"},
    "phases": {
        *("algos", "aot", "models", "rollout", "rewards", "data", "train", "run", "sharding", "types"),
        *("config", "config_checks", "config_load", "config_objective", "config_study"),
    },
    "cli": {"phases", "run", "config", "config_load", "config_study"},
}
# Packages from outside that a part may import, where the list is short enough to be a rule.
OUTSIDE = {
    "algos": {"jax", "numpy"},
    "config": {"pydantic"},
    "config_mesh": {"pydantic"},
    "config_objective": {"pydantic"},
    "types": {"jax", "flax"},
}


def part_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def name_of(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


def imported(source: str, package: str = "vcppo_jax") -> set[str]:
    """Every module that the source imports, wherever in it, dotted; `from a import b` gives a and a.b."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def parts(modules: set[str]) -> set[str]:
    """The parts of the package among imported modules."""
    known = set(ALLOWED)
    return {m.split(".")[1] for m in modules if m.startswith("vcppo_jax.")} & known


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_go_one_way(file):
    part = part_of(file)
    assert part in ALLOWED, f"{part}: a new part of the package; say in ALLOWED what it may import"
    over = parts(imported(file.read_text())) - ALLOWED[part] - {part}
    assert not over, f"{name_of(file)} imports {sorted(over)}"


@pytest.mark.parametrize("file", [f for f in FILES if part_of(f) in OUTSIDE], ids=name_of)
def test_pure_parts_import_little_from_outside(file):
    roots = {m.split(".")[0] for m in imported(file.read_text())} - {"vcppo_jax"}
    over = roots - OUTSIDE[part_of(file)] - set(sys.stdlib_module_names)
    assert not over, f"{name_of(file)} imports {sorted(over)}"


@pytest.mark.parametrize("file", [f for f in FILES if part_of(f) == "rewards"], ids=name_of)
def test_rewards_need_no_device(file):
    roots = {m.split(".")[0] for m in imported(file.read_text())}
    assert not roots & {"jax", "flax", "optax", "transformers"}


def test_only_sharding_spells_mesh_axes():
    # config_mesh.py names the layouts, the values of its keys; elsewhere a logical axis is asked for.
    for file in FILES:
        if part_of(file) in ("sharding", "config_mesh"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert node.value not in ("fsdp", "tensor"), f"{name_of(file)}:{node.lineno}: {node.value!r}"


def test_the_package_itself_imports_lazily():
    tree = ast.parse((ROOT / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
            assert (module or "").split(".")[0] in sys.stdlib_module_names, f"line {node.lineno}: {module}"


def test_library_functions_are_not_decorated_with_jit():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                for decorator in node.decorator_list:
                    assert "jit" not in ast.unparse(decorator), f"{name_of(file)}:{node.lineno}: {node.name}"


def test_the_checks_see_a_forbidden_import():
    source = (
        "def f():\n  from vcppo_jax.models import heads\n  from vcppo_jax import config\n  import torch.nn"
    )
    assert parts(imported(source)) == {"models", "config"}
    assert "torch.nn" in imported(source)
