"""Shares of the engines' work in a step: what their caches and their proposals have saved."""

from agentrl.protocols import EngineStats


class EngineShares:
    """The share of proposed tokens that were accepted, and that of prompts' tokens that were found
    in a cache, from one call to the next.
    """

    def __init__(self) -> None:
        self._before = EngineStats(0, 0, 0, 0, 0)
        self._tells_of_cache = False

    def metrics(self, stats: EngineStats) -> dict[str, float]:
        """`speculation/accepted` and `prefix_cache/found` since the last call: the one if tokens
        were proposed, the other once an engine has told of any token in its cache.
        """
        before, self._before = self._before, stats
        cached = stats.cached_tokens - before.cached_tokens
        computed = stats.prefilled_tokens - before.prefilled_tokens
        self._tells_of_cache |= cached > 0
        found = {
            **_share(
                "speculation/accepted",
                stats.accepted_tokens - before.accepted_tokens,
                stats.proposed_tokens - before.proposed_tokens,
            ),
            **_share("prefix_cache/found", cached, cached + computed),
        }
        if not self._tells_of_cache:
            found.pop("prefix_cache/found", None)
        return found


def _share(name: str, part: int, whole: int) -> dict[str, float]:
    # The counts of an engine begin again when it restarts, so that the sums may fall.
    return {name: part / whole} if whole > 0 and 0 <= part <= whole else {}
