"""Programs that break connections, send nonsense, or look for the episodes of others."""

import asyncio
import json
import re
import sys
from pathlib import Path

import httpx
import pytest

from agentrl.gateway.config import GatewayConfig
from agentrl.trajectory import Failed, Terminated
from tests.gateway.served import saying, served
from tests.processes import PATIENCE_SECONDS

BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def client_of(assignment, key=None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {key or assignment.api_key}"}
    return httpx.AsyncClient(
        base_url=assignment.base_url, headers=headers, timeout=PATIENCE_SECONDS
    )


@pytest.mark.parametrize("streams", [False, True])
def test_a_connection_that_breaks_before_the_answer_costs_no_second_sample(streams):
    asked = asyncio.Event()

    def seconds(request):
        asked.set()
        return 0.5

    engine = saying("left", prefill_seconds=seconds)

    async def play(assignment):
        body = BODY | {"stream": streams}
        async with client_of(assignment) as client, asyncio.TaskGroup() as group:
            broken = group.create_task(client.post("/chat/completions", json=body))
            await asked.wait()
            broken.cancel()
        async with client_of(assignment) as client:
            assert "left" in (await client.post("/chat/completions", json=body)).text
        return 1.0

    trajectory, session = served(play, engine)
    assert trajectory.status == Terminated()
    assert len(engine.requests) == len(session.tree.calls) == len(trajectory.turns) == 1
    assert not trajectory.dropped


def test_an_answer_to_a_connection_that_is_gone_is_not_trained_on():
    asked = asyncio.Event()

    def seconds(request):
        asked.set()
        return 0.2

    async def play(assignment):
        async with client_of(assignment) as client, asyncio.TaskGroup() as group:
            broken = group.create_task(client.post("/chat/completions", json=BODY))
            await asked.wait()
            broken.cancel()
        async with client_of(assignment) as client:
            other = BODY | {"messages": [{"role": "user", "content": "something else"}]}
            await client.post("/chat/completions", json=other)
        return 1.0

    trajectory, _ = served(play, saying("left", "right", prefill_seconds=seconds))
    assert len(trajectory.turns) == 1
    assert trajectory.dropped == {"unseen": (1, 5)}


def asked_with_arguments(arguments: str) -> bytes:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return json.dumps(
        BODY | {"messages": [{"role": "assistant", "tool_calls": [call]}, *BODY["messages"]]}
    ).encode()


@pytest.mark.parametrize(
    ("content", "status", "error"),
    [
        (b"{", 400, "not JSON"),
        (b"[]", 400, "JSON object"),
        (b"null", 400, "JSON object"),
        (b"{}", 400, "required"),
        (b'{"model": "m", "messages": 5}', 400, "messages"),
        (b'{"messages": []}', 400, "model: Field required"),
        (b'{"model": "m", "messages": [], "n": 1.5}', 400, "n: Input should be a valid integer"),
        (b'{"model": "m", "messages": [5]}', 400, "messages"),
        (b'{"model": "m", "messages": [{"role": "user", "content": {"a": 1}}]}', 400, "messages"),
        (b'{"model": "m", "messages": [{"role": "user"}]}', 400, "content"),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "n": 99}',
            400,
            "n is 99",
        ),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', 400, "surrogate"),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": -1}',
            400,
            "max_tokens",
        ),
        (b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "n": 0}', 400, "n"),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "stop": [""]}',
            400,
            "stop",
        ),
        (
            b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "temperature": NaN}',
            400,
            "not JSON",
        ),
        (asked_with_arguments("[" * 5_000), 400, "arguments of the call 'x'"),
        (asked_with_arguments('{"a": ' + "[" * 300 + "]" * 300 + "}"), 400, "too deep nesting"),
        (asked_with_arguments('{"a": 1e400}'), 400, "infinite number"),
        (b"x" * 20_000, 413, "longer than"),
        (b"[" * 10_000, 400, "not JSON"),
    ],
)
def test_nonsense_is_refused_and_harms_no_episode(content, status, error):
    async def play(assignment):
        async with client_of(assignment) as client:
            refused = await client.post("/chat/completions", content=content)
            assert (refused.status_code, error in refused.json()["error"]["message"]) == (
                status,
                True,
            ), refused.text
            assert (await client.post("/chat/completions", json=BODY)).status_code == 200
        return 1.0

    trajectory, _ = served(play, saying("left"), config=GatewayConfig(max_body_bytes=16_384))
    assert trajectory.status == Terminated()


def test_a_page_of_another_site_may_send_nothing_and_is_told_so_by_each_protocol():
    async def play(assignment):
        async with client_of(assignment) as client:
            of_a_page = {"origin": "http://evil.example"}
            refused = await client.post("/chat/completions", json=BODY, headers=of_a_page)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
            refused = await client.post("/messages", json=BODY, headers=of_a_page)
            assert refused.json()["type"] == "error"
            assert refused.json()["error"]["type"] == "permission_error"
            await client.post("/chat/completions", json=BODY)
        return 1.0

    assert served(play, saying("left"))[0].status == Terminated()


def test_a_reward_with_endless_fields_is_refused_unread_and_another_says_three_of_them():
    fields = {f"field{number}": 1 for number in range(5000)}

    async def play(assignment):
        async with client_of(assignment) as client:
            url = f"{assignment.url}/v1/rewards"
            refused = await client.post(url, json={"reward": 1.0, **fields})
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                413,
                "request_too_large",
            )
            few = dict([*fields.items()][:50])
            refused = await client.post(url, json={"reward": 1.0, **few})
            assert refused.json()["error"]["message"] == "; ".join(
                f"field{number}: Extra inputs are not permitted" for number in range(3)
            )
            await client.post("/chat/completions", json=BODY)

    trajectory, session = served(play, saying("left"))
    assert session.outcome is None
    assert isinstance(trajectory.status, Failed)  # no reward came


def test_of_keys_in_several_headers_one_that_is_there_counts_and_the_same_one_at_all_paths():
    async def play(assignment):
        key, asked = assignment.api_key, {**BODY, "max_tokens": 5}
        told = [
            [("authorization", "Bearer"), ("x-api-key", key)],
            [("x-goog-api-key", ""), ("authorization", f"Bearer {key}")],
            [("authorization", f"Bearer {key}"), ("authorization", "Bearer of another")],
            [("authorization", "Bearer of another"), ("authorization", f"Bearer {key}")],
        ]
        async with httpx.AsyncClient(base_url=assignment.url, timeout=PATIENCE_SECONDS) as client:
            statuses = [
                [
                    (await client.post(path, json=body, headers=headers)).status_code
                    for path, body in (
                        ("/v1/chat/completions", asked),
                        ("/v1/messages/count_tokens", BODY),
                    )
                ]
                for headers in told
            ]
        assert statuses == [[200, 200], [200, 200], [200, 200], [401, 401]]
        return 1.0

    assert served(play, saying("left"))[0].status == Terminated()


def test_a_request_id_that_comes_with_another_count_or_protocol_is_a_conflict():
    async def play(assignment):
        async with client_of(assignment) as client:
            client.headers["idempotency-key"] = "one"
            path, twice = "/chat/completions", {**BODY, "n": 2}
            assert (await client.post(path, json=twice)).status_code == 200
            refused = await client.post(path, json=BODY)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                409,
                "idempotency_mismatch",
            )
            # There, an answer has one choice.
            refused = await client.post("/messages", json={**BODY, "max_tokens": 4096})
            assert refused.status_code == 409
            choices = (await client.post(path, json=twice)).json()["choices"]
            assert [choice["message"]["content"] for choice in choices] == ["left", "left"]
        return 1.0

    engine = saying("left")
    assert served(play, engine)[0].status == Terminated()
    assert len(engine.requests) == 2


@pytest.mark.parametrize(
    "examples", [pytest.param(1, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.long)]
)
def test_schemathesis_finds_nothing(examples, tmp_path):
    async def play(assignment):
        async with client_of(assignment) as client:
            for path in ("/chat/completions", "/messages", "/responses"):
                # The first request of a protocol loads its types.
                await client.post(path, json=BODY)
        run = await asyncio.create_subprocess_exec(
            str(Path(sys.executable).with_name("st")),
            "run",
            f"{assignment.url}/openapi.json",
            f"--header=Authorization: Bearer {assignment.api_key}",
            # the schema does not say which fields are refused
            "--exclude-checks=positive_data_acceptance",
            f"--max-examples={examples}",
            "--seed=1",
            "--no-color",
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output = (await run.communicate())[0].decode()
        assert run.returncode == 0, output
        generated, passed = re.findall(r"(\d+) generated, (\d+) passed", output)[0]
        assert generated == passed
        return 1.0

    assert served(play, saying("left"), seconds=PATIENCE_SECONDS)[0].status == Terminated()
