"""pydantic-ai: an agent with a tool, with chat completions."""

import json
import os

from pydantic_ai import Agent

agent = Agent("openai-chat:policy", instructions="You add.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


task = json.loads(os.environ["AGENTRL_TASK"])
a, b = task["seed"] % 7, task["seed"] % 11
result = agent.run_sync(f"What is {a} + {b}?")
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump(float(result.output.strip() == str(a + b)), file)
