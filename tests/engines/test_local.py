"""What only the local engine promises: its cache, its batches, its death."""

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from agentrl.engines import local, packed_model, slots
from agentrl.engines.local import LocalEngine
from agentrl.engines.sampling import Sampler, Truncation, noise_keys, truncated
from agentrl.engines.slots import Openings, SlotTable, SlotTokens
from agentrl.errors import ConfigError, EngineDeadError, EngineError
from agentrl.protocols import GenerateRequest, ScoreRequest, Scores
from agentrl.settings.sampling import SamplingParams
from agentrl.tokens.arrays import ints
from agentrl.trajectory import Completion
from agentrl.weights.low_rank import Factors, LowRank
from tests.properties import examples


def engine_of(model: Path, **settings: Any) -> LocalEngine:
    return LocalEngine(LocalEngine.Config(**{"max_batch": 4, "device": "cpu", **settings}), model)


def request(
    name: str, prompt: Sequence[int], max_tokens: int = 8, seed: int = 0
) -> GenerateRequest:
    return GenerateRequest(name, tuple(prompt), SamplingParams(max_tokens=max_tokens), seed)


async def all_of(engine: LocalEngine, requests: Sequence[GenerateRequest]) -> list[Completion]:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(engine.generate(each)) for each in requests]
    return [task.result() for task in started]


def plain_logprobs(
    model: Path, prompt: Sequence[int], completion: Completion, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    with torch.inference_mode():
        logits = plain(torch.tensor([[*prompt, *completion.token_ids]])).logits[
            0, len(prompt) - 1 : -1
        ]
    return torch.log_softmax(logits.float(), -1).gather(
        1, torch.tensor(completion.token_ids)[:, None]
    )[:, 0]


def test_a_later_turn_computes_only_what_is_new(shallow_model_dir: Path) -> None:
    async def main() -> None:
        async with engine_of(shallow_model_dir) as engine:
            prompt = list(range(10, 60))
            first = await engine.generate(request("a", prompt, 8))
            assert engine.stats().prefilled_tokens == 50
            await engine.generate(request("b", [*prompt, *first.token_ids, 11, 12, 13], 8))
            # all but the last sampled token have their KV; that one and three new ones do not
            assert engine.stats().cached_tokens == 57
            assert engine.stats().prefilled_tokens == 50 + 4

    asyncio.run(main())


def test_each_sibling_of_a_group_finds_its_own_episode_again(shallow_model_dir: Path) -> None:
    async def main() -> None:
        async with engine_of(shallow_model_dir) as engine:
            prompt = tuple(range(10, 30))
            first = await all_of(engine, [request(f"a{i}", prompt, 5, seed=i) for i in range(4)])
            follow = [request(f"b{i}", (*prompt, *c.token_ids, 11), 5) for i, c in enumerate(first)]
            await all_of(engine, follow[::-1])
            copied = 3 * 19  # of the first one's prompt, all but the last token
            assert engine.stats().cached_tokens == copied + 4 * 24

    asyncio.run(main())


@pytest.mark.parametrize("budget", [4096, 30])
def test_a_prompt_of_a_whole_group_is_computed_once(
    shallow_model_dir: Path, monkeypatch: Any, budget: int
) -> None:
    monkeypatch.setattr(local, "_STEP_TOKENS", budget)
    prompts = {"a": range(10, 60), "b": range(20, 60)}
    group = [
        request(f"{name}{seed}", prompt, seed=seed)
        for name, prompt in prompts.items()
        for seed in range(4)
    ]

    async def main() -> None:
        async with engine_of(shallow_model_dir, prefix_cache=False) as engine:
            alone = [await engine.generate(each) for each in group]
        async with engine_of(shallow_model_dir, max_batch=8) as engine:
            together = await all_of(engine, group)
            stats = engine.stats()
            later = await engine.generate(replace(group[5], id="later"))
        assert stats.cached_tokens == 3 * 49 + 3 * 39
        assert stats.prefilled_tokens == 50 + 40 + 6
        for one, other in zip([*alone, alone[5]], [*together, later], strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert np.allclose(one.logprobs, other.logprobs, atol=1e-4)

    asyncio.run(main())


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=1), st.integers(0, 3)), max_size=30))
def test_a_prompt_is_found_in_its_last_slot_until_that_gets_another(
    puts: list[tuple[bytes, int]],
) -> None:
    openings, expected = Openings(), dict[bytes, tuple[int, SlotTokens]]()
    for prompt, slot in puts:
        tokens = SlotTokens()
        openings.put(prompt, slot, tokens)
        expected = {other: at for other, at in expected.items() if at[0] != slot} | {
            prompt: (slot, tokens)
        }
    for prompt, _ in puts:
        assert openings.get(prompt) == expected.get(prompt)


def test_a_prompt_is_computed_again_after_its_slot_has_been_taken_or_its_weights_are_old(
    shallow_model_dir: Path,
) -> None:
    async def main() -> None:
        weights = AutoModelForCausalLM.from_pretrained(shallow_model_dir).state_dict()
        async with engine_of(shallow_model_dir, max_batch=1) as engine:
            one, other = range(10, 60), range(20, 60)
            for number, prompt in enumerate((one, other, one)):
                await engine.generate(request(f"a{number}", prompt))
            assert engine.stats().cached_tokens == 0
        async with engine_of(shallow_model_dir, kv_on_update="keep") as engine:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(engine.generate(request("long", one, 40)))
                for _ in range(20):
                    await asyncio.sleep(0)
                assert engine.stats().generated_tokens
                await engine.update_weights(weights, 1)
                tasks.create_task(engine.generate(request("b", one)))
            assert engine.stats().cached_tokens == 0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("sessions", "pause"),
    [(False, 0), (True, 0), (True, 12)],
    ids=["found by tokens", "found by session", "back after others were served"],
)
def test_with_fewer_slots_than_episodes_later_turns_still_find_their_prefix(
    shallow_model_dir: Path, sessions: bool, pause: int
) -> None:
    async def episode(engine: LocalEngine, number: int) -> None:
        prompt, known = list(range(10, 150 + number)), 0
        for turn in range(6):
            told = {"session": f"e{number}", "known": known} if sessions else {}
            completion = await engine.generate(
                replace(request(f"{number}.{turn}", prompt, 4, number), **told)
            )
            known = len(prompt) + len(completion.token_ids)
            prompt += [*completion.token_ids, 11, 12]
            for _ in range(pause):
                await asyncio.sleep(0)

    async def main() -> None:
        async with engine_of(shallow_model_dir) as engine:
            async with asyncio.TaskGroup() as tasks:
                for number in range(12):
                    tasks.create_task(episode(engine, number))
            stats = engine.stats()
        assert stats.cached_tokens > 1.5 * stats.prefilled_tokens, stats

    asyncio.run(main())


@pytest.mark.parametrize("off", ["by config", "by new weights"])
def test_no_kv_is_reused_when_it_must_not_be(shallow_model_dir: Path, off: str) -> None:
    async def main() -> None:
        async with engine_of(shallow_model_dir, prefix_cache=off != "by config") as engine:
            first = await engine.generate(request("a", range(10, 60)))
            if off == "by new weights":
                model = AutoModelForCausalLM.from_pretrained(shallow_model_dir)
                # With the tied head's second name.
                await engine.update_weights(model.state_dict(), 1)
            await engine.generate(request("b", [*range(10, 60), *first.token_ids, 11]))
            assert engine.stats().cached_tokens == 0

    asyncio.run(main())


def test_the_same_callers_get_bit_for_bit_the_same_in_every_run(shallow_model_dir: Path) -> None:
    async def episode(engine: LocalEngine, number: int) -> list[Completion]:
        prompt = list(range(10, 20 + number))
        turns = []
        for turn in range(3):
            turns.append(
                await engine.generate(
                    request(f"{number}.{turn}", prompt, 4 + number % 3, seed=number)
                )
            )
            prompt += [*turns[-1].token_ids, 11, 12]
        return turns

    async def run() -> tuple[list[list[Completion]], Any]:
        async with engine_of(shallow_model_dir) as engine, asyncio.TaskGroup() as tasks:
            episodes = [tasks.create_task(episode(engine, number)) for number in range(9)]
            for task in episodes:
                await task
            return [task.result() for task in episodes], engine.stats()

    assert asyncio.run(run()) == asyncio.run(run())


def test_callers_answered_together_are_decoded_together(
    shallow_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[int] = []
    step = packed_model.PackedModel.step

    def noted(
        self: packed_model.PackedModel, rows: Sequence[packed_model.StepRow]
    ) -> list[tuple[int, float]]:
        batches.append(len(rows))
        return step(self, rows)

    monkeypatch.setattr(packed_model.PackedModel, "step", noted)

    async def episode(engine: LocalEngine, number: int) -> None:
        for turn in range(5):
            async with asyncio.timeout(30):
                await engine.generate(request(f"{number}.{turn}", range(10, 20), 3))

    async def main() -> None:
        async with engine_of(shallow_model_dir) as engine, asyncio.TaskGroup() as tasks:
            for number in range(4):
                tasks.create_task(episode(engine, number))

    asyncio.run(main())
    assert batches == [4] * 15


@pytest.mark.parametrize("step_tokens", [7, 64, pytest.param(1, marks=pytest.mark.slow)])
def test_prompts_longer_than_a_step_are_computed_in_parts(
    shallow_model_dir: Path, monkeypatch: pytest.MonkeyPatch, step_tokens: int
) -> None:
    monkeypatch.setattr(local, "_STEP_TOKENS", step_tokens)
    requests = [request(f"{i}", range(10, 20 + 40 * i), 5, seed=i) for i in range(4)]

    async def main() -> list[Completion]:
        async with engine_of(shallow_model_dir) as engine:
            return await all_of(engine, requests)

    for each, completion in zip(requests, asyncio.run(main()), strict=True):
        torch.testing.assert_close(
            torch.tensor(completion.logprobs),
            plain_logprobs(shallow_model_dir, each.prompt_ids, completion),
            atol=1e-4,
            rtol=0,
        )


@pytest.mark.slow
async def all_scores(engine: LocalEngine, requests: Sequence[ScoreRequest]) -> list[Scores]:
    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(engine.score(each)) for each in requests]
    return [task.result() for task in started]


def test_tokens_are_scored_together_or_in_parts_with_the_same_logprobs_and_leave_the_cache_alone(
    shallow_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    given = [
        ScoreRequest(f"{n}", rng.integers(6, 400, length), start, 1.0 + n / 4)
        for n, (length, start) in enumerate([(5, 1), (150, 1), (33, 32), (90, 60), (64, 2)])
    ]

    async def main() -> tuple[list[Scores], list[Scores]]:
        async with engine_of(shallow_model_dir) as engine:
            prompt = list(range(10, 60))
            first = await engine.generate(request("a", prompt, 8))
            together = await all_scores(engine, given)
            monkeypatch.setattr(packed_model, "_SCORED_TOKENS", 37)
            in_parts = await all_scores(engine, given)
            await engine.generate(request("b", [*prompt, *first.token_ids, 11], 8))
            assert engine.stats().cached_tokens == 57
            return together, in_parts

    for request_, one, other in zip(given, *asyncio.run(main()), strict=True):
        assert len(one.logprobs) == len(request_.token_ids) - request_.start
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-4)


def test_when_scoring_fails_all_who_wait_are_answered(
    shallow_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("out of memory")

    async def dies(engine: LocalEngine, number: int) -> None:
        with pytest.raises(EngineDeadError, match="out of memory"):
            await engine.score(ScoreRequest(f"{number}", [7] * 1000))

    async def main() -> None:
        async with engine_of(shallow_model_dir) as engine, asyncio.TaskGroup() as tasks:
            monkeypatch.setattr(packed_model.PackedModel, "score", fails)
            for number in range(9):  # more than are scored at once
                tasks.create_task(dies(engine, number))

    asyncio.run(main())


def test_the_cache_grows_under_live_requests(shallow_model_dir: Path) -> None:
    requests = [request("short", range(10, 30), 300), request("long", [7] * 600, 5)]

    async def main() -> list[Completion]:
        async with (
            engine_of(shallow_model_dir, max_batch=64) as engine,
            asyncio.TaskGroup() as tasks,
        ):
            short = tasks.create_task(engine.generate(requests[0]))
            while engine.stats().generated_tokens < 100:  # noqa: ASYNC110
                await asyncio.sleep(0)
            return [await engine.generate(requests[1]), await short]

    for each, completion in zip(requests[::-1], asyncio.run(main()), strict=True):
        expected = plain_logprobs(shallow_model_dir, each.prompt_ids, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_bfloat16_is_as_near_the_truth_as_a_plain_bfloat16_forward_pass(
    shallow_model_dir: Path,
) -> None:
    async def main() -> Completion:
        async with engine_of(shallow_model_dir, dtype="bfloat16") as engine:
            return await engine.generate(request("a", range(10, 60), 40))

    completion = asyncio.run(main())
    truth = plain_logprobs(shallow_model_dir, range(10, 60), completion)
    plain = plain_logprobs(shallow_model_dir, range(10, 60), completion, torch.bfloat16)
    engines = torch.tensor(completion.logprobs)
    assert (engines - truth).abs().max() < 2 * (plain - truth).abs().max()
    assert (engines - truth).abs().mean() < 0.05


def test_when_a_step_fails_everybody_is_told_and_nobody_hangs(
    shallow_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(
        self: packed_model.PackedModel, rows: Sequence[packed_model.StepRow]
    ) -> list[tuple[int, float]]:
        raise RuntimeError("out of memory")

    async def told(engine: LocalEngine, name: str) -> None:
        with pytest.raises(EngineError, match="out of memory"):
            await engine.generate(request(name, (7, 8)))

    async def main() -> None:
        async with engine_of(shallow_model_dir) as engine:
            await engine.generate(request("fine", (7, 8)))
            monkeypatch.setattr(packed_model.PackedModel, "step", broken)
            async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
                for number in range(9):
                    tasks.create_task(told(engine, f"{number}"))
            await told(engine, "later")
            with pytest.raises(EngineError, match="out of memory"):
                await engine.update_weights({}, 1)

    asyncio.run(main())


def test_leaving_ends_who_still_waits_and_the_body_s_own_error_stays_as_it_is(
    shallow_model_dir: Path,
) -> None:
    engine = engine_of(shallow_model_dir)

    async def told(name: str) -> None:
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(request(name, (7, 8), 1000))

    async def body(tasks: asyncio.TaskGroup) -> None:
        async with engine:
            for number in range(6):
                tasks.create_task(told(f"{number}"))
            await asyncio.sleep(0.05)
            raise KeyError("mine")

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            with pytest.raises(KeyError, match="mine"):
                await body(tasks)
        await told("later")

    asyncio.run(main())


def test_wrong_weights_are_refused_whole(shallow_model_dir: Path) -> None:
    weights = dict(AutoModelForCausalLM.from_pretrained(shallow_model_dir).named_parameters())
    doubled = {name: 2 * p.detach() for name, p in weights.items()}
    wrong = [
        {**doubled, "model.norm.weight": torch.ones(3)},
        {**doubled, "model.other.weight": torch.ones(3)},
        {name: p for name, p in doubled.items() if "norm" not in name},
    ]

    async def main() -> None:
        async with engine_of(shallow_model_dir) as engine:
            for each in wrong:
                with pytest.raises(EngineError, match="nothing was changed"):
                    await engine.update_weights(each, 1)
            completion = await engine.generate(request("a", range(10, 60)))
            expected = plain_logprobs(shallow_model_dir, range(10, 60), completion)
            torch.testing.assert_close(
                torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0
            )
            assert set(completion.policy_versions) == {0}

    asyncio.run(main())


def test_a_malformed_request_is_refused(shallow_model_dir: Path) -> None:
    async def main() -> None:
        async with engine_of(shallow_model_dir) as engine, asyncio.TaskGroup() as tasks:
            nothing = replace(
                request("c", [7]), sampling=SamplingParams().model_copy(update={"max_tokens": 0})
            )
            for bad in (request("a", [99999]), request("b", [-1]), nothing):
                with pytest.raises(EngineError):
                    await engine.generate(bad)
            tasks.create_task(engine.generate(request("twice", [7], 30)))
            await asyncio.sleep(0)
            with pytest.raises(EngineError, match="live already"):
                await engine.generate(request("twice", [7]))

    asyncio.run(main())


def test_more_context_than_the_model_has_is_a_config_error(shallow_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="2048"):
        asyncio.run(engine_of(shallow_model_dir, max_context=4096).__aenter__())


operations = st.lists(
    st.tuples(
        st.sampled_from(["take", "park", "forget"]),
        st.integers(0, 5),
        st.lists(st.integers(0, 2), max_size=5),
    ),
    max_size=40,
)


@given(operations)
@examples(300)
def test_the_slot_table_is_a_longest_prefix_lookup(steps: list[tuple[str, int, list[int]]]) -> None:
    table, parked, taken, size = SlotTable(4), dict[int, list[int]](), list[int](), 4
    for kind, which, tokens in steps:
        if kind == "take" and len(taken) < size:
            fits = [h for h in parked.values() if len(h) < len(tokens) and tokens[: len(h)] == h]
            place = table.take_extended(ints(tokens))
            assert (place is None) == (not fits)
            if place is None:
                place, oldest = table.take_any(ints(tokens)), next(iter(parked), None)
                if len(parked) + len(taken) == size:
                    assert place.slot == oldest
            else:
                assert parked[place.slot] == tokens[: place.cached]
                assert place.cached == max(len(h) for h in fits)
            assert place.tokens.values.tolist() == tokens
            parked.pop(place.slot, None)
            taken.append(place.slot)
        elif kind == "park" and taken:
            slot = taken.pop(which % len(taken))
            table.park(slot, SlotTokens(ints(tokens)), len(tokens))
            if tokens:
                parked[slot] = tokens
        elif kind == "forget":
            table.forget_parked()
            parked.clear()
        assert len(set(taken)) == len(taken)
        assert table.available == size - len(taken)


turn_parts = st.lists(st.integers(0, 2), max_size=4)


@given(
    st.lists(
        st.tuples(turn_parts, st.lists(st.integers(0, 2), min_size=1, max_size=4)), max_size=8
    ),
    st.booleans(),
)
@examples(100)
def test_a_session_finds_its_slot_by_what_it_says_is_known_and_others_find_it_by_its_tokens(
    turns, others
) -> None:
    table, so_far = SlotTable(3), [0]
    for number, (new, sampled) in enumerate(turns):
        known = len(so_far) if number else 0
        prompt = ints([*so_far, *new])
        assert table.known(prompt, "mine", known) == known
        assert table.known(prompt, "of somebody else", known) == 0
        assert table.known(prompt, "mine", known - 1) == 0
        place = table.take_known(prompt, "mine", known) or table.take_any(prompt)
        assert (place.cached, len(place.tokens)) == (max(0, known - 1), len(prompt))
        place.tokens.append(ints(sampled))
        so_far = place.tokens.values.tolist()
        assert so_far == [*prompt.tolist(), *sampled]
        table.park(place.slot, place.tokens, len(so_far) - 1, "mine")
        assert place.tokens.digest(len(so_far) - 1) == SlotTokens(ints(so_far)).digest(
            len(so_far) - 1
        )
        if others:  # a slot that another has taken and given back is not the session's any more
            taken = table.take_extended(ints(so_far))
            assert taken is not None
            assert (taken.slot, taken.cached) == (place.slot, len(so_far) - 1)
            table.park(taken.slot, taken.tokens, taken.cached, "of somebody else")
            assert table.known(ints(so_far), "mine", len(so_far)) == 0
            back = table.take_extended(ints(so_far))
            assert back is not None
            table.park(back.slot, back.tokens, back.cached, "mine")


def test_a_prompt_that_is_not_what_it_says_it_is_is_found_by_its_tokens() -> None:
    table = SlotTable(2)
    table.park(table.take_any(ints([1, 2, 3])).slot, SlotTokens(ints([1, 2, 3, 4])), 3, "mine")
    other = ints([1, 2, 3, 5, 6])
    assert table.known(other, "mine", 4) == 0
    assert table.take_known(other, "mine", 4) is None
    place = table.take_extended(other)
    assert place is not None
    assert (place.cached, place.tokens.values.tolist()) == (3, other.tolist())


def test_a_late_turn_costs_the_engine_what_an_early_one_does(
    shallow_model_dir: Path, monkeypatch: Any
) -> None:
    """Counted in tokens that are checked, copied and hashed, with as many new ones in each turn."""
    touched: Counter[str] = Counter()

    def counted(name: str, function: Any, tokens_of: Any) -> Any:
        def counting(*args: Any, **options: Any) -> Any:
            touched[name] += tokens_of(*args, **options)
            return function(*args, **options)

        return counting

    monkeypatch.setattr(
        SlotTokens, "append", counted("copied", SlotTokens.append, lambda self, values: len(values))
    )
    monkeypatch.setattr(slots, "prefix_hashes", counted("hashed", slots.prefix_hashes, len))
    monkeypatch.setattr(local, "prefix_hashes", slots.prefix_hashes)
    checked = counted(
        "checked",
        local.max_new_tokens,
        lambda asked, **given: len(asked.prompt_ids) - given["checked"],
    )
    monkeypatch.setattr(local, "max_new_tokens", checked)

    async def main() -> list[Counter[str]]:
        by_turn, so_far = [], [1]
        async with engine_of(shallow_model_dir) as engine:
            for turn in range(60):
                prompt = [*so_far, 3, 4, 5]
                request = GenerateRequest(
                    str(turn), prompt, SamplingParams(max_tokens=2), turn, 0, "s", len(so_far)
                )
                touched.clear()
                completion = await engine.generate(request)
                by_turn.append(Counter(touched))
                so_far = [*prompt, *completion.token_ids.tolist()]
        return by_turn

    by_turn = asyncio.run(main())
    assert by_turn[59] == by_turn[5] == {"checked": 3, "copied": 5, "hashed": 5}


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31)), min_size=1, max_size=6)
)
def test_noise_is_a_function_of_seed_and_position_alone(rows: list[tuple[int, int]]) -> None:
    sampler = Sampler(13, torch.device("cpu"))

    def noise(some: Sequence[tuple[int, int]]) -> torch.Tensor:
        seeds, positions = np.asarray(some, dtype=np.uint64).T
        return sampler.gumbel(torch.from_numpy(noise_keys(seeds, positions)))

    together = noise(rows)
    for index, row in enumerate(rows):
        assert torch.equal(noise([row])[0], together[index])
    assert bool(torch.isfinite(together).all())


def tail_counts(draws: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """How often each token was drawn, and its probability: two common tokens, and tails from 1e-3
    down to 1e-7.
    """
    tails = [10.0**-power for power in range(3, 8) for _ in range(4)]
    probabilities = np.array([0.6, 0.4 - sum(tails), *tails])
    sampler = Sampler(len(probabilities), torch.device("cpu"))
    logits = torch.from_numpy(np.log(probabilities)).float()
    counts = np.zeros(len(probabilities), dtype=np.int64)
    rows = 1 << 16
    for first in range(0, draws, rows):
        positions = np.arange(first, min(first + rows, draws), dtype=np.uint64)
        keys = noise_keys(np.full(len(positions), seed, np.uint64), positions)
        ones = torch.ones(len(positions))
        drawn, _, _ = sampler.sample(
            logits.expand(len(positions), -1), ones, torch.from_numpy(keys)
        )
        counts += np.bincount(drawn.numpy(), minlength=len(counts))
    return counts, probabilities


@given(
    st.lists(st.integers(-6, 6), min_size=1, max_size=12),
    st.integers(0, 13),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.4, 1.0]),
)
def test_truncation_keeps_the_likeliest_and_of_equals_the_first(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    weights = [math.exp(logits[token] - max(logits)) for token in best]
    kept = [
        (token, weight) for token, weight in zip(best, weights, strict=True) if weight >= min_p
    ][: top_k or None]
    mass = sum(weight for _, weight in kept)
    before = [sum(weight for _, weight in kept[:place]) / mass for place in range(len(kept))]
    assume(all(abs(share - top_p) > 1e-4 for share in before))  # else rounding decides
    expected = {token for (token, _), share in zip(kept, before, strict=True) if share < top_p}
    other = [0.0] * len(logits)  # a row of another request changes nothing
    rows = truncated(
        torch.tensor([logits, other], dtype=torch.float32),
        Truncation.of([(top_k, top_p, min_p), (0, 1.0, 0.0)], torch.device("cpu")),
    )
    assert set(rows[0].isfinite().nonzero()[:, 0].tolist()) == expected
    assert torch.equal(rows[1], torch.tensor(other))
    assert torch.equal(rows[0][list(expected)], torch.tensor(logits).float()[list(expected)])


@pytest.mark.long
def test_a_million_draws_have_the_probabilities_of_the_logits_down_to_the_tails() -> None:
    draws = 1 << 20
    counts, probabilities = (
        np.add.reduceat(part, [0, 1, 2, 6, 10, 14, 18]) for part in tail_counts(draws, 1)
    )
    expected = probabilities * draws
    often = expected > 5
    statistic = ((counts - expected)[often] ** 2 / expected[often]).sum()
    # Six degrees of freedom: beyond 30 once in 25,000 runs.
    assert statistic < 30, (
        counts,
        expected,
    )
    assert (counts[~often] <= 8).all(), (counts, expected)


def test_the_noise_draws_tokens_that_are_rarer_than_float32_can_tell() -> None:
    """The winner's exponential variate is about as small as its probability, so values down to 1e-8
    must occur.
    """
    sampler = Sampler(1 << 16, torch.device("cpu"))
    keys = noise_keys(np.arange(64, dtype=np.uint64), np.zeros(64, np.uint64))
    exponential = torch.exp(-sampler.gumbel(torch.from_numpy(keys)).double())
    below = [int((exponential < bound).sum()) for bound in (1e-5, 1e-6, 3e-7)]
    expected = [exponential.numel() * bound for bound in (1e-5, 1e-6, 3e-7)]  # 42, 4.2, 1.3
    assert abs(below[0] - expected[0]) < 5 * expected[0] ** 0.5
    assert 0 < below[1] < 16
    assert len(torch.unique(exponential[exponential < 1e-5])) == below[0], "they lie on no grid"


def test_a_seed_that_is_no_integer_is_refused_when_the_request_is_made() -> None:
    for seed in (1.5, "7", None):
        with pytest.raises(TypeError, match="the seed of a request is an integer"):
            GenerateRequest("a", [1], SamplingParams(), seed=seed)
    assert GenerateRequest("a", [1], SamplingParams(), seed=np.int64(7)).seed == 7


def test_the_noise_is_gumbel_and_independent_over_seeds_positions_and_tokens() -> None:
    sampler = Sampler(64, torch.device("cpu"))
    seeds, positions = (
        a.reshape(-1).astype(np.uint64) for a in np.meshgrid(np.arange(64), np.arange(64))
    )
    noise = (
        sampler.gumbel(torch.from_numpy(noise_keys(seeds, positions))).reshape(64, 64, 64).double()
    )
    uniform = torch.exp(-torch.exp(-noise))
    counts = torch.histc(uniform, bins=100, min=0, max=1)
    expected = uniform.numel() / 100
    assert float(((counts - expected) ** 2 / expected).sum()) < 99 + 5 * (2 * 99) ** 0.5
    centred = uniform - 0.5
    bound = 5 / 12 / uniform.numel() ** 0.5
    for axis in range(3):
        assert abs(float((centred * centred.roll(1, axis)).mean())) < bound


class CountedReads(LowRank):
    """An update of low rank that notes which weights are asked of it."""

    def __getitem__(self, name: str) -> torch.Tensor:
        READ.append(name)
        return super().__getitem__(name)


READ: list[str] = []


def test_an_update_of_low_rank_loads_only_what_it_or_the_last_one_changes(
    shallow_model_dir: Path,
) -> None:
    def update(*layers: str) -> LowRank:
        factors = {}
        for layer in layers:
            name = f"model.layers.{layer}.weight"
            rows, width = LowRank(shallow_model_dir, {})[name].shape
            factors[name] = Factors(torch.ones(2, width), torch.ones(rows, 2), 0.01)
        return CountedReads(shallow_model_dir, factors)

    async def main() -> None:
        async with engine_of(shallow_model_dir) as engine:
            read = {}
            for version, layers in enumerate(
                [["0.self_attn.q_proj"], ["1.mlp.up_proj"], [], ["0.self_attn.q_proj"]], start=1
            ):
                READ.clear()
                weights = update(*layers)
                await engine.update_weights(weights, version)
                read[version] = sorted(name.removeprefix("model.layers.") for name in READ)
                for name, weight in LowRank(shallow_model_dir, weights.factors).items():
                    assert torch.equal(engine.weights[name], weight), (version, name)
            q_proj, up_proj = "0.self_attn.q_proj.weight", "1.mlp.up_proj.weight"
            assert read == {1: [q_proj], 2: [q_proj, up_proj], 3: [up_proj], 4: [q_proj]}
            # After whole weights, none are known to be the folder's.
            whole = {name: weight + 1 for name, weight in LowRank(shallow_model_dir, {}).items()}
            await engine.update_weights(whole, 5)
            await engine.update_weights(update("1.mlp.up_proj"), 6)
            for name, weight in update("1.mlp.up_proj").items():
                assert torch.equal(engine.weights[name], weight), name

    asyncio.run(main())
