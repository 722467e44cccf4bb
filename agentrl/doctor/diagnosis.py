"""`Diagnosis`: what the doctor has found about one subject."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A line of the doctor's page. It is wrong if it has a `remedy`."""

    subject: str
    """What was looked at."""
    words: str
    """What was found."""
    remedy: str = ""
    """What to do about it; empty if nothing has to be done."""
    skipped: bool = False
    """It could not be looked at, for the reason in `words`."""

    @property
    def wrong(self) -> bool:
        """True if something has to be done."""
        return bool(self.remedy)
