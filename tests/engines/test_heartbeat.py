"""Signs of life of an engine's processes."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import time

import pytest

from agentrl.engines.heartbeat import BeginBeating, Heartbeat, begin_beating
from agentrl.errors import EngineDeadError

BEATING = """
import sys, time
from agentrl.engines.heartbeat import begin_beating
begin_beating(sys.argv[1])
begin_beating(sys.argv[1])
print("ready", flush=True)
time.sleep(1e6)
"""


def test_a_process_that_is_busy_gives_signs_of_life_and_one_that_is_stopped_does_not() -> None:
    heartbeat = Heartbeat()
    assert heartbeat.oldest == float("inf")
    command = [sys.executable, "-S", "-c", BEATING, heartbeat.path]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(2)
    ]

    async def main() -> None:
        async with asyncio.timeout(60):
            for _ in range(2):
                await heartbeat.next(lambda: None)
        os.kill(processes[0].pid, signal.SIGSTOP)
        await asyncio.sleep(0.01)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await heartbeat.next(lambda: None)
        os.kill(processes[0].pid, signal.SIGCONT)
        async with asyncio.timeout(60):
            await heartbeat.next(lambda: None)

    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        asyncio.run(main())
    finally:
        for process in processes:
            with process:
                process.kill()
        heartbeat.close()


def test_who_waits_for_a_sign_of_life_hears_of_a_death_instead() -> None:
    heartbeat = Heartbeat()

    def check() -> None:
        raise EngineDeadError("its core is dead")

    async def main() -> None:
        with pytest.raises(EngineDeadError, match="its core is dead"):
            await heartbeat.next(check)

    with open(heartbeat.path, "wb", buffering=0) as file:
        file.write(bytes(8))  # a beat of long ago
    asyncio.run(main())
    heartbeat.close()


def test_an_answer_makes_the_process_beat_that_reads_it() -> None:
    heartbeat = Heartbeat()
    begin_beating(heartbeat.path)
    assert heartbeat.oldest <= time.monotonic()
    other = Heartbeat()
    assert pickle.loads(pickle.dumps([BeginBeating(other.path), 1])) == [None, 1]
    assert other.oldest <= time.monotonic()
    heartbeat.close()
    other.close()
