"""An agent as its author wrote it: a loop around OpenAI's client. agentrl trains the model behind
it.
"""

import random
import re

from openai import AsyncOpenAI


async def run(task, base_url, api_key):
    """Find a number from 0 to 7 in three guesses."""
    number = random.Random(task.seed).randrange(8)
    messages = [{"role": "user", "content": "Guess my number, from 0 to 7."}]
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(3):
            answer = await client.chat.completions.create(model="policy", messages=messages)
            guess = answer.choices[0].message.content or ""
            if guess.strip() == str(number):
                return 1.0
            low = guess.strip().isdigit() and int(guess) < number
            messages += [
                {"role": "assistant", "content": guess},
                {
                    "role": "user",
                    "content": "My number is higher." if low else "My number is lower.",
                },
            ]
    return 0.0


def knows_half(prompt, rng):
    """A player that a random model imitates first. It heeds hints half of the time."""
    low, high = 0, 7
    for guess, hint in re.findall(r"(\d)\D*My number is (higher|lower)", prompt):
        low, high = (
            (max(low, int(guess) + 1), high)
            if hint == "higher"
            else (low, min(high, int(guess) - 1))
        )
    heeds = rng.random() < 0.5 and low <= high
    return str((low + high) // 2 if heeds else rng.randrange(8))
