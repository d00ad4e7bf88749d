"""Tasks whose problems are computed: two built-in ones, and reasoning-gym's as an optional extra.

Both built-in tasks are sums modulo ten with a chain of thought that adds one by one. They are the smallest on
which PPO's collapse and its repair can be seen: guessing without the chain is right one time in ten.
`running_sum` adds random digits, which the prompt lists. `alternating_sum` adds two digits in turn, so that a
short prompt asks for a long chain. Everything is a pure function of (seed, split, index).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")
HELD_OUT_SHARE = 8
"""One problem in this many is held out, chosen by a hash of what it says."""
_DEMONSTRATION_STREAM = 2
"""Third word of the random seed where demonstrations are drawn; 0 and 1 are the splits of the problems."""
_PREFERENCE_STREAM = 3


@dataclass(frozen=True)
class Problem:
    """A problem in words and its one right answer."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Sum:
    """A sum modulo ten: `start` and then the addends, one step of the chain each."""

    prompt: str
    key: str
    """Tells problems apart: the splits are drawn by it."""
    start: int
    addends: tuple[int, ...]
    labels: tuple[str, ...]
    """What a step begins with; empty texts for none."""

    @property
    def sums(self) -> list[int]:
        """The sum after each step, modulo ten."""
        return ((self.start + np.cumsum(self.addends)) % 10).tolist()

    @property
    def problem(self) -> Problem:
        """The problem, and the last sum."""
        return Problem(self.prompt, str(self.sums[-1]))


def digit_sum(digits: Sequence[int]) -> Sum:
    """The problem of adding these digits."""
    return Sum(
        prompt="Digit sum modulo ten:\n" + " ".join(map(str, digits)),
        key="".join(map(str, digits)),
        start=0,
        addends=tuple(digits),
        labels=("",) * len(digits),
    )


def alternating_sum(start: int, pair: tuple[int, int], additions: int) -> Sum:
    """The problem of adding two digits in turn to `start`, `additions` times in all; the steps count down."""
    first, second = pair
    return Sum(
        prompt=f"Digit sum modulo ten:\n{start}+{first}+{second} {additions:02d}",
        key=f"{start}{first}{second}{additions:02d}",
        start=start,
        addends=tuple(pair[step % 2] for step in range(additions)),
        labels=tuple(f"{additions - step:02d}" for step in range(additions)),
    )


class Task(Protocol):
    """What draws problems, and how flawed its demonstrations are."""

    @property
    def early_exit_hazard(self) -> float:
        """Chance before each step that a demonstration ends its chain there and guesses a digit."""
        ...

    @property
    def step_error_rate(self) -> float:
        """Chance per step that a demonstration writes a wrong sum and goes on from it."""
        ...

    def draw(self, random: np.random.Generator) -> Sum:
        """A random problem."""
        ...


@dataclass(frozen=True)
class SumTask:
    """Add `digits` digits modulo ten. Raises ValueError where a parameter is out of range."""

    digits: int
    """Digits per problem, at least 2; the chain has one step per digit."""
    early_exit_hazard: float
    step_error_rate: float

    def __post_init__(self) -> None:
        if self.digits < 2:
            raise ValueError(
                f"digits: expected at least 2 (shorter problems cannot be held out), got {self.digits}"
            )
        _check_rates(self)

    def draw(self, random: np.random.Generator) -> Sum:
        """A problem of random digits."""
        return digit_sum(random.integers(0, 10, size=self.digits).tolist())


@dataclass(frozen=True)
class AlternatingTask:
    """Add two digits in turn, from `additions` to `additions + 9` times. ValueError for a bad parameter.

    There are 10,000 problems. A step has four tokens of the built-in tokenizer, a whole response six more.
    """

    additions: int
    """The fewest additions of a problem, 1 to 90."""
    early_exit_hazard: float
    step_error_rate: float

    def __post_init__(self) -> None:
        if not 1 <= self.additions <= 90:
            raise ValueError(f"additions: expected from 1 to 90, got {self.additions}")
        _check_rates(self)

    def draw(self, random: np.random.Generator) -> Sum:
        """A problem of random digits and a random number of additions."""
        start, first, second, more = random.integers(0, 10, size=4).tolist()
        return alternating_sum(start, (first, second), self.additions + more)


def _check_rates(task: Task) -> None:
    for name in ("early_exit_hazard", "step_error_rate"):
        value = getattr(task, name)
        if not 0 <= value <= 1:
            raise ValueError(f"{name}: expected a probability from 0 to 1, got {value}")


def held_out(drawn: Sum) -> bool:
    """Whether this problem belongs to the validation split, whatever the seed."""
    digest = hashlib.blake2b(drawn.key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0


def draw(task: Task, index: int, *, seed: int, split: Split) -> Sum:
    """Problem `index` of the split; none occurs in both splits. ValueError for an unknown split."""
    if split not in SPLITS:
        raise ValueError(f"split: expected one of {', '.join(SPLITS)}, got {split!r}")
    random = np.random.default_rng([seed, index, SPLITS.index(split)])
    while True:
        drawn = task.draw(random)
        if held_out(drawn) == (split == "validation"):
            return drawn


def problems(task: Task, count: int, *, seed: int, split: Split) -> list[Problem]:
    """The first `count` problems of the split, each with its sum modulo ten."""
    return [draw(task, index, seed=seed, split=split).problem for index in range(count)]


def demonstration(task: Task, index: int, *, seed: int) -> tuple[Problem, str]:
    """Training problem `index` and a flawed solution of it, to imitate in the cold start.

    The solution reads `<think>+3=3+1=4+4=8</think>\\boxed{8}`. Before each step the chain ends early with
    chance `early_exit_hazard`, and the answer is then a random digit; each sum is wrong with chance
    `step_error_rate`, and the chain goes on from the wrong one. A policy that imitates this and is sampled
    at temperature 1 has all that RL must repair, and can do all that RL must find.
    """
    drawn = draw(task, index, seed=seed, split="train")
    random = np.random.default_rng([seed, index, _DEMONSTRATION_STREAM])
    steps = len(drawn.addends)
    exits = random.random(steps) < task.early_exit_hazard
    errors = (random.random(steps) < task.step_error_rate) * random.integers(1, 10, size=steps)
    guess = int(random.integers(0, 10))
    length = int(exits.argmax()) if exits.any() else steps
    sums = ((drawn.start + np.cumsum(drawn.addends + errors)) % 10).tolist()
    return drawn.problem, _response(drawn, sums[:length], guess if exits.any() else sums[-1])


def demonstrations(task: Task, count: int, *, seed: int) -> list[tuple[Problem, str]]:
    """The first `count` training problems, each with its demonstration."""
    return [demonstration(task, index, seed=seed) for index in range(count)]


class Preference(NamedTuple):
    """A pair to train a reward model on."""

    problem: Problem
    chosen: str
    """The solution."""
    rejected: str
    """A worse response."""
    rejected_truncated: bool
    """Whether the worse one was cut before its end."""


def preference(task: Task, index: int, *, seed: int) -> Preference:
    """Training problem `index`, its solution, and a worse response.

    Half of the worse responses are truncated: the right chain, cut at a random place, without an answer. A
    quarter has one wrong step from which the chain goes on to a wrong answer, a quarter stops early and
    guesses wrong.
    """
    drawn = draw(task, index, seed=seed, split="train")
    random = np.random.default_rng([seed, index, _PREFERENCE_STREAM])
    right = drawn.sums
    kind = int(random.integers(4))
    place, shift = int(random.integers(len(right))), int(random.integers(1, 10))
    if kind < 2:
        chain = _chain(drawn, right)
        rejected = f"<think>{chain[: int(random.integers(len(chain) + 1))]}"
    elif kind == 2:
        sums = [(total + shift * (step >= place)) % 10 for step, total in enumerate(right)]
        rejected = _response(drawn, sums, sums[-1])
    else:
        rejected = _response(drawn, right[:place], (right[-1] + shift) % 10)
    return Preference(drawn.problem, solution(drawn), rejected, rejected_truncated=kind < 2)


def preferences(task: Task, count: int, *, seed: int) -> list[Preference]:
    """The first `count` training problems, each with a better and a worse response."""
    return [preference(task, index, seed=seed) for index in range(count)]


def solution(drawn: Sum) -> str:
    """The faultless response."""
    return _response(drawn, drawn.sums, drawn.sums[-1])


def _chain(drawn: Sum, sums: Sequence[int]) -> str:
    steps = zip(drawn.labels, drawn.addends, sums)
    return "".join(f"{label}+{addend}={running}" for label, addend, running in steps)


def _response(drawn: Sum, sums: Sequence[int], answer: int) -> str:
    return f"<think>{_chain(drawn, sums)}</think>\\boxed{{{answer}}}"


TASKS: dict[str, type[SumTask] | type[AlternatingTask]] = {
    "running_sum": SumTask,
    "alternating_sum": AlternatingTask,
}
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
