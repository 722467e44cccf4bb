"""What runs for long ends by each stop signal, in the same way."""

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from agentrl.cli import serving
from agentrl.cli.stopping import Stopping, run_or_stop
from agentrl.envs.frozen_lake import FrozenLake
from agentrl.flow import run_steadily
from agentrl.flow.stop_signals import STOP_SIGNALS
from agentrl.recipes import serve_policy
from agentrl.remote.http_server import HttpServer
from agentrl.remote.server import EnvServer
from agentrl.remote.sessions import ServerLimits
from agentrl.viewer.server import PageServer


@pytest.fixture(autouse=True)
def usual() -> Iterator[None]:
    """The signals do what they do in a process that a terminal has started, whatever this one has
    inherited.
    """
    handlers = dict.fromkeys(STOP_SIGNALS, signal.SIG_DFL) | {
        signal.SIGINT: signal.default_int_handler
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("first", "second", "saved"),
    [
        (signal.SIGTERM, signal.SIGTERM, True),
        (signal.SIGHUP, signal.SIGTERM, True),
        (signal.SIGUSR1, signal.SIGHUP, True),
        (signal.SIGINT, signal.SIGTERM, True),
        (signal.SIGTERM, signal.SIGINT, False),  # a person who does not want to wait
    ],
)
def test_signals_of_schedulers_and_terminals_stop_a_run_and_the_next_one_keeps_its_checkpoint(
    first: signal.Signals, second: signal.Signals, saved: bool
) -> None:
    done: list[str] = []

    async def trains() -> None:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), first)
        try:
            await asyncio.sleep(3600)
        finally:  # it saves a checkpoint meanwhile
            os.kill(os.getpid(), second)
            await asyncio.sleep(0.01)
            done.append("saved")

    stopping = Stopping()
    with pytest.raises(KeyboardInterrupt), stopping:
        run_steadily(stopping.watch(trains()))
    os.kill(os.getpid(), signal.SIGTERM)  # while the process ends
    assert done == ["saved"] * saved
    assert stopping.by == first


def test_a_second_ctrl_c_prints_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async def works() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            send(signal.SIGINT)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(works())
            asyncio.get_running_loop().call_later(0.01, send, signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_steadily(main())
    gc.collect()  # asyncio complains of a task when it is deleted
    assert caplog.text == ""


@pytest.mark.parametrize("ignored", [signal.SIGHUP, signal.SIGUSR1])
def test_what_nohup_has_told_to_ignore_stays_ignored(
    ignored: signal.Signals, tmp_path: Path
) -> None:
    signal.signal(ignored, signal.SIG_IGN)
    with Stopping():
        send(ignored)
        assert signal.getsignal(ignored) is signal.SIG_IGN

    seen: list[Any] = []

    def listening(url: str) -> None:
        send(ignored)
        seen.append(signal.getsignal(ignored))
        send(signal.SIGTERM)

    PageServer([tmp_path], on_start=listening).run()
    assert seen == [signal.SIG_IGN]


def env_server(number: signal.Signals, folder: Path) -> HttpServer:
    return EnvServer(
        FrozenLake, limits=ServerLimits(drain_seconds=0), on_start=lambda url: send(number)
    )


def page_server(number: signal.Signals, folder: Path) -> HttpServer:
    return PageServer([folder], on_start=lambda url: send(number))


@pytest.mark.parametrize("number", STOP_SIGNALS)
@pytest.mark.parametrize("make", [env_server, page_server])
def test_each_stop_signal_ends_a_server_which_has_then_done_its_work(
    number: signal.Signals, make: Any, tmp_path: Path
) -> None:
    before = signal.getsignal(number)
    make(number, tmp_path).run()  # and raises nothing, and is not killed
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_stop_signal_ends_the_gateway_which_writes_what_it_has_recorded(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []

    async def serve(*_: Any, stopped: asyncio.Event, **more: Any) -> None:
        send(number)
        await stopped.wait()
        written.append("recordings")

    monkeypatch.setattr(serve_policy, "serve_policy", serve)
    (tmp_path / "lake.yaml").write_text("env: frozen_lake\nmodel: tiny\n")
    monkeypatch.setattr(serving, "model_to_evaluate", lambda *_: tmp_path)
    serving.gateway(tmp_path / "lake.yaml", record=tmp_path / "said")
    assert written == ["recordings"]


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_stop_signal_ends_an_evaluation_with_the_status_of_a_shell(
    number: signal.Signals,
) -> None:
    ended: list[str] = []

    async def plays() -> None:
        asyncio.get_running_loop().call_later(0.01, send, number)
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("workers")

    with pytest.raises(typer.Exit) as caught:
        run_or_stop(plays())
    assert (caught.value.exit_code, ended) == (128 + number, ["workers"])
