"""Units of measure in an answer: 12 m is not 12 cm, though both hold the number 12.

`unit_of("It is 12 square metres.")` is `{"m": 2}`, `unit_of("60 mph")` is `{"mile": 1, "h": -1}`.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from agentrl.rewards.rules.notation import plain

Unit = Mapping[str, int]
"""Base units and their powers; empty where none is given."""

_PREFIXES = {
    "": "",
    "nano": "n",
    "micro": "µ",
    "milli": "m",
    "centi": "c",
    "deci": "d",
    "kilo": "k",
    "mega": "M",
    "giga": "G",
}
_PREFIXED = {
    "m": "meter metre",
    "g": "gram gramme",
    "L": "liter litre",
    "J": "joule",
    "W": "watt",
    "V": "volt",
    "N": "newton",
    "Pa": "pascal",
    "Hz": "hertz",
    "B": "byte",
}
_NAMES = {
    "s": "s sec secs second seconds",
    "ms": "ms millisecond milliseconds",
    "min": "min mins minute minutes",
    "h": "h hr hrs hour hours",
    "day": "day days",
    "week": "week weeks wk wks",
    "month": "month months",
    "year": "year years yr yrs",
    "inch": "inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard yards",
    "mile": "mi mile miles",
    "acre": "acre acres",
    "hectare": "ha hectare hectares",
    "oz": "oz ounce ounces",
    "lb": "lb lbs pound pounds",
    "ton": "ton tons tonne tonnes",
    "gallon": "gal gallon gallons",
    "pint": "pint pints",
    "quart": "quart quarts",
    "cup": "cup cups",
    "USD": "dollar dollars usd",
    "cent": "cent cents ¢",
    "EUR": "euro euros eur €",
    "GBP": "£ gbp",
    "JPY": "¥ yen jpy",
    "INR": "₹ rupee rupees inr",
    "degree": "degree degrees deg °",
    "rad": "radian radians rad",
    "celsius": "celsius",
    "fahrenheit": "fahrenheit",
    "kelvin": "kelvin kelvins",
    "cal": "calorie calories cal",
    "kcal": "kcal kilocalorie kilocalories",
}
_RATES = {
    "mph": {"mile": 1, "h": -1},
    "kmh": {"km": 1, "h": -1},
    "kph": {"km": 1, "h": -1},
    "mpg": {"mile": 1, "gallon": -1},
}
_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cu": 3, "cubed": 3}


def _spell_units() -> Iterator[tuple[str, str]]:
    """The ways to write each unit, with the unit."""
    for base, names in _PREFIXED.items():
        for long, short in _PREFIXES.items():
            yield short + base, short + base
            for name in names.split():
                yield long + name, short + base
                yield f"{long}{name}s", short + base
    for base, written in _NAMES.items():
        for name in written.split():
            yield name, base


_UNITS = dict(_spell_units()) | {"$": "USD", "l": "L", "ml": "mL", "cl": "cL", "hertz": "Hz"}
"""Base units by the ways they are written. Names may have capitals, symbols are as they stand here.
"""

_WRAPPER = re.compile(
    r"\\(?:text|mathrm|textbf|mathbf|textit|mathit|mbox|rm|operatorname)\s*"
    r"\{((?:[^{}]|\{[^{}]*\})*)\}"
)
_SPACE = re.compile(r"\\[,;:! ]|~|\\q?quad\b")
_DEGREE = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree\b|\\circ\b")
_NUMBER = re.compile(r"(?<![\^\w.])(?<!\^[-{(])(?<!\^[{(]-)(?<!\*\*)\d[\d.,]*")
_TOKEN = re.compile(
    r"\s*(?:(?P<name>[A-Za-zµ]+|[€£¥₹¢°])(?:\.(?=\s*[A-Za-z]))?|(?P<over>/)|(?P<times>[*·-]))"
)
_POWER = re.compile(r"\s*(?:\^|\*\*)\s*[{(]?\s*(-?\d)\s*[)}]?")
_MONEY = re.compile(r"[$€£¥₹]\s*-?$")

_MEASURE = re.compile(
    r"\s*([-+−](?=\\?[$€£¥₹]))?\\?[$€£¥₹]?\s*((?(1)|[-+−]?)\d[\d.,]*)"
    r"\s*(?:°|\^\s*\{?\s*\\circ\s*\}?)?[A-Za-z\s]*\.?\s*"
)


def units_differ(expected: str, given: str) -> bool:
    """True if two answers with numbers have different units of measure.

    An answer without a unit, or with words that are none, differs from nothing. The same length in
    another unit, such as 0.12 m for 12 cm, differs too: a question that names a unit wants it.
    """
    right, said = unit_of(expected), unit_of(given)
    return bool(right and said and right != said)


def unit_of(text: str) -> Unit:
    """The unit after the last number of a text, or before it as in $5; empty if there is none that
    is known.
    """
    text = _SPACE.sub(" ", _WRAPPER.sub(r" \1 ", text)).replace("\\cdot", "*")
    text = _DEGREE.sub("°", plain(text).replace("\\pi", " "))
    text = re.sub(r"\\(?=[$%])", "", text).replace("\\", " ")
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007  the last one
        pass
    if found is None:
        return {}
    after = re.sub(r"^[.,]?[\s})\]]*(?:\$(?!\w))?", " ", text[found.end() :], count=1)
    unit = _read_units(after)
    money = _MONEY.search(text[: found.start()])
    # A pair of dollars is LaTeX.
    if not unit and money and text.count("$") % 2 == int("$" in money[0]):
        return {_UNITS[money[0][0]]: 1}
    return unit


def without_unit(text: str) -> str:
    """The number alone, where a text is a number with a unit and nothing more; else the text."""
    measure = _MEASURE.fullmatch(text)
    return (measure[1] or "") + measure[2] if measure and unit_of(text) else text


def _read_units(text: str) -> Unit:
    """The units at the start of a text."""
    powers: Counter[str] = Counter()
    at, sign, ahead = 0, 1, 1
    while found := _TOKEN.match(text, at):
        at = found.end()
        if found["over"]:
            sign = -1
            continue
        if found["times"]:
            continue
        name = found["name"]
        # The case of short names matters: "mW" is not "MW".
        known = _UNITS.get(name) or _UNITS.get(name.lower() if len(name) > 2 else name)
        if name == "per":
            sign = -1
        elif name.lower() in _POWERS:
            # "metres squared" changes the unit before it, "square metres" the one after it.
            if powers and name.lower().endswith("ed"):
                powers[list(powers)[-1]] *= _POWERS[name.lower()]
            ahead = _POWERS[name.lower()] if not name.lower().endswith("ed") else 1
        elif name.lower() in _RATES:
            powers.update(_RATES[name.lower()])
        # "5 in" are inches only at the end: "5 in the box" goes on with words.
        elif name == "in" and not text[at:].strip(" .})$"):
            powers["inch"] += sign * ahead
        elif known is None:
            break
        elif known == "degree" and (
            scale := re.match(r"\s*([CF])\b|\s*(celsius|fahrenheit)\b", text[at:], re.I)
        ):
            powers["fahrenheit" if scale[0].strip().lower().startswith("f") else "celsius"] += sign
            at += scale.end()
        else:
            power = _POWER.match(text, at)
            powers[known] += sign * (int(power[1]) if power else ahead)
            at, sign, ahead = (power.end() if power else at), 1, 1
    return {name: power for name, power in powers.items() if power}
