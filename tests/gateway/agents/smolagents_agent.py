"""smolagents: its agent that calls tools, of which the last one is `final_answer`."""

import json
import os

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: a number
        b: another one
    """
    return a + b


task = json.loads(os.environ["AGENTRL_TASK"])
a, b = task["seed"] % 7, task["seed"] % 11
agent = ToolCallingAgent([add], OpenAIModel("policy"), max_steps=4)
result = agent.run(f"What is {a} + {b}?")
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump(float(str(result).strip() == str(a + b)), file)
