"""Programs of agents, for tests: an adder, and some that crash, hang or leave processes behind."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time
import urllib.request

WORDS = ("left", "right", "up", "down")


def said(base_url, api_key, text):
    """The model's answer to a text. The standard library is loaded in no time."""
    body = {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    headers = {"authorization": f"Bearer {api_key}", "content-type": "application/json"}
    request = urllib.request.Request(
        f"{base_url}/chat/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


async def follow(task, base_url, api_key):
    """The model must repeat a word."""
    word = random.Random(task.seed).choice(WORDS)
    answer = await asyncio.to_thread(said, base_url, api_key, f"Say {word}")
    return float(answer.strip() == word)


def repeats(prompt, rng):
    """Plays `follow` rightly half of the time, and else says any word."""
    words = [word for word in WORDS if f"Say {word}" in prompt]
    return words[0] if words and rng.random() < 0.5 else rng.choice(WORDS)


async def crashes(task, base_url, api_key):
    await asyncio.to_thread(said, base_url, api_key, "hi")
    raise KeyError("the agent is lost")


async def hangs(task, base_url, api_key):
    await asyncio.to_thread(said, base_url, api_key, "hi")
    await asyncio.Event().wait()


def leaves_processes(task, base_url, api_key):
    """Starts one in its group, and one that leaves it; then hangs."""
    sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen(sleeps)
    subprocess.Popen(sleeps, start_new_session=True)
    with open(os.environ["AGENTRL_TEST_STARTED"], "w") as file:
        file.write("started")
    time.sleep(600)


async def spoils_options(task, base_url, api_key):
    """Pays by its options, which it changes."""
    await asyncio.to_thread(said, base_url, api_key, "hi")
    task.options["deep"].append(1)
    return float(task.options.pop("size") + len(task.options["deep"]))
