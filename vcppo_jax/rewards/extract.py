r"""Where a response's answer stands: after the thinking, inside the last ``\boxed{...}``.

Both functions are linear in the length of the text and do not recurse, so that no response, however
malformed, costs more than reading it.
"""

from __future__ import annotations

import re

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

_BOX = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)


def after_thinking(response: str, *, thinking_open: bool = False) -> str | None:
    """What follows the last ``</think>``, or None where the thinking was never closed.

    A response without any tag is returned whole, unless ``thinking_open`` says that the prompt had
    already opened the thinking. ``<think>`` opened again after the last ``</think>`` counts as
    unclosed: a draft in there is no answer.
    """
    close = response.rfind(THINK_CLOSE)
    if close < 0:
        return None if thinking_open or THINK_OPEN in response else response
    rest = response[close + len(THINK_CLOSE) :]
    return None if THINK_OPEN in rest else rest


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}``, or None where there is none or its brace never closes.

    Spaces before the brace and nested braces are allowed, escaped braces (``\{``) do not nest. An
    unclosed last box hides the boxes before it: the model was giving another answer when it stopped.
    A box inside a box starts later, so it is the last one.
    """
    start = -1
    for match in _BOX.finditer(text):
        start = match.end()
    if start < 0:
        return None
    depth = 1
    for brace in _BRACE.finditer(text, start):
        symbol = brace.group()
        if symbol == "{":
            depth += 1
        elif symbol == "}":
            depth -= 1
            if depth == 0:
                return text[start : brace.start()]
    return None
