"""Shares of the engines' work that caches and speculative decoding have saved in a step."""

from agentrl.protocols import EngineStats


class EngineShares:
    """The share of proposed tokens that were accepted, and of prompt tokens that were found in a
    cache, between two calls.
    """

    def __init__(self) -> None:
        self._before = EngineStats(0, 0, 0, 0, 0)
        self._reports_cache = False

    def metrics(self, stats: EngineStats) -> dict[str, float]:
        """`speculation/accepted` since the last call, if tokens were proposed, and
        `prefix_cache/found`, once an engine has reported any cached token.
        """
        before, self._before = self._before, stats
        accepted = stats.accepted_tokens - before.accepted_tokens
        proposed = stats.proposed_tokens - before.proposed_tokens
        cached = stats.cached_tokens - before.cached_tokens
        computed = stats.prefilled_tokens - before.prefilled_tokens
        self._reports_cache |= cached > 0
        shares = {"speculation/accepted": (accepted, proposed)}
        if self._reports_cache:
            shares["prefix_cache/found"] = (cached, cached + computed)
        # The counts of an engine begin again when it restarts, so that differences may be negative.
        return {
            name: part / whole
            for name, (part, whole) in shares.items()
            if whole > 0 and 0 <= part <= whole
        }
