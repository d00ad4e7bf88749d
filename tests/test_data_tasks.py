"""The built-in running sum and the reasoning-gym adapter."""

import itertools

import numpy as np
import pytest

from vcppo_jax.data.tasks import (
    TASKS,
    AlternatingTask,
    Problem,
    SumTask,
    alternating_sum,
    demonstrations,
    digit_sum,
    draw,
    held_out,
    problems,
    reasoning_gym_problems,
    solution,
)
from vcppo_jax.data.tokenizer import builtin_model_dir, encode_chat, encode_response, load_tokenizer

TASK = SumTask(digits=12, early_exit_hazard=0.03, step_error_rate=0.2)
FAULTLESS = SumTask(digits=12, early_exit_hazard=0.0, step_error_rate=0.0)


def steps_of(response):
    chain = response.removeprefix("<think>").split("</think>")[0]
    return [(int(step[0]), int(step[2])) for step in chain.split("+")[1:]]


ALTERNATING = AlternatingTask(additions=24, early_exit_hazard=0.02, step_error_rate=0.02)


def test_the_table_has_both_tasks():
    assert {"running_sum": SumTask, "alternating_sum": AlternatingTask} == TASKS


def test_the_alternating_sum_adds_two_digits_in_turn_and_counts_down():
    drawn = alternating_sum(7, (5, 9), 3)
    assert drawn.problem == Problem("Digit sum modulo ten:\n7+5+9 03", "6")
    assert solution(drawn) == "<think>03+5=202+9=101+5=6</think>\\boxed{6}"
    assert alternating_sum(0, (5, 9), 2).key != alternating_sum(0, (9, 5), 2).key


def test_alternating_chains_are_long_and_their_prompts_short():
    tokenizer = load_tokenizer(builtin_model_dir("tiny"))
    for index in range(200):
        drawn = draw(ALTERNATING, index, seed=0, split="train")
        assert 24 <= len(drawn.addends) <= 33
        assert len(encode_response(tokenizer, solution(drawn))) == 4 * len(drawn.addends) + 6
        assert len(encode_chat(tokenizer, drawn.prompt)) == 19
    assert {len(draw(ALTERNATING, index, seed=0, split="train").addends) for index in range(200)} == set(
        range(24, 34)
    )


def test_flawed_alternating_demonstrations_go_on_from_their_errors():
    exits, errors, steps = 0, 0, 0
    for problem, response in demonstrations(ALTERNATING, 400, seed=0):
        chain = response.removeprefix("<think>").split("</think>")[0]
        found = [chain[i : i + 6] for i in range(0, len(chain), 6)]
        running = int(problem.prompt.split("\n")[1][0])
        for step in found:
            errors += (running + int(step[3])) % 10 != int(step[5])
            running = int(step[5])
        steps += len(found)
        exits += len(found) < int(problem.prompt[-2:])
    assert abs(errors / steps - 0.02) < 0.01
    assert abs(exits / 400 - (1 - 0.98**28.5)) < 0.1


@pytest.mark.parametrize("additions", [0, 91])
def test_additions_out_of_range(additions):
    with pytest.raises(ValueError, match=f"additions: expected from 1 to 90, got {additions}"):
        AlternatingTask(additions, early_exit_hazard=0.0, step_error_rate=0.0)


def test_solution_text():
    assert solution(digit_sum([3, 1, 4, 9])) == "<think>+3=3+1=4+4=8+9=7</think>\\boxed{7}"


def test_problem_text_and_answer():
    digits = list(draw(TASK, 5, seed=0, split="train").addends)
    made = draw(TASK, 5, seed=0, split="train").problem
    assert made.prompt == "Digit sum modulo ten:\n" + " ".join(map(str, digits))
    assert len(digits) == 12
    assert made.answer == str(sum(digits) % 10)


def test_problems_depend_on_seed_and_index_alone():
    assert problems(TASK, 8, seed=1, split="train")[5] == draw(TASK, 5, seed=1, split="train").problem
    assert draw(TASK, 5, seed=1, split="train").problem != draw(TASK, 5, seed=2, split="train").problem
    assert len({p.prompt for p in problems(TASK, 200, seed=0, split="train")}) == 200


def test_splits_are_disjoint_even_across_seeds_and_for_the_smallest_task():
    smallest = SumTask(digits=2, early_exit_hazard=0.0, step_error_rate=0.0)
    train = {p.prompt for p in problems(smallest, 600, seed=0, split="train")}
    validation = {p.prompt for p in problems(smallest, 200, seed=1, split="validation")}
    every = [digit_sum(pair) for pair in itertools.product(range(10), repeat=2)]
    assert len(validation) == sum(map(held_out, every)) > 0
    assert train.isdisjoint(validation)


def test_digits_and_answers_are_not_biased():
    validation = [draw(TASK, i, seed=0, split="validation").addends for i in range(1000)]
    counts = np.bincount(np.ravel(validation), minlength=10) / 12_000
    assert np.abs(counts - 0.1).max() < 0.015  # five standard deviations
    answers = np.bincount([sum(d) % 10 for d in validation], minlength=10) / 1000
    assert np.abs(answers - 0.1).max() < 0.05


def test_demonstrations_without_faults_are_the_solutions():
    for index, (made, response) in enumerate(demonstrations(FAULTLESS, 20, seed=3)):
        assert made == draw(FAULTLESS, index, seed=3, split="train").problem
        assert response == solution(draw(FAULTLESS, index, seed=3, split="train"))
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
        assert [d for d, _ in steps] == list(draw(TASK, index, seed=0, split="train").addends)[: len(steps)]
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
        draw(TASK, 0, seed=0, split="test")


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
