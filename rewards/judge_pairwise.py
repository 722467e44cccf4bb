"""`PairwiseJudge`: a language model ranks the members of a group, two at a time."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import httpx
from pydantic import Field

from agentrl.errors import AgentRLError, ConfigError
from agentrl.rewards.judge_endpoint import JudgeEndpoint, Verdict
from agentrl.rewards.judge_evidence import EvidenceSettings
from agentrl.rewards.judge_prompt import JudgePrompt
from agentrl.rewards.judge_ranking import meetings, win_shares
from agentrl.trajectory import Score, Trajectory


class PairwiseVerdict(Verdict):
    """The answer about a pair."""

    better: Literal["first", "second", "tie"]


class ReasonedPairwiseVerdict(Verdict):
    """The same, thought over."""

    reason: str = Field(description="one or two sentences")
    better: Literal["first", "second", "tie"]


_POINTS = {"first": 1.0, "tie": 0.5, "second": 0.0}


@dataclass(slots=True)
class _Orders:
    """The number of judged pairs, and of verdicts that changed with the order of the pair."""

    pairs: int = 0
    swayed: int = 0


class PairwiseJudge:
    """Scores each member of a group by the share of the others that it beats (0 to 1).

    Each pair is judged in both orders, and a member gets the mean of both: 1 for a win, 0.5 for a
    tie. So a judge that always prefers the first text gives every member 0.5. Equal texts tie and
    are not judged. The score is the share of wins (`agentrl.rewards.judge_ranking.win_shares`). If
    one verdict fails, all scores of the group fail; on a retry the other verdicts come from the
    cache. Enters, fails and uses `client` like `JudgeEndpoint`.
    """

    class Config(EvidenceSettings):
        """Settings of `judge_pairwise`."""

        better: str
        """The question that decides which one is better: `Which answer is friendlier?`"""
        opponents: int | None = Field(default=None, ge=1)
        """Compare each member with this many that follow it in the group, as in a ring; null:
        compare all pairs. A group of G costs 2 G `opponents` verdicts, or G (G - 1) for all pairs.
        """

    def __init__(self, config: Config, client: httpx.AsyncClient | None = None) -> None:
        self._config = config
        self._endpoint = JudgeEndpoint(config, client)
        self._verdict: type[PairwiseVerdict | ReasonedPairwiseVerdict] = (
            ReasonedPairwiseVerdict if config.reasons else PairwiseVerdict
        )
        self._orders = _Orders()

    async def __aenter__(self) -> Self:
        await self._endpoint.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._endpoint.__aexit__(*exc)

    async def score_group(self, trajectories: Sequence[Trajectory]) -> Sequence[Score]:
        """The win share of each member."""
        size = len(trajectories)
        if size < 2:
            raise ConfigError(
                "judge_pairwise compares the members of a group: rollout.group_size has to be 2 or"
                " more"
            )
        pairs = meetings(size, self._config.opponents)
        # Each pair is judged in both orders, as judges prefer what they read first.
        verdicts = {}
        async with asyncio.TaskGroup() as tasks:
            for pair in pairs:
                for i, j in (pair, pair[::-1]):
                    choice = self._choose(trajectories[i], trajectories[j])
                    verdicts[i, j] = tasks.create_task(choice)
        points_by_order: dict[tuple[int, int], float] = {}
        explanations: list[dict[str, str]] = [{} for _ in range(size)]
        for (i, j), task in verdicts.items():
            answer = task.result()
            if isinstance(answer, AgentRLError):
                raise answer
            points_by_order[i, j], reason = answer
            if reason:
                explanations[i][f"shown before member {j}"] = reason
                explanations[j][f"shown after member {i}"] = reason
        self._orders.pairs += len(pairs)
        self._orders.swayed += sum(
            points_by_order[i, j] != 1.0 - points_by_order[j, i] for i, j in pairs
        )
        shares = win_shares(
            {(i, j): (points_by_order[i, j] + 1.0 - points_by_order[j, i]) / 2 for i, j in pairs},
            size,
        )
        return [
            Score(share, {"win_share": share}, explanations=own)
            for share, own in zip(shares, explanations, strict=True)
        ]

    async def _choose(
        self, first: Trajectory, second: Trajectory
    ) -> tuple[float, str] | AgentRLError:
        """The points of the first, and the verdict in words. A failure is returned, so that the
        verdicts on the other pairs still come in.
        """
        if self._config.messages(first) == self._config.messages(second):
            return _POINTS["tie"], ""
        try:
            verdict = await self._endpoint.ask(self.prompt(first, second), self._verdict)
        except AgentRLError as error:
            return error
        reason = verdict.reason if isinstance(verdict, ReasonedPairwiseVerdict) else ""
        return _POINTS[verdict.better], f"{verdict.better}: {reason}" if reason else ""

    def prompt(self, first: Trajectory, second: Trajectory) -> JudgePrompt:
        """The question to the judge about a pair."""
        config = self._config
        shown = {"first": config.messages(first), "second": config.messages(second)}
        return JudgePrompt(
            role=config.role("You compare two works of a program on the same task."),
            data={**shown, **config.right_answer(first)},
            ask=(
                f"Compare what the assistant wrote in each. {config.better} Their order means"
                ' nothing. Answer "first" or "second" for the better one, or "tie".'
            ),
        )

    def metrics(self) -> Mapping[str, float]:
        """As `RubricJudge.metrics`, and the share of pairs whose order changed the verdict."""
        orders, self._orders = self._orders, _Orders()
        return {
            **self._endpoint.tally.take(),
            "swayed_by_order": orders.swayed / max(1, orders.pairs),
        }
