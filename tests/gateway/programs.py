"""Programs of agents, for tests: an adder, and some that crash, hang or leave processes behind."""

import asyncio
import os
import random
import subprocess
import sys
import time

from openai import AsyncOpenAI

WORDS = ("left", "right", "up", "down")


async def follow(task, base_url, api_key):
    """The model must repeat a word."""
    word = random.Random(task.seed).choice(WORDS)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        answer = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": f"Say{' ' + word}"}], max_tokens=4
        )
    return float((answer.choices[0].message.content or "").strip() == word)


def repeats(prompt, rng):
    """Plays `follow` rightly half of the time, and else says any word."""
    words = [word for word in WORDS if f"Say {word}" in prompt]
    return f" {words[0] if words and rng.random() < 0.5 else rng.choice(WORDS)}"


async def crashes(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    raise KeyError("the agent is lost")


async def hangs(task, base_url, api_key):
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hi"}])
    await asyncio.Event().wait()


def leaves_processes(task, base_url, api_key):
    """Starts one in its group, and one that leaves it; then hangs."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleeps)
    subprocess.Popen(sleeps, start_new_session=True)
    with open(os.environ["AGENTRL_TEST_STARTED"], "w") as file:
        file.write("started")
    time.sleep(600)
