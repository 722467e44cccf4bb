"""Google's `generateContent`, as its clients send it."""

from typing import Any

import httpx
import pytest

from agentrl.trajectory import Terminated
from tests.gateway.served import CALL, RENDERER, TOOL, loads, saying, served
from tests.processes import PATIENCE_SECONDS

DECLARED = {
    "functionDeclarations": [
        {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "OBJECT",
                "properties": {"a": {"type": "INTEGER"}, "b": {"type": "INTEGER"}},
            },
        }
    ]
}


def talk(assignment) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"{assignment.url}/v1beta/models",
        headers={"x-goog-api-key": assignment.api_key},
        timeout=PATIENCE_SECONDS,
    )


def user(text: str) -> dict:
    return {"role": "user", "parts": [{"text": text}]}


def events_of(answer: httpx.Response) -> list[dict]:
    return [loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line]


def contents_of(answer: httpx.Response, way: str) -> list[dict]:
    """The contents of an answer, which a client sends back: those of a stream one by one."""
    assert answer.status_code == 200, answer.text
    given = events_of(answer) if way.endswith("alt=sse") else answer.json()
    responses = given if isinstance(given, list) else [given]
    assert responses[-1]["candidates"][0]["finishReason"] == "STOP"
    return [response["candidates"][0]["content"] for response in responses]


@pytest.mark.parametrize("ids", [True, False], ids=["ids", "no ids"])
@pytest.mark.parametrize(
    "way", ["generateContent", "streamGenerateContent?alt=sse", "streamGenerateContent"]
)
def test_calls_of_tools_extend_one_conversation(way, ids):
    text = "Let me see, twice. " * 3 + f"\n{CALL}\n{CALL}"

    async def play(assignment):
        async with talk(assignment) as client:
            body: dict[str, Any] = {
                "system_instruction": {"parts": [{"text": "You add."}]},
                "contents": [user("2 + 3, and 2 + 3?")],
                "tools": [DECLARED],
                "generationConfig": {"temperature": 1, "maxOutputTokens": 500},
            }
            answer = await client.post(f"/policy:{way}", json=body)
            said = contents_of(answer, way)
            parts = [part for content in said for part in content["parts"]]
            assert "".join(part.get("text", "") for part in parts) == text.partition(" \n")[0]
            calls = [part["functionCall"] for part in parts if "functionCall" in part]
            assert [call["args"] for call in calls] == [{"a": 2, "b": 3}] * 2
            assert len({call["id"] for call in calls}) == 2
            results = []
            for place, call in enumerate(calls):
                result = {"name": "add", "response": {"output": f"{place}: 5"}}
                results.append({"functionResponse": result | ({"id": call["id"]} if ids else {})})
                if not ids:
                    del call["id"]
            body["contents"] += [*said, {"role": "user", "parts": results}]
            said = contents_of(await client.post(f"/policy:{way}", json=body), way)
            assert "".join(part["text"] for one in said for part in one["parts"]) == "5"
        return 1.0

    trajectory, session = served(play, saying(text, "5"))
    assert trajectory.status == Terminated()
    assert [call.kind for call in session.tree.calls] == ["start", "extension"]
    told = [RENDERER.answer_text(turn.completion.token_ids) for turn in trajectory.turns]
    assert told == [text, "5"]
    results = [message for message in trajectory.messages if message.role == "tool"]
    assert [message.content for message in results] == ["0: 5", "1: 5"]
    assert trajectory.messages[0].content == "You add."


def test_a_tool_is_shown_to_the_model_as_by_the_other_protocols():
    prompts = []

    async def play(assignment):
        async with talk(assignment) as client:
            await client.post(
                "/policy:generateContent", json={"contents": [user("hi")], "tools": [DECLARED]}
            )
            asked = {
                "model": "policy",
                "tools": [TOOL],
                "messages": [{"role": "user", "content": "hi"}],
            }
            await client.post(f"{assignment.base_url}/chat/completions", json=asked)
        return 1.0

    _, session = served(play, saying("yes"))
    prompts = [call.prompt_ids.tolist() for call in session.tree.calls]
    assert prompts[0] == prompts[1]


def test_lengths_and_models_are_told():
    async def play(assignment):
        async with talk(assignment) as client:
            body, listing = {"contents": [user("Which way?")]}, f"{assignment.url}/v1beta/models"
            counted = (await client.post("/policy:countTokens", json=body)).json()
            inner = {"generateContentRequest": {"model": "models/policy", **body}}
            assert (await client.post("/policy:countTokens", json=inner)).json() == counted
            whole = (await client.post("/policy:generateContent", json=body)).json()
            used = whole["usageMetadata"]
            assert used["promptTokenCount"] == counted["totalTokens"]
            assert used["candidatesTokenCount"] == len("left") + 1
            assert used["totalTokenCount"] == counted["totalTokens"] + len("left") + 1
            (listed,) = (await client.get(listing)).json()["models"]
            assert listed["name"] == "models/policy"
            assert listed["inputTokenLimit"] == 100_000
            assert (await client.get("/other")).json()["name"] == "models/other"
            for_it = f"{assignment.url}/v1/models/policy"  # where OpenAI's clients look, too
            assert (await client.get(for_it)).json()["name"] == "models/policy"
            key = {"key": client.headers.pop("x-goog-api-key")}
            assert (await client.get(listing, params=key)).status_code == 200
            answer = await client.post("/policy:generateContent", params=key, json=body)
            assert answer.status_code == 200
        return 1.0

    assert len(served(play, saying("left"))[0].turns) == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"googleSearch": {}}]}, "the tool googleSearch"),
        ({"tools": [{"functionDeclarations": 5}]}, "tools.0.functionDeclarations"),
        ({"tools": [{"functionDeclarations": [{"description": "a"}]}]}, "has no name"),
        ({"tools": [{"functionDeclarations": [{"name": 5}]}]}, "functionDeclarations.0.name"),
        ({"tools": [{"functionDeclarations": [{"name": "f", "description": 5}]}]}, "description"),
        ({"cachedContent": "x"}, "cachedContent"),
        ({"generationConfig": {"presencePenalty": 1}}, "presencePenalty"),
        ({"generationConfig": {"topP": "x"}}, "generationConfig.topP"),
        ({"generationConfig": {"responseMimeType": "application/json"}}, "a format of answers"),
        ({"contents": [{"parts": [{"inlineData": {"data": ""}}]}]}, "contents[0]: picture 0 of"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "x"}}]}]}, "contents[0]: fileData"),
        ({"contents": [user("a"), {"role": "model", "parts": [{"text": "b"}]}]}, "a last message"),
        ({"contents": []}, "no message"),
        ({"contents": None}, "no message"),
        ({"contents": {"role": "model", "other": 1}}, "no message"),
        ({"contents": "hi"}, "contents"),
        ({"contents": [user("x" * 200_000)]}, "the context holds"),
    ],
)
def test_what_is_not_supported_is_refused_in_googles_form(fields, named):
    async def play(assignment):
        async with talk(assignment) as client:
            body = {"contents": [user("hi")], **fields}
            answer = await client.post("/policy:generateContent", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["status"]) == (
                400,
                400,
                "INVALID_ARGUMENT",
            )
            assert named in error["message"]
            wrong = await client.post(
                "/policy:generateContent", json=body, headers={"x-goog-api-key": "no"}
            )
            assert wrong.json()["error"]["status"] == "UNAUTHENTICATED"
            lost = await client.post("/policy:embedContent", json=body)
            assert lost.json()["error"]["status"] == "NOT_FOUND"
            assert "Calls go to" in lost.json()["error"]["message"]
            options = await client.options("/policy:generateContent")
            assert (options.status_code, options.headers["allow"]) == (405, "POST")
        return 1.0

    served(play, saying("hi"))
