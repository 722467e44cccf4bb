"""The loop that people write around the anthropic package, with streams: tools until the model
answers.
"""

import json
import os

from anthropic import Anthropic

TOOLS = [
    {
        "name": "add",
        "description": "Add two numbers.",
        "input_schema": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    }
]
task = json.loads(os.environ["AGENTRL_TASK"])
a, b = task["seed"] % 7, task["seed"] % 11
messages = [{"role": "user", "content": f"What is {a} + {b}?"}]
client = Anthropic()
for _ in range(4):
    with client.messages.stream(
        model="policy", max_tokens=1024, system="You add.", messages=messages, tools=TOOLS
    ) as stream:
        answer = stream.get_final_message()
    messages.append({"role": "assistant", "content": answer.content})
    results = [
        {
            "type": "tool_result",
            "tool_use_id": block.id,
            "content": str(block.input["a"] + block.input["b"]),
        }
        for block in answer.content
        if block.type == "tool_use"
    ]
    if not results:
        break
    messages.append({"role": "user", "content": results})
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump(float("".join(block.text for block in answer.content) == str(a + b)), file)
