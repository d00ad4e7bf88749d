r"""Whether an answer equals the gold one: exact rules first, Math-Verify for what they cannot decide.

`answers_equal` without a symbolic comparison is cheap and bounded, so the trainer's own process may call
it: it returns True or False where a rule decides and None where only computer algebra can. With
`math_verify_equal` it always decides, in unbounded time: call that in a process that may be killed.

The rules, in order: the same spelling; two numbers as exact rationals (never a tolerance; a percent sign,
degrees and a unit are dropped, though 25 % also equals 0.25); a choice letter; words; the base of a
numeral; one side written as an assignment; lists, tuples, intervals and sets item by item.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from vcppo_jax.rewards import notation, rationals

MAX_ANSWER_CHARS = 2000  # longer answers are only compared as they are spelled, or as plain numbers
MAX_NESTING = 8  # lists in lists, text in text
NUMERIC_DIGITS = 200  # Math-Verify's absolute resolution is then 1e-200; its default equates 2^-98 and 2^-99

Symbolic = Callable[[str, str], bool]

_CHOICE_GOLD = re.compile(r"\(?([A-J])\)?")
_CHOICE_ONLY = re.compile(r"\(?([A-Ja-j])\)?[.:]?")
_CHOICE_AND_CONTENT = re.compile(r"(?:\(?([A-J])\)[.:]?|([A-J])[.:])\s*(.+)", re.DOTALL)
_OTHER_CHOICE = re.compile(
    r"(?<![A-Za-z])[A-J][).:]|(?:(?<![A-Za-z])(?:or|and)|[,;/&])\s*\(?[A-J](?![A-Za-z])"
)
_SHORT_WORDS = frozenset({"yes", "no", "odd"})
_WORDS = re.compile(r"[A-Za-z][A-Za-z' ;,\-]*")
_NUMERAL_IN_BASE = re.compile(r"([0-9A-Za-z]+)_\{?([0-9]+)\}?")
_DECIMAL = re.compile(r"(?<![0-9.])([0-9]*)\.([0-9]+)")
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")


def answers_equal(answer: str, gold: str, symbolic: Symbolic | None = None) -> bool | None:
    """True or False, or None where no rule decides and no ``symbolic`` comparison is given.

    ``answer`` is the content of the response's box, ``gold`` the reference; both as written.
    ``symbolic(answer, gold)`` gets normalised LaTeX.
    """
    if max(len(answer), len(gold)) > MAX_ANSWER_CHARS:
        return _long_answers_equal(answer, gold)
    return _equal(notation.normalize(answer), notation.normalize(gold), symbolic, 0)


def _long_answers_equal(answer: str, gold: str) -> bool:
    answer, gold = answer.strip(" $\r\n"), gold.strip(" $\r\n")
    number = rationals.plain_decimal(answer)
    return answer == gold or (number is not None and number == rationals.plain_decimal(gold))


def _equal(answer: str, gold: str, symbolic: Symbolic | None, nesting: int) -> bool | None:
    if not answer or not gold:
        return False
    if answer.replace(";", ",") == gold.replace(";", ","):
        return True
    if nesting > MAX_NESTING:
        return None if symbolic is None else symbolic(answer, gold)
    for rule in (_numbers, _choices, _words, _bases):
        verdict = rule(answer, gold)
        if verdict is not None:
            return verdict
    for structure in (_unwrapped, _assignments, _lists):
        decided, verdict = structure(answer, gold, symbolic, nesting + 1)
        if decided:
            return verdict
    return None if symbolic is None else symbolic(answer, gold)


def _numbers(answer: str, gold: str) -> bool | None:
    plain_answer, plain_gold = rationals.plain_decimal(answer), rationals.plain_decimal(gold)
    if plain_answer is not None and plain_gold is not None:
        return plain_answer == plain_gold
    left, right = rationals.quantity(answer), rationals.quantity(gold)
    if left is None or right is None:
        return None
    if left.value == right.value:
        return True
    if left.percent == right.percent:
        return False
    return left.value == right.value * 100 if left.percent else left.value * 100 == right.value


def _choices(answer: str, gold: str) -> bool | None:
    gold_letter = _CHOICE_GOLD.fullmatch(notation.text_content(gold) or gold)
    if gold_letter is None:
        return None
    answer = notation.without_text_commands(answer)
    only = _CHOICE_ONLY.fullmatch(answer)
    if only is not None:
        return only.group(1).upper() == gold_letter.group(1)
    named = _CHOICE_AND_CONTENT.fullmatch(answer)
    if named is None:
        return False if _OTHER_CHOICE.search(answer) else None
    letter = named.group(1) or named.group(2)
    return letter == gold_letter.group(1) and not _OTHER_CHOICE.search(named.group(3))


def _words(answer: str, gold: str) -> bool | None:
    """Words are compared as words: computer algebra would read ``seat`` and ``east`` as equal products."""
    gold_text, answer_text = notation.text_content(gold), notation.text_content(answer)
    gold_words = _folded(gold if gold_text is None else gold_text)
    if _WORDS.fullmatch(gold_words) is None:
        return None
    longest = max(len(word) for word in re.findall("[a-z]+", gold_words))
    if longest < (4 if gold_text is None else 2) and gold_words not in _SHORT_WORDS:
        return None  # x, p - q, abc: variables
    if _folded(answer if answer_text is None else answer_text) == gold_words:
        return True
    return None if re.search("[,;]", gold_words) else False  # a list of words is left to `_lists`


def _folded(text: str) -> str:
    return " ".join(text.casefold().strip(" .\"'`").split())


def _bases(answer: str, gold: str) -> bool | None:
    answer_numeral, gold_numeral = _NUMERAL_IN_BASE.fullmatch(answer), _NUMERAL_IN_BASE.fullmatch(gold)
    if gold_numeral is None:
        return None
    if answer_numeral is not None:
        return answer_numeral.groups() == gold_numeral.groups()
    number = rationals.plain_decimal(answer)  # the question named the base: the digits are what counts
    return None if number is None else number == rationals.plain_decimal(gold_numeral.group(1))


def _unwrapped(answer: str, gold: str, symbolic: Symbolic | None, nesting: int) -> tuple[bool, bool | None]:
    r"""An answer that is one ``\text{...}`` around more than a word is read as if it stood bare."""
    answer_text, gold_text = notation.text_content(answer), notation.text_content(gold)
    bare = [text for text in (answer_text, gold_text) if text is not None]
    if not bare or all(_WORDS.fullmatch(text) for text in bare):
        return False, None
    inner_answer = answer if answer_text is None else notation.normalize(answer_text)
    inner_gold = gold if gold_text is None else notation.normalize(gold_text)
    return True, _equal(inner_answer, inner_gold, symbolic, nesting)


def _assignments(answer: str, gold: str, symbolic: Symbolic | None, nesting: int) -> tuple[bool, bool | None]:
    left, right = notation.assignment(answer), notation.assignment(gold)
    if left is not None and right is not None:
        same_name = left[0] == right[0]
        return same_name, _equal(left[1], right[1], symbolic, nesting) if same_name else None
    if left is not None and not notation.has_relation(gold):
        return True, _equal(left[1], gold, symbolic, nesting)
    if right is not None and not notation.has_relation(answer):
        return True, _equal(answer, right[1], symbolic, nesting)
    return False, None


def _lists(answer: str, gold: str, symbolic: Symbolic | None, nesting: int) -> tuple[bool, bool | None]:
    left, right = notation.split_list(answer), notation.split_list(gold)
    if left is None or right is None:
        listed, other = (left, gold) if left is not None else (right, answer)
        if listed is None:
            return False, None
        if len(listed.items) == 1:  # the set {5} answers as 5
            pair = (listed.items[0], gold) if left is not None else (answer, listed.items[0])
            return True, _equal(*pair, symbolic, nesting)
        several = any(re.search(r"\\(?:pm|mp|l?dots|cdots)", item) for item in listed.items)
        return rationals.quantity(other) is not None and not several, False
    if any(re.search(r"\\(?:pm|mp|l?dots|cdots)", item) for item in left.items + right.items):
        return False, None  # one item may stand for several
    kinds = {left.brackets, right.brackets}
    if len(left.items) != len(right.items) or not (len(kinds) == 1 or kinds in ({"", "{}"}, {"", "()"})):
        return True, False
    if kinds <= {"", "{}"}:
        return True, _same_items(left.items, right.items, symbolic, nesting)
    verdicts = {_equal(a, b, symbolic, nesting) for a, b in zip(left.items, right.items)}
    return True, False if False in verdicts else None if None in verdicts else True


def _same_items(
    answer: tuple[str, ...], gold: tuple[str, ...], symbolic: Symbolic | None, nesting: int
) -> bool | None:
    """Whether two lists of equal length hold the same items in any order; None where some pair is open."""
    unmatched = list(answer)
    undecided = False
    for wanted in gold:
        if wanted in unmatched:
            unmatched.remove(wanted)
            continue
        verdicts = [_equal(item, wanted, symbolic, nesting) for item in unmatched]
        if True in verdicts:
            unmatched.pop(verdicts.index(True))
        elif None in verdicts:
            undecided = True
        else:
            return False
    return None if undecided else True


def math_verify_equal(answer: str, gold: str) -> bool:
    """Math-Verify's verdict on two normalised answers, decimals taken as exact fractions.

    An answer that does not parse is not equal. Runs for as long as sympy likes: see `pool`.
    """
    import math_verify  # here, since only the pool's processes pay for sympy

    left, right = _parsed(gold), _parsed(answer)
    if left is None or right is None:
        return False
    same = math_verify.verify(
        left,
        right,
        numeric_precision=NUMERIC_DIGITS,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
    return bool(same) and _not_both_tiny(left, right)


def _parsed(text: str):
    import math_verify

    text = text.replace(";", ",")
    text = _THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)
    text = _DECIMAL.sub(_as_fraction, text)
    parsed = math_verify.parse(
        rf"\boxed{{{text}}}",
        [math_verify.LatexExtractionConfig(boxed_match_priority=0)],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return parsed[0] if len(parsed) == 1 else None


def _as_fraction(match: re.Match[str]) -> str:
    whole, decimals = match.groups()
    return rf"(\frac{{{(whole + decimals).lstrip('0') or '0'}}}{{1{'0' * len(decimals)}}})"


def _not_both_tiny(left, right) -> bool:
    """False for two different constants that are both below Math-Verify's resolution."""
    import sympy

    if not all(isinstance(side, sympy.Expr) and not side.free_symbols for side in (left, right)):
        return True
    limit = sympy.Float(10) ** (-NUMERIC_DIGITS // 2)
    try:
        if not all(abs(sympy.N(side, 30)) < limit for side in (left, right)):
            return True
    except TypeError:  # not comparable: nan, an unevaluated limit
        return True
    return bool(sympy.simplify(left - right).is_zero)
