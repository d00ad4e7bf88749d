r"""One spelling for the many ways to typeset the same answer, and its parts: text, lists, assignments.

`normalize` maps LaTeX and Unicode variants to one form that the rules of `equality` rely on: a single
``\frac``, no sizing or spacing commands, no dollar signs, ``-`` for every minus. A comma that separates
thousands stays ``,``; a comma followed by a space becomes ``;``, since only a list is written so.
"""

from __future__ import annotations

import functools
import itertools
import re
from typing import NamedTuple

TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|mbox|hbox|math(?:rm|bf|it|sf)|operatorname)\s*\{"

MAX_OUTER_BRACES = 8

_UNICODE = str.maketrans(
    {
        **dict.fromkeys("−‐‑‒–﹣－", "-"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\x00", ""),
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u202f\u3000\t\r\n", " "),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ",
        "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ",
        "°": r"^\circ ", "²": "^2", "³": "^3", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
        "％": r"\%", "，": ",", "（": "(", "）": ")",
    }
)  # fmt: skip

_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+", " "),
        (r"\\(?:left|right)\s*\.|\\(?:left|right|[bB]igg?[lr]?)(?![A-Za-z])", ""),
        (r"\\(?:displaystyle|textstyle|limits)(?![A-Za-z])|\\!\s*", ""),
        (r"\\\$|\$|(?<!\\)\\[\[\]()]", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:lbrace|lbrack)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace|rbrack)(?![A-Za-z])", r"\\}"),
        (r"\{\s*,\s*\}", ","),
        (r"(?<=[0-9])(?:\\[,;: ]|~)\s*(?=[0-9]{3}(?![0-9]))", ","),
        (r"(?<!\\)\\[,;:> ]|\\q?quad(?![A-Za-z])|~", " "),
        (r" {2,}", " "),
        (r"\s*,?\s*\\(?:text|mbox|textrm|mathrm)\s*\{\s*(?:and|or)\s*\}\s*", "; "),
        (r"\s*,?\s(?:and|or)\s+", "; "),
        (r",\s+", ";"),
        (r"(?<![A-Za-z0-9])\s+|\s+(?![A-Za-z0-9])", ""),
        (r"([_^])\{(\w)\}(?!\w)", r"\1\2"),
    )
)

_TEXT_GROUP = re.compile(TEXT_COMMAND + r"([^{}]*)\}")
_ASSIGNMENT = re.compile(
    r"((?:\\?[A-Za-z]+)(?:_\w|_\{\w+\})?|\([A-Za-z](?:[,;][A-Za-z])+\))\s*(?:=|\\in(?![A-Za-z]))\s*([^=]+)"
)
_RELATION = re.compile(r"[=<>]|\\(?:in|le|leq|ge|geq|ne|neq|lt|gt|approx|equiv)(?![A-Za-z])")
_DELIMITER = re.compile(r"\\[{}]|\\[lr]angle(?![A-Za-z])|\\.|[(){}\[\],;]", re.DOTALL)
_GROUPED_ZEROS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})*,0[0-9]{2}(?:,[0-9]{3})*")


@functools.lru_cache(maxsize=4096)  # the samples of one prompt share their gold, and often their answers
def normalize(text: str) -> str:
    """The one spelling of an answer that every rule of `equality` reads; see the module's docstring."""
    text = text.translate(_UNICODE)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".;").strip()
    for _ in range(MAX_OUTER_BRACES):
        if not (text.startswith("{") and text.endswith("}") and _closes_at_end(text)):
            break
        text = text[1:-1].strip()
    return text


def _closes_at_end(text: str) -> bool:
    """Whether the brace that opens ``text`` is closed by its last character."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return match.end() == len(text)
    return False


def text_content(text: str) -> str | None:
    r"""The inside of an answer that is one ``\text{...}`` (or ``\textbf``, ``\mathrm``, ...), else None."""
    match = _TEXT_GROUP.fullmatch(text)
    return None if match is None else match.group(1).strip().rstrip(".").strip()


def without_text_commands(text: str) -> str:
    r"""``text`` with every ``\text{...}`` replaced by its content."""
    return _TEXT_GROUP.sub(r"\1 ", text).strip()


def assignment(text: str) -> tuple[str, str] | None:
    r"""(name, value) of ``x = 5`` or ``x \in [0, 1]``, or None; ``f(x) = ...`` and ``a = b = c`` are none."""
    match = _ASSIGNMENT.fullmatch(text)
    if match is None or _RELATION.search(match.group(2)):
        return None
    return match.group(1), match.group(2).strip()


def has_relation(text: str) -> bool:
    r"""Whether ``text`` holds an equation, an inequality or ``\in``."""
    return _RELATION.search(text) is not None


class AnswerList(NamedTuple):
    """The items, and the brackets around them: ``()``, ``[)``, ``{}``, ..., or ``""`` for a bare list."""

    brackets: str
    items: tuple[str, ...]


def split_list(text: str) -> AnswerList | None:
    """The items of a list, tuple, interval or finite set, or None where ``text`` is none of these.

    One pair of brackets must enclose the whole text, or commas must stand outside all brackets.
    ``1,000`` is a number, not a list of 1 and 0.
    """
    depth, cuts, first_close = 0, [], -1
    for match in _DELIMITER.finditer(text):
        symbol = match.group()
        if symbol in ("(", "[", "{", r"\{", r"\langle"):
            depth += 1
        elif symbol in (")", "]", "}", r"\}", r"\rangle"):
            depth -= 1
            if depth == 0 and first_close < 0:
                first_close = match.end()
        elif symbol in (",", ";"):
            cuts.append((depth, match.start()))
        if depth < 0:
            return None
    if depth != 0:
        return None
    outer = [position for level, position in cuts if level == 0]
    if outer:
        return None if _GROUPED_ZEROS.fullmatch(text) else _items(text, "", 0, len(text), outer)
    opening = re.match(r"\\\{|\\langle|[(\[]", text)
    closing = re.search(r"(?:\\\}|\\rangle|[)\]])$", text)
    if opening is None or closing is None or first_close != len(text):
        return None
    inner = [position for level, position in cuts if level == 1]
    brackets = (opening.group() + closing.group()).replace("\\langle", "(").replace("\\rangle", ")")
    brackets = brackets.replace("\\", "")
    if not inner and brackets != "{}":
        return None
    return _items(text, brackets, opening.end(), closing.start(), inner)


def _items(text: str, brackets: str, start: int, stop: int, cuts: list[int]) -> AnswerList | None:
    edges = [start - 1, *cuts, stop]
    items = tuple(text[left + 1 : right].strip() for left, right in itertools.pairwise(edges))
    return AnswerList(brackets, items) if all(items) else None
