"""Exact metrics of a run whose environment can be enumerated, such as `oracle` (ShinRL,
arXiv:2112.04123).

    environment's questions ──▶ trainer: probability of each answer ──▶ exact return, regret
                                                                   └──▶ exact advantages
                                                                            ▲ compare
                                                                            ▼
                                                                        the batch's advantages

They are of the policy before the step. That policy has played the batch only with
`rollout.max_staleness = 0`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import sqrt

import numpy as np

from agentrl import plugins
from agentrl.batch import TrainBatch, TrainingSample, collate, to_samples
from agentrl.config.run_config import RunConfig
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import ConfigError
from agentrl.oracles.exact import spelling_probabilities
from agentrl.protocols import (
    Credit,
    Enumerable,
    Enumeration,
    EnumerationOffers,
    Question,
    Renderer,
    Trainer,
)
from agentrl.tokens.arrays import FloatArray
from agentrl.trajectory import Group, Message, Trajectory, unshared

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ExactMetrics:
    """The exact metrics of a run. Where the environment cannot be enumerated there are none, and
    they cost nothing.
    """

    config: RunConfig
    renderer: Renderer
    trainer: Trainer
    critic: Trainer | None = None
    enumeration: Enumeration | None = None

    @staticmethod
    def of_run(
        config: RunConfig, renderer: Renderer, trainer: Trainer, critic: Trainer | None
    ) -> "ExactMetrics":
        """The metrics of a run with these parts. If its environment offers some and they would be
        wrong, it warns.
        """
        enumeration = _enumeration_of(config)
        obstacle = "" if enumeration is None else _obstacle(config, renderer, enumeration)
        if obstacle:
            logger.warning("the metrics exact/... are left out: %s (docs/oracles.md)", obstacle)
        return ExactMetrics(config, renderer, trainer, critic, None if obstacle else enumeration)

    async def measure(self, groups: Sequence[Group], batch: TrainBatch) -> Mapping[str, float]:
        """The metrics of the present policy, and of the advantages that the batch of these groups
        is trained with.
        """
        if self.enumeration is None:
            return {}
        renderer = self.renderer
        assert isinstance(renderer, TemplateRenderer), "checked when the run began"
        context, longest = self.config.rollout.context, self.config.rollout.sampling.max_tokens
        questions = [
            _with_instructions(question, context.instructions)
            for question in self.enumeration.questions
        ]
        spelled = await spelling_probabilities(
            self.trainer, renderer, questions, max_tokens=longest, context=context
        )
        probabilities = [
            [sum(chances.values()) for chances in of_question] for of_question in spelled
        ]
        found = {
            **self.enumeration.metrics(probabilities),
            "respelled": _largest_respelling(renderer, questions, spelled),
        }
        credit = EnumerationOffers.of(self.enumeration).credit
        if credit is not None:
            found |= await self._advantage_errors(partial(credit, probabilities), groups, batch)
        return {f"exact/{name}": value for name, value in found.items()}

    async def _advantage_errors(
        self,
        credit: Callable[[Trajectory], Sequence[Credit] | None],
        groups: Sequence[Group],
        batch: TrainBatch,
    ) -> Mapping[str, float]:
        """The distances of the trained advantages from the exact ones, and of the critic's values
        from the exact values.
        """
        trajectories = [
            one for group in groups for part in group.by_agent() for one in part.trajectories
        ]
        if any(dict(one.task.options) != self.config.env.options for one in trajectories):
            return {}
        credits_ = [credit(trajectory) for trajectory in trajectories]
        known = [of_turns for of_turns in credits_ if of_turns is not None]
        if len(known) != len(credits_):
            return {}
        advantages_N = _lay_credits(trajectories, known, "advantage", batch)
        values_N = _lay_credits(trajectories, known, "value", batch)
        if advantages_N is None or values_N is None:  # some episodes or tokens are not trained on
            return {}
        found = compared(batch.advantages_N, advantages_N)
        if self.critic is not None:
            begins_N = (
                np.diff(batch.turns_N, prepend=-1) + np.diff(batch.trajectories_N, prepend=-1) != 0
            )
            off = (await self.critic.predict(batch) - values_N)[begins_N].astype(np.float64)
            found["value_error"] = sqrt(float(np.mean(off**2)))
        return found


def compared(found_N: FloatArray, exact_N: FloatArray) -> dict[str, float]:
    """The cosine of two kinds of advantages, and the norm of their difference relative to that of
    the exact ones.

    Nothing, if either are all zero: then they have no direction.
    """
    found, exact = found_N.astype(np.float64), exact_N.astype(np.float64)
    length, wanted = float(np.linalg.norm(found)), float(np.linalg.norm(exact))
    if not length or not wanted:
        return {}
    return {
        "advantage_cosine": float(found @ exact) / (length * wanted),
        "advantage_residual": float(np.linalg.norm(found - exact)) / wanted,
    }


def _largest_respelling(
    renderer: TemplateRenderer,
    questions: Sequence[Question],
    spelled: Sequence[Sequence[Mapping[tuple[int, ...], float]]],
) -> float:
    """The largest probability that an answer is sampled in other tokens than those that later
    questions show it in.
    """
    rest = [0.0]
    for question, of_question in zip(questions, spelled, strict=True):
        for text, chances in zip(question.answers, of_question, strict=True):
            usual = tuple(renderer.encode_answer(text).tolist())
            rest.append(
                sum(chance for ids, chance in chances.items() if ids[: len(usual)] != usual)
            )
    return max(rest)


def _lay_credits(
    trajectories: Sequence[Trajectory],
    credits_: Sequence[Sequence[Credit]],
    name: str,
    batch: TrainBatch,
) -> FloatArray | None:
    """One number of each turn's credit for each loss token of the batch; `None` if the batch has
    other tokens.
    """

    def samples() -> Iterator[TrainingSample]:
        for trajectory, of_turns in zip(trajectories, credits_, strict=True):
            yield from to_samples(trajectory, [getattr(credit, name) for credit in of_turns])

    laid = collate(samples())
    same = np.array_equal(laid.tokens_S, batch.tokens_S) and np.array_equal(
        laid.loss_mask_S, batch.loss_mask_S
    )
    return laid.advantages_N if same else None


def _enumeration_of(config: RunConfig) -> Enumeration | None:
    """The offers of the run's environment, if it is unwrapped and runs in this interpreter."""
    if config.env.mixture or config.env.foreign or config.env.all_wrappers:
        return None
    factory = plugins.load("envs", config.env.name)
    if not isinstance(factory, type) or not issubclass(factory, Enumerable):
        return None
    try:
        return factory().enumeration(unshared(config.env.options, "env.options"))
    except ConfigError as error:
        logger.warning("the metrics exact/... are left out: %s", error)
        return None


def _obstacle(config: RunConfig, renderer: Renderer, enumeration: Enumeration) -> str:
    """The reasons why the numbers would not be those of the policy that plays; "" if they are."""
    sampling, context, budget = (
        config.rollout.sampling,
        config.rollout.context,
        config.rollout.budget,
    )
    longest = max(
        sum(one.role == "assistant" for one in question.messages) + 1
        for question in enumeration.questions
    )
    obstacles = {
        "rollout.sampling truncates the policy (top_p, top_k, min_p)": sampling.truncated,
        "rollout.sampling has stops of its own": bool(sampling.stop or sampling.stop_token_ids),
        "rollout.context=summary asks for free text": context.name == "summary",
        "the model may reason before it answers": (
            not isinstance(renderer, TemplateRenderer) or renderer.reasons
        ),
        f"episodes have up to {longest} turns, and rollout.budget.turns is less": (
            longest > budget.turns
        ),
        "rollout.budget ends episodes by their tokens or seconds": bool(
            budget.tokens or budget.seconds
        ),
    }
    return "; ".join(name for name, is_so in obstacles.items() if is_so)


def _with_instructions(question: Question, instructions: str) -> Question:
    """The question with the context policy's text in its system message, as an episode has it."""
    if not instructions:
        return question
    first, *others = question.messages
    if first.role == "system":
        return Question(
            (Message("system", f"{first.content}\n\n{instructions}"), *others), question.answers
        )
    return Question((Message("system", instructions), first, *others), question.answers)
