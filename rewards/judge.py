"""`RubricJudge`: a language model scores a trajectory by named criteria."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

import httpx
from pydantic import BeforeValidator, Field, StringConstraints, WithJsonSchema, create_model

from agentrl.rewards.judge_endpoint import JudgeEndpoint, Verdict
from agentrl.rewards.judge_evidence import EvidenceSettings
from agentrl.rewards.judge_prompt import JudgePrompt
from agentrl.settings.base import Settings
from agentrl.trajectory import Score, Trajectory


class Criterion(Settings):
    """One criterion of the judge."""

    about: str
    """Its meaning, and what earns a high level."""
    weight: float = Field(default=1.0, gt=0)
    """Its weight in the score."""


def _expand_criterion(written: Any) -> Any:
    """A criterion that is only a text, as its settings."""
    return {"about": written} if isinstance(written, str) else written


CriterionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,47}$")]


class RubricJudge:
    """Scores each trajectory by criteria: the weighted mean of their levels, as a share of the
    highest (0 to 1).

    The unweighted level of each criterion is a part of the score. Enters, fails and uses `client`
    like `JudgeEndpoint`.
    """

    class Config(EvidenceSettings):
        """Settings of `judge`."""

        criteria: dict[CriterionName, Annotated[Criterion, BeforeValidator(_expand_criterion)]] = (
            Field(min_length=1)
        )
        """By name: `clear: The answer is easy to follow`, or with a weight: `clear: {about: ...,
        weight: 2}`.
        """
        levels: int = Field(default=10, ge=1, le=100)
        """The highest level of a criterion; the lowest is 0."""

    def __init__(self, config: Config, client: httpx.AsyncClient | None = None) -> None:
        self._config = config
        self._endpoint = JudgeEndpoint(config, client)
        self._verdict = _make_verdict_type(
            list(config.criteria), config.levels, reasons=config.reasons
        )

    async def __aenter__(self) -> Self:
        await self._endpoint.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._endpoint.__aexit__(*exc)

    async def score(self, trajectory: Trajectory) -> Score:
        """The weighted mean of the judge's levels."""
        verdict = await self._endpoint.ask(self.prompt(trajectory), self._verdict)
        answered = verdict.model_dump(by_alias=True)
        levels: dict[str, int] = answered["levels"]
        parts = {name: level / self._config.levels for name, level in levels.items()}
        weights = {name: criterion.weight for name, criterion in self._config.criteria.items()}
        value = sum(weights[name] * part for name, part in parts.items()) / sum(weights.values())
        return Score(
            value, parts, explanations={"": answered["reason"]} if self._config.reasons else {}
        )

    def prompt(self, trajectory: Trajectory) -> JudgePrompt:
        """The question to the judge about a trajectory."""
        config = self._config
        listed = "\n".join(
            f"- {name}: {criterion.about}" for name, criterion in config.criteria.items()
        )
        return JudgePrompt(
            role=config.role("You give the work of a program levels by named criteria."),
            data={"messages": config.messages(trajectory), **config.right_answer(trajectory)},
            ask=(
                "Give what the assistant wrote there a level from 0 (not at all) to"
                f" {config.levels} (fully) for each criterion:\n{listed}"
            ),
        )

    def metrics(self) -> Mapping[str, float]:
        """Counts since the last call: answers, cached, failures by kind, tokens, cost, latency in
        seconds.
        """
        return self._endpoint.tally.take()


def _make_verdict_type(criteria: Sequence[str], levels: int, *, reasons: bool) -> type[Verdict]:
    """The schema of an answer. Levels are an enumeration, which every engine for structured output
    supports.
    """
    schema = {"type": "integer", "enum": [*range(levels + 1)]}
    level: Any = Annotated[int, Field(ge=0, le=levels), WithJsonSchema(schema)]
    # The fields have other names than the criteria, which may be named like a pydantic method, such
    # as `copy`.
    by_name: dict[str, Any] = {
        f"level_{i}": (level, Field(alias=name)) for i, name in enumerate(criteria)
    }
    fields: dict[str, Any] = {"levels": (create_model("Levels", __base__=Verdict, **by_name), ...)}
    # A model writes the fields in this order: a reason after its levels would only defend them.
    if reasons:
        fields = {
            "reason": (str, Field(description="one or two sentences for each criterion")),
            **fields,
        }
    verdict: type[Verdict] = create_model("Rubric", __base__=Verdict, **fields)
    return verdict
