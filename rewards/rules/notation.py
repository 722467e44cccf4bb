"""Numbers as people write them: Unicode's signs, digits, fractions and powers, as the ASCII that
rules read.

`plain("−5")` is "-5", `plain("1½")` is "\\frac{3}{2}", `plain("6.02 × 10²³")` is
602000000000000000000000.
"""

import re
import unicodedata
from decimal import Decimal
from math import isfinite
from typing import Any

_MINUS_SIGNS = "\u2010\u2011\u2012\u2013\u2212\u2796\ufe58\ufe63"
_MULTIPLICATION_SIGNS = "\u00b7\u00d7\u2217\u2219\u22c5\u2715\u2716\u2a09\u2a2f"
_FRACTION_SLASHES = "\u00f7\u2044\u2215\u29f8"
_SPACES = (
    "\u00a0\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000"
)
_THIN_SPACE = "\u202f"
_INVISIBLE_CHARACTERS = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\u2061\u2062\u2063\u2064\ufeff"
_NAMED = {
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
    "\u2205": r"\emptyset ",
    "\u00b1": r"\pm ",
    "\u00b0": r"^\circ ",
    "\u066a": "%",
    "\ufe6a": "%",
    "\ufe62": "+",
    "\u066b": ".",
    "\u066c": ",",
}
_ASCII = str.maketrans(
    {
        # The full-width forms of ASCII.
        **{chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
        **dict.fromkeys(_MINUS_SIGNS, "-"),
        **dict.fromkeys(_MULTIPLICATION_SIGNS, "*"),
        **dict.fromkeys(_FRACTION_SLASHES, "/"),
        **dict.fromkeys(_SPACES, _THIN_SPACE),
        **dict.fromkeys(_INVISIBLE_CHARACTERS, ""),
        **_NAMED,
    }
)
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋₍₎ₙᵢ", "0123456789+-()ni", strict=True))
_RAISED_RUN = re.compile(f"[{''.join(_RAISED)}]+")
_LOWERED_RUN = re.compile(f"[{''.join(_LOWERED)}]+")
_OTHER_DIGIT = re.compile(r"[^\W\x00-\x7f]")
_VULGAR = re.compile(r"(?:(?<![\w.])(\d{1,9})[ \u202f]?)?([¼½¾⅐-⅞])")
_ROOT = re.compile(
    r"(?:√|(?<![A-Za-z\\])sqrt)[ ]?(?:\(([^()]{1,60})\)|(\d+(?:\.\d+)?|[A-Za-z](?![a-z])|\\pi))"
)
# As programs write them. A number in bold, `**2**`, is no power.
_PYTHON_POWER = re.compile(
    r"(?<=[\dA-Za-z)}\]])(?<![A-Za-z]{2})[ ]?\*\*[ ]?(?=[-\dA-Za-z(])(?!\S{0,60}\*\*)"
)
_NAMED_PI = re.compile(r"(?:(?<=[\d)}\]*/^+=(-])|(?<=[\d)*/+=-] )|\A)pi(?![A-Za-z])")
_NEGATIVE_POWER = re.compile(r"\^[ ]?(-\d{1,60})(?!\d|\.\d)")
# "5 minus 2" has an operand before it.
_NAMED_MINUS = re.compile(
    r"(?<![\d)}\]$%] )(?<!\b[A-Za-z] )\b(?i:minus|negative) "
    r"(?=\\?\$?(?:\.?\d|\\(?:[dt]?frac|sqrt|pi)\b))"
)
# "-$5" is "$-5", but "$3-$5" is none, and nor is what follows a formula.
_SIGN_OF_MONEY = re.compile(r"(?<![\w$)}\]])([-+])(\\?[$€£¥₹])(?=\.?\d)")

# Every repetition is bounded, so that no text makes these slow.
_GROUPED = re.compile(
    rf"(?<![\w.,\\])(\d{{1,3}})((?:(?:{_THIN_SPACE}|\\[, ;:!]|\{{,\}}|')\d{{3}}){{1,20}})(?!\w)"
)
_SPACED_OUT = re.compile(r"[-+]?\d{1,3}(?: \d{3}){1,20}(?:\.\d{0,60})?")
_GAP = re.compile(r"\D")
_MIXED = re.compile(
    r"(?<![\w.,^/*+{(\\])(?<![\d.^/*] )(\d{1,9})[ ](\d{1,9})/(\d{1,9})(?![\w.,/^]*\d)"
)
_REPEATING = re.compile(
    r"(?<![\w.])(\d{0,30})\.(\d{0,30})\\(?:overline|dot|bar|overset\{\\cdot\})["
    r" ]?(?:\{(\d{1,30})\}|(\d))"
)
_WRAPPED_E = re.compile(
    r"(?<=[\d.])(?:\\[,;: !])?[ ]?(?:\\(?:mathrm|text|textrm|rm)\{([eE])\}|\{\\rm"
    r" ?([eE])\}|([eE])(?=\{))"
    r"[ ]?(?:\{([-+]?\d{1,4})\}|([-+]?\d{1,4}))(?!\d)"
)
_WHOLE = re.compile(r"(?<![\w.,])(\d{16,400})\.0{1,60}(?!\d)")
_DECIMAL = r"(?<![\w.\\^_])((?:\d{1,60}(?:,\d{3}){0,20}(?:\.\d{0,60})?|\.\d{1,60}))"
_POWER_OF_TEN = re.compile(
    _DECIMAL + r"[ ]?(?:\*|\\times|\\cdot|x)[ ]?10[ ]?(?:\^|\*\*)[ ]?(?:\{[ ]?([-+]?\d{1,4})["
    r" ]?\}|\(([-+]?\d{1,4})\)"
    r"|([-+]?\d{1,4}))(?![\w^!]|\.\d|\*\*)"
)
_EXPONENT = re.compile(_DECIMAL + r"[eE]([-+]?\d{1,4})(?![\w^(]|\.\d)")
_MOST_ZEROS = 400


def plain(text: str) -> str:
    """The text with its numbers in ASCII, without grouping, and with powers of ten written out."""
    text = _ascii(text)
    text = (
        _GROUPED.sub(lambda found: found[1] + _GAP.sub("", found[2]), text)
        .replace(_THIN_SPACE, " ")
        .strip()
    )
    text = text.replace(" ", "") if _SPACED_OUT.fullmatch(text) else text
    text = _MIXED.sub(_write_mixed_number, text)
    text = _REPEATING.sub(_write_repeating, text)
    text = _WHOLE.sub(r"\1", text)  # sympy keeps the first fifteen digits of a decimal
    text = _POWER_OF_TEN.sub(
        lambda found: _write_out(found, found[2] or found[3] or found[4]), text
    )
    return _EXPONENT.sub(lambda found: _write_out(found, found[2]), text)


def without_exponents(text: str) -> str | None:
    """The text with `2e-3` as two times Euler's number, minus three; None where nothing can be read
    so.
    """
    spaced = re.sub(r"(?<=[\d.])e(?=[-+]\d)", " e ", _ascii(text))
    return plain(spaced) if spaced != _ascii(text) else None


def exact_number(value: Any) -> Decimal | None:
    """The digits of a JSON number; None for anything else.

    Raises:
        ValueError: it is a truth value, or not finite.
    """
    if isinstance(value, bool):
        raise ValueError("a truth value is no number")
    if not isinstance(value, int | float):
        return None
    if not isfinite(value):
        raise ValueError("not a finite number")
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value))


def number_in(text: str) -> Decimal | None:
    """The number that the whole text is; None where it is something else."""
    text = plain(text).strip()
    if re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d*)?", text):
        text = text.replace(",", "")
    return Decimal(text) if re.fullmatch(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)", text) else None


def _ascii(text: str) -> str:
    """The text with its numbers and signs in ASCII and LaTeX."""
    text = text.translate(_ASCII)
    text = _RAISED_RUN.sub(_write_power, text)
    text = _LOWERED_RUN.sub(
        lambda run: "_{" + "".join(map(_LOWERED.__getitem__, run[0])) + "}", text
    )
    text = _VULGAR.sub(_write_vulgar_fraction, text)
    text = _OTHER_DIGIT.sub(lambda found: str(unicodedata.decimal(found[0], found[0])), text)
    text = _NAMED_MINUS.sub("-", _NAMED_PI.sub(r"\\pi ", _PYTHON_POWER.sub("^", text)))
    text = _SIGN_OF_MONEY.sub(r"\2\1", text)
    # math-verify reads 2 in 2^-1
    text = _NEGATIVE_POWER.sub(r"^{\1}", text)
    text = _WRAPPED_E.sub(r"\1\2\3\4\5", text).replace(r"\bmod", r"\mod")
    return _ROOT.sub(lambda found: rf"\sqrt{{{found[1] or found[2]}}}", text)


def _write_power(raised: re.Match[str]) -> str:
    """Raised characters as an exponent. One needs no brackets."""
    exponent = "".join(map(_RAISED.__getitem__, raised[0]))
    return f"^{exponent}" if len(exponent) == 1 else f"^({exponent})"


def _write_vulgar_fraction(found: re.Match[str]) -> str:
    """A character such as a half, with the whole number before it, as a fraction."""
    numerator, _, denominator = unicodedata.normalize("NFKC", found[2]).partition("\u2044")
    return rf"\frac{{{int(found[1] or 0) * int(denominator) + int(numerator)}}}{{{denominator}}}"


def _write_mixed_number(found: re.Match[str]) -> str:
    """A number such as 1 1/2 as a fraction."""
    whole, numerator, denominator = map(int, found.groups())
    if not numerator < denominator:  # two numbers, one after the other
        return found[0]
    return rf"\frac{{{whole * denominator + numerator}}}{{{denominator}}}"


def _write_repeating(found: re.Match[str]) -> str:
    """A decimal with repeating digits as a fraction: c repeating digits are c / 99...9."""
    whole, fixed, cycle = found[1], found[2], found[3] or found[4]
    scale, nines = 10 ** len(fixed), 10 ** len(cycle) - 1
    before = int(whole + fixed or "0")
    return rf"\frac{{{before * nines + int(cycle)}}}{{{scale * nines}}}"


def _write_out(found: re.Match[str], exponent: str) -> str:
    """The number without its exponent; as it stands where it would be too long."""
    if abs(int(exponent)) > _MOST_ZEROS:
        return found[0]
    return format(Decimal(found[1].replace(",", "")).scaleb(int(exponent)), "f").rstrip(".")
