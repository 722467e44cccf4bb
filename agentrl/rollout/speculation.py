"""The measure of speculative decoding in a step."""

from agentrl.protocols import EngineStats


class SpeculationMeter:
    """The share of proposed tokens that were accepted, from one call to the next."""

    def __init__(self) -> None:
        self._proposed = 0
        self._accepted = 0

    def metrics(self, stats: EngineStats) -> dict[str, float]:
        """`speculation/accepted` since the last call; nothing if no tokens were proposed."""
        proposed = stats.proposed_tokens - self._proposed
        accepted = stats.accepted_tokens - self._accepted
        self._proposed, self._accepted = stats.proposed_tokens, stats.accepted_tokens
        # The counts of an engine begin again when it restarts, so that the sums may fall.
        if proposed <= 0 or not 0 <= accepted <= proposed:
            return {}
        return {"speculation/accepted": accepted / proposed}
