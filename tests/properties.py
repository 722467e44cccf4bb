"""How many examples a property is tried on: 25 in `make test`, in the profile "full" of `make long`
as many as it asks for.
"""

from hypothesis import settings

FAST, FULL = 25, 100
"""For those that ask for no number."""


def examples(number: int) -> settings:
    """So many in the profile "full"; in `make test` no more than for any other."""
    return settings(
        max_examples=number if settings.default.max_examples == FULL else min(number, FAST)
    )
