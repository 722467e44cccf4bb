"""openai-agents: its runner, with the Responses API."""

import json
import os

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


task = json.loads(os.environ["AGENTRL_TASK"])
a, b = task["seed"] % 7, task["seed"] % 11
agent = Agent(name="adder", instructions="You add.", tools=[add], model="policy")
result = Runner.run_sync(agent, f"What is {a} + {b}?")
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump(float(result.final_output.strip() == str(a + b)), file)
