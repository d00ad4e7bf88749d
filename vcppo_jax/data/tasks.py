"""Tasks whose problems are computed: the built-in running sum, and reasoning-gym's as an optional extra.

The running sum is the smallest task on which PPO's collapse and its repair can be seen: K random digits,
a chain of thought that adds them one by one modulo ten, then the boxed answer. Guessing without the chain is
right one time in ten. Everything is a pure function of (seed, split, index).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
HELD_OUT_SHARE = 8
"""One digit sequence in this many is held out, chosen by a hash of the digits."""
_DEMONSTRATION_STREAM = 2
"""Third word of the random seed where demonstrations are drawn; 0 and 1 are the splits of the problems."""
_PREFERENCE_STREAM = 3
"""The same for preference pairs."""


@dataclass(frozen=True)
class Problem:
    """A problem in words and its one right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class SumTask:
    """Add `digits` digits modulo ten. Raises ValueError where a parameter is out of range."""

    digits: int
    """Digits per problem, at least 2; the chain has one step per digit."""
    early_exit_hazard: float
    """Chance before each step that a demonstration ends its chain there and guesses a digit."""
    step_error_rate: float
    """Chance per step that a demonstration writes a wrong sum and goes on from it."""

    def __post_init__(self) -> None:
        if self.digits < 2:
            raise ValueError(
                f"digits: expected at least 2 (shorter problems cannot be held out), got {self.digits}"
            )
        for name in ("early_exit_hazard", "step_error_rate"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name}: expected a probability from 0 to 1, got {value}")


def held_out(digits: Sequence[int]) -> bool:
    """Whether this digit sequence belongs to the validation split, whatever the seed."""
    digest = hashlib.blake2b("".join(map(str, digits)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def problem_digits(task: SumTask, index: int, *, seed: int, split: Split) -> tuple[int, ...]:
    """The digits of problem `index`; no sequence occurs in both splits. ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    random = np.random.default_rng([seed, index, SPLITS.index(split)])
    while True:
        digits = tuple(random.integers(0, 10, size=task.digits).tolist())
        if held_out(digits) == (split == "validation"):
            return digits


def problem(task: SumTask, index: int, *, seed: int, split: Split) -> Problem:
    """Problem `index` of the split: `Digit sum modulo ten:` and the digits, and their sum modulo ten."""
    digits = problem_digits(task, index, seed=seed, split=split)
    return Problem(prompt=_prompt(digits), answer=str(sum(digits) % 10))


def problems(task: SumTask, count: int, *, seed: int, split: Split) -> list[Problem]:
    """The first `count` problems of the split."""
    return [problem(task, index, seed=seed, split=split) for index in range(count)]


def demonstration(task: SumTask, index: int, *, seed: int) -> tuple[Problem, str]:
    """Training problem `index` and a flawed solution of it, to imitate in the cold start.

    The solution reads `<think>+3=3+1=4+4=8</think>\\boxed{8}`. Before each step the chain ends early with
    chance `early_exit_hazard`, and the answer is then a random digit; each sum is wrong with chance
    `step_error_rate`, and the chain goes on from the wrong one. A policy that imitates this and is sampled
    at temperature 1 has all that RL must repair, and can do all that RL must find.
    """
    digits = problem_digits(task, index, seed=seed, split="train")
    random = np.random.default_rng([seed, index, _DEMONSTRATION_STREAM])
    exits = random.random(task.digits) < task.early_exit_hazard
    errors = (random.random(task.digits) < task.step_error_rate) * random.integers(1, 10, size=task.digits)
    guess = int(random.integers(0, 10))
    length = int(exits.argmax()) if exits.any() else task.digits
    sums = (np.cumsum(digits + errors) % 10).tolist()
    steps = list(zip(digits, sums, strict=True))[:length]
    answer = guess if exits.any() else sums[-1]
    return Problem(prompt=_prompt(digits), answer=str(sum(digits) % 10)), _response(steps, answer)


def demonstrations(task: SumTask, count: int, *, seed: int) -> list[tuple[Problem, str]]:
    """The first `count` training problems, each with its demonstration."""
    return [demonstration(task, index, seed=seed) for index in range(count)]


def preference(task: SumTask, index: int, *, seed: int) -> tuple[Problem, str, str]:
    """Training problem `index`, its solution, and a worse response, to train a reward model on.

    Half of the worse responses are unfinished: the right chain, cut at a random place, without an answer. A
    quarter has one wrong step from which the chain goes on to a wrong answer, a quarter stops early and
    guesses wrong.
    """
    digits = problem_digits(task, index, seed=seed, split="train")
    random = np.random.default_rng([seed, index, _PREFERENCE_STREAM])
    right = (np.cumsum(digits) % 10).tolist()
    steps = list(zip(digits, right, strict=True))
    kind, place, shift = (
        int(random.integers(4)),
        int(random.integers(task.digits)),
        int(random.integers(1, 10)),
    )
    if kind < 2:
        chain = _chain(steps)
        rejected = f"<think>{chain[: int(random.integers(len(chain) + 1))]}"
    elif kind == 2:
        sums = [(total + shift * (step >= place)) % 10 for step, total in enumerate(right)]
        rejected = _response(list(zip(digits, sums, strict=True)), sums[-1])
    else:
        rejected = _response(steps[:place], (right[-1] + shift) % 10)
    return Problem(prompt=_prompt(digits), answer=str(right[-1])), _response(steps, right[-1]), rejected


def preferences(task: SumTask, count: int, *, seed: int) -> list[tuple[Problem, str, str]]:
    """The first `count` training problems, each with a better and a worse response."""
    return [preference(task, index, seed=seed) for index in range(count)]


def solution(digits: Sequence[int]) -> str:
    """The faultless response to these digits."""
    sums = (np.cumsum(digits) % 10).tolist()
    return _response(list(zip(digits, sums, strict=True)), sums[-1])


def _prompt(digits: Sequence[int]) -> str:
    return "Digit sum modulo ten:\n" + " ".join(map(str, digits))


def _chain(steps: Sequence[tuple[int, int]]) -> str:
    return "".join(f"+{digit}={running}" for digit, running in steps)


def _response(steps: Sequence[tuple[int, int]], answer: int) -> str:
    return f"<think>{_chain(steps)}</think>\\boxed{{{answer}}}"


TASKS: dict[str, type[SumTask]] = {"running_sum": SumTask}
"""Built-in tasks by name, as in `data.train: task:running_sum`."""


def reasoning_gym_problems(name: str, count: int, *, seed: int) -> list[Problem]:
    """`count` problems of one of reasoning-gym's procedural tasks, without repeats of a question.

    Only tasks with a single right answer are taken: where reasoning-gym has its own scoring (any valid
    expression, partial credit), equality with the sample answer would be the wrong reward.

    Raises ImportError where the extra `tasks` is not installed; ValueError for an unknown name, a task with
    its own scoring, or one that runs out of different questions.
    """
    factory, base = _reasoning_gym()
    single_answer = sorted(
        task for task, (kind, _) in factory.items() if kind.score_answer is base.score_answer
    )
    if name not in single_answer:
        known = "has its own scoring, not one right answer" if name in factory else "is unknown"
        raise ValueError(f"reasoning-gym task {name!r} {known}: expected one of {', '.join(single_answer)}")
    kind, config_kind = factory[name]
    dataset = kind(config=config_kind(seed=seed, size=2 * count))
    found: dict[str, str] = {}
    for index in range(2 * count):
        item = dataset[index]
        if isinstance(item["answer"], str) and item["answer"].strip():
            found.setdefault(item["question"], item["answer"])
        if len(found) == count:
            return [Problem(prompt=question, answer=answer) for question, answer in found.items()]
    raise ValueError(
        f"reasoning-gym task {name!r}: expected {count} different questions, found {len(found)} in "
        f"{2 * count} draws; ask for fewer"
    )


def _reasoning_gym() -> tuple[dict[str, Any], Any]:
    """reasoning-gym's table name -> (dataset class, config class), and the base class."""
    try:
        from reasoning_gym.dataset import ProceduralDataset
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            "reasoning-gym tasks need the extra `tasks`: python3 -m pip install 'vcppo_jax[tasks]'"
        ) from error
    return DATASETS, ProceduralDataset
