"""The loop that people write around the openai package: tools until the model answers."""

import json
import os

from openai import OpenAI

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]
task = json.loads(os.environ["AGENTRL_TASK"])
a, b = task["seed"] % 7, task["seed"] % 11
messages = [
    {"role": "system", "content": "You add."},
    {"role": "user", "content": f"What is {a} + {b}?"},
]
client = OpenAI()
for _ in range(4):
    answer = (
        client.chat.completions.create(model="policy", messages=messages, tools=TOOLS)
        .choices[0]
        .message
    )
    messages.append(answer)
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        given = json.loads(call.function.arguments)
        messages.append(
            {"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])}
        )
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump(float(answer.content == str(a + b)), file)
