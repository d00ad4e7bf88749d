r"""Exact numbers: plain arithmetic as rationals, with bounds, so that it may run in the trainer's process.

Read are integers of any length, decimals, repeating decimals (``0.1\overline{6}``), thousands separators,
``\frac`` with and without braces, mixed numbers, ``6.02 \times 10^{23}``, ``6.02e23``, sums, products,
quotients and whole powers of these; around them a currency sign, a percent sign, degrees, a unit.
Nothing is rounded. What is not such a number, or larger than the bounds below, is None.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction
from typing import NamedTuple

from vcppo_jax.rewards.notation import TEXT_COMMAND

MAX_EXPRESSION_CHARS = 2000
MAX_BITS = 8192  # of a numerator or denominator: 2466 digits; one product at this size takes microseconds
MAX_DEPTH = 30

_PLAIN = re.compile(r"([+-]?)([0-9]{1,3}(?:[, ][0-9]{3})+|[0-9]*)(?:\.([0-9]*))?")
_NUMBER = re.compile(
    r"(?P<whole>[0-9]{1,3}(?:[, ][0-9]{3})+(?![0-9])|[0-9]*)(?P<point>\.(?P<decimals>[0-9]*)"
    r"(?:\\(?:overline|bar)\{(?P<repeat>[0-9]+)\})?)?(?:[eE](?P<exponent>[+-]?[0-9]+))?"
)
_SLASH_FRACTION = re.compile(r" ([0-9]+)\s*/\s*([0-9]+)(?![0-9.])")
_TIMES = re.compile(r"\*|\\(?:times|cdot)(?![A-Za-z])")
_LETTER_X_TIMES = re.compile(r"(?<=[0-9])\s*[xX]\s*(?=10\s*\^)")
_SIGNED_DIGITS = re.compile(r"[+-]?[0-9]+")

_UNIT_WORDS = (
    "mm cm dm km kg mg mL ml ft in inch inches foot feet yard mile meter metre centimeter centimetre "
    "kilometer kilometre gram kilogram liter litre gallon ounce pound ton second sec minute "
    "min hour hr day week month year degree radian dollar cent euro unit mph "
    "percent people person student way point coin apple book"
)
_UNIT = r"(?:square|cubic|sq\.?|cu\.?)?\s*(?:" + "|".join(f"{word}s?" for word in _UNIT_WORDS.split()) + ")"
_BARE_UNIT = re.compile(
    rf"(?<=[0-9)}}\s])\s*{_UNIT}(?:\s*(?:/|per)\s*{_UNIT})?(?:\^[23]|\^\{{[23]\}})?$", re.IGNORECASE
)
_TEXT_UNIT = re.compile(r"\s*(?:/|\\cdot)?\s*" + TEXT_COMMAND + r"([^{}]*)\}(?:\^[0-9]|\^\{[0-9]\})?$")
_DEGREES = re.compile(r"(?:\^\{?\s*\\circ\s*\}?|\\degrees?)\s*[CF]?$")
_PERCENT = re.compile(r"\s*(?:\\?%|percent|" + TEXT_COMMAND + r"\s*(?:percent|%)\s*\})$", re.IGNORECASE)
_CURRENCY = re.compile(r"^([+-]?)\s*(?:[€£¥]|\\(?:euro|pounds)(?![A-Za-z]))\s*")
_NO_UNIT = re.compile(
    r"(?:\b(?:and|or|not|to|if|when|where|for|base|mod|remainder)\b|[0-9=<>])", re.IGNORECASE
)
_SYMBOL_NOT_UNIT = frozenset("eijxyzn")
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALE = re.compile(
    r"\s*(?:" + TEXT_COMMAND + rf")?\s*({'|'.join(_SCALES)})s?\b([^{{}}]*)\}}?$", re.IGNORECASE
)


class Quantity(NamedTuple):
    """A number and whether a percent sign followed it (``value`` is what stands before the sign)."""

    value: Fraction
    percent: bool


class _NotANumber(Exception):
    """The text is no number, or one beyond the bounds."""


def plain_decimal(text: str) -> tuple[bool, str, str] | None:
    """(negative, digits, decimals) of a plain number of any length without needless zeros, else None.

    Equal numbers give equal tuples; no arithmetic is done, so the length needs no bound.
    """
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    sign, whole, decimals = match.group(1), match.group(2), match.group(3) or ""
    if not whole and not decimals:
        return None
    whole = whole.replace(",", "").replace(" ", "").lstrip("0")
    decimals = decimals.rstrip("0")
    return (sign == "-" and bool(whole or decimals), whole, decimals)


@functools.lru_cache(maxsize=4096)  # the samples of one prompt share their gold, and often their answers
def quantity(text: str) -> Quantity | None:
    """The exact number in a normalised answer, its unit dropped, or None where it is not one number."""
    if len(text) > MAX_EXPRESSION_CHARS or not any(character in "0123456789" for character in text):
        return None
    text = _CURRENCY.sub(r"\1", text)
    text, percents = _PERCENT.subn("", text)
    text, scale = _without_unit(text)
    try:
        value = scale * _Arithmetic(_LETTER_X_TIMES.sub("*", text)).value()
    except _NotANumber:
        return None
    return Quantity(value, percent=percents > 0)


def _without_unit(text: str) -> tuple[str, int]:
    """The text without its degree sign or unit, and the factor that a scale word (million) stands for."""
    text = _DEGREES.sub("", text)
    scale = _SCALE.search(text)
    if scale is not None and not _NO_UNIT.search(scale.group(2)):
        return text[: scale.start()], _SCALES[scale.group(1).lower()]
    for _ in range(3):  # \text{km}/\text{h}
        unit = _TEXT_UNIT.search(text)
        if unit is None:
            break
        word = unit.group(1).strip()
        if _NO_UNIT.search(word) or word in _SYMBOL_NOT_UNIT:
            break
        text = text[: unit.start()]
    return _DEGREES.sub("", _BARE_UNIT.sub("", text)).strip(), 1


class _Arithmetic:
    """A recursive-descent reader of one arithmetic expression; depth and size are bounded."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0

    def value(self) -> Fraction:
        """The value of the whole text; raises `_NotANumber` where it is not arithmetic."""
        result = self._sum()
        self._skip_spaces()
        if self.position != len(self.text):
            raise _NotANumber
        return result

    def _skip_spaces(self) -> None:
        while self.text.startswith(" ", self.position):
            self.position += 1

    def _take(self, token: str) -> bool:
        self._skip_spaces()
        if not self.text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def _take_times(self) -> bool:
        self._skip_spaces()
        match = _TIMES.match(self.text, self.position)
        if match is None:
            return self.text.startswith("(", self.position)  # 2(3): a product without a sign
        self.position = match.end()
        return True

    def _sum(self) -> Fraction:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _NotANumber
        result = self._signed_product()
        while True:
            if self._take("+"):
                result = _bounded(result + self._product())
            elif self._take("-"):
                result = _bounded(result - self._product())
            else:
                self.depth -= 1
                return result

    def _signed_product(self) -> Fraction:
        if self._take("-"):
            return -self._product()
        self._take("+")
        return self._product()

    def _product(self) -> Fraction:
        result = self._power()
        while True:
            if self._take("/") or self._take(r"\div"):
                result = _divide(result, self._power())
            elif self._take_times():
                result = _bounded(result * self._power())
            else:
                return result

    def _power(self) -> Fraction:
        base = self._atom()
        if not self._take("^"):
            return base
        if self._take("{"):
            exponent = self._group("}")
        elif self._take("("):
            exponent = self._group(")")
        else:
            match = _SIGNED_DIGITS.match(self.text, self.position)
            if match is None:
                raise _NotANumber
            self.position = match.end()
            exponent = Fraction(_integer(match.group()))
        if self._take("^"):
            raise _NotANumber
        return _raise(base, exponent)

    def _group(self, close: str) -> Fraction:
        result = self._sum()
        if not self._take(close):
            raise _NotANumber
        return result

    def _atom(self) -> Fraction:
        if self._take("("):
            return self._group(")")
        if self._take("{"):
            return self._group("}")
        if self._take(r"\frac"):
            return self._fraction()
        return self._number()

    def _fraction(self) -> Fraction:
        numerator, _ = self._fraction_part()
        denominator, single_digit = self._fraction_part()
        if single_digit and self.text[self.position : self.position + 1].isdigit():
            raise _NotANumber  # \frac123: the author's meaning is anyone's guess
        return _divide(numerator, denominator)

    def _fraction_part(self) -> tuple[Fraction, bool]:
        if self._take("{"):
            return self._group("}"), False
        digit = self.text[self.position : self.position + 1]
        if digit not in tuple("0123456789"):
            raise _NotANumber
        self.position += 1
        return Fraction(int(digit)), True

    def _number(self) -> Fraction:
        self._skip_spaces()
        match = _NUMBER.match(self.text, self.position)
        if match is None or not (match["whole"] or match["decimals"] or match["repeat"]):
            raise _NotANumber
        self.position = match.end()
        whole = match["whole"].replace(",", "").replace(" ", "") or "0"
        decimals = match["decimals"] or ""
        result = Fraction(_integer(whole + decimals), 10 ** len(decimals))
        if match["repeat"]:
            nines = (10 ** len(match["repeat"]) - 1) * 10 ** len(decimals)
            result += Fraction(_integer(match["repeat"]), nines)
        if match["exponent"]:
            return _bounded(result * _raise(Fraction(10), Fraction(_integer(match["exponent"]))))
        if match["point"] is None:
            result += self._mixed_part()
        return _bounded(result)

    def _mixed_part(self) -> Fraction:
        r"""The fraction of a mixed number (``1\frac{3}{4}``, ``1 3/4``) that follows a whole one, or 0."""
        match = _SLASH_FRACTION.match(self.text, self.position)
        if match is None:
            return self._fraction() if self._take(r"\frac") else Fraction(0)
        self.position = match.end()
        return _divide(Fraction(_integer(match.group(1))), Fraction(_integer(match.group(2))))


def _integer(digits: str) -> int:
    if len(digits) > MAX_EXPRESSION_CHARS:
        raise _NotANumber
    return int(digits)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _NotANumber
    return value


def _divide(numerator: Fraction, denominator: Fraction) -> Fraction:
    if denominator == 0:
        raise _NotANumber
    return _bounded(numerator / denominator)


def _raise(base: Fraction, exponent: Fraction) -> Fraction:
    """base ** exponent for a whole exponent; the result's size is checked before it is computed."""
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        raise _NotANumber
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent.numerator) > MAX_BITS:
        raise _NotANumber
    return _bounded(base**exponent.numerator)
