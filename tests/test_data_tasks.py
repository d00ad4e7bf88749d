"""The built-in running sum and the reasoning-gym adapter."""

import itertools

import numpy as np
import pytest

from vcppo_jax.data.tasks import (
    TASKS,
    Problem,
    SumTask,
    demonstrations,
    held_out,
    problem,
    problem_digits,
    problems,
    reasoning_gym_problems,
    solution,
)

TASK = SumTask(digits=12, early_exit_hazard=0.03, step_error_rate=0.2)
FAULTLESS = SumTask(digits=12, early_exit_hazard=0.0, step_error_rate=0.0)


def steps_of(response):
    chain = response.removeprefix("<think>").split("</think>")[0]
    return [(int(step[0]), int(step[2])) for step in chain.split("+")[1:]]


def test_the_task_table_makes_the_running_sum():
    assert TASKS["running_sum"](digits=3, early_exit_hazard=0.1, step_error_rate=0.1).digits == 3


def test_solution_text():
    assert solution([3, 1, 4, 9]) == "<think>+3=3+1=4+4=8+9=7</think>\\boxed{7}"


def test_problem_text_and_answer():
    digits = problem_digits(TASK, 5, seed=0, split="train")
    made = problem(TASK, 5, seed=0, split="train")
    assert made.prompt == "Digit sum modulo ten:\n" + " ".join(map(str, digits))
    assert len(digits) == 12
    assert made.answer == str(sum(digits) % 10)


def test_problems_depend_on_seed_and_index_alone():
    assert problems(TASK, 8, seed=1, split="train")[5] == problem(TASK, 5, seed=1, split="train")
    assert problem(TASK, 5, seed=1, split="train") != problem(TASK, 5, seed=2, split="train")
    assert len({p.prompt for p in problems(TASK, 200, seed=0, split="train")}) == 200


def test_splits_are_disjoint_even_across_seeds_and_for_the_smallest_task():
    smallest = SumTask(digits=2, early_exit_hazard=0.0, step_error_rate=0.0)
    train = {p.prompt for p in problems(smallest, 600, seed=0, split="train")}
    validation = {p.prompt for p in problems(smallest, 200, seed=1, split="validation")}
    assert len(validation) == sum(held_out(pair) for pair in itertools.product(range(10), repeat=2)) > 0
    assert train.isdisjoint(validation)


def test_digits_and_answers_are_not_biased():
    validation = [problem_digits(TASK, i, seed=0, split="validation") for i in range(1000)]
    counts = np.bincount(np.ravel(validation), minlength=10) / 12_000
    assert np.abs(counts - 0.1).max() < 0.015  # five standard deviations
    answers = np.bincount([sum(d) % 10 for d in validation], minlength=10) / 1000
    assert np.abs(answers - 0.1).max() < 0.05


def test_demonstrations_without_faults_are_the_solutions():
    for index, (made, response) in enumerate(demonstrations(FAULTLESS, 20, seed=3)):
        assert made == problem(FAULTLESS, index, seed=3, split="train")
        assert response == solution(problem_digits(FAULTLESS, index, seed=3, split="train"))
        assert response.endswith(f"\\boxed{{{made.answer}}}")


def test_demonstrations_have_the_stated_faults():
    made = demonstrations(TASK, 2000, seed=0)
    lengths = np.array([len(steps_of(response)) for _, response in made])
    complete = lengths == 12
    assert abs(complete.mean() - 0.97**12) < 0.05  # 0.694, five standard deviations
    assert (lengths == 0).any()  # the shortest response of all can be sampled
    errors = total = 0
    for index, (_, response) in enumerate(made):
        steps = steps_of(response)
        assert [d for d, _ in steps] == list(problem_digits(TASK, index, seed=0, split="train"))[: len(steps)]
        before = [0, *(s for _, s in steps[:-1])]
        errors += sum(s != (b + d) % 10 for (d, s), b in zip(steps, before))
        total += len(steps)
    assert abs(errors / total - 0.2) < 0.02
    right = np.array([response.endswith(f"{{{p.answer}}}") for p, response in made])
    assert 0.10 < right.mean() < 0.20
    answered = [int(response[-2]) for _, response in made]
    assert all(steps_of(made[i][1])[-1][1] == answered[i] for i in np.flatnonzero(complete))


def test_an_early_exit_guesses():
    made = demonstrations(SumTask(digits=12, early_exit_hazard=0.2, step_error_rate=0.0), 1000, seed=0)
    right = [r.endswith(f"{{{p.answer}}}") for p, r in made if len(steps_of(r)) < 12]
    assert len(right) > 850
    assert abs(np.mean(right) - 0.1) < 0.05  # five standard deviations


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((1, 0.0, 0.0), "digits: expected at least 2"),
        ((12, -0.1, 0.0), "early_exit_hazard: expected a probability"),
        ((12, 0.0, 1.5), "step_error_rate: expected a probability"),
    ],
)
def test_bad_parameters(values, message):
    with pytest.raises(ValueError, match=message):
        SumTask(*values)


def test_unknown_split():
    with pytest.raises(ValueError, match="split: expected one of train, validation, got 'test'"):
        problem(TASK, 0, seed=0, split="test")


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym", reason="the extra `tasks` is not installed")
    made = reasoning_gym_problems("gcd", 6, seed=1)
    assert made == reasoning_gym_problems("gcd", 6, seed=1) != reasoning_gym_problems("gcd", 6, seed=2)
    assert all(isinstance(p, Problem) and p.answer.isdigit() for p in made)
    assert len({p.prompt for p in made}) == 6
    with pytest.raises(ValueError, match="'countdown' has its own scoring"):
        reasoning_gym_problems("countdown", 2, seed=1)
    with pytest.raises(ValueError, match=r"'gdc' is unknown: expected one of .*gcd"):
        reasoning_gym_problems("gdc", 2, seed=1)


def test_reasoning_gym_that_is_not_installed_names_the_extra(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.dataset", None)
    with pytest.raises(ImportError, match=r"vcppo_jax\[tasks\]"):
        reasoning_gym_problems("gcd", 2, seed=1)
