"""Sample responses as the report shows them: which ones, and with the thinking set apart from the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LONGEST_TEXT = 6000
"""Characters of a prompt or response that the page shows; of longer ones, start and end."""


@dataclass(frozen=True)
class Sample:
    """A response as shown; `thinking` is None where it has no thinking part."""

    step: int
    prompt: str
    thinking: str | None
    answer: str
    gold: str
    score: str
    good: bool
    reason: str
    length: str
    truncated: bool


def split_thinking(prompt: str, response: str) -> tuple[str | None, str]:
    """(thinking, answer): split at the last `</think>`; without one all is thinking if `<think>` is there."""
    thinking, close, answer = response.rpartition("</think>")
    if not close:
        if "<think>" not in response and not prompt.rstrip().endswith("<think>"):
            return None, response.strip()
        thinking, answer = response, ""
    return thinking.strip().removeprefix("<think>").strip(), answer.strip()


def _shorten(text: str) -> str:
    if len(text) <= _LONGEST_TEXT:
        return text
    half = _LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def pick_samples(lines: Sequence[Mapping[str, Any]], *, per_step: int) -> list[Sample]:
    """Samples of the first, middle and last step that has some, at most `per_step` each, good ones first."""
    steps = sorted({line["step"] for line in lines})
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    picked = []
    for step in chosen:
        of_step = [line for line in lines if line["step"] == step]
        reasons = list(dict.fromkeys(str(line.get("reason", "")) for line in of_step))
        # one of each outcome before a second of any
        ranked = sorted(
            enumerate(of_step),
            key=lambda item: (
                sum(
                    str(other.get("reason", "")) == str(item[1].get("reason", ""))
                    for other in of_step[: item[0]]
                ),
                reasons.index(str(item[1].get("reason", ""))),
            ),
        )
        picked += [_sample(line) for _, line in ranked[:per_step]]
    return picked


def _sample(line: Mapping[str, Any]) -> Sample:
    prompt, response = str(line.get("prompt", "")), str(line.get("response", ""))
    thinking, answer = split_thinking(prompt, response)
    score = line.get("score")
    is_number = isinstance(score, (int, float))
    return Sample(
        step=line["step"],
        prompt=_shorten(prompt),
        thinking=None if thinking is None else _shorten(thinking),
        answer=_shorten(answer),
        gold=str(line.get("gold", "")),
        score=f"{score:+g}" if is_number else str(score),
        good=is_number and score > 0,  # type: ignore[operator]
        reason=str(line.get("reason", "")).replace("_", " "),
        length=f"{line['length']} tokens" if "length" in line else "",
        truncated=bool(line.get("truncated", False)),
    )
