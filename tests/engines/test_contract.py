"""What every engine must do, proved on each of them: local, scripted, over HTTP, and (marks `slow`,
`vllm`) in an actor of Ray, and vLLM.

The truth is a plain forward pass of the same weights over the whole sequence, without any cache.
"""

import asyncio
import copy
import inspect
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import AsyncMock

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from agentrl.cluster.ray_engine import RayEngine
from agentrl.engines.local import LocalEngine
from agentrl.engines.openai import OpenAIEngine
from agentrl.engines.router import Router
from agentrl.engines.vllm import VllmEngine
from agentrl.errors import EngineDeadError, EngineError, FormatError
from agentrl.plugins import Component
from agentrl.protocols import (
    AnswerFormat,
    Engine,
    EngineOffers,
    GenerateRequest,
    ScoreRequest,
    Scores,
)
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.engines import NextLogits, ScriptedEngine
from agentrl.testing.openai_server import serve_engine
from agentrl.trajectory import Completion
from agentrl.weights.bundle import BundlePlace, WeightBundle
from agentrl.weights.low_rank import Factors, LowRank
from tests.processes import still_alive, title
from tests.tiers import only

T = TypeVar("T")
MAX_BATCH = 8
MAX_CONTEXT = 256
Weights = Mapping[str, Tensor]
Played = tuple[GenerateRequest, Completion]


class Truth:
    """Plain forward passes of any weights of one architecture."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.base: Weights = {
            name: p.detach().clone() for name, p in self._model.named_parameters()
        }
        self.vocab: int = self._model.config.vocab_size

    def logits(self, weights: Weights, tokens: Sequence[int]) -> Tensor:
        """Logits after every token of the sequence."""
        with torch.inference_mode():
            return torch.func.functional_call(
                self._model,
                dict(weights),
                (torch.tensor([tokens]),),
                {"use_cache": False},
                tie_weights=True,
            ).logits[0]

    def logprobs(
        self, weights: Weights, prompt: Sequence[int], sampled: Sequence[int], temperature: float
    ) -> Tensor:
        """The logprob of each sampled token."""
        logits = self.logits(weights, [*prompt, *sampled])[len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        return logprobs.gather(1, torch.tensor(sampled)[:, None])[:, 0]

    def next_logits(self, weights: Weights) -> NextLogits:
        cached = lru_cache(maxsize=256)(lambda tokens: self.logits(weights, tokens)[-1].numpy())
        return lambda tokens: cached(tuple(tokens))

    def other(self, seed: int) -> Weights:
        """Weights of the same kind with other values."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: p + 0.5 * p.std(correction=0) * torch.randn(p.shape, generator=generator)
            for name, p in self.base.items()
        }

    def logits_over(self, spans: Sequence[tuple[Weights, Sequence[int]]]) -> Tensor:
        """Logits after every token, if each span of tokens is computed by weights of its own, over
        the KV that the spans before it have left.
        """
        cache, parts = DynamicCache(config=self._model.config), []
        # `cache` in newer versions of transformers.
        takes = inspect.signature(self._model.forward).parameters
        name = "cache" if "cache" in takes else "past_key_values"
        with torch.inference_mode():
            for weights, tokens in spans:
                answer = torch.func.functional_call(
                    self._model,
                    dict(weights),
                    (torch.tensor([tokens]),),
                    {"use_cache": True, name: cache},
                    tie_weights=True,
                )
                parts.append(answer.logits[0])
        return torch.cat(parts)

    def sentinel(self, token: int) -> Weights:
        """Weights under which every token is followed by `token`: only its embedding is longer
        along one axis.
        """
        weights = {name: torch.zeros_like(p) for name, p in self.base.items()}
        for name, p in weights.items():
            if name.endswith("norm.weight"):
                p.fill_(1.0)
        weights["model.embed_tokens.weight"][:, 0] = 1.0
        weights["model.embed_tokens.weight"][token, 0] = 2.0
        weights["model.norm.weight"].fill_(10.0)
        return weights

    def marked_sentinel(self, token: int, mark: float) -> Weights:
        """As `sentinel`, greedily; and all values in the KV cache are `mark`, which the logprobs
        show.
        """
        weights = self.sentinel(token)
        weights["model.layers.0.self_attn.v_proj.weight"][:, 0] = mark
        weights["model.layers.0.self_attn.o_proj.weight"][1, 0] = 0.1
        weights["model.norm.weight"].fill_(0.8)
        return weights


class Adapted(dict[str, Tensor]):
    """Weights that differ from a folder's by an adapter."""

    def __init__(self, update: LowRank) -> None:
        super().__init__(update)
        self.update_of_folder = update


class AdapterTruth(Truth):
    """The truth of an engine that serves adapters: `base` and `other` weights are published as
    factors, and others whole.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self.base = Adapted(LowRank(folder, {}))

    def other(self, seed: int) -> Weights:
        generator = torch.Generator().manual_seed(seed)
        factors = {}
        for name, weight in self.base.items():
            if weight.dim() == 2 and "embed" not in name:
                rows, width = weight.shape
                A = torch.randn(4, width, generator=generator)
                B = torch.randn(rows, 4, generator=generator)
                factors[name] = Factors(A, B, 0.25 * float(weight.std()))
        return Adapted(LowRank(self._folder, factors))


class QuickTruth(Truth):
    """The truth of a scripted engine: its model may be any function, so nobody has to wait for a
    transformer.

    What stands before a token is summed with halving weights. All axes but the first, which tells
    the sentinels apart, are then moved by one: else every token would just be repeated.
    """

    def logits(self, weights: Weights, tokens: Sequence[int]) -> Tensor:
        return self._hidden(weights, tokens) @ weights["model.embed_tokens.weight"].detach().T

    def next_logits(self, weights: Weights) -> NextLogits:
        embeddings_VD = weights["model.embed_tokens.weight"].detach()
        return lambda tokens: (embeddings_VD @ self._hidden(weights, tokens)[-1]).numpy()

    def _hidden(self, weights: Weights, tokens: Sequence[int]) -> Tensor:
        ages_TT = torch.arange(len(tokens))[:, None] - torch.arange(len(tokens))
        halving_TT = torch.where(ages_TT >= 0, 0.5 ** ages_TT.clamp(0), 0.0)
        sums_TD = halving_TT @ weights["model.embed_tokens.weight"].detach()[list(tokens)]
        sums_TD = (
            sums_TD
            * sums_TD.square().mean(-1, keepdim=True).rsqrt()
            * weights["model.norm.weight"].detach()
        )
        # The half flattens the distribution.
        return 0.5 * torch.cat([sums_TD[:, :1], sums_TD[:, 1:].roll(1, 1)], 1)


def processes_of_engines() -> list[psutil.Process]:
    """Those of vLLM and the actors of Ray that this one has started."""
    started = psutil.Process().children(recursive=True)
    return [process for process in started if title(process).startswith(("VLLM", "ray::engine"))]


class Served:
    """An engine on its own loop for all tests of the module, and its present weights."""

    engine: Engine

    def __init__(self, engine: AbstractAsyncContextManager[Engine], truth: Truth) -> None:
        self._entered = engine
        self.truth = truth
        self.by_version: dict[int, Weights] = {0: truth.base}
        self._runner = asyncio.Runner()
        self._requests = 0
        self._left = False

    def __enter__(self) -> "Served":
        before = set(processes_of_engines())
        self.engine = self._runner.run(self._entered.__aenter__())
        self.processes = [process for process in processes_of_engines() if process not in before]
        # Long enough for several updates to fall into it; another process goes on while new weights
        # are written.
        here = isinstance(self.engine, LocalEngine | ScriptedEngine)
        self.long = 80 if here else 190
        return self

    def __exit__(self, *exc: object) -> None:
        self._runner.run(self.leave())
        self._runner.close()

    async def leave(self) -> None:
        """Leave the engine, which a test may have done already: the last one, as vLLM takes half a
        minute to start.
        """
        if not self._left:
            self._left = True
            await self._entered.__aexit__(None, None, None)

    @property
    def weights(self) -> Weights:
        return self.by_version[self.engine.policy_version]

    def run(self, test: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(120):
                if self.weights is not self.truth.base:
                    await self.publish(self.truth.base)
                return await test

        return self._runner.run(bounded())

    @property
    def scheduler(self) -> Engine:
        """The engine that schedules the requests: over HTTP the one behind the server."""
        return self.engine.behind if isinstance(self.engine, _EngineOverHttp) else self.engine

    async def publish(self, weights: Weights) -> int:
        version = self.engine.policy_version + 1
        update = weights.update_of_folder if isinstance(weights, Adapted) else weights
        await self.engine.update_weights(update, version)
        assert self.engine.policy_version == version
        self.by_version[version] = weights
        return version

    def request(
        self,
        prompt: Sequence[int],
        max_tokens: int = 16,
        *,
        temperature: float = 1.0,
        stop: tuple[int, ...] = (),
        seed: int = 0,
        priority: int = 0,
        stop_texts: tuple[str, ...] = (),
        **sampling: Any,
    ) -> GenerateRequest:
        self._requests += 1
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            stop_token_ids=stop,
            stop=stop_texts,
            **sampling,
        )
        return GenerateRequest(f"request-{self._requests}", tuple(prompt), params, seed, priority)

    async def all(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        async with asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(self.engine.generate(request)) for request in requests]
        return [task.result() for task in started]

    @asynccontextmanager
    async def players(self, ask: Callable[[int], GenerateRequest]) -> AsyncIterator[list[Played]]:
        """More callers than there are places, each of whom asks again at once, and until the block
        is left.
        """
        played: list[Played] = []
        going = True

        async def play(number: int) -> None:
            while going:
                request = ask(number)
                played.append((request, await self.engine.generate(request)))

        async with asyncio.TaskGroup() as tasks:
            for number in range(MAX_BATCH + 4):
                tasks.create_task(play(number))
            yield played
            going = False

    async def tokens(self, number: int) -> None:
        """Wait until so many more have been generated."""
        wanted = self.engine.stats().generated_tokens + number
        await self.until(lambda: self.engine.stats().generated_tokens >= wanted)

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():  # engines have no event for what tests wait for
            await asyncio.sleep(0.001)
            await self.catch_up()  # its stats are as fresh as its last answer
        # What was asked of it before this is there now, and not only counted here.
        await self.catch_up()

    async def catch_up(self) -> None:
        """Wait for an answer that comes after those to all that was asked before."""
        if isinstance(self.engine, RayEngine):
            self.engine._latest = await self.engine._call("report")
        elif isinstance(self.engine, VllmEngine):
            await self.engine._entered().is_sleeping()

    def assert_true(
        self, request: GenerateRequest, completion: Completion, tolerance: float = 1e-3
    ) -> None:
        """Every token's logprob is that of a plain forward pass of the very weights it is stamped
        with.
        """
        for version in set(completion.policy_versions):
            error = self.error(request, completion, version)
            assert error < tolerance, f"version {version}: off by {error}"

    def error(self, request: GenerateRequest, completion: Completion, version: int) -> float:
        """How far the logprobs of the tokens stamped `version` are from a plain forward pass of its
        weights.
        """
        expected = self.truth.logprobs(
            self.by_version[version],
            request.prompt_ids,
            completion.token_ids,
            request.sampling.temperature,
        )
        stamped = torch.tensor(completion.policy_versions) == version
        return float((torch.tensor(completion.logprobs) - expected)[stamped].abs().max())


@pytest.fixture(scope="module")
def lively_dir(shallow_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shallow model with larger weights: fresh ones predict all tokens alike, and hide every
    fault.
    """
    folder = tmp_path_factory.mktemp("models") / "lively"
    model = AutoModelForCausalLM.from_pretrained(shallow_model_dir)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6.0)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(shallow_model_dir).save_pretrained(folder)
    return folder


def local_engine(folder: Path, truth: Truth, **settings: Any) -> Engine:
    return LocalEngine(
        LocalEngine.Config(max_batch=MAX_BATCH, max_context=MAX_CONTEXT, **settings), folder
    )


def scripted_engine(folder: Path, truth: Truth, **settings: Any) -> Engine:
    return ScriptedEngine(
        truth.next_logits(truth.base),
        max_batch=MAX_BATCH,
        max_context=MAX_CONTEXT,
        on_weights=lambda weights, version: truth.next_logits(copy.copy(weights)),
        tokenizer=AutoTokenizer.from_pretrained(folder),
    )


def truth_of(engine: Callable[..., Any], folder: Path) -> Truth:
    kinds = {scripted_engine: QuickTruth, adapter_engine: AdapterTruth}
    return kinds.get(engine, Truth)(folder)


def vllm_engine(folder: Path, truth: Truth, **settings: Any) -> Engine:
    config = VllmEngine.Config(
        max_batch=MAX_BATCH, max_context=MAX_CONTEXT, structured_outputs=True, **settings
    )
    return VllmEngine(config, folder)


def adapter_engine(folder: Path, truth: Truth, **settings: Any) -> Engine:
    return vllm_engine(folder, truth, adapters="serve", adapter_rank=4, **settings)


def ray_engine(folder: Path, truth: Truth, **settings: Any) -> Engine:
    from agentrl.cluster.ray_placement import Unplaced
    from agentrl.cluster.ray_receivers import RayReceivers
    from tests.cluster.shared_ray import join_shared_ray

    join_shared_ray()
    config = LocalEngine.Config(max_batch=MAX_BATCH, max_context=MAX_CONTEXT, **settings)
    options = Unplaced().options("engine", 0)
    return RayEngine(Component("local", LocalEngine, config), folder, options, RayReceivers())


class _EngineOverHttp(OpenAIEngine):
    behind: Engine


@asynccontextmanager
async def engine_over_http(folder: Path, truth: Truth) -> AsyncIterator[Engine]:
    async with (
        local_engine(folder, truth) as local,
        serve_engine(local) as url,
        _EngineOverHttp(OpenAIEngine.Config(url=url)) as engine,
    ):
        engine.behind = local
        yield engine


# The tests of each run in one process, which starts it once.
ENGINES = [
    pytest.param(local_engine, id="local", marks=pytest.mark.xdist_group("local engine")),
    pytest.param(scripted_engine, id="scripted", marks=pytest.mark.xdist_group("scripted engine")),
    pytest.param(ray_engine, id="ray", marks=pytest.mark.slow),
    pytest.param(
        adapter_engine, id="vllm with adapters", marks=[pytest.mark.vllm, pytest.mark.long]
    ),
    pytest.param(vllm_engine, id="vllm", marks=pytest.mark.vllm),
]
VLLM_AGAIN = pytest.param(vllm_engine, id="vllm", marks=[pytest.mark.vllm, pytest.mark.long])
"""With other settings than for most tests: half a minute more to start."""
RAY_AGAIN = pytest.param(ray_engine, id="ray", marks=[pytest.mark.slow, pytest.mark.long])
OVER_HTTP = pytest.param(
    engine_over_http, id="openai", marks=pytest.mark.xdist_group("engine over HTTP")
)
owns_its_weights = pytest.mark.parametrize("served", ENGINES, indirect=True, scope="module")
"""Not for engines whose weights somebody else has: those take no new ones, and give no unfinished
tokens.
"""


@pytest.fixture(scope="module", params=[*ENGINES, OVER_HTTP])
def served(request: pytest.FixtureRequest, lively_dir: Path) -> Iterator[Served]:
    truth = truth_of(request.param, lively_dir)
    with Served(request.param(lively_dir, truth), truth) as served:
        yield served


@pytest.fixture(
    scope="module",
    params=[*ENGINES[:2], RAY_AGAIN, ENGINES[3], VLLM_AGAIN],
)
def keeping(request: pytest.FixtureRequest, lively_dir: Path) -> Iterator[Served]:
    """Engines that keep the KV of requests in flight when weights change."""
    truth = truth_of(request.param, lively_dir)
    with Served(request.param(lively_dir, truth, kv_on_update="keep"), truth) as served:
        yield served


KV_BOUND = 2


@pytest.fixture(scope="module", params=[ENGINES[0], RAY_AGAIN, ENGINES[3], VLLM_AGAIN])
def reusing(request: pytest.FixtureRequest, lively_dir: Path) -> Iterator[Served]:
    """Engines that keep the KV of each session over two updates."""
    truth = truth_of(request.param, lively_dir)
    settings = {"kv_on_update": "reuse", "kv_max_staleness": KV_BOUND}
    with Served(request.param(lively_dir, truth, **settings), truth) as served:
        yield served


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(6, 400, (length,), generator=generator).tolist())


def test_greedy_tokens_are_those_of_a_naive_loop(served: Served) -> None:
    request = served.request(prompt_of(20), 24, temperature=0.0)
    completion = served.run(served.engine.generate(request))
    tokens = list(request.prompt_ids)
    for _ in range(24):
        tokens.append(int(served.truth.logits(served.truth.base, tokens)[-1].argmax()))
    assert completion.token_ids.tolist() == tokens[20:]
    assert len(set(completion.token_ids)) > 4  # the model says something
    assert completion.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_logprobs_are_of_the_sampled_distribution(served: Served, temperature: float) -> None:
    requests = [
        served.request(prompt_of(5 + 9 * i, i), 20, temperature=temperature, seed=i)
        for i in range(6)
    ]
    for request, completion in zip(requests, served.run(served.all(requests)), strict=True):
        served.assert_true(request, completion)


@pytest.mark.parametrize("temperature", only([0.6, 1.0], 0.6))
# over HTTP come the tokens that the engine behind it draws, as the next test says
@owns_its_weights
def test_tokens_are_drawn_from_the_model_s_distribution(served: Served, temperature: float) -> None:
    prompt, draws = prompt_of(12), 1000
    requests = [
        served.request(prompt, 1, temperature=temperature, seed=1000 + seed)
        for seed in range(draws)
    ]
    tokens = [completion.token_ids[0] for completion in served.run(served.all(requests))]
    probabilities = torch.softmax(
        served.truth.logits(served.truth.base, prompt)[-1] / temperature, dim=-1
    )
    common = [v for v in range(served.truth.vocab) if probabilities[v] * draws >= 8]
    expected = [draws * float(probabilities[v]) for v in common]
    counts: list[float] = [tokens.count(v) for v in common]
    expected.append(draws - sum(expected))
    counts.append(draws - sum(counts))
    assert len(common) > 3
    chi_square = sum((n - e) ** 2 / e for n, e in zip(counts, expected, strict=True))
    freedom = len(expected) - 1
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_over_http_come_the_tokens_that_the_engine_itself_draws(lively_dir: Path) -> None:
    truth = Truth(lively_dir)
    requests = [
        GenerateRequest(
            f"{seed}",
            prompt_of(12),
            SamplingParams(max_tokens=2, temperature=(0.6, 1.0)[seed % 2]),
            seed,
        )
        for seed in range(50)
    ]

    async def drawn(made: AbstractAsyncContextManager[Engine]) -> list[tuple[int, ...]]:
        async with made as engine, asyncio.TaskGroup() as tasks:
            started = [tasks.create_task(engine.generate(request)) for request in requests]
        return [tuple(task.result().token_ids.tolist()) for task in started]

    here = asyncio.run(drawn(local_engine(lively_dir, truth)))
    assert asyncio.run(drawn(engine_over_http(lively_dir, truth))) == here
    assert len(set(here)) > 5


def test_the_same_seed_gives_the_same_tokens_whoever_else_is_in_the_batch(served: Served) -> None:
    def mine() -> GenerateRequest:
        return served.request(prompt_of(30, 5), 24, seed=77)

    alone = served.run(served.engine.generate(mine()))
    others = [served.request(prompt_of(4 + i, i), 3 + 2 * i, seed=i) for i in range(20)]
    crowd = served.run(served.all([*others[:10], mine(), *others[10:]]))
    other_seed = served.run(served.engine.generate(served.request(prompt_of(30, 5), 24, seed=78)))
    assert crowd[10].token_ids.tolist() == alone.token_ids.tolist()
    assert other_seed.token_ids.tolist() != alone.token_ids.tolist()


TRUNCATIONS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_p": 0.7, "top_k": 40},
    {"min_p": 0.2, "top_k": 40},
    {"top_p": 0.9, "top_k": 5, "min_p": 0.01, "temperature": 1.3},
]


def kept_of(truth: Truth, tokens: Sequence[int], sampling: SamplingParams) -> set[int]:
    """What truncation leaves of the model's distribution: `min_p` first, then `top_k`, then `top_p`
    of the rest.
    """
    probabilities = torch.softmax(
        truth.logits(truth.base, tokens)[-1] / sampling.temperature, dim=-1
    )
    likely, order = probabilities.sort(descending=True)
    likely = likely[likely >= sampling.min_p * likely[0]][: sampling.top_k or None]
    before = (likely.cumsum(0) - likely) / likely.sum()
    return set(order[: int((before < sampling.top_p).sum())].tolist())


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=" ".join)
@owns_its_weights
def test_what_a_token_was_sampled_from_is_kept_and_its_logprob_is_over_that(
    served: Served, truncation: dict[str, Any]
) -> None:
    asked = [served.request(prompt_of(5 + 9 * i, i), 12, seed=i, **truncation) for i in range(4)]
    plain = served.request(prompt_of(9), 12, seed=9)
    requests = [replace(request, keep_support=True) for request in asked]
    *cut, whole = served.run(served.all([*requests, plain]))
    assert whole.support is None
    served.assert_true(plain, whole)
    for request, completion in zip(requests, cut, strict=True):
        support, tokens = completion.support_of_each, request.prompt_ids.tolist()
        for row, token in enumerate(completion.token_ids.tolist()):
            kept = support.take([slice(row, row + 1)]).values.tolist()
            assert len(kept) == len(set(kept)) <= request.sampling.top_k
            assert set(kept) == kept_of(served.truth, tokens, request.sampling)
            logits = (
                served.truth.logits(served.truth.base, tokens)[-1][kept]
                / request.sampling.temperature
            )
            expected = torch.log_softmax(logits, dim=-1)[kept.index(token)]
            assert completion.logprobs[row] == pytest.approx(float(expected), abs=1e-3)
            tokens.append(token)


def test_truncated_sampling_without_keeping_draws_from_the_same_tokens(served: Served) -> None:
    for number, truncation in enumerate(TRUNCATIONS):
        request = served.request(prompt_of(8), 6, seed=number, **truncation)
        completion = served.run(served.engine.generate(request))
        tokens = request.prompt_ids.tolist()
        assert completion.support is None
        for token in completion.token_ids.tolist():
            assert token in kept_of(served.truth, tokens, request.sampling)
            tokens.append(token)


def test_an_engine_over_http_says_why_it_keeps_no_support(lively_dir: Path) -> None:
    async def main() -> None:
        async with engine_over_http(lively_dir, Truth(lively_dir)) as engine:
            await engine.generate(
                GenerateRequest("a", (5,), SamplingParams(top_k=3), keep_support=True)
            )

    with pytest.raises(EngineError, match="cannot say which tokens top_k, top_p and min_p left"):
        asyncio.run(main())


def test_a_stop_text_ends_the_completion_with_the_token_that_completes_it(
    served: Served, lively_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(lively_dir)
    whole = served.run(served.engine.generate(served.request(prompt_of(20), 24, seed=3)))
    text = tokenizer.decode(whole.token_ids[4:9].tolist())
    assert len(text) >= 2
    stopped = served.run(
        served.engine.generate(served.request(prompt_of(20), 24, stop_texts=("no", text), seed=3))
    )
    length = len(stopped.token_ids)
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids.tolist() == whole.token_ids[:length].tolist()
    assert len(stopped.logprobs) == len(stopped.policy_versions) == length <= 9
    assert text in tokenizer.decode(stopped.token_ids.tolist())
    assert text not in tokenizer.decode(stopped.token_ids[:-1].tolist())


@owns_its_weights
def test_a_stop_text_that_an_interrupt_cuts_in_two_is_found_by_the_request_that_resumes(
    served: Served, lively_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(lively_dir)
    whole = served.run(served.engine.generate(served.request(prompt_of(20), 24, temperature=0.0)))
    text = tokenizer.decode(whole.token_ids[5:9].tolist())
    begun = served.request(
        (*prompt_of(20), *whole.token_ids[:7].tolist()), 17, temperature=0.0, stop_texts=(text,)
    )
    assert served.run(served.engine.generate(replace(begun, resumed=7))).token_ids.tolist() == [
        *whole.token_ids[7:9]
    ]


def test_an_answer_has_the_format_that_a_request_asks_for_or_is_refused_by_name(
    served: Served, lively_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(lively_dir)
    stop = tokenizer.eos_token_id
    wanted = AnswerFormat(json.dumps({"enum": ["left", "right"]}))
    requests = [
        replace(served.request(prompt_of(12), 30, stop=(stop,), seed=i), format=wanted)
        for i in range(8)
    ]
    if type(served.engine).__name__ != "VllmEngine":
        with pytest.raises(FormatError, match="does not constrain answers"):
            served.run(served.engine.generate(requests[0]))
        return
    for request, completion in zip(requests, served.run(served.all(requests)), strict=True):
        token_ids = completion.token_ids.tolist()
        assert completion.finish_reason == "stop"
        assert json.loads(tokenizer.decode(token_ids[:-1])) in ("left", "right")
        assert token_ids[-1] == stop
        # The logprobs are of the tokens that the format leaves, so a trainer would not compute the
        # same.
        unconstrained = served.truth.logprobs(
            served.weights, request.prompt_ids.tolist(), token_ids, 1.0
        )
        assert float(completion.logprobs.sum()) > float(unconstrained.sum()) + 1
    nonsense = replace(served.request(prompt_of(12)), format=AnswerFormat('{"type": "nonsense"}'))
    with pytest.raises(FormatError, match="nonsense"):
        served.run(served.engine.generate(nonsense))
    interrupted = replace(served.request(prompt_of(12)), format=wanted, resumed=3)
    with pytest.raises(FormatError, match="cannot go on with an interrupted answer"):
        served.run(served.engine.generate(interrupted))


def test_a_stop_token_ends_the_completion_and_is_its_last_token(served: Served) -> None:
    prompt = prompt_of(20)
    free = served.run(served.engine.generate(served.request(prompt, 24, temperature=0.0)))
    stop = free.token_ids[7]
    cut = served.run(
        served.engine.generate(served.request(prompt, 24, temperature=0.0, stop=(stop, 3)))
    )
    assert (
        cut.token_ids.tolist() == free.token_ids.tolist()[: free.token_ids.tolist().index(stop) + 1]
    )
    assert cut.finish_reason == "stop"


def test_a_stop_token_on_the_last_allowed_place_is_a_stop(served: Served) -> None:
    prompt = prompt_of(20)
    first = served.run(served.engine.generate(served.request(prompt, 1, temperature=0.0)))
    again = served.run(
        served.engine.generate(served.request(prompt, 1, temperature=0.0, stop=first.token_ids))
    )
    assert (first.finish_reason, again.finish_reason) == ("length", "stop")


def test_a_later_turn_equals_a_fresh_prefill(served: Served) -> None:
    async def episode(seed: int) -> None:
        prompt = list(prompt_of(11, seed))
        for turn in range(4):
            request = served.request(prompt, 9, seed=seed * 10 + turn)
            completion = await served.engine.generate(request)
            served.assert_true(request, completion)
            prompt += [*completion.token_ids, *prompt_of(5 + seed, turn)]

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            for seed in range(5):
                tasks.create_task(episode(seed))

    served.run(main())


def test_more_ragged_requests_than_places_all_come_out_right(served: Served) -> None:
    requests = [
        served.request(prompt_of(3 + 37 * i % 150, i), 1 + 7 * i % 13, seed=i) for i in range(30)
    ]
    completions = served.run(served.all(requests))
    for request, completion in zip(requests, completions, strict=True):
        assert len(completion.token_ids) == request.sampling.max_tokens
        served.assert_true(request, completion)


def test_cancelling_a_caller_frees_its_place(served: Served) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            long = [
                tasks.create_task(served.engine.generate(served.request(prompt_of(10, i), 240)))
                for i in range(MAX_BATCH)
            ]
            await served.until(lambda: served.engine.stats().running == MAX_BATCH)
            short = tasks.create_task(served.engine.generate(served.request(prompt_of(10), 2)))
            await asyncio.sleep(0)
            assert not any(task.done() for task in [*long, short])
            long[3].cancel()
            assert len((await short).token_ids) == 2
            assert not any(task.done() for task in long[4:])
            for task in long:
                task.cancel()
        await served.until(lambda: served.engine.stats().running == 0)

    served.run(main())
    assert served.engine.stats().waiting == 0


def test_a_caller_s_deadline_costs_one_place_until_the_deadline(served: Served) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await served.engine.generate(served.request(prompt_of(4), 250))
        await served.until(lambda: served.engine.stats().running == 0)

    served.run(main())


def test_the_lower_priority_number_is_served_first(served: Served) -> None:
    order: list[str] = []

    async def noted(name: str, request: GenerateRequest) -> None:
        await served.engine.generate(request)
        order.append(name)

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            full = [
                tasks.create_task(served.engine.generate(served.request(prompt_of(10, i), 240)))
                for i in range(MAX_BATCH)
            ]
            await served.until(lambda: served.scheduler.stats().running == MAX_BATCH)
            late = tasks.create_task(
                noted("priority 5", served.request(prompt_of(10), 3, priority=5))
            )
            await served.until(lambda: served.scheduler.stats().waiting == 1)
            soon = tasks.create_task(
                noted("priority 1", served.request(prompt_of(10), 3, priority=1))
            )
            await served.until(lambda: served.scheduler.stats().waiting == 2)
            full[0].cancel()
            await soon
            await late
            for task in full:
                task.cancel()

    served.run(main())
    assert order == ["priority 1", "priority 5"]


def test_a_completion_ends_where_the_context_ends(served: Served) -> None:
    completion = served.run(served.engine.generate(served.request(prompt_of(MAX_CONTEXT - 3), 50)))
    assert served.engine.max_context == MAX_CONTEXT
    assert (len(completion.token_ids), completion.finish_reason) == (3, "length")


@pytest.mark.parametrize("length", [0, MAX_CONTEXT, MAX_CONTEXT + 50])
def test_a_prompt_that_does_not_fit_is_refused_and_harms_nobody(
    served: Served, length: int
) -> None:
    good = served.request(prompt_of(10), 5)
    with pytest.raises(EngineError, match=r"max_context|needs a prompt"):
        served.run(served.engine.generate(served.request(prompt_of(length))))
    served.assert_true(good, served.run(served.engine.generate(good)))


@owns_its_weights
def test_after_an_update_everything_is_of_the_new_weights(served: Served) -> None:
    request = served.request(prompt_of(64, 9), 24, temperature=0.0)

    async def main() -> tuple[Completion, GenerateRequest, Completion]:
        before = await served.engine.generate(request)
        version = await served.publish(served.truth.other(1))
        again = served.request(request.prompt_ids, 24, temperature=0.0)
        # The next turn too: its prefix is in every cache, computed with the old weights.
        turn = served.request([*request.prompt_ids, *before.token_ids, *prompt_of(4)], 24)
        after, later = await served.all([again, turn])
        assert set(before.policy_versions) == {version - 1}
        assert set(after.policy_versions) == set(later.policy_versions) == {version}
        served.assert_true(request, before)
        served.assert_true(again, after)
        assert after.token_ids.tolist() != before.token_ids.tolist()
        return before, turn, later

    _, turn, later = served.run(main())
    served.assert_true(turn, later)


@owns_its_weights
def test_weights_that_change_in_mid_generation_change_every_token_after_and_none_before(
    served: Served,
) -> None:
    async def main() -> list[Played]:
        async with served.players(
            lambda i: served.request(prompt_of(7 + 5 * i, i), served.long, seed=i)
        ) as played:
            for seed in range(3):
                await served.tokens(15 * MAX_BATCH)
                await served.publish(served.truth.other(seed))
        return played

    played = served.run(main())
    assert served.engine.stats().older_kv_tokens == 0
    for request, completion in played:
        served.assert_true(request, completion)
        assert list(completion.policy_versions) == sorted(completion.policy_versions)
    assert max(len(set(completion.policy_versions)) for _, completion in played) > 1, (
        "no update came in mid-generation"
    )


@owns_its_weights
def test_every_version_tag_is_exact(served: Served) -> None:
    """Under version v every token is the sentinel of v, so a tag that is off by one token shows."""

    def sentinel(version: int) -> int:
        return 10 + version % 100

    async def main() -> list[Played]:
        first = served.engine.policy_version + 1
        await served.publish(served.truth.sentinel(sentinel(first)))
        async with served.players(
            lambda i: served.request(prompt_of(20, i), served.long - 30 + i, seed=i)
        ) as played:
            for update in range(6):
                await served.tokens(6 * MAX_BATCH)
                await served.publish(served.truth.sentinel(sentinel(first + update + 1)))
        return played

    played = served.run(main())
    for _, completion in played:
        assert completion.token_ids.tolist() == [
            sentinel(version) for version in completion.policy_versions.tolist()
        ]
    assert max(len(set(completion.policy_versions)) for _, completion in played) > 1, (
        "no update came in mid-generation"
    )


@owns_its_weights
def test_versions_only_grow(served: Served) -> None:
    async def main() -> None:
        version = await served.publish(served.truth.base)
        for not_newer in (version, version - 1):
            with pytest.raises(EngineError, match="only grow"):
                await served.engine.update_weights(served.truth.other(1), not_newer)
        request = served.request(prompt_of(8), 8)
        completion = await served.engine.generate(request)
        assert set(completion.policy_versions) == {version}
        served.assert_true(request, completion)

    served.run(main())


def test_counts_add_up(served: Served) -> None:
    async def main() -> None:
        before = served.engine.stats()
        completions = await served.all(
            [served.request(prompt_of(10 + i, 40 + i), 4 + i) for i in range(12)]
        )
        after = served.engine.stats()
        assert after.generated_tokens - before.generated_tokens == sum(
            len(c.token_ids) for c in completions
        )
        assert (
            after.prefilled_tokens
            + after.cached_tokens
            - before.prefilled_tokens
            - before.cached_tokens
            == sum(10 + i for i in range(12))
        )
        assert (after.running, after.waiting) == (0, 0)

    served.run(main())


@owns_its_weights
def test_an_interrupt_gives_every_token_back_and_the_rest_is_as_if_nothing_had_happened(
    served: Served,
) -> None:
    prompts = [prompt_of(7 + 5 * i, i) for i in range(MAX_BATCH)]

    async def main() -> None:
        whole = await served.all(
            [served.request(prompt, served.long, temperature=0.0) for prompt in prompts]
        )
        before = served.engine.stats().generated_tokens
        async with asyncio.TaskGroup() as tasks:
            requests = [served.request(prompt, served.long, temperature=0.0) for prompt in prompts]
            all_done = tasks.create_task(served.all(requests))
            await served.until(
                lambda: served.engine.stats().generated_tokens >= before + 5 * MAX_BATCH
            )
            await served.engine.interrupt()
            assert served.engine.stats().running == 0
        partial = all_done.result()
        assert {completion.finish_reason for completion in partial} == {"abort"}
        assert (
            sum(len(c.token_ids) for c in partial)
            == served.engine.stats().generated_tokens - before
        )
        assert min(len(completion.token_ids) for completion in partial) >= 1
        rest = await served.all(
            [
                served.request(
                    (*prompt, *begun.token_ids), served.long - len(begun.token_ids), temperature=0.0
                )
                for prompt, begun in zip(prompts, partial, strict=True)
            ]
        )
        for uninterrupted, begun, ended in zip(whole, partial, rest, strict=True):
            assert [*begun.token_ids, *ended.token_ids] == [*uninterrupted.token_ids]

    served.run(main())


@owns_its_weights
def test_an_interrupt_ends_who_waits_and_who_has_only_just_come(served: Served) -> None:
    async def main() -> None:
        requests = [served.request(prompt_of(10, i), 200, seed=i) for i in range(3 * MAX_BATCH)]
        seen = served.engine.stats().generated_tokens
        async with asyncio.TaskGroup() as tasks:
            all_done = tasks.create_task(served.all(requests))
            await served.until(lambda: served.engine.stats().generated_tokens > seen + MAX_BATCH)
            last = tasks.create_task(served.engine.generate(served.request(prompt_of(30), 200)))
            await asyncio.sleep(0)
            await served.engine.interrupt()
        await served.engine.interrupt()  # there is nobody, and nothing happens
        completions = [*all_done.result(), last.result()]
        assert {completion.finish_reason for completion in completions} == {"abort"}
        assert sum(len(completion.token_ids) > 0 for completion in completions) == MAX_BATCH
        for request, completion in zip(requests, completions, strict=False):
            served.assert_true(request, completion)
        good = served.request(prompt_of(12), 9)
        served.assert_true(good, await served.engine.generate(good))
        assert (served.engine.stats().running, served.engine.stats().waiting) == (0, 0)

    served.run(main())


@owns_its_weights
def test_an_interrupt_does_not_wait_for_who_goes_meanwhile(served: Served) -> None:
    async def main() -> None:
        requests = [
            asyncio.create_task(served.engine.generate(served.request(prompt_of(10, i), 200)))
            for i in range(200)
        ]
        await asyncio.sleep(0)
        interrupt = asyncio.create_task(served.engine.interrupt())
        await asyncio.sleep(0)
        for request in requests:
            request.cancel()
        async with asyncio.timeout(30):
            await interrupt
            await asyncio.wait(requests)

    served.run(main())


@owns_its_weights
def test_new_weights_after_an_interrupt_sample_the_rest(served: Served) -> None:
    request = served.request(prompt_of(20), served.long)

    async def main() -> None:
        seen = served.engine.stats().generated_tokens
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(served.engine.generate(request))
            await served.until(lambda: served.engine.stats().generated_tokens > seen + 5)
            await served.engine.interrupt()
            version = await served.publish(served.truth.other(5))
        begun = task.result()
        rest = served.request(
            (*request.prompt_ids, *begun.token_ids), served.long - len(begun.token_ids)
        )
        ended = await served.engine.generate(rest)
        assert set(begun.policy_versions) == {version - 1}
        assert set(ended.policy_versions) == {version}
        served.assert_true(request, begun)
        served.assert_true(rest, ended)

    served.run(main())


@pytest.mark.parametrize("make", [local_engine, scripted_engine])
def test_an_engine_that_is_not_running_is_a_dead_engine(
    make: Callable[..., Engine], lively_dir: Path
) -> None:
    truth = Truth(lively_dir)
    engine = make(lively_dir, truth)
    request = GenerateRequest("r", (7, 8), SamplingParams(max_tokens=250))

    async def refuses() -> None:
        for call in (
            engine.generate(request),
            engine.interrupt(),
            engine.update_weights(truth.base, 1),
        ):
            with pytest.raises(EngineDeadError, match="not running"):
                await call

    async def is_told() -> None:
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.generate(request)

    async def main() -> None:
        await refuses()
        async with asyncio.TaskGroup() as tasks, engine:
            tasks.create_task(is_told())
            await asyncio.sleep(0.01)
        await refuses()

    asyncio.run(main())


@owns_its_weights
def test_pressure_is_told(served: Served) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            all_done = tasks.create_task(
                served.all(
                    [served.request(prompt_of(20, i), served.long) for i in range(MAX_BATCH)]
                )
            )
            await served.until(lambda: served.engine.stats().kv_use > 0)
            assert served.engine.stats().kv_use <= 1
            await served.publish(served.truth.other(1))
        assert len(all_done.result()) == MAX_BATCH
        assert served.engine.stats().kv_use == 0
        assert served.engine.stats().preemptions == 0  # an update is none

    served.run(main())


@dataclass
class Marked:
    """Requests to an engine whose versions are told apart: by the token that each says, and by the
    mark that is in every value of its KV.
    """

    served: Served
    played: list[Played] = field(default_factory=list)

    @staticmethod
    def token(version: int) -> int:
        """The only token that a version says."""
        return 10 + version % 150

    async def update(self) -> None:
        version = self.served.engine.policy_version + 1
        weights = self.served.truth.marked_sentinel(self.token(version), 1.0 + version % 7)
        await self.served.publish(weights)

    async def play(self, request: GenerateRequest) -> tuple[int, ...]:
        """The prompt and what was said."""
        completion = await self.served.engine.generate(request)
        self.played.append((request, completion))
        return (*request.prompt_ids, *completion.token_ids)

    async def keep_playing(self, number: int, prefix: tuple[int, ...]) -> None:
        while True:
            # vLLM's blocks have 128 tokens: one is shared by half of the players, the others fill
            # theirs in mid-request.
            tokens = prefix[: 130 if number % 2 else 110]
            # Each turn could use what the one before has left in the cache.
            for _ in range(3):
                prompt = (*tokens, number)
                tokens = await self.play(self.served.request(prompt, 8 + number, temperature=0.0))

    async def found_in_cache(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the engine has not computed again."""
        seen = self.served.engine.stats().cached_tokens
        await self.play(self.served.request(prompt, 1, temperature=0.0))
        return self.served.engine.stats().cached_tokens - seen

    def gaps(self) -> list[float]:
        """How far each answer that saw an update is from one that was computed from its last
        version alone; every token is its version's, and the first version is exact.
        """
        gaps = []
        for request, completion in self.played:
            said = [self.token(version) for version in completion.policy_versions.tolist()]
            assert completion.token_ids.tolist() == said
            first, last = completion.policy_versions[0], completion.policy_versions[-1]
            assert self.served.error(request, completion, first) < 1e-3
            if last > first:
                gaps.append(self.served.error(request, completion, last))
        return gaps


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.long)])
def test_kept_kv_is_its_own_request_s_only_and_every_version_tag_is_exact(
    keeping: Served, times: int
) -> None:
    """Updates in mid-request, each with another sentinel token, and another mark in every value of
    the KV cache.

    Tokens tell which weights sampled them. Logprobs tell whose KV they saw: of the version that a
    request began under, all of it must be; of later ones, none may be that was not kept.
    """
    engine, prefix, marked = keeping.engine, prompt_of(150), Marked(keeping)
    updates = {"LocalEngine": 12, "ScriptedEngine": 5, "RayEngine": 10, "VllmEngine": 35}[
        type(engine).__name__
    ] * times
    keeps = not isinstance(engine, ScriptedEngine)

    async def main() -> None:
        await marked.update()
        async with asyncio.TaskGroup() as tasks:
            players = [
                tasks.create_task(marked.keep_playing(number, prefix))
                for number in range(MAX_BATCH + 4)
            ]
            for number in range(updates):
                if number == updates // 2:
                    # Nobody has to wait any more, and a next turn follows at once.
                    for player in players[MAX_BATCH - 2 :]:
                        player.cancel()
                await keeping.tokens(3 * MAX_BATCH)
                await marked.update()
            for player in players:
                player.cancel()
        await keeping.until(lambda: engine.stats().running == 0)
        await marked.found_in_cache(prefix)
        again = await marked.found_in_cache((*prefix, 9))
        assert (again > 0) == keeps
        await marked.update()
        assert await marked.found_in_cache((*prefix, 9)) == 0
        await marked.found_in_cache(prefix)
        assert await marked.found_in_cache((*prefix, 9)) == again

    keeping.run(main())
    gaps = marked.gaps()
    assert len(gaps) > updates / 2
    assert (max(gaps) > 0.1) == keeps  # the old KV was kept indeed
    older = sum(
        int((completion.policy_versions > completion.policy_versions[0]).sum())
        for _, completion in marked.played
    )
    counted = engine.stats().older_kv_tokens
    assert older <= counted if keeps else counted == 0  # those of cancelled callers too


class Attended:
    """Which version has computed the KV of each token of a session, as the rules of `reuse` say."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.versions: list[int] = []
        """Of each token that has KV."""
        self.over_older = 0
        """Tokens that were sampled over KV of older versions than theirs."""

    def logprobs(self, request: GenerateRequest, completion: Completion, cached: int) -> Tensor:
        """Those of the sampled tokens, given how many of the prompt's tokens were found cached.

        Those have the KV that they have. What computes the rest of the prompt, and each sampled
        token, is the version that samples what comes next. All is computed again when the oldest
        becomes too old.
        """
        tokens = [*request.prompt_ids.tolist(), *completion.token_ids.tolist()]
        begin, expected = len(request.prompt_ids), []
        self.versions = self.versions[:cached]
        for end, group in groupby(
            range(len(completion.token_ids)), lambda i: int(completion.policy_versions[i])
        ):
            sampled = [begin + index for index in group]
            if min(self.versions, default=end) < end - KV_BOUND:
                self.versions = []
            self.versions += [end] * (sampled[-1] - len(self.versions))
            self.over_older += len(sampled) * (min(self.versions) < end)
            logits = self._served.truth.logits_over(self._spans(tokens))
            logprobs = torch.log_softmax(logits[sampled[0] - 1 :], dim=-1)
            expected.append(logprobs.gather(1, torch.tensor(tokens)[sampled][:, None])[:, 0])
        return torch.cat(expected)

    def _spans(self, tokens: Sequence[int]) -> list[tuple[Weights, list[int]]]:
        spans = []
        for version, places in groupby(range(len(self.versions)), lambda i: self.versions[i]):
            spans.append((self._served.by_version[version], [tokens[i] for i in places]))
        return spans


@dataclass
class Conversation:
    """A session that is asked one turn after another, with nobody else there."""

    served: Served
    name: str
    tokens: tuple[int, ...]
    known: int = 0

    def __post_init__(self) -> None:
        self.attended = Attended(self.served)

    async def turn(self, *new: int, max_tokens: int = 8, known: int | None = None) -> int:
        """Ask the next turn, check its logprobs, and return how many of its tokens were cached."""
        engine = self.served.engine
        prompt = (*self.tokens, *new)
        request = replace(
            self.served.request(prompt, max_tokens, seed=len(prompt)),
            session=self.name,
            known=self.known if known is None else known,
        )
        before, older = engine.stats(), self.attended.over_older
        completion = await engine.generate(request)
        await self.served.catch_up()
        after = engine.stats()
        cached = after.cached_tokens - before.cached_tokens
        expected = self.attended.logprobs(request, completion, cached)
        # In float32, as everywhere here: sums in another order are the only difference.
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=0, atol=1e-3)
        assert after.older_kv_tokens - before.older_kv_tokens == self.attended.over_older - older
        if not (max(self.attended.versions) > min(self.attended.versions)):
            self.served.assert_true(request, completion)
        else:
            assert self.served.error(request, completion, engine.policy_version) > 0.05
        assert after.prefilled_tokens - before.prefilled_tokens == len(prompt) - cached
        self.tokens = (*prompt, *completion.token_ids.tolist())
        self.known = len(self.tokens)
        return cached

    @property
    def reusable(self) -> int:
        """How many tokens of the next turn can be cached. The last sampled one has no KV yet, and
        vLLM caches whole blocks only.
        """
        have_kv = self.known - 1
        is_vllm = isinstance(self.served.engine, VllmEngine)
        return have_kv // _BLOCK * _BLOCK if is_vllm else have_kv


_BLOCK = 128
"""Tokens of a block of vLLM's cache on CPUs."""


def test_between_turns_a_session_keeps_its_kv_over_updates_and_none_that_is_too_old(
    reusing: Served,
) -> None:
    """No token of an unchanged prefix is computed again, and what is sampled over it is what the
    old weights' KV and the new weights give.
    """

    async def main() -> None:
        talk = Conversation(reusing, "talk", prompt_of(140, 3))
        assert await talk.turn() == 0
        for update in range(2 * KV_BOUND + 2):
            await reusing.publish(reusing.truth.other(update))
            # Of version v, it is kept over v + 1 and v + 2; from v + 3 on, all is of that.
            expected = 0 if update % (KV_BOUND + 1) == KV_BOUND else talk.reusable
            assert await talk.turn(7, 9) == expected
            expected = talk.reusable
            assert await talk.turn(11) == expected

    reusing.run(main())


def test_what_begins_anew_gets_no_kv_of_older_weights(reusing: Served) -> None:
    async def main() -> None:
        talks = [Conversation(reusing, f"{seed}", prompt_of(140, 20 + seed)) for seed in range(4)]
        for talk in talks:
            await talk.turn()
        await reusing.publish(reusing.truth.other(1))
        extended, equal, forked, replayed = talks
        assert await Conversation(reusing, "other", extended.tokens).turn(5) == 0
        assert await Conversation(reusing, "", prompt_of(140, 21)).turn() == 0
        assert await Conversation(reusing, "another", prompt_of(140, 21)).turn() > 0
        assert await equal.turn(5) > 0  # its own is still there
        forked.attended.versions = []
        assert await forked.turn(5, known=0) == 0
        again = Conversation(reusing, replayed.name, prompt_of(140, 23))
        assert await again.turn(5) == 0
        await reusing.publish(reusing.truth.other(2))
        expected = again.reusable
        assert await again.turn(9) == expected

    reusing.run(main())


def test_an_interrupted_turn_goes_on_with_its_kv_after_an_update(reusing: Served) -> None:
    """As with `weights.update=abort_resume`."""
    prompt = prompt_of(130, 5)

    async def main() -> None:
        router = Router([reusing.engine], update="abort_resume")
        async with router, asyncio.TaskGroup() as tasks:
            request = replace(reusing.request(prompt, 60), session="interrupted")
            before = reusing.engine.stats()
            task = tasks.create_task(router.generate(request))
            await reusing.tokens(5)
            version = reusing.engine.policy_version + 1
            await router.update_weights(reusing.truth.other(6), version)
            reusing.by_version[version] = reusing.truth.other(6)
        await reusing.catch_up()
        completion, after = task.result(), reusing.engine.stats()
        assert set(completion.policy_versions.tolist()) == {version - 1, version}
        cached = after.cached_tokens - before.cached_tokens
        assert cached >= 128
        attended = Attended(reusing)
        # What was not found is computed by the new weights: a block's rest, and the last token.
        begun = int((completion.policy_versions == version - 1).sum())
        attended.logprobs(request, _first(completion, begun), 0)
        rest = replace(request, prompt_ids=[*prompt, *completion.token_ids[:begun].tolist()])
        expected = attended.logprobs(rest, _first(completion, begun, after=True), cached)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs[begun:]), expected, rtol=0, atol=1e-3
        )
        older = after.older_kv_tokens - before.older_kv_tokens
        assert older == attended.over_older == len(completion.token_ids) - begun

    with pytest.MonkeyPatch.context() as patch:
        for method in ("__aenter__", "__aexit__"):  # the engine has been entered, and stays so
            patch.setattr(reusing.engine, method, AsyncMock())
        reusing.run(main())


def _first(completion: Completion, count: int, *, after: bool = False) -> Completion:
    """The first tokens of a completion, or those after them."""
    part = slice(count, None) if after else slice(count)
    return Completion(
        completion.token_ids[part],
        completion.logprobs[part],
        completion.policy_versions[part],
        completion.finish_reason,
    )


def widest(played: Sequence[Played]) -> int:
    """How many updates the answer that saw the most of them was sampled over."""
    return max((int(max(c.policy_versions) - min(c.policy_versions)) for _, c in played), default=0)


def test_turns_in_flight_keep_their_kv_over_updates_until_it_is_too_old(reusing: Served) -> None:
    async def main() -> list[Played]:
        before = reusing.engine.stats().older_kv_tokens
        async with reusing.players(
            lambda i: reusing.request(prompt_of(7 + 5 * i, i), reusing.long, seed=i)
        ) as played:
            for seed in range(20 * KV_BOUND):
                await reusing.tokens(6 * MAX_BATCH)
                await reusing.publish(reusing.truth.other(seed))
                # On a busy machine, updates are few beside the tokens.
                if seed > 2 * KV_BOUND and widest(played) > KV_BOUND:
                    break
        await reusing.catch_up()
        nonlocal over_older
        over_older = reusing.engine.stats().older_kv_tokens - before
        return played

    over_older = 0
    played, expected = reusing.run(main()), 0
    for request, completion in played:
        assert len(completion.token_ids) == request.sampling.max_tokens
        assert list(completion.policy_versions) == sorted(completion.policy_versions)
        attended = Attended(reusing)
        torch.testing.assert_close(
            torch.tensor(completion.logprobs),
            attended.logprobs(request, completion, 0),
            rtol=0,
            atol=1e-3,
        )
        expected += attended.over_older
    assert over_older == expected > 0
    assert widest(played) > KV_BOUND, "no KV became too old in mid-generation"


async def scores_of(engine: Engine, requests: Sequence[ScoreRequest]) -> list[Scores]:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(engine.score(request)) for request in requests]
    return [task.result() for task in started]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@owns_its_weights  # over HTTP there is no such call
def test_given_tokens_get_the_logprobs_of_a_plain_forward_pass(
    served: Served, temperature: float
) -> None:
    """Of any length, up to a full context, alone or among others, from any token on."""
    lengths = (2, 3, 17, 17, 40, MAX_CONTEXT - 1, MAX_CONTEXT)
    requests = [
        ScoreRequest(f"score-{n}", prompt_of(length, n), 1 + n * (length - 2) // 6, temperature)
        for n, length in enumerate(lengths)
    ]
    if EngineOffers.of(served.engine).scores_at_one_only and temperature != 1:
        with pytest.raises(
            EngineError, match=r"temperature 1 only: write rollout\.sampling\.temperature=1"
        ):
            served.run(served.engine.score(requests[0]))
        return
    for request, scores in zip(
        requests, served.run(scores_of(served.engine, requests)), strict=True
    ):
        tokens = request.token_ids.tolist()
        expected = served.truth.logprobs(
            served.weights, tokens[: request.start], tokens[request.start :], request.temperature
        )
        torch.testing.assert_close(torch.tensor(scores.logprobs), expected, rtol=0, atol=1e-3)
        assert scores.policy_version == served.engine.policy_version


@owns_its_weights
def test_sampled_tokens_get_the_logprobs_that_they_were_sampled_with(served: Served) -> None:
    requests = [served.request(prompt_of(5 + 9 * i, i), 20, seed=i) for i in range(6)]
    completions = served.run(served.all(requests))
    given = [
        ScoreRequest(f"again-{n}", [*asked.prompt_ids, *answer.token_ids], len(asked.prompt_ids))
        for n, (asked, answer) in enumerate(zip(requests, completions, strict=True))
    ]
    for answer, scores in zip(
        completions, served.run(scores_of(served.engine, given)), strict=True
    ):
        np.testing.assert_allclose(scores.logprobs, answer.logprobs, rtol=0, atol=1e-3)


@owns_its_weights
def test_scores_are_of_one_version_though_weights_change_meanwhile(served: Served) -> None:
    tokens, going = prompt_of(MAX_CONTEXT, 3), True
    found: list[Scores] = []

    async def ask(number: int) -> None:
        while going:
            found.append(await served.engine.score(ScoreRequest(f"caller-{number}", tokens)))
            await asyncio.sleep(0.001)  # else one that answers at once is asked thousands of times

    async def main() -> None:
        nonlocal going
        async with asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(ask(number))
            for update in range(4):
                seen = len(found)
                await served.until(lambda seen=seen: len(found) > seen + 4)  # type: ignore[misc]
                await served.publish(served.truth.other(update))
                if update == 2:
                    await served.engine.interrupt()
            going = False

    served.run(main())
    versions = {scores.policy_version for scores in found}
    assert len(versions) > 3
    for version in versions:
        expected = served.truth.logprobs(
            served.by_version[version], tokens[:1], tokens[1:], 1.0
        ).numpy()
        of_version = [scores for scores in found if scores.policy_version == version]
        np.testing.assert_allclose(
            [s.logprobs for s in of_version], [expected] * len(of_version), rtol=0, atol=2e-3
        )


@pytest.mark.parametrize(
    "wrong", ["too long", "start of 0", "start after the end", "one token", "other tokens"]
)
@owns_its_weights
def test_tokens_that_cannot_be_scored_are_refused(served: Served, wrong: str) -> None:
    tokens = {
        "too long": prompt_of(MAX_CONTEXT + 1),
        "one token": (7,),
        "other tokens": (7, served.truth.vocab),
    }
    start = {"start of 0": 0, "start after the end": 9}.get(wrong, 1)
    if wrong == "other tokens" and isinstance(served.engine, ScriptedEngine):
        pytest.skip("its model may have any tokens")
    with pytest.raises(EngineError, match=r"context of|needs 1 <= start|outside of the vocabulary"):
        served.run(
            served.engine.score(ScoreRequest("wrong", tokens.get(wrong, prompt_of(9)), start))
        )


@asynccontextmanager
async def slow_to_read(
    bundle: WeightBundle,
) -> AsyncIterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Inside the block, whoever checks the bundle's bytes waits, as on a slow disk. The value waits
    until somebody does.
    """
    assert bundle.shapes()  # it is read here before
    path = bundle.folder / bundle.manifest.buckets[0].file
    content = path.read_bytes()
    pipes: list[int] = []
    path.unlink()
    os.mkfifo(path)

    async def until_read() -> None:
        while not pipes:
            with suppress(OSError):  # nobody reads it yet
                pipes.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
            await asyncio.sleep(0.01)

    def deliver() -> None:
        path.unlink()
        path.write_bytes(content)
        for pipe in pipes:
            os.set_blocking(pipe, True)
            with open(pipe, "wb") as file, suppress(BrokenPipeError):
                file.write(content)

    try:
        yield until_read
    finally:
        await asyncio.to_thread(deliver)


@owns_its_weights
def test_an_engine_lives_while_it_stages_weights_for_longer_than_its_lease_unless_it_is_stopped(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, offers = served.engine, EngineOffers.of(served.engine)
    if not offers.stages_weights:
        pytest.skip("it does not stage weights")
    lease = 4.0 if offers.probes else 0.1
    for method in ("__aenter__", "__aexit__"):  # the engine has been entered, and stays so
        monkeypatch.setattr(engine, method, AsyncMock())

    def bundle(seed: int) -> WeightBundle:
        place = BundlePlace(tmp_path / str(seed), engine.policy_version + 1, 1 << 30)
        return place.write(served.truth.other(seed))

    async def main() -> None:
        version = engine.policy_version + 1
        weights = bundle(1)
        async with Router([engine], lease=lease) as router, asyncio.TaskGroup() as tasks:
            async with slow_to_read(weights) as until_read:
                staging = tasks.create_task(router.stage_weights(weights, version))
                await until_read()
                await asyncio.sleep(1.5 * lease)
                assert not staging.done()
            await staging
            await router.update_weights(weights, version)
            assert router.worker_count().alive == 1
        served.by_version[version] = served.truth.other(1)

    async def is_missed_when_stopped() -> None:
        weights = bundle(2)
        async with (
            slow_to_read(weights) as until_read,
            Router([engine], lease=lease) as router,
            asyncio.TaskGroup() as tasks,
        ):

            async def stop_as_it_reads() -> None:
                await until_read()
                for process in served.processes:
                    process.suspend()

            tasks.create_task(stop_as_it_reads())
            try:
                with pytest.raises(EngineDeadError, match="it gave no sign of life for 4 s"):
                    await router.stage_weights(weights, engine.policy_version + 1)
            finally:
                for process in served.processes:
                    process.resume()

    served.run(main())
    if served.processes:
        served.run(is_missed_when_stopped())
        served.run(served.catch_up())


# How an engine ends. These tests are the last ones: they use up the engine that the others were
# served by.


async def is_told(engine: Engine, request: GenerateRequest, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        await engine.generate(request)


@owns_its_weights
def test_leaving_ends_callers_and_processes(served: Served) -> None:
    async def main() -> None:
        seen = served.engine.stats().generated_tokens
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                is_told(served.engine, served.request(prompt_of(10), 240), "closed|gone")
            )
            await served.until(lambda: served.engine.stats().generated_tokens > seen)
            await served.leave()
        await is_told(served.engine, served.request(prompt_of(10), 8), "not running")

    served.run(main())
    assert still_alive(served.processes, 60) == []


LIVES_HERE = pytest.mark.skip(reason="it lives in this process")
in_processes_of_its_own = pytest.mark.parametrize(
    "keeping",
    [
        pytest.param(local_engine, id="local", marks=LIVES_HERE),
        pytest.param(scripted_engine, id="scripted", marks=LIVES_HERE),
        *ENGINES[2:-1],
        VLLM_AGAIN,
    ],
    indirect=True,
    scope="module",
)


@in_processes_of_its_own
def test_weights_of_another_model_change_nothing(keeping: Served) -> None:
    engine = keeping.engine

    async def main() -> None:
        version = engine.policy_version
        async with asyncio.TaskGroup() as tasks:
            generating = tasks.create_task(engine.generate(keeping.request(prompt_of(10), 100)))
            with pytest.raises(EngineError, match="nothing was changed"):
                await engine.update_weights({"model.norm.weight": torch.ones(3)}, version + 1)
        assert set(generating.result().policy_versions) == {engine.policy_version} == {version}

    keeping.run(main())


@in_processes_of_its_own
def test_the_death_of_its_processes_is_told_to_all_who_wait_and_who_come_later(
    keeping: Served,
) -> None:
    engine, dead = keeping.engine, "Dead|dead|gone|lost|not running"

    async def update_fails(version: int) -> None:
        with pytest.raises(EngineError, match=dead):
            await engine.update_weights(keeping.truth.base, version)

    async def main() -> None:
        for process in keeping.processes:
            process.suspend()  # so that nothing is answered before they are killed
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(is_told(engine, keeping.request(prompt_of(10), 240), dead))
            tasks.create_task(update_fails(engine.policy_version + 1))
            await asyncio.sleep(0.01)
            for process in keeping.processes:
                process.kill()
        await is_told(engine, keeping.request(prompt_of(10), 8), dead)
        await keeping.leave()

    assert keeping.processes
    keeping.run(main())
    assert still_alive(keeping.processes, 60) == []
