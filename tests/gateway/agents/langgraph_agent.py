"""LangGraph's ready-made agent, with the chat model of langchain-openai."""

import json
import os

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


task = json.loads(os.environ["AGENTRL_TASK"])
a, b = task["seed"] % 7, task["seed"] % 11
agent = create_react_agent(ChatOpenAI(model="policy"), [add], prompt="You add.")
result = agent.invoke({"messages": [("user", f"What is {a} + {b}?")]})
with open(os.environ["AGENTRL_REWARD_FILE"], "w") as file:
    json.dump(float(result["messages"][-1].content.strip() == str(a + b)), file)
