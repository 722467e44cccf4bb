"""The loop that people write around the google-genai package, with a chat, streams and a function
that its library calls.
"""

import json
import os

from google import genai
from google.genai import types


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


task = json.loads(os.environ["AGENTRL_TASK"])
a, b = task["seed"] % 7, task["seed"] % 11
client = genai.Client()
config = types.GenerateContentConfig(system_instruction="You add.", tools=[add])
chat = client.chats.create(model="policy", config=config)
question = f"What is {a} + {b}?"
assert client.models.count_tokens(model="policy", contents=question).total_tokens > 0
found = client.models.get(model="policy").name
assert found == "models/policy", found
if task["seed"] % 2:
    said = chat.send_message(question).text
else:
    said = "".join(chunk.text or "" for chunk in chat.send_message_stream(question))
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump(float(said == str(a + b)), file)
