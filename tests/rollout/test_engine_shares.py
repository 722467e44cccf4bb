"""Shares of the engines' work are those of one step, and only there where an engine tells."""

from agentrl.protocols import EngineStats
from agentrl.rollout.engine_shares import EngineShares


def counts(computed: int, cached: int, proposed: int = 0, accepted: int = 0) -> EngineStats:
    return EngineStats(
        0, 0, 100, computed, cached, proposed_tokens=proposed, accepted_tokens=accepted
    )


def test_the_share_of_accepted_proposals_is_that_of_the_step():
    shares = EngineShares()
    assert shares.metrics(counts(0, 0)) == {}
    assert shares.metrics(counts(0, 0, 40, 30)) == {"speculation/accepted": 0.75}
    assert shares.metrics(counts(0, 0, 50, 31)) == {"speculation/accepted": 0.1}
    assert shares.metrics(counts(0, 0, 4, 2)) == {}  # an engine has begun again


def test_the_share_of_cached_prompts_is_that_of_the_step_once_an_engine_has_told_of_any():
    shares = EngineShares()
    assert shares.metrics(counts(50, 0)) == {}
    assert shares.metrics(counts(80, 10)) == {"prefix_cache/found": 0.25}
    assert shares.metrics(counts(90, 10)) == {"prefix_cache/found": 0.0}
    assert shares.metrics(counts(90, 10)) == {}
    assert shares.metrics(counts(20, 5)) == {}  # an engine has begun again
    assert shares.metrics(counts(30, 15)) == {"prefix_cache/found": 0.5}
