"""An agent as its author wrote it: a loop around OpenAI's client. agentrl trains the model behind
it.
"""

import random

from openai import AsyncOpenAI

OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}


async def run(task, base_url, api_key):
    """Ask for two opposites."""
    rng, messages, right = random.Random(task.seed), [], 0
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(2):
            word = rng.choice(list(OPPOSITE))
            messages.append({"role": "user", "content": f"What is the opposite of {word}?"})
            answer = await client.chat.completions.create(model="policy", messages=messages)
            said = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": said})
            right += said.strip() == OPPOSITE[word]
    return {"reward": right / 2, "success": right == 2}


def knows_half(prompt, rng):
    """A player that a random model imitates first, so that it knows the words: it gives any answer
    half of the time.
    """
    asked = prompt.rpartition("opposite of ")[2].partition("?")[0]
    return OPPOSITE[asked] if rng.random() < 0.5 else rng.choice(list(OPPOSITE))
