"""The router: sticky sessions, load escape, death, silence, and the three ways of new weights."""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from agentrl.cluster.worker_registry import WorkerCount
from agentrl.engines.router import Router
from agentrl.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    LethalRequestError,
    StallError,
    WeightsError,
)
from agentrl.flow import Flow, deadline, now, run_virtual
from agentrl.flow.suspicion import LETHAL_DEATHS
from agentrl.protocols import (
    AnswerFormat,
    EngineOffers,
    EngineStats,
    GenerateRequest,
    ScoreRequest,
    Scores,
)
from agentrl.settings.sampling import SamplingParams
from agentrl.testing import ScriptedEngine
from agentrl.weights.config import WeightUpdate


def request(name: str, *, session: str = "", tokens: int = 10) -> GenerateRequest:
    return GenerateRequest(
        name,
        (1, 2),
        SamplingParams(max_tokens=tokens, temperature=0.0, stop_token_ids=(99,)),
        seed=7,
        session=session,
    )


def counting() -> ScriptedEngine:
    """Its token at each position is the number of tokens before it: a lost or repeated one shows.
    One a second.
    """
    return ScriptedEngine(
        lambda tokens: [10.0 * (i == len(tokens)) for i in range(100)],
        seconds_per_token=lambda request: 1.0,
    )


def served(
    engines: list[ScriptedEngine], main: Callable[[Router], object], update: WeightUpdate = "keep"
) -> None:
    async def run() -> None:
        async with Router(engines, update=update) as router:
            await main(router)

    run_virtual(run)


def test_an_episode_stays_with_its_replica_and_new_ones_go_to_the_least_busy():
    engines = [counting(), counting()]

    async def main(router: Router) -> None:
        for turn in range(3):
            async with Flow("turn") as flow:
                for episode in ("a", "b", "c", "d"):
                    flow.start(
                        router.generate(request(f"{episode}/{turn}", session=episode)), name=episode
                    )

    served(engines, main)
    homes = [{asked.session for asked in engine.requests} for engine in engines]
    assert sorted(len(home) for home in homes) == [2, 2]
    assert not homes[0] & homes[1]


def test_a_session_leaves_a_replica_that_is_far_busier():
    engines = [counting(), counting()]

    async def main(router: Router) -> None:
        await router.generate(request("first", session="s"))
        homes = router._homes._homes
        async with Flow("crowd") as flow:
            for number in range(20):
                homes[f"crowd-{number}"] = homes["s"]
                flow.start(
                    router.generate(request(f"c{number}", session=f"crowd-{number}")),
                    name=str(number),
                )
        assert {len(engine.requests) > 4 for engine in engines} == {True}

    served(engines, main)


@pytest.mark.parametrize("update", ["keep", "abort_resume"])
def test_no_token_is_sampled_twice_and_every_version_is_exact(update):
    engine = counting()

    async def main(router: Router) -> None:
        async with Flow("requests") as flow:
            tasks = [flow.start(router.generate(request(str(n))), name=str(n)) for n in range(3)]
            for version in (1, 2):
                await asyncio.sleep(3.5)
                await router.update_weights({}, version)
        for task in tasks:
            completion = task.result()
            assert completion.token_ids.tolist() == [*range(2, 12)]
            assert (
                completion.policy_versions.tolist() == [0] * 3 + [1] * 4 + [2] * 3
                or update == "abort_resume"
            )
            assert list(completion.policy_versions) == sorted(completion.policy_versions)
            assert completion.finish_reason == "length"
        assert engine.stats().generated_tokens == 30

    served([engine], main, update)


class Letters:
    """Token n is the letter with the number n."""

    def decode(self, token_ids, **options):
        return "".join(chr(97 + token) for token in token_ids)


def test_what_was_sampled_from_and_stop_texts_survive_an_interrupted_turn():
    engine = ScriptedEngine(
        lambda tokens: [10.0 * (i == len(tokens)) for i in range(100)],
        seconds_per_token=lambda request: 1.0,
        tokenizer=Letters(),
    )
    sampling = SamplingParams(max_tokens=12, top_k=3, stop=("gh",))
    asked = GenerateRequest("a", (1, 2), sampling, seed=7, keep_support=True)

    async def main(router: Router) -> None:
        async with Flow("requests") as flow:
            task = flow.start(router.generate(asked), name="a")
            await asyncio.sleep(5.5)  # the text is c d e f g, and h comes after the update
            await router.update_weights({}, 1)
        completion = task.result()
        assert completion.token_ids.tolist() == [2, 3, 4, 5, 6, 7]
        assert completion.finish_reason == "stop"
        assert completion.support_of_each.lengths.tolist() == [3] * 6

    served([engine], main, "abort_resume")


def test_an_answer_of_a_format_begins_again_after_an_interrupt_as_its_engine_keeps_its_place():
    engine = ScriptedEngine.replying(
        lambda request: [*range(6)],
        seconds_per_token=lambda request: 1.0,
        formats=True,
        max_context=100,
    )
    asked = GenerateRequest("a", (1, 2), SamplingParams(max_tokens=6), format=AnswerFormat())

    async def main(router: Router) -> None:
        async with Flow("requests") as flow:
            task = flow.start(router.generate(asked), name="a")
            await asyncio.sleep(3.5)
            await router.update_weights({}, 1)
        assert task.result().token_ids.tolist() == [*range(6)]
        assert task.result().policy_versions.tolist() == [1] * 6

    served([engine], main, "abort_resume")


def test_drain_waits_for_turns_in_flight_and_holds_new_ones_back():
    engine = counting()

    async def main(router: Router) -> None:
        async with Flow("requests") as flow:
            early = flow.start(router.generate(request("early")), name="early")
            await asyncio.sleep(2.5)
            updating = flow.start(router.update_weights({}, 1), name="update")
            await asyncio.sleep(1)
            late = flow.start(router.generate(request("late")), name="late")
            await updating
            assert now() == pytest.approx(10)
        assert set(early.result().policy_versions) == {0}
        assert set(late.result().policy_versions) == {1}
        assert now() == pytest.approx(20)

    served([engine], main, "drain")


def test_a_dead_replica_s_requests_are_answered_by_a_survivor():
    doomed = ScriptedEngine.replying(
        lambda request: (5,),
        fail=lambda request: EngineDeadError("its process is gone"),
        prefill_seconds=lambda r: 2.0,
    )
    engines = [doomed, counting()]

    async def main(router: Router) -> None:
        async with Flow("requests") as flow:
            tasks = [flow.start(router.generate(request(str(n))), name=str(n)) for n in range(6)]
        assert [task.result().token_ids.tolist() for task in tasks] == [[*range(2, 12)]] * 6
        await router.update_weights({}, 1)
        assert router.policy_version == 1
        assert engines[0].policy_version == 0

    served(engines, main)


def test_when_the_last_replica_dies_everybody_is_told():
    async def main(router: Router) -> None:
        with pytest.raises(EngineDeadError, match=r"no engine is left: .*is gone"):
            await router.generate(request("a"))

    served(
        [ScriptedEngine.replying(lambda r: (5,), fail=lambda r: EngineDeadError("it is gone"))] * 1,
        main,
    )


def test_a_refused_request_is_not_a_death():
    engine = ScriptedEngine.replying(
        lambda r: (5,), fail=lambda r: EngineError("too long") if r.id == "a" else None
    )

    async def main(router: Router) -> None:
        with pytest.raises(EngineError, match="too long"):
            await router.generate(request("a"))
        assert (await router.generate(request("b"))).token_ids.tolist() == [5, 99]

    served([engine], main)


def test_a_silent_replica_is_abandoned_and_its_requests_are_sent_again_but_the_last_is_kept():
    silent = ScriptedEngine.replying(lambda request: (5,), hang=lambda request: True)
    engines = [silent, counting()]

    async def main(router: Router) -> None:
        async with Flow("requests") as flow:
            tasks = [
                flow.start(router.generate(request(str(n), tokens=30)), name=str(n))
                for n in range(4)
            ]
            await asyncio.sleep(5)
            assert not router.evict_unresponsive()  # the first look only remembers
            await asyncio.sleep(5)
            assert router.evict_unresponsive()
            assert silent.stats().running == 2
        assert [len(task.result().token_ids) for task in tasks] == [30] * 4
        assert silent.stats().running == 0
        assert not router.evict_unresponsive()

    served(engines, main)


def test_a_caller_that_gives_up_is_not_sent_anywhere_else():
    engines = [counting(), counting()]

    async def main(router: Router) -> None:
        async with Flow("requests") as flow:
            task = flow.start(router.generate(request("a")), name="a")
            await asyncio.sleep(2)
            task.cancel()
        assert task.cancelled()
        assert len(engines[0].requests) + len(engines[1].requests) == 1

    served(engines, main)


class Probeable(ScriptedEngine):
    """Says whether it lives: never again after `hang_from` seconds of the clock, or that it is
    dead.
    """

    dies_at = hangs_at = float("inf")

    async def probe(self) -> None:
        if now() >= self.hangs_at:
            await asyncio.sleep(1e9)
        if now() >= self.dies_at:
            raise EngineDeadError("its machine is on fire")


def probeable(**times: float) -> Probeable:
    engine = Probeable(
        lambda tokens: [10.0 * (i == len(tokens)) for i in range(100)],
        seconds_per_token=lambda request: 1.0,
    )
    for name, at in times.items():
        setattr(engine, name, at)
    return engine


@pytest.mark.parametrize("fault", ["dies_at", "hangs_at"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_an_engine_that_dies_or_hangs_restarts_at_the_current_version_and_its_requests_are_answered(
    fault: str, replicas: int
):
    engines = [probeable(**({fault: 13.5} if number == 0 else {})) for number in range(replicas)]
    spare: list[Probeable] = []

    def again(number: int) -> Probeable:
        assert number == 0
        spare.append(probeable())
        return spare[-1]

    async def main() -> None:
        async with Router(engines, factory=again, lease=5.0) as router, Flow("requests") as flow:
            await router.update_weights({}, 1)
            await router.update_weights({}, 4)
            assert router.worker_count() == WorkerCount("engine", replicas, replicas)
            await asyncio.sleep(10)
            tasks = [
                flow.start(router.generate(request(str(n), session=str(n))), name=str(n))
                for n in range(4)
            ]
            completions = [await task for task in tasks]
            assert now() < 13.5 + 5 + 1 + 10 + 1
            for completion in completions:
                assert completion.token_ids.tolist() == [*range(2, 12)]
                assert set(completion.policy_versions) == {4}
            await router.update_weights({}, 5)
            assert router.policy_version == 5
            assert len((await router.generate(request("last"))).token_ids) == 10
            assert router.worker_count() == WorkerCount("engine", replicas, replicas, restarts=1)

    run_virtual(main)
    assert len(spare) == 1
    with pytest.raises(EngineDeadError):  # it was closed with the router
        run_virtual(lambda: spare[0].generate(request("late")))


def test_weights_that_come_while_no_engine_lives_are_those_that_the_next_one_begins_with():
    first = probeable(dies_at=2.0)

    class Slow(Probeable):
        async def __aenter__(self) -> "Slow":
            await asyncio.sleep(20)
            return await super().__aenter__()

    async def main() -> None:
        async with Router(
            [first], factory=lambda number: Slow(lambda tokens: [1.0]), lease=5.0
        ) as router:
            await router.update_weights({}, 1)
            await asyncio.sleep(5)
            assert router.policy_version == 1
            await router.update_weights({}, 2)
            assert now() >= 22
            assert router.policy_version == 2

    run_virtual(main)


def test_an_engine_that_cannot_be_restarted_ends_the_run_and_says_which():
    class Doomed(Probeable):
        async def __aenter__(self) -> "Doomed":
            raise EngineError("no memory")

    async def main() -> None:
        async with Router(
            [probeable(dies_at=2.0)], factory=lambda n: Doomed(lambda tokens: [1.0]), lease=5.0
        ):
            await asyncio.sleep(1e6)

    with pytest.raises(
        EngineDeadError, match=r"engine 0 could not be restarted: no memory \(3 times in a row\)"
    ):
        run_virtual(main)


def test_weights_that_no_engine_takes_are_not_those_of_an_engine_that_is_restarted():
    def refuse(weights: object, version: int) -> None:
        if version == 2:
            raise EngineError("not of this model")

    def make() -> Probeable:
        return Probeable(lambda tokens: [1.0], on_weights=refuse)

    first = make()
    first.dies_at = 50.0

    async def main() -> None:
        async with Router([first], factory=lambda number: make(), lease=5.0) as router:
            await router.update_weights({}, 1)
            with pytest.raises(EngineError, match="not of this model"):
                await router.update_weights({}, 2)
            await asyncio.sleep(100)
            assert router.policy_version == 1

    run_virtual(main)


def test_a_starting_engine_whose_weights_are_removed_for_the_next_version_takes_that():
    made: list[int] = []

    class Slow(ScriptedEngine):
        async def update_weights(self, weights: Mapping[str, Any], version: int) -> None:
            await asyncio.sleep(20)
            if version == 1:
                raise WeightsError("its files are gone")
            await super().update_weights(weights, version)

    class Dying(ScriptedEngine):
        async def score(self, request: ScoreRequest) -> Scores:
            raise EngineDeadError("out of memory")

    def replacement(number: int) -> Slow:
        made.append(number)
        return Slow(lambda tokens: [0.0, 1.0])

    async def main() -> None:
        engines = [Dying(lambda tokens: [0.0, 1.0]), ScriptedEngine(lambda tokens: [0.0, 1.0])]
        async with Router(engines, factory=replacement) as router:
            await router.update_weights({}, 1)
            await router.score(ScoreRequest("a", (1, 1, 1), 1))
            await asyncio.sleep(10)
            assert made == [0], "it takes version 1"
            await router.update_weights({}, 2)
            await asyncio.sleep(100)
            assert made == [0]
            assert [replica.engine.policy_version for replica in router._alive] == [2, 2]

    run_virtual(main)


def test_an_engine_that_refuses_what_another_has_taken_serves_no_more():
    def refuse(weights: object, version: int) -> None:
        raise EngineError("not here")

    picky = ScriptedEngine(lambda tokens: [1.0], on_weights=refuse)
    willing = ScriptedEngine(lambda tokens: [1.0])

    async def main() -> None:
        async with Router([picky, willing]) as router:
            await router.update_weights({}, 1)
            assert router.policy_version == 1
            for number in range(4):
                completion = await router.generate(request(str(number), session=str(number)))
                assert set(completion.policy_versions) == {1}

    run_virtual(main)


def test_tokens_whose_scorer_dies_are_scored_by_another_engine_or_by_the_next_one():
    class Dying(ScriptedEngine):
        async def score(self, request: ScoreRequest) -> Scores:
            raise EngineDeadError("out of memory")

    def model(tokens):
        return [0.0, float(len(tokens))]

    async def main() -> None:
        for others in (0, 1):
            engines = [Dying(model), *(ScriptedEngine(model) for _ in range(others))]
            async with Router(engines, factory=lambda number: ScriptedEngine(model)) as router:
                await router.update_weights({}, 3)
                scores = await router.score(ScoreRequest("a", (1, 1, 1), 1))
                assert scores.logprobs.tolist() == pytest.approx(
                    [-math.log1p(math.exp(-n)) for n in (1, 2)]
                )
                assert scores.policy_version == 3

    run_virtual(main)


def test_an_engine_without_scores_says_so():
    class Plain(ScriptedEngine):
        score = None  # type: ignore[assignment]

    async def main() -> None:
        async with Router([Plain(lambda tokens: [1.0])]) as router:
            with pytest.raises(EngineError, match="Plain has no method `score`"):
                await router.score(ScoreRequest("a", (1, 1)))

    run_virtual(main)


def mortal(kills: Callable[[GenerateRequest], bool]) -> ScriptedEngine:
    """It dies of each request that `kills`, half a second after it began."""
    return ScriptedEngine(
        lambda tokens: [10.0 * (i == len(tokens)) for i in range(100)],
        prefill_seconds=lambda request: 0.5 if kills(request) else 1.0,
        seconds_per_token=lambda request: 0.1,
        dies=kills,
    )


def mortal_router(
    kills: Callable[[GenerateRequest], bool], replicas: int, **settings: Any
) -> tuple[Router, list[int]]:
    """A router of engines, and the numbers of those that were started again, in order."""
    restarted: list[int] = []

    def again(number: int) -> ScriptedEngine:
        restarted.append(number)
        return mortal(kills)

    engines = [mortal(kills) for _ in range(replicas)]
    return Router(engines, factory=again, **settings), restarted


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize(("company", "kills"), [(0, 2), (1, 3), (40, 4)])
def test_a_request_that_engines_die_of_is_set_aside_and_all_others_are_answered(
    replicas: int, company: int, kills: int
) -> None:
    lethal = GenerateRequest("lethal", (6, 6, 6), SamplingParams(max_tokens=4))
    others = [GenerateRequest(str(n), (7, n), SamplingParams(max_tokens=4)) for n in range(company)]

    async def main() -> None:
        router, restarted = mortal_router(lambda asked: asked.prompt_ids[0] == 6, replicas)
        async with router, Flow("requests") as flow:
            good = [
                flow.start(router.generate(other), name=other.id)
                for other in others[: company // 2]
            ]
            with pytest.raises(
                LethalRequestError, match=r"died \d times while they .* request lethal \(3 tokens\)"
            ):
                await router.generate(lethal)
            good += [
                flow.start(router.generate(other), name=other.id)
                for other in others[company // 2 :]
            ]
            for number in range(3):
                with pytest.raises(LethalRequestError):
                    await router.generate(replace(lethal, id=f"again {number}"))
            for task in good:
                assert len((await task).token_ids) == 4
            await asyncio.sleep(10)
            assert LETHAL_DEATHS <= len(restarted) <= kills
            assert router.worker_count() == WorkerCount(
                "engine", replicas, replicas, len(restarted), set_aside=1
            )

    run_virtual(main)


def test_several_requests_that_kill_are_each_found_and_nobody_else_pays() -> None:
    async def main() -> None:
        router, restarted = mortal_router(lambda asked: asked.prompt_ids[0] == 6, 2)
        async with router, Flow("requests") as flow:
            prompts = [(6 if n % 7 == 3 else 7, n) for n in range(28)]
            asked = [
                GenerateRequest(str(prompt), prompt, SamplingParams(max_tokens=4))
                for prompt in prompts
            ]
            answers = [flow.start(outcome(router, one), name=one.id) for one in asked]
        assert [task.result() for task in answers] == [n % 7 != 3 for n in range(28)]
        assert len(restarted) <= 4 * 4

    async def outcome(router: Router, asked: GenerateRequest) -> bool:
        try:
            return len((await router.generate(asked)).token_ids) == 4
        except LethalRequestError:
            return False

    run_virtual(main)


@pytest.mark.parametrize("allowed", [0, 3, 8])
def test_an_engine_that_dies_whatever_it_is_asked_ends_the_run_after_its_restarts(
    allowed: int,
) -> None:
    restarted: list[int] = []

    async def main() -> None:
        router, again = mortal_router(lambda asked: True, 1, restarts=allowed)
        async with router:
            try:
                for number in range(1000):
                    with suppress(LethalRequestError):
                        await router.generate(replace(request(str(number)), seed=number))
            finally:
                restarted.extend(again)

    with pytest.raises(EngineDeadError, match=r"engine 0 keeps dying.*\(cluster.restarts\)"):
        run_virtual(main)
    assert len(restarted) == allowed


def test_restarts_with_answers_in_between_are_not_in_vain() -> None:
    async def main() -> None:
        router, restarted = mortal_router(lambda asked: False, 1, restarts=2)
        async with router:
            for number in range(20):
                assert len((await router.generate(request(str(number)))).token_ids) == 10
                router._evict(router._replicas[0], EngineDeadError("killed"))
            assert len(restarted) == 19

    run_virtual(main)


def test_restarts_in_vain_pause_longer_each_time() -> None:
    async def main() -> None:
        router, _ = mortal_router(lambda asked: True, 1, restarts=5)
        began: list[float] = []
        async with router:
            for number in range(5):
                router._evict(router._replicas[0], EngineDeadError(str(number)))
                await router._until_served()
                began.append(now())
        assert began == pytest.approx([0, 0.5, 1.5, 3.5, 7.5])

    run_virtual(main)


@pytest.mark.parametrize("later", [False, True])
def test_an_engine_that_does_not_start_in_time_ends_the_run_and_says_so(later: bool) -> None:
    class Loading(Probeable):
        async def __aenter__(self) -> "Loading":
            await asyncio.sleep(1e9)
            return self

    async def main() -> None:
        first: Probeable = probeable(dies_at=5.0) if later else Loading(lambda tokens: [1.0])
        async with Router(
            [first],
            factory=lambda number: Loading(lambda tokens: [1.0]),
            lease=5.0,
            start_seconds=60,
        ):
            await asyncio.sleep(1e6)

    with pytest.raises(
        StallError, match=r"engine 0 did not start within 60 s \(cluster.start_seconds\)"
    ):
        run_virtual(main)


def test_tokens_that_scorers_die_of_are_set_aside() -> None:
    class Scorer(ScriptedEngine):
        async def score(self, request: ScoreRequest) -> Scores:
            if request.token_ids[0] == 6:
                await self.__aexit__()
            return await super().score(request)

    def model(tokens: Sequence[int]) -> list[float]:
        return [1.0] * 8

    restarted: list[int] = []

    def again(number: int) -> Scorer:
        restarted.append(number)
        return Scorer(model)

    async def main() -> None:
        async with Router([Scorer(model)], factory=again) as router:
            for number in range(3):
                with pytest.raises(
                    LethalRequestError,
                    match="died 2 times while they worked on the score of lethal",
                ):
                    await router.score(ScoreRequest("lethal", (6, 1), 1))
                assert len((await router.score(ScoreRequest(str(number), (1, 1), 1))).logprobs) == 1
        assert restarted == [0, 0]

    run_virtual(main)


def test_an_engine_that_is_killed_twice_while_all_ask_the_same_loses_no_request() -> None:
    async def main() -> None:
        router, restarted = mortal_router(lambda asked: False, 1)
        async with router, Flow("requests") as flow:
            asked = [replace(request(str(number)), seed=number) for number in range(32)]
            answers = [flow.start(router.generate(one), name=one.id) for one in asked]
            for _ in range(2):
                await asyncio.sleep(1.2)
                router._evict(router._replicas[0], EngineDeadError("killed by hand"))
        assert [len(task.result().token_ids) for task in answers] == [10] * 32
        assert len(restarted) == 2
        assert router.worker_count().set_aside == 0

    run_virtual(main)


class Core(ScriptedEngine):
    """An engine with one queue for all work, as vLLM's core has: a probe waits behind new weights.

    `hangs_at`: the version whose staging never ends.
    """

    offers = EngineOffers(probes_while_busy=False)

    def __init__(self, stage_seconds: float = 0.0, hangs_at: int = -1) -> None:
        super().__init__(lambda tokens: [1.0], seconds_per_token=lambda request: 1.0)
        self._stage_seconds = stage_seconds
        self._hangs_at = hangs_at
        self._queue = asyncio.Lock()
        self.staged: list[int] = []
        self.frozen = False

    def stats(self) -> EngineStats:
        stats = super().stats()
        return replace(stats, generated_tokens=0) if self.frozen else stats

    async def stage_weights(self, weights: object, version: int) -> None:
        async with self._queue:
            await asyncio.sleep(1e9 if version == self._hangs_at else self._stage_seconds)
        self.staged.append(version)

    async def sleep(self) -> None:
        """Nothing to release."""

    async def update_weights(self, weights: Any, version: int) -> None:
        async with self._queue:
            await asyncio.sleep(self._stage_seconds)
        await super().update_weights(weights, version)

    async def probe(self) -> None:
        async with self._queue:
            pass


class BesideCore(Core):
    """The same, with a thread that answers probes whatever the queue does, until `stops_at`."""

    offers = EngineOffers(probes_while_busy=True)
    stops_at = math.inf

    async def probe(self) -> None:
        await asyncio.sleep(1e9 if now() >= self.stops_at else 0.0)


@pytest.mark.parametrize("kind", [Core, BesideCore])
def test_engines_that_take_new_weights_for_longer_than_their_lease_are_not_replaced(
    kind: type[Core],
) -> None:
    engines = [kind(stage_seconds=100.0) for _ in range(2)]

    async def main() -> None:
        async with Router(engines, factory=lambda number: kind(), lease=5.0) as router:
            for version in (1, 2):
                await router.stage_weights({}, version)
                await router.update_weights({}, version)
                assert now() == pytest.approx(200.0 * version)
            await asyncio.sleep(100)
            assert router.worker_count() == WorkerCount("engine", 2, 2, restarts=0)
            assert router.policy_version == 2

    run_virtual(main)
    assert [engine.staged for engine in engines] == [[1, 2], [1, 2]]


def test_an_engine_that_hangs_as_it_stages_is_replaced_at_the_updates_own_deadline() -> None:
    engines, spare = [Core(100.0), Core(100.0, hangs_at=1)], Core(100.0)

    async def main() -> None:
        async with (
            Router(engines, factory=lambda number: spare, lease=5.0, update_seconds=300) as router,
            Flow("requests") as flow,
        ):
            asked = [
                flow.start(router.generate(request(str(n), tokens=400)), name=str(n))
                for n in range(2)
            ]
            # The publisher's deadline is as long as the router's.
            with deadline("engine", "update_weights", 300):
                await router.stage_weights({}, 1)
            # The replacement, which is there at once, has staged them too.
            assert now() == pytest.approx(400.0)
            assert spare.staged == [1]
            await router.update_weights({}, 1)
            assert router.worker_count() == WorkerCount("engine", 2, 2, restarts=1)
            assert router.policy_version == 1
            # What the lost engine worked on is answered too.
            assert [len((await task).token_ids) for task in asked] == [400, 400]

    run_virtual(main)


def test_an_engine_that_hangs_as_it_is_interrupted_for_new_weights_is_replaced_too() -> None:
    class Stuck(Core):
        async def interrupt(self) -> None:
            await asyncio.sleep(1e9)

    async def main() -> None:
        async with Router(
            [Stuck(), Core()],
            update="abort_resume",
            factory=lambda number: Core(),
            update_seconds=300,
        ) as router:
            with deadline("engine", "update_weights", 300):
                await router.update_weights({}, 1)
            assert now() == pytest.approx(300.0)
            assert router.worker_count() == WorkerCount("engine", 2, 2, restarts=1)
            assert router.policy_version == 1

    run_virtual(main)


@pytest.mark.parametrize(
    ("seconds_per_context_token", "seconds"), [(0.0, 120.0), (0.005, 120 + 0.005 * 16384)]
)
def test_an_engine_whose_work_hangs_while_it_gives_signs_of_life_is_replaced(
    seconds_per_context_token: float, seconds: float
) -> None:
    hung, slow = BesideCore(), BesideCore()
    hung._max_context = slow._max_context = 20_000  # of which two times 8192 count
    hung._hang = lambda request: request.id != "first"
    slow._seconds_per_token = lambda request: 100.0  # slow, but not hanging
    replaced_at: list[float] = []

    def again(number: int) -> Core:
        replaced_at.append(now())
        return BesideCore()

    async def main() -> None:
        async with (
            Router(
                [hung, slow],
                factory=again,
                lease=5.0,
                answer_seconds=120,
                seconds_per_context_token=seconds_per_context_token,
            ) as router,
            Flow("requests") as flow,
        ):
            await router.generate(request("first", tokens=1))
            await asyncio.sleep(1000)  # without requests
            await router.sleep()
            asked = [
                flow.start(router.generate(request(str(n), tokens=20)), name=str(n))
                for n in range(2)
            ]
            await asyncio.sleep(1000)  # it cannot answer now
            await router.wake()
            woken = now()
            assert [len((await task).token_ids) for task in asked] == [20, 20]
            assert replaced_at == [pytest.approx(woken + seconds, abs=2)]

    run_virtual(main)


def test_a_sign_of_life_that_stops_in_the_middle_of_an_update_is_missed_within_the_lease() -> None:
    stopped, healthy = BesideCore(100.0), BesideCore(100.0)
    stopped.stops_at = 20.0
    replaced_at: list[float] = []

    def again(number: int) -> Core:
        replaced_at.append(now())
        return BesideCore(100.0)

    async def main() -> None:
        async with Router([stopped, healthy], factory=again, lease=5.0) as router:
            await router.stage_weights({}, 1)
            await router.update_weights({}, 1)
            assert router.worker_count() == WorkerCount("engine", 2, 2, restarts=1)

    run_virtual(main)
    assert replaced_at == [pytest.approx(20 + 5, abs=2)]


def test_staging_that_all_engines_died_of_is_done_by_their_replacements() -> None:
    class Dying(Core):
        async def stage_weights(self, weights: object, version: int) -> None:
            raise EngineDeadError("its machine is lost")

    spares: list[Core] = []

    def again(number: int) -> Core:
        spares.append(Core(1.0))
        return spares[-1]

    async def main() -> None:
        async with Router([Dying(), Dying()], factory=again, lease=5.0) as router:
            await router.stage_weights({}, 1)
            assert [spare.staged for spare in spares] == [[1], [1]]

        with pytest.raises(EngineDeadError, match="died in each of 3 attempts to stage version 1"):
            async with Router([Dying()], factory=lambda number: Dying(), lease=5.0) as router:
                await router.stage_weights({}, 1)

    run_virtual(main)


@pytest.mark.parametrize("busy_with", ["sleep", "weights", "start"])
def test_the_watchdog_spares_engines_that_cannot_answer_for_now(busy_with: str) -> None:
    engines = [Core(5000.0), Core(5000.0)]

    async def main() -> None:
        router = Router(
            engines,
            factory=lambda number: Starting(5000.0),
            start_seconds=9000,
            update_seconds=9000,
        )
        async with router, Flow("requests") as flow:
            answers = [
                flow.start(router.generate(request(str(n), tokens=20_000)), name=str(n))
                for n in range(2)
            ]
            await asyncio.sleep(1)
            for engine in engines:
                engine.frozen = True
            if busy_with == "sleep":
                await router.sleep()
            elif busy_with == "weights":
                flow.start(router.stage_weights({}, 1), name="stage")
            else:
                for replica in router._replicas:
                    router._evict(replica, EngineDeadError("killed"))
            for _ in range(3):
                await asyncio.sleep(1200)
                assert router.evict_unresponsive()
            assert router.worker_count().restarts == (2 if busy_with == "start" else 0)
            for task in answers:
                task.cancel()

    run_virtual(main)


class Starting(ScriptedEngine):
    """It takes `seconds` to start, and raises `error` then if there is one."""

    def __init__(self, seconds: float, error: Exception | None = None) -> None:
        super().__init__(lambda tokens: [1.0])
        self._seconds = seconds
        self._error = error
        self.ended = ""

    async def __aenter__(self) -> "Starting":
        try:
            await asyncio.sleep(self._seconds)
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise
        if self._error is not None:
            raise self._error
        return await super().__aenter__()

    async def __aexit__(self, *exc: object) -> None:
        self.ended = "closed"
        await super().__aexit__(*exc)


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 60),
        ({"starts_per_node": 3}, 3 * 60),
        ({"starts_per_node": 1}, 8 * 60),
        ({"starts_per_node": 1, "nodes": ["a", "b"] * 4}, 4 * 60),
    ],
)
def test_engines_start_side_by_side_a_few_at_a_time_on_each_machine(
    settings: dict[str, Any], seconds: float
) -> None:
    async def main() -> None:
        engines = [Starting(60.0) for _ in range(8)]
        # The wait for others is no part of a start.
        async with Router(engines, start_seconds=90, **settings) as router:
            assert now() == pytest.approx(seconds)
            assert router.worker_count() == WorkerCount("engine", 8, 8)

    run_virtual(main)


def test_engines_that_died_together_are_started_again_side_by_side() -> None:
    async def main() -> None:
        engines = [Starting(60.0) for _ in range(8)]
        async with Router(
            engines, factory=lambda number: Starting(60.0), starts_per_node=4
        ) as router:
            for replica in router._replicas:
                router._evict(replica, EngineDeadError("its rack lost power"))
            await asyncio.sleep(119)
            assert router.worker_count().alive == 4
            await asyncio.sleep(2)
            assert router.worker_count() == WorkerCount("engine", 8, 8, restarts=8)

    run_virtual(main)


class OutOfMemoryError(EngineError):
    """An error of a plug-in."""

    def __init__(self, device: int, gib: float) -> None:
        super().__init__(f"device {device} lacks {gib} GiB")


@pytest.mark.parametrize(
    "error",
    [
        EngineError("no memory"),
        OutOfMemoryError(3, 1.5),
        ConfigError("no such dtype"),
        RuntimeError("CUDA error"),
    ],
)
def test_an_engine_that_does_not_start_ends_the_start_of_the_others_and_is_named(
    error: Exception,
) -> None:
    engines = [Starting(60.0 * (1 + n), error if n == 3 else None) for n in range(6)]

    async def main() -> None:
        async with Router(engines):
            raise AssertionError("it has started")

    with pytest.raises(type(error), match=str(error)) as raised:
        run_virtual(main)
    told = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    assert "engine 3 of 6 did not start" in told
    assert [engine.ended for engine in engines] == ["closed"] * 3 + [""] + ["cancelled"] * 2


class Weighty(Core):
    """Notes what it is told."""

    def __init__(self, *, dies: bool = False) -> None:
        super().__init__(1.0)
        self.log: list[str] = []
        self.dies = dies

    async def sleep(self) -> int:
        self.log.append("sleeps")
        return 50

    async def wake_weights(self) -> int:
        self.log.append("wakes its weights")
        if self.dies:
            raise EngineDeadError("its machine is lost")
        return 30

    async def wake(self) -> None:
        self.log.append("wakes")

    async def update_weights(self, weights: Any, version: int) -> None:
        self.log.append(f"version {version}")
        await super().update_weights(weights, version)


@pytest.mark.parametrize("others", [0, 1])
def test_a_replica_that_dies_as_its_weights_wake_is_replaced_when_all_of_it_may_wake(
    others: int,
) -> None:
    """Also the only one: an update waits for no replacement that may not start."""
    engines = [Weighty(dies=True), *[Weighty() for _ in range(others)]]
    spares: list[Weighty] = []

    def again(number: int) -> Weighty:
        spares.append(Weighty())
        return spares[-1]

    async def main() -> None:
        async with Router(engines, factory=again) as router:
            assert await router.sleep() == 50
            assert await router.wake_weights() == (30 if others else None)
            await asyncio.sleep(600)
            await router.stage_weights({}, 1)
            await router.update_weights({}, 1)
            assert (spares, router.policy_version) == ([], 1)
            await router.wake()
            for name in range(2):
                answer = await router.generate(request(str(name), session=str(name)))
                assert set(answer.policy_versions) == {1}

    run_virtual(main)
    for engine in engines[1:]:
        assert engine.log == ["sleeps", "wakes its weights", "version 1", "wakes"]
    assert [spare.log for spare in spares] == [["version 1"]]
