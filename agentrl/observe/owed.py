"""Evaluations that a run has begun and that have no result yet."""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from agentrl.files.durable import write_whole

logger = logging.getLogger(__name__)


class OwedEvaluations:
    """What the weights after each number of steps owe: the names of evaluations, in a file of the
    run until they have arrived. A run that was killed meanwhile finds them there when it is
    resumed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owed: dict[int, list[str]] = {}
        if path.exists():
            try:
                self._owed = {
                    int(step): [str(name) for name in names]
                    for step, names in json.loads(path.read_text()).items()
                }
            except (ValueError, TypeError, AttributeError) as error:
                logger.warning(
                    "%s cannot be read (%s): evaluations that had begun are left out", path, error
                )

    def of(self, step: int) -> list[str]:
        """What the weights after `step` steps owe."""
        return self._owed.get(step, [])

    def steps(self) -> list[int]:
        """The steps whose weights owe something."""
        return sorted(self._owed)

    def owe(self, step: int, names: Iterable[str]) -> None:
        """These evaluations begin."""
        if new := [name for name in names if name not in self.of(step)]:
            self._owed[step] = [*self.of(step), *new]
            self._write()

    def arrived(self, step: int, name: str) -> None:
        """This evaluation has its result."""
        if name in self.of(step):
            self._owed[step].remove(name)
            self._owed = {step: names for step, names in self._owed.items() if names}
            self._write()

    def go_back_to(self, step: int) -> None:
        """Forget what later weights owe: a resumed run will train them again."""
        if any(later > step for later in self._owed):
            self._owed = {there: names for there, names in self._owed.items() if there <= step}
            self._write()

    def _write(self) -> None:
        write_whole(self._path, json.dumps(self._owed) + "\n")
