"""Pieces about engines: the logprobs that they sample with, and how they get new weights. Those of
vLLM (`vllm_pieces.py`) are made of the same parts.
"""

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.batch import TrainBatch, TrainingSample, collate
from agentrl.engines.local import LocalEngine
from agentrl.models.facts import model_facts
from agentrl.protocols import Engine, GenerateRequest
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import floats, ints, mask
from agentrl.trainers.local import LocalTrainer
from agentrl.trajectory import Completion
from agentrl.weights.config import WeightsConfig
from agentrl.weights.publisher import WeightPublisher
from benchmarks.battery.piece import Findings, Place
from benchmarks.battery.subjects import LOSS, SMALL, random_batch, random_model, remove_model

_TRANSPORTS = "agentrl.weights.transports"
FILES = {
    "shared memory": f"{_TRANSPORTS}.files:shared_memory",
    "disk": f"{_TRANSPORTS}.files:disk",
}
"""The transports by files. Plug-ins have no short names where nothing is installed."""
TOLERANCES = {"float32": 2e-3, "bfloat16": 0.05}
"""Nats of the mean gap between engine and trainer that precision may explain."""


def local_engine(place: Place, findings: Findings) -> None:
    """Logprobs of engine and trainer in float32 and, on a GPU, in bfloat16."""
    model = random_model(place, SMALL)
    for kind in ("float32", "bfloat16") if place.on_gpu else ("float32",):
        config = LocalEngine.Config(
            device=place.device, dtype=kind, max_batch=32, max_context=512 if place.on_gpu else 64
        )
        trial = Trial(place, findings, LocalEngine(config, model), model, kind)
        asyncio.run(trial.compare())
    remove_model(model)


def weights(place: Place, findings: Findings) -> None:
    """An update by each transport, also by the one without storage."""
    model = random_model(place, SMALL, layers=8)
    config = LocalEngine.Config(device=place.device, max_batch=16, max_context=64, dtype="float32")
    trial = Trial(place, findings, LocalEngine(config, model), model, "float32")
    transports = {**FILES, "direct": f"{_TRANSPORTS}.direct:DirectTransport"}
    asyncio.run(trial.publish_by_each(transports))
    remove_model(model)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What an engine answered."""

    batch: TrainBatch
    """The answers."""
    versions: frozenset[int]
    """The versions of the weights that their tokens were sampled from."""


@dataclass(frozen=True, slots=True)
class Trial:
    """An engine and a trainer of one model, side by side."""

    place: Place
    """Where they run."""
    findings: Findings
    """Where it is noted how they compare."""
    engine: Engine
    """The engine, not entered yet."""
    model: Path
    """The folder of the model."""
    kind: str
    """The precision of both."""

    def trainer(self, **settings: Any) -> LocalTrainer:
        """A trainer on the same device."""
        config = LocalTrainer.Config(device=self.place.device, dtype=self.kind, **settings)
        return LocalTrainer(config, self.model, total_steps=10)

    async def compare(self) -> None:
        """Let the engine sample, and note how far the trainer's logprobs are from the engine's."""
        async with self.engine, self.trainer() as trainer:
            await self.sample(seed=1)  # what is done once
            began = time.perf_counter()
            sampled = await self.sample()
            seconds = time.perf_counter() - began
            self.findings.note(
                f"{self.kind}: sampled", sampled.batch.num_loss_tokens / seconds, "tokens/s"
            )
            await self.note_gap(self.kind, trainer, sampled)

    async def note_gap(self, when: str, trainer: LocalTrainer, sampled: Sampled) -> None:
        """Note how far the trainer's logprobs are from those of the engine's answers."""
        gaps_N = np.abs(await trainer.predict(sampled.batch) - sampled.batch.rollout_logprobs_N)
        mean = float(gaps_N.mean())
        self.findings.note(f"{when}: mean gap of logprobs", mean, "nats")
        self.findings.note(f"{when}: largest gap of logprobs", float(gaps_N.max()), "nats")
        self.findings.check(
            mean <= TOLERANCES[self.kind],
            f"{when}: the trainer's logprobs are {mean:.3g} from the engine's on average",
        )

    async def publish_by_each(self, transports: Mapping[str, str]) -> None:
        """Make a step, publish by a transport, and compare logprobs; with each in turn."""
        vocabulary = model_facts(self.model).vocab
        async with self.engine, self.trainer(lr=1e-3) as trainer:
            for version, (name, transport) in enumerate(transports.items(), 1):
                batch = random_batch(vocabulary, 4, 40, seed=version)
                before_N = await trainer.predict(batch)
                await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
                moved = float(np.abs(await trainer.predict(batch) - before_N).mean())
                self.findings.note(f"{name}: the step changed a logprob by", moved, "nats")
                await self._publish(name, transport, trainer, version)
                sampled = await self.sample(seed=version)
                self.findings.check(
                    sampled.versions == {version},
                    f"by {name}, version {version} is served as {set(sampled.versions)}",
                )
                await self.note_gap(f"{name}, version {version}", trainer, sampled)

    async def _publish(
        self, name: str, transport: str, trainer: LocalTrainer, version: int
    ) -> None:
        config = WeightsConfig(transport=transport, folder=self.place.folder)
        async with WeightPublisher(self.engine, config=config) as publisher:
            published = await publisher.publish(trainer, version)
        for phase, seconds in published.seconds.items():
            self.findings.note(f"{name}: {phase}", seconds, "s")
        self.findings.note(f"{name}: size", published.weights.size / 1e9, "GB")

    async def sample(self, seed: int = 0) -> Sampled:
        """What the engine answers to random prompts."""
        requests = self.requests(seed)
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(self.engine.generate(request)) for request in requests]
        completions = [answer.result() for answer in answers]
        pairs = zip(requests, completions, strict=True)
        versions = [
            version for answer in completions for version in answer.policy_versions.tolist()
        ]
        return Sampled(collate([sample_of(*pair) for pair in pairs]), frozenset(versions))

    def requests(self, seed: int = 0) -> Sequence[GenerateRequest]:
        """Random prompts of different lengths."""
        rng = np.random.default_rng((seed, 7))
        count, prompt, answer = (24, 48, 128) if self.place.on_gpu else (3, 8, 12)
        sampling = SamplingParams(max_tokens=min(answer, 12) if seed else answer, temperature=1.0)
        vocabulary = model_facts(self.model).vocab
        return [
            GenerateRequest(
                f"{seed}/{number}",
                ints(rng.integers(1, vocabulary, int(rng.integers(2, prompt + 1)))),
                sampling,
                seed=number,
            )
            for number in range(count)
        ]


def sample_of(request: GenerateRequest, completion: Completion) -> TrainingSample:
    """A request and its answer as a sample for the trainer."""
    prompt, sampled = len(request.prompt_ids), len(completion.token_ids)
    zeros = np.zeros(prompt)
    return TrainingSample(
        token_ids=ints(np.concatenate([request.prompt_ids, completion.token_ids])),
        loss_mask=mask(np.arange(prompt + sampled) >= prompt),
        rollout_logprobs=floats(np.concatenate([zeros, completion.logprobs])),
        advantages=floats(np.concatenate([zeros, np.ones(sampled)])),
        policy_versions=ints(np.concatenate([zeros - 1, completion.policy_versions])),
        turn_ids=ints(np.zeros(prompt + sampled)),
    )
