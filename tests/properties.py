"""How many examples a property is tried on: 25 in the fast suite, in the profile "full" as many as
it asks for.
"""

from hypothesis import settings

FAST, FULL = 25, 100
"""For those that ask for no number."""


def examples(number: int) -> settings:
    """So many in the profile "full"; in the fast suite no more than for any other."""
    return settings(
        max_examples=number if settings.default.max_examples == FULL else min(number, FAST)
    )
