"""What the tests of `launch/` share: running a script with stand-ins for the programs that it calls."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
LAUNCH = ROOT / "launch"


def stand_in(directory: Path, name: str, script: str) -> None:
    """An executable Bash script called `name` in `directory`, which a test puts on PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / name
    file.write_text(f"#!/usr/bin/env bash\nset -u\n{script}\n")
    file.chmod(0o755)


def environment(*directories: Path, **variables: str) -> dict[str, str]:
    """This process's environment, without what a cluster or JAX sets, `directories` first on PATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAX_"))}
    return env | {"PATH": os.pathsep.join([*map(str, directories), env["PATH"]])} | variables


def run_script(
    script: str, *arguments: str, env: dict[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """`launch/<script>` to its end."""
    return subprocess.run(
        [LAUNCH / script, *arguments], env=env, cwd=cwd, capture_output=True, text=True, timeout=60
    )
