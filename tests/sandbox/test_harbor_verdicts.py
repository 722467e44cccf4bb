"""Harbor's own run of a task and ours come to the same verdict."""

from pathlib import Path

import pytest

from benchmarks.harbor_verdicts import Comparison, HarborRoot, MissingError, Outcome, compare
from tests.docker_engine import needs_docker

ONE, HALF, NONE = Outcome({"reward": 1.0}), Outcome({"reward": 0.5}), Outcome(why="nothing")


def test_what_differs_between_verdicts_is_named() -> None:
    theirs = {("01-hello", "nop"): HALF, ("half", "nop"): HALF, ("silent", "nop"): NONE}
    assert not Comparison(theirs, theirs).differing
    ours = {("01-hello", "nop"): ONE, ("half", "nop"): NONE, ("silent", "nop"): HALF}
    assert Comparison(theirs, ours).differing == [
        "01-hello by nop: reward 0.5 in Harbor, reward 1 here",
        "half by nop: reward 0.5 in Harbor, nothing here",
        "silent by nop: nothing in Harbor, reward 0.5 here",
    ]
    both = {("01-hello", "nop"): NONE}
    assert Comparison(both, both).differing  # that nothing was judged is no agreement


@needs_docker
@pytest.mark.long
def test_verdicts_are_those_of_harbors_own_runs(docker_host: str, tmp_path: Path) -> None:
    """With a verifier in the agent's machine, one in a machine of its own, and in between."""
    names = ["01-hello", "06-totals", "several", "late"]
    try:
        found = compare(names, HarborRoot(tmp_path / "root"), docker_host)
    except MissingError as error:
        pytest.skip(str(error))
    assert len(found.harbor) == len(found.ours) == 2 * len(names)
    assert not found.differing
    assert found.harbor["06-totals", "oracle"].rewards == {"reward": 1.0}
    assert found.harbor["several", "nop"].rewards == {"reward": 0.25, "style": 1.0}
    assert found.harbor["late", "nop"].why == "VerifierTimeoutError"
