"""A teacher: an engine that says how likely another model finds the tokens of a batch.

    batch ──▶ samples, a few at a time ──▶ engine: score ──▶ logprobs of the loss tokens

It is a `reference` served by an engine instead of a trainer: with continuous batching, on other
devices than the trainer's, and by more than one replica.
"""

from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BeforeValidator, Field, model_validator

from agentrl.batch import TrainBatch
from agentrl.errors import EngineError, LethalRequestError
from agentrl.flow import Flow, deadline
from agentrl.protocols import Engine, ScoreRequest, clock_of
from agentrl.settings.base import Settings
from agentrl.tokens.arrays import FloatArray


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class TeacherConfig(Settings):
    """The model that teaches, and the engine that serves it."""

    model: Path | None = None
    """Folder of the teacher, with the same tokenizer; by default the model that the run began with.
    """
    refresh: int = Field(0, ge=0)
    """Load the trained weights at every version divisible by this number: the policy then learns
    from an earlier self (self-distillation). 0 means never."""
    engine: Annotated[dict[str, Any], BeforeValidator(_named)] = Field(default_factory=dict)
    """`name` and settings of the teacher's engine; the others are those of the section `engine`, if
    it has the same name."""
    concurrency: int = Field(64, gt=0)
    """Most samples that are scored at once."""

    @model_validator(mode="after")
    def _trained_weights_fit_the_trained_model(self) -> Self:
        if self.model is not None and self.refresh:
            raise ValueError("refresh loads the weights of the trained model: leave out model")
        return self


class Teacher:
    """Asks an engine about the loss tokens of batches, at the temperature that they were sampled
    with.

    `seconds` is the deadline of each sample; at most `concurrency` of them are asked about at once.
    """

    def __init__(
        self, engine: Engine, *, temperature: float, seconds: float, concurrency: int
    ) -> None:
        self._engine = engine
        self._temperature = temperature
        self._seconds = seconds
        self._concurrency = concurrency

    async def logprobs(self, batch: TrainBatch) -> FloatArray:
        """The teacher's logprob of each loss token, after the tokens before it in its sample; shape
        N. NaN for those of a sample that engines have died of twice.

        Raises:
            EngineError: the engine cannot score a sample, or changed its weights meanwhile.
            EngineDeadError: it died, and could not be restarted.
            DeadlineError: it did not answer in time.
        """
        samples = batch.split([1] * batch.num_samples)
        found: list[FloatArray] = [np.empty(0, np.float32)] * len(samples)
        versions: set[int] = set()
        waiting = iter(enumerate(samples))

        async def ask() -> None:
            for number, sample in waiting:  # shared: each `ask` takes the next sample
                wanted = np.flatnonzero(sample.loss_mask_S)
                if not len(wanted):
                    continue
                # Nothing after the last loss token matters, so the prompt ends there.
                first, stop = int(wanted[0]), int(wanted[-1]) + 1
                request = ScoreRequest(
                    f"teacher/{number}", sample.tokens_S[:stop], first, self._temperature
                )
                try:
                    with deadline("engine", "score", self._seconds, clock_of(self._engine)):
                        scores = await self._engine.score(request)
                except LethalRequestError:
                    found[number] = np.full(len(wanted), np.nan, np.float32)
                    continue
                if np.isnan(scores.logprobs).any():
                    raise EngineError(
                        f"the teacher's engine says NaN of {request.id}: look at the teacher's"
                        " weights"
                    )
                found[number] = scores.logprobs[wanted - first]
                versions.add(scores.policy_version)

        async with Flow("teacher") as flow:
            for number in range(min(self._concurrency, len(samples))):
                flow.start(ask(), name=str(number))
        if len(versions) > 1:
            raise EngineError(
                "the teacher's engines served several versions within one batch:"
                f" {sorted(versions)}"
            )
        return np.concatenate(found)


__all__ = ["Teacher", "TeacherConfig"]
