"""Judges against a scripted endpoint: speed, cost, failures, order, and what they say of
themselves.
"""

import asyncio
import json
import logging
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.errors import ConfigError, RewardError
from agentrl.rewards.judge import RubricJudge
from agentrl.rewards.judge_pairwise import PairwiseJudge
from agentrl.rewards.judge_ranking import meetings, strengths, win_shares
from agentrl.scoring.part import RewardPart
from agentrl.scoring.pipeline import RewardPipeline
from agentrl.testing.judge_server import MODEL, JudgeCall, JudgeReply, JudgeServer
from agentrl.trajectory import Message, Task, Terminated, Trajectory
from tests.processes import PATIENCE_SECONDS
from tests.properties import examples

FAST = {"backoff": 0.01, "reasons": False, "concurrency": 8}


def trajectory(answer: str, options: Mapping[str, Any] | None = None) -> Trajectory:
    messages = (Message("user", "What is six times seven?"), Message("assistant", answer))
    return Trajectory(answer, Task("sums", 0, options or {}, answer), (), Terminated(), messages)


def rubric(server: JudgeServer, tmp_path: Path, **settings: Any) -> RubricJudge:
    criteria = {
        "correct": {"about": "The result is right.", "weight": 3},
        "copy": "It is copied from nowhere.",
    }
    shown = {
        "url": server.url,
        "cache": tmp_path / "judge.sqlite",
        "criteria": criteria,
        **FAST,
        **settings,
    }
    return RubricJudge(RubricJudge.Config.model_validate(shown))


def pairwise(server: JudgeServer, tmp_path: Path, **settings: Any) -> PairwiseJudge:
    shown = {
        "url": server.url,
        "cache": tmp_path / "judge.sqlite",
        "better": "Which is longer?",
        **FAST,
        **settings,
    }
    return PairwiseJudge(PairwiseJudge.Config.model_validate(shown))


def levels(correct: int, copy: int = 10, seconds: float = 0.0) -> JudgeReply:
    return JudgeReply.json({"levels": {"correct": correct, "copy": copy}}, seconds)


async def all_of(asked: Sequence[Awaitable[Any]]) -> list[Any]:
    async def one(awaitable: Awaitable[Any]) -> Any:
        return await awaitable

    async with asyncio.TaskGroup() as tasks:
        started = [tasks.create_task(one(awaitable)) for awaitable in asked]
    return [task.result() for task in started]


def script_of(*replies: JudgeReply) -> Callable[[JudgeCall], JudgeReply]:
    """These replies in turn, and the last one for ever."""
    return lambda call: replies[min(call.number, len(replies) - 1)]


def test_a_rubric_is_the_weighted_mean_of_its_levels_and_each_is_a_part(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            JudgeServer(lambda call: levels(5, 10)) as server,
            rubric(server, tmp_path) as judge,
        ):
            score = await judge.score(trajectory("42"))
            assert score.value == pytest.approx((3 * 0.5 + 1 * 1.0) / 4)
            assert score.parts == {"correct": 0.5, "copy": 1.0}
            (call,) = server.calls
            schema = call.body["response_format"]["json_schema"]
            assert schema["strict"]
            assert schema["schema"]["additionalProperties"] is False
            assert call.body["model"] == MODEL
            assert call.data["messages"][1] == {"role": "assistant", "content": "42"}

    asyncio.run(main())


def test_a_judges_reasons_are_the_words_of_its_scores(tmp_path: Path) -> None:
    async def main() -> None:
        reasoned = {"reason": "Right, and its own.", "levels": {"correct": 10, "copy": 10}}
        async with (
            JudgeServer(lambda call: JudgeReply.json(reasoned)) as server,
            rubric(server, tmp_path, reasons=True) as judge,
        ):
            pipeline = RewardPipeline([RewardPart(judge, "taste", 1.0)], deadline=30.0)
            score = await pipeline.score(trajectory("42"))
            assert score.explanations == {"taste": "Right, and its own."}
        chosen = {"reason": "It says more.", "better": "second"}
        async with (
            JudgeServer(lambda call: JudgeReply.json(chosen)) as server,
            pairwise(server, tmp_path, reasons=True) as judge,
        ):
            pipeline = RewardPipeline([RewardPart(judge, "best", 1.0)], deadline=30.0)
            scores = await pipeline.score_group([trajectory("4"), trajectory("42")], [score, score])
            assert scores[0].explanations == {
                "taste": "Right, and its own.",
                "best/shown before member 1": "second: It says more.",
                "best/shown after member 1": "second: It says more.",
            }

    asyncio.run(main())


def test_64_calls_are_under_way_at_once_and_the_same_again_cost_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        asked = [trajectory(f"answer {number}") for number in range(64)]
        async with JudgeServer(lambda call: levels(call.number % 11), together=64) as server:
            async with rubric(
                server, tmp_path, concurrency=64, prompt_price=10, completion_price=100
            ) as judge:
                first = await all_of([judge.score(each) for each in asked])
                assert server.most_live == 64
                metrics = judge.metrics()
                assert metrics["answers"] == 64
                assert metrics["cost"] == pytest.approx(64 * (100 * 10 + 10 * 100) / 1e6)
                assert 0 < metrics["latency_mean"] <= metrics["latency_max"]
                assert await all_of([judge.score(each) for each in asked]) == first
            async with rubric(
                server, tmp_path
            ) as resumed:  # another process would see the same file
                assert await all_of([resumed.score(each) for each in asked]) == first
                metrics = resumed.metrics()
                assert (metrics["cached"], metrics["answers"], metrics["cost"]) == (64, 0, 0)
                assert resumed.metrics()["cached"] == 0
            assert len(server.calls) == 64

    asyncio.run(main())


def test_a_judge_asks_by_a_client_of_the_callers_own_and_leaves_it_open(tmp_path: Path) -> None:
    app = FastAPI()
    keys: list[str] = []

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": MODEL}]}

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> dict[str, Any]:
        keys.append(request.headers["x-api-key"])
        message = {"role": "assistant", "content": json.dumps({"levels": {"clear": 10}})}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    async def main() -> None:
        config = RubricJudge.Config.model_validate(
            {
                "url": "http://judge",
                "cache": tmp_path / "judge.sqlite",
                "criteria": {"clear": "It is clear."},
                **FAST,
            }
        )
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, headers={"X-API-Key": "mine"}) as client:
            async with RubricJudge(config, client) as judge:
                assert (
                    await judge.score(trajectory("half of a surrogate pair: \ud800"))
                ).value == 1.0
            assert not client.is_closed
        assert keys == ["mine"]

    asyncio.run(main())


def test_a_run_is_told_what_its_judges_cost_by_their_names(tmp_path: Path) -> None:
    async def main() -> None:
        async with JudgeServer(lambda call: levels(7)) as server:
            one = RewardPart(lambda played: 1.0, "one")
            parts = [RewardPart(rubric(server, tmp_path, prompt_price=1e4), "style", 0.5), one]
            async with RewardPipeline(parts, deadline=60.0) as reward:
                score = await reward.score(trajectory("42"))
                assert score.parts["style"] == pytest.approx((3 * 0.7 + 1) / 4)
                assert reward.metrics()["scoring/style/cost"] == 1.0
                assert reward.metrics()["scoring/style/cost"] == 0.0
                assert reward.metrics()["scoring/style/total_cost"] == 1.0

    asyncio.run(main())


def test_the_same_question_asked_at_once_is_sent_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            JudgeServer(lambda call: levels(7, seconds=0.05)) as server,
            rubric(server, tmp_path) as judge,
        ):
            scores = await all_of([judge.score(trajectory("42")) for _ in range(20)])
            assert len({score.value for score in scores}) == 1
            assert len(server.calls) == 1

    asyncio.run(main())


def test_what_changes_the_question_is_asked_anew(tmp_path: Path) -> None:
    async def main() -> None:
        async with JudgeServer(lambda call: levels(7)) as server:
            for settings in (
                {},
                {"temperature": 0.5},
                {"about": "Sums."},
                {"levels": 12},
                {"extra_body": {"n": 1}},
            ):
                async with rubric(server, tmp_path, **settings) as judge:
                    await judge.score(trajectory("42"))
            assert len(server.calls) == 5

    asyncio.run(main())


@pytest.mark.parametrize(
    ("trouble", "kind"),
    [
        (JudgeReply(status=500), "busy"),
        (JudgeReply(status=429, retry_after="0.2"), "busy"),
        (JudgeReply("I would say 7 of 10."), "unreadable"),
        (JudgeReply.json({"levels": {"correct": 11, "copy": 3}}), "unreadable"),
        (JudgeReply.json({"levels": {"correct": 3}}), "unreadable"),
        (JudgeReply.json({"levels": {"correct": True, "copy": 1}}), "unreadable"),
        (JudgeReply.json({"levels": {"correct": 3, "copy": 1}, "value": 1.0}), "unreadable"),
        (JudgeReply('{"levels": {"correct": 3', finish_reason="length"), "unreadable"),
        (JudgeReply('{"levels": {"correct": 3, "correct": 10, "copy": 1}}'), "unreadable"),
        (
            JudgeReply(
                '{"levels": {"correct": 3, "copy": 1}, "levels": {"correct": 10, "copy": 10}}'
            ),
            "unreadable",
        ),
        (JudgeReply("x" * (9 << 20)), "unreadable"),
        (replace(levels(3), finish_reason="content_filter"), "unreadable"),
        (JudgeReply(fault="drop"), "unreachable"),
        (JudgeReply(fault="hang"), "unreachable"),
    ],
    ids=[
        "500",
        "429",
        "prose",
        "too high",
        "one missing",
        "no number",
        "one too many",
        "cut",
        "a key twice",
        "deep twice",
        "too long",
        "filtered",
        "dropped",
        "hung",
    ],
)
def test_what_is_no_verdict_is_counted_and_asked_again(
    trouble: JudgeReply, kind: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            JudgeServer(script_of(trouble, trouble, levels(10))) as server,
            rubric(
                server, tmp_path, timeout=1.0 if trouble.fault == "hang" else PATIENCE_SECONDS
            ) as judge,
        ):
            begun = time.perf_counter()
            score = await judge.score(trajectory("42"))
            assert score.value == 1.0
            assert len(server.calls) == 3
            assert judge.metrics()[kind] == 2
            if trouble.retry_after:
                assert time.perf_counter() - begun > 2 * 0.2
            assert len({call.user for call in server.calls}) == 3  # each with a key of its own

    asyncio.run(main())


@pytest.mark.parametrize("tokens", [10**400, -1, None, 5.5, "many"], ids=repr)
def test_a_verdict_counts_whatever_its_usage_says(tokens: Any, tmp_path: Path) -> None:
    async def main() -> None:
        odd = replace(levels(10), prompt_tokens=tokens)
        async with (
            JudgeServer(script_of(odd, levels(10))) as server,
            rubric(server, tmp_path, prompt_price=1e6) as judge,
        ):
            assert (await judge.score(trajectory("42"))).value == 1.0
            metrics = judge.metrics()
            assert (metrics["answers"], metrics["cost"], metrics["prompt_tokens"]) == (1, 0, 0)
            await judge.score(trajectory("43"))
            assert judge.metrics()["cost"] == 100

    asyncio.run(main())


NO_LEVELS = [
    "8.5",
    "8.5/10",
    '"8"',
    '"8.5/10"',
    '"8 or 9"',
    "NaN",
    "Infinity",
    "-1",
    "11",
    "1e1000",
    "true",
    "null",
    "[8]",
    "[]",
]


def test_a_number_that_is_no_level_is_no_verdict(tmp_path: Path) -> None:
    replies = [
        JudgeReply(f'{{"levels": {{"correct": {number}, "copy": 1}}}}') for number in NO_LEVELS
    ]
    replies += [JudgeReply("8.5/10"), JudgeReply("8 or 9"), JudgeReply("")]
    asked: set[int] = set()

    def script(call: JudgeCall) -> JudgeReply:
        number = int(call.data["messages"][1]["content"])
        again, _ = number in asked, asked.add(number)
        return levels(8) if again else replies[number]

    async def main() -> None:
        async with JudgeServer(script) as server, rubric(server, tmp_path) as judge:
            scores = await all_of(
                [judge.score(trajectory(str(number))) for number in range(len(replies))]
            )
            assert [score.parts["correct"] for score in scores] == [0.8] * len(replies)
            assert judge.metrics()["unreadable"] == len(replies)

    asyncio.run(main())


def test_a_pair_with_two_verdicts_has_none(tmp_path: Path) -> None:
    twice = JudgeReply('{"better": "first", "better": "second"}')

    async def main() -> None:
        server = JudgeServer(lambda call: twice if call.number < 2 else longer(call))
        async with server, pairwise(server, tmp_path) as judge:
            scores = await judge.score_group([trajectory("4"), trajectory("44")])
            assert [score.value for score in scores] == [0.0, 1.0]
            assert judge.metrics()["unreadable"] == 2

    asyncio.run(main())


def test_no_verdict_within_the_budget_is_a_reward_error_and_never_a_number(tmp_path: Path) -> None:
    async def main() -> None:
        async with JudgeServer(lambda call: JudgeReply("no idea")) as server:
            async with rubric(server, tmp_path, retries=2) as judge:
                with pytest.raises(
                    RewardError, match=r"asked 3 times .* does not fit|asked 3 times .* no Rubric"
                ):
                    await judge.score(trajectory("42"))
                assert len(server.calls) == 3
            server.script = lambda call: JudgeReply(status=429, retry_after="3600")
            async with rubric(server, tmp_path) as judge:
                # The hour is not waited for.
                with pytest.raises(RewardError, match="asked 1 times"):
                    await judge.score(trajectory("42"))
            server.script = lambda call: levels(3)
            async with rubric(server, tmp_path) as judge:
                assert (await judge.score(trajectory("42"))).parts[
                    "correct"
                ] == 0.3  # no failure was cached

    asyncio.run(main())


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [(400, RewardError, "refuses the question"), (401, ConfigError, "api_key_env")],
)
def test_what_asking_again_cannot_mend_is_asked_once(
    status: int, error: type[Exception], says: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            JudgeServer(lambda call: JudgeReply(status=status)) as server,
            rubric(server, tmp_path) as judge,
        ):
            with pytest.raises(error, match=says):
                await judge.score(trajectory("42"))
            assert len(server.calls) == 1

    asyncio.run(main())


def test_a_lost_judge_that_has_answered_is_asked_again_and_one_that_never_has_is_an_error(
    tmp_path: Path,
) -> None:
    gone = JudgeReply(status=404)

    async def main() -> None:
        async with JudgeServer(script_of(levels(3), gone, gone, levels(10))) as server:
            async with rubric(server, tmp_path) as judge:
                assert (await judge.score(trajectory("41"))).parts["correct"] == 0.3
                assert (await judge.score(trajectory("42"))).value == 1.0
                assert judge.metrics()["unreachable"] == 2
            server.script = lambda call: gone
            async with rubric(server, tmp_path) as judge:
                with pytest.raises(ConfigError, match="404"):
                    await judge.score(trajectory("43"))

    asyncio.run(main())


@pytest.mark.slow
def test_a_judge_that_goes_away_and_comes_back_is_waited_for(tmp_path: Path) -> None:
    async def main() -> None:
        server = JudgeServer(lambda call: levels(4, seconds=0.1))
        async with server, rubric(server, tmp_path, concurrency=4, retries=100) as judge:
            asking = asyncio.ensure_future(
                all_of([judge.score(trajectory(str(number))) for number in range(12)])
            )
            while len(server.calls) < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await server.stop()
            await asyncio.sleep(0.3)
            assert not asking.done()
            await server.start()
            assert [score.parts["correct"] for score in await asking] == [0.4] * 12
            assert judge.metrics()["unreachable"] >= 4

    asyncio.run(main())


@pytest.mark.slow
def test_a_question_that_is_given_up_gives_its_connection_back(tmp_path: Path) -> None:
    async def main() -> None:
        rng = random.Random(0)
        server = JudgeServer(lambda call: levels(4, seconds=0.004))
        async with server, rubric(server, tmp_path, concurrency=1, cache=None) as judge:
            for number in range(100):
                asked = asyncio.ensure_future(judge.score(trajectory(f"{number}")))
                await asyncio.sleep(rng.uniform(0, 0.01))
                asked.cancel()
                await asyncio.wait([asked])
            async with asyncio.timeout(60):
                assert (await judge.score(trajectory("at last"))).parts["correct"] == 0.4

    asyncio.run(main())


def test_no_more_requests_than_allowed_are_under_way_or_sent_in_a_minute(tmp_path: Path) -> None:
    async def main() -> None:
        asked = [trajectory(f"{number}") for number in range(12)]
        async with JudgeServer(lambda call: levels(4, seconds=0.03)) as server:
            async with rubric(server, tmp_path, concurrency=3) as judge:
                await all_of([judge.score(each) for each in asked])
                assert server.most_live == 3
            async with rubric(server, tmp_path, cache=None, requests_per_minute=60 / 0.03) as judge:
                begun = time.perf_counter()
                await all_of([judge.score(each) for each in asked])
                assert time.perf_counter() - begun >= 12 * 0.03  # the list of models was the first

    asyncio.run(main())


def test_a_judge_that_always_says_first_gives_equal_scores(tmp_path: Path) -> None:
    async def main() -> None:
        server = JudgeServer(lambda call: JudgeReply.json({"better": "first"}))
        async with server, pairwise(server, tmp_path) as judge:
            scores = await judge.score_group([trajectory("4" * number) for number in range(1, 6)])
            assert [score.value for score in scores] == [0.5] * 5
            assert judge.metrics()["swayed_by_order"] == 1.0
            assert len(server.calls) == 5 * 4

    asyncio.run(main())


def longer(call: JudgeCall) -> JudgeReply:
    """A fair judge."""
    first, second = (len(call.data[name][1]["content"]) for name in ("first", "second"))
    return JudgeReply.json(
        {"better": "first" if first > second else "second" if second > first else "tie"}
    )


@pytest.mark.parametrize("opponents", [None, 2])
def test_a_fair_judge_ranks_the_group_and_equal_texts_tie_unasked(
    opponents: int | None, tmp_path: Path
) -> None:
    async def main() -> None:
        async with (
            JudgeServer(longer) as server,
            pairwise(server, tmp_path, opponents=opponents) as judge,
        ):
            scores = await judge.score_group(
                [trajectory("4" * number) for number in (3, 1, 6, 2, 5, 4, 4)]
            )
            values = [score.value for score in scores]
            assert values[1] == min(values)
            assert values[2] == max(values)
            assert judge.metrics()["swayed_by_order"] == 0
            if opponents is None:
                assert values == pytest.approx([2 / 6, 0, 1, 1 / 6, 5 / 6, 3.5 / 6, 3.5 / 6])
                assert len(server.calls) == 6 * 5  # six different texts
            else:
                assert len(server.calls) < 6 * 5

    asyncio.run(main())


def test_a_failed_pair_fails_the_group_and_only_it_is_asked_again(tmp_path: Path) -> None:
    def script(call: JudgeCall) -> JudgeReply:
        failing = call.data["first"][1]["content"] == "4" and len(server.calls) <= 12
        return JudgeReply("no idea") if failing else longer(call)

    server = JudgeServer(script)

    async def main() -> None:
        group = [trajectory("4" * number) for number in range(1, 5)]
        async with server, pairwise(server, tmp_path, retries=0) as judge:
            with pytest.raises(RewardError, match="no verdict"):
                await judge.score_group(group)
            assert len(server.calls) == 12
            values = [score.value for score in await judge.score_group(group)]
            assert values == pytest.approx([0, 1 / 3, 2 / 3, 1])
            assert len(server.calls) == 12 + 3
            with pytest.raises(ConfigError, match="group_size"):
                await judge.score_group(group[:1])

    asyncio.run(main())


def test_the_key_stands_in_no_file_no_log_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    secret = "sk-a-secret-of-the-user"
    caplog.set_level(logging.DEBUG)

    async def main() -> list[str]:
        said: list[str] = []
        async with JudgeServer(lambda call: levels(4), api_key=secret) as server:
            with pytest.raises(ConfigError, match="401") as refused:
                await rubric(server, tmp_path).__aenter__()
            said.append(str(refused.value))
            with pytest.raises(ConfigError, match="no such environment variable"):
                await rubric(server, tmp_path, api_key_env="NO_SUCH_KEY").__aenter__()
            monkeypatch.setenv("JUDGE_KEY", secret + "-no-longer-valid")
            with pytest.raises(ConfigError, match=r"\*\*\*") as refused:
                await rubric(server, tmp_path, api_key_env="JUDGE_KEY").__aenter__()
            said.append(str(refused.value))
            monkeypatch.setenv("JUDGE_KEY", f"{secret}\nand-more")
            with pytest.raises(ConfigError, match="JUDGE_KEY") as refused:
                await rubric(server, tmp_path, api_key_env="JUDGE_KEY").__aenter__()
            said.append(str(refused.value))
            monkeypatch.setenv("JUDGE_KEY", f"{secret}\n")  # as files end
            judge = rubric(server, tmp_path, api_key_env="JUDGE_KEY")
            async with judge:
                await judge.score(trajectory("42"))
            assert len(server.calls) == 1
            said.append(repr(vars(judge)) + str(judge._config.model_dump()))
        return said

    said = [
        *asyncio.run(main()),
        caplog.text,
        *(path.read_bytes().decode("latin1") for path in tmp_path.iterdir()),
    ]
    assert len(said) >= 5
    assert [text for text in said if secret in text] == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"url": "localhost:8000"}, "write an address"),
        ({"url": "https://user:password@host/v1"}, "no secrets"),
        ({"url": "https://host/v1?key=secret"}, "no secrets"),
        ({"url": "https://host/v1/chat/completions"}, "only the part before"),
        ({"criteria": {}}, "at least 1"),
        ({"criteria": {"Bad Name": "x"}}, "pattern"),
        ({"criteria": {"a": {"about": "x", "weight": 0}}}, "greater than 0"),
        ({"levels": 0}, "greater than or equal to 1"),
        ({"modle": "x"}, "Extra inputs"),
    ],
)
def test_wrong_settings_are_refused_before_anything_starts(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValidationError, match=says):
        RubricJudge.Config.model_validate(
            {"url": "http://localhost", "criteria": {"a": "b"}, **settings}
        )


def test_an_endpoint_that_cannot_work_is_found_on_entering(tmp_path: Path) -> None:
    async def main() -> None:
        async with JudgeServer(lambda call: levels(4)) as server:
            with pytest.raises(ConfigError, match=f"serves {MODEL}"):
                await rubric(server, tmp_path, model="another").__aenter__()
            (tmp_path / "text").write_text("no database, and longer than a header of one " * 10)
            with pytest.raises(ConfigError, match="Name another file"):
                await rubric(server, tmp_path, cache=tmp_path / "text").__aenter__()
            judge = rubric(server, tmp_path, reference="answer")
            with pytest.raises(ConfigError, match="async with"):
                await judge.score(trajectory("42", {"answer": "42"}))
            async with judge:
                await judge.score(trajectory("42", {"answer": "42"}))
                assert server.calls[0].data["right_answer"] == "42"
                with pytest.raises(ConfigError, match="reference"):
                    await judge.score(trajectory("42"))
        with pytest.raises(ConfigError, match="asked 3 times"):
            await rubric(server, tmp_path, retries=2).__aenter__()

    asyncio.run(main())


def test_an_endpoint_without_a_list_of_models_is_believed_to_serve_the_one_that_is_named(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with JudgeServer(lambda call: levels(4), lists_models=False) as server:
            with pytest.raises(ConfigError, match="name one with `model`"):
                await rubric(server, tmp_path).__aenter__()
            async with rubric(server, tmp_path, model="gpt-9") as judge:
                await judge.score(trajectory("42"))
            assert server.calls[0].body["model"] == "gpt-9"

    asyncio.run(main())


def test_a_server_may_say_by_a_date_when_it_wants_to_be_asked_again(tmp_path: Path) -> None:
    past, next_week = (
        format_datetime(datetime.now(UTC) + timedelta(days=days), usegmt=True) for days in (-2, 7)
    )
    no_zone = f"{past.removesuffix('GMT')}+{'9' * 20}"
    # It ends in -0000.
    without_zone = format_datetime(datetime.now(UTC).replace(tzinfo=None) - timedelta(days=2))
    busy = [
        JudgeReply(status=429, retry_after=when)
        for when in (past, without_zone, "soon", "-5", "nan", no_zone, next_week)
    ]

    async def main() -> None:
        async with JudgeServer(script_of(*busy)) as server, rubric(server, tmp_path) as judge:
            # The week is longer than the budget.
            with pytest.raises(RewardError, match="asked 7 times"):
                await judge.score(trajectory("42"))

    asyncio.run(main())


def test_only_the_question_and_the_last_answer_are_shown_where_that_is_wanted(
    tmp_path: Path,
) -> None:
    talk = [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "thinks"),
        ("tool", "t"),
        ("assistant", "a"),
    ]
    long = Trajectory(
        "t", Task("sums", 0), (), Terminated(), tuple(Message(role, text) for role, text in talk)
    )

    async def main() -> None:
        async with JudgeServer(lambda call: levels(4)) as server:
            for show, seen in (
                ("transcript", ["s", "q", "thinks", "t", "a"]),
                ("answer", ["q", "a"]),
            ):
                async with rubric(server, tmp_path, show=show) as judge:
                    await judge.score(long)
                assert [message["content"] for message in server.calls[-1].data["messages"]] == seen

    asyncio.run(main())


matrices = st.integers(2, 7).flatmap(
    lambda size: st.tuples(
        st.just(size),
        st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]), min_size=21, max_size=21),
    )
)


@given(matrices)
@examples(30)
def test_win_shares_sum_to_half_of_the_group_and_bradley_terry_agrees(
    drawn: tuple[int, list[float]],
) -> None:
    size, results = drawn
    points = dict(zip(meetings(size), results, strict=False))
    shares = win_shares(points, size)
    assert sum(shares) == pytest.approx(size / 2)
    strength = strengths(points, size)
    for i in range(size):
        for j in range(size):
            if shares[i] > shares[j] + 1e-9:  # of a whole tournament, both give the same order
                assert strength[i] > strength[j]


def test_a_ring_finds_who_only_met_weak_ones() -> None:
    # 0 > 1 > 2 > 3 > 4 > 5.
    beaten = {
        (0, 1): 1.0,
        (1, 2): 1.0,
        (2, 3): 1.0,
        (3, 4): 1.0,
        (4, 5): 1.0,
        (0, 5): 1.0,
    }
    shares = win_shares(beaten, 6)
    assert shares[0] == max(shares)
    assert shares[5] == min(shares)
    assert sum(shares) == pytest.approx(3.0)
    assert meetings(6, 1) == sorted(beaten)
    assert len(meetings(6)) == len(meetings(6, 99)) == 15


SERVER = """
import asyncio, sys
from agentrl.testing.judge_server import JudgeServer, JudgeReply
async def main():
    script = lambda call: JudgeReply.json({"levels": {"correct": 9, "copy": 9}}, seconds=0.2)
    async with JudgeServer(script, port=int(sys.argv[1])):
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.mark.slow
def test_a_judge_process_that_is_killed_in_the_middle_is_waited_for_and_no_score_is_made_up(
    tmp_path: Path,
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port)], env={**os.environ, "PYTHONPATH": ""}
        )

    async def main() -> None:
        process = start()
        try:
            settings = {
                "url": f"http://127.0.0.1:{port}",
                "criteria": {"correct": "Right.", "copy": "Own."},
                **FAST,
            }
            config = {
                **settings,
                "cache": tmp_path / "judge.sqlite",
                "concurrency": 8,
                "retries": 1000,
            }
            async with RubricJudge(RubricJudge.Config.model_validate(config)) as judge:
                asking = asyncio.ensure_future(
                    all_of([judge.score(trajectory(str(n))) for n in range(64)])
                )
                await asyncio.sleep(0.6)
                process.send_signal(signal.SIGKILL)
                process.wait()
                await asyncio.sleep(0.5)
                assert not asking.done()
                process = start()
                assert {score.value for score in await asking} == {0.9}
                metrics = judge.metrics()
                assert metrics["answers"] == 64
                assert metrics["unreachable"] >= 8
        finally:
            process.kill()
            process.wait()

    asyncio.run(main())
