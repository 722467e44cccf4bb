"""Right answers that are compared as text: whether any message could equal them."""

import re
from typing import Any

_ENDS = re.compile(r"(?m)^\s*####\s*\S.{0,40}?\s*$|\\boxed\s*\{")


def check_it_is_no_solution(option: str, gold: Any) -> None:
    """Check that a right answer, which an answer has to equal as text, is not a whole solution that
    ends with it.

    Raises:
        ValueError: it is, as in GSM8K (`... #### 72`) and MATH (`... \\boxed{4}.`), so no answer
        would ever be paid.
    """
    found = _ENDS.search(gold) if isinstance(gold, str) else None
    if found is None or gold.strip() == found[0].strip() or gold.strip().startswith(r"\boxed"):
        return
    raise ValueError(
        "it is a whole solution, and is compared as text, which would pay nothing: write"
        f" 'tasks.answer=\"{{{option} | final}}\"' or reward=math (or numeric), which take its last"
        " result"
    )
