"""The policy that an engine serves."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.errors import EngineError
from agentrl.flow import deadline
from agentrl.protocols import (
    AnswerFormat,
    Engine,
    GenerateRequest,
    Prompt,
    clock_of,
)
from agentrl.rollout.answers import checked_completion
from agentrl.rollout.config import context_seconds
from agentrl.rollout.runner import Episode
from agentrl.rollout.seeds import derive_seed
from agentrl.settings.sampling import SamplingParams
from agentrl.trajectory import (
    Completion,
)


@dataclass(frozen=True, slots=True)
class EnginePolicy:
    """The model that an engine serves. `trained`: on these answers, so what they were sampled from
    is kept.

    `max_tokens`: longest answer in the environments of a mixture that have a limit of their own.
    `keep_experts`: keep the experts that a mixture of experts chose, too
    (`trainer.routing`). `formats`: the engine can constrain answers. `vocab_size`: an
    answer with an id that is not below it is a failure of the engine. `deadline` is that of an
    answer to a short prompt, in seconds; `seconds_per_context_token` adds to it (`Deadlines`).
    `apart`: another engine than that of the run's policy, whose KV cache is another one.
    """

    engine: Engine
    sampling: SamplingParams
    deadline: float
    trained: bool = True
    max_tokens: Mapping[str, int] = field(default_factory=dict)
    keep_experts: bool = False
    formats: bool = False
    vocab_size: int | None = None
    seconds_per_context_token: float = 0.0
    apart: bool = False

    @property
    def max_context(self) -> int:
        """The engine's limit."""
        return self.engine.max_context

    async def answer(self, episode: Episode, turn: int, prompt: Prompt, env: object) -> Completion:
        """Sample a completion within the deadline."""
        return await self.sample(episode, turn, prompt)

    async def sample(
        self, episode: Episode, turn: int, prompt: Prompt, answer_format: AnswerFormat | None = None
    ) -> Completion:
        """Sample a completion within the deadline, wherever the prompt comes from."""
        sampling = self.sampling.with_bounded_support() if self.trained else self.sampling
        longest = episode.usage.longest_answer(
            self.max_tokens.get(episode.task.env, sampling.max_tokens)
        )
        if longest != sampling.max_tokens:
            sampling = sampling.model_copy(update={"max_tokens": longest})
        request = GenerateRequest(
            id=f"{episode.id}/{turn}",
            prompt_ids=prompt.ids,
            sampling=sampling,
            seed=derive_seed(episode.seed, turn),
            priority=episode.priority,
            session=episode.id,
            known=len(prompt.ids) - len(prompt.new_ids),
            keep_support=self.trained and self.sampling.truncated,
            keep_experts=self.trained and self.keep_experts,
            format=answer_format,
            images=prompt.images,
        )
        clock = clock_of(self.engine)
        seconds = self.deadline + context_seconds(len(prompt.ids), self.seconds_per_context_token)
        with episode.clock.following(clock), deadline("engine", "generate", seconds, clock):
            completion = checked_completion(
                await self.engine.generate(request), request, self.vocab_size
            )
        if completion.finish_reason == "abort":
            raise EngineError(f"the engine aborted request {request.id}")
        sampled = len(completion.token_ids)
        context = 0 if self.apart else len(prompt.ids) + sampled
        episode.usage.add_answer(sampled, context, episode.id)
        return completion
