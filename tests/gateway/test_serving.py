"""`agentrl gateway`: any client, and recordings that can be trained on."""

import asyncio
import socket
from random import Random

import httpx
import pyarrow.parquet as pq
import pytest

from agentrl.cli.serving import gateway
from agentrl.flow import Flow, now, run_virtual
from agentrl.gateway.config import GatewayConfig
from agentrl.gateway.public_sessions import PublicSessionRegistry
from agentrl.gateway.refusal import CallRefusedError
from agentrl.gateway.server import _listener, serving
from agentrl.recipes.preferences import PreferencesConfig, read_preferences
from agentrl.recipes.serve_policy import Recordings, write_regularly
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.settings.sampling import SamplingParams
from tests.gateway.served import RENDERER, saying
from tests.processes import PATIENCE_SECONDS

QUESTION = [{"role": "user", "content": "Which way?"}]


def desk_of(engine, recordings, flow, token="secret", **config) -> PublicSessionRegistry:
    sampling = SamplingParams(max_tokens=64, stop_token_ids=RENDERER.stop_token_ids)
    policy = EnginePolicy(engine, sampling, 60.0, trained=False)
    return PublicSessionRegistry(
        GatewayConfig(**config),
        policy=policy,
        renderer=RENDERER,
        token=token,
        seed=0,
        ended=recordings.add,
        calls=flow,
    )


async def ask(client, key, messages):
    headers = {"authorization": f"Bearer {key}"}
    return await client.post(
        "/v1/chat/completions", json={"model": "m", "messages": messages}, headers=headers
    )


def test_what_is_said_is_recorded_and_dpo_reads_it(tmp_path):
    recordings = Recordings(tmp_path)

    async def main():
        engine = saying("left", "right")
        async with engine, Flow("calls") as flow:
            registry = desk_of(engine, recordings, flow)
            async with (
                serving(registry),
                httpx.AsyncClient(base_url=registry.url, timeout=PATIENCE_SECONDS) as client,
            ):
                assert (await ask(client, "guessed:a", QUESTION)).status_code == 401
                for name, reward in (("good", 1.0), ("bad", 0.0), ("nothing", None)):
                    first = (await ask(client, f"secret:{name}", QUESTION)).json()
                    said = first["choices"][0]["message"]
                    again = [
                        *QUESTION,
                        {"role": "assistant", "content": said["content"]},
                        *QUESTION,
                    ]
                    await ask(client, f"secret:{name}", again)
                    if reward is not None:
                        headers = {"authorization": f"Bearer secret:{name}"}
                        posted = await client.post(
                            "/v1/rewards", json={"reward": reward}, headers=headers
                        )
                        assert posted.status_code == 200
                registry.end_all()
            flow.cancel()
        await recordings.write()

    asyncio.run(main())
    (pair,) = read_preferences(PreferencesConfig(path=tmp_path), Random(0))
    assert [message.role for message in pair.chosen] == ["user", "assistant", "user", "assistant"]
    rewarded, unrewarded = (
        pq.read_table(tmp_path / kind).to_pylist() for kind in ("trajectories", "unrewarded")
    )
    assert [row["score"] for row in rewarded] == [1.0, 0.0]
    assert len(unrewarded) == 1
    assert [len(row["turns"]) for row in (*rewarded, *unrewarded)] == [2, 2, 2]
    assert not any(turn["forked"] for row in rewarded for turn in row["turns"])


def test_what_has_ended_is_written_soon_although_it_is_little(tmp_path):
    written = []

    class Counted(Recordings):
        async def write(self, least: int = 1) -> None:
            if any(len(rows) >= least for rows in self.waiting.values()):
                written.append((now(), self.waiting.pop("unrewarded")))

    async def main():
        recordings = Counted(tmp_path)
        async with Flow("recordings") as flow:
            flow.start(write_regularly(recordings), name="recordings")
            recordings.waiting["unrewarded"] = ["one"]
            await asyncio.sleep(40.5)
            recordings.waiting["unrewarded"] = ["many"] * 256
            await asyncio.sleep(5)
            flow.cancel()

    run_virtual(main)
    assert [(seconds, len(rows)) for seconds, rows in written] == [(30, 1), (41, 256)]


def test_an_end_without_a_reward_makes_no_score(tmp_path):
    async def main():
        recordings = Recordings(tmp_path)
        async with saying("left") as engine, Flow("calls") as flow:
            registry = desk_of(engine, recordings, flow)
            async with (
                serving(registry),
                httpx.AsyncClient(base_url=registry.url, timeout=PATIENCE_SECONDS) as client,
            ):
                await ask(client, "secret:a", QUESTION)
                headers = {"authorization": "Bearer secret:a"}
                ends = {"success": True, "done": True}
                posted = await client.post("/v1/rewards", json=ends, headers=headers)
                assert posted.status_code == 200
                registry.end_all()
            flow.cancel()
        assert list(recordings.waiting) == ["unrewarded"]

    asyncio.run(main())


def test_a_reward_for_an_episode_that_is_not_open_begins_none(tmp_path):
    async def main():
        recordings = Recordings(tmp_path)
        async with saying("left") as engine, Flow("calls") as flow:
            registry = desk_of(engine, recordings, flow)
            async with (
                serving(registry),
                httpx.AsyncClient(base_url=registry.url, timeout=PATIENCE_SECONDS) as client,
            ):
                headers = {
                    "authorization": "Bearer secret:a",
                    "content-type": "application/x-www-form-urlencoded",
                }
                body = '{"reward": 1}'  # as curl sends it
                refused = await client.post("/v1/rewards", content=body, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    404,
                    "no_such_episode",
                )
                refused = await client.post(
                    "/v1/rewards", content=body, headers={"authorization": "Bearer guessed:a"}
                )
                assert refused.status_code == 401
                assert len(registry._named) == 0
                await ask(client, "secret:a", QUESTION)
                assert (
                    await client.post("/v1/rewards", content=body, headers=headers)
                ).status_code == 200
                registry.end_all()
                assert (
                    await client.post("/v1/rewards", content=body, headers=headers)
                ).status_code == 404
            flow.cancel()
        assert [score.value for _, score in recordings.waiting["trajectories"]] == [1.0]

    asyncio.run(main())


def test_an_idle_episode_ends_and_its_name_begins_another():
    ended = []

    async def main():
        engine = saying("left")
        async with engine, Flow("calls") as flow:
            recordings = type("Ended", (), {"add": staticmethod(ended.append)})
            registry = desk_of(engine, recordings, flow, idle_seconds=0.2, max_episodes=1)
            sweeping = flow.start(registry.sweep(), name="sweep")
            async with (
                serving(registry),
                httpx.AsyncClient(base_url=registry.url, timeout=PATIENCE_SECONDS) as client,
            ):
                assert (await ask(client, "secret:a", QUESTION)).status_code == 200
                full = await ask(client, "secret:b", QUESTION)
                assert full.status_code == 429
                async with asyncio.timeout(PATIENCE_SECONDS):
                    while not ended:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                assert (await ask(client, "secret:b", QUESTION)).status_code == 200
            sweeping.cancel()

    asyncio.run(main())
    assert ended[0].episode.id == "a-1"


@pytest.mark.parametrize(
    ("given", "served"), [({"port": 8123, "host": "::1"}, ("::1", 8123)), ({}, ("127.0.0.1", 9))]
)
def test_the_command_line_says_where_the_gateway_listens(given, served, tmp_path, monkeypatch):
    async def serve(config, model, record, **_):
        found.append((config.gateway.host, config.gateway.port))

    found: list = []
    monkeypatch.setattr("agentrl.recipes.serve_policy.serve_policy", serve)
    (tmp_path / "lake.yaml").write_text(
        f"env: frozen_lake\nmodel: {tmp_path}\ngateway: {{port: 9}}\n"
    )
    monkeypatch.setattr("agentrl.cli.serving.model_to_evaluate", lambda *_: tmp_path)
    gateway(tmp_path / "lake.yaml", token_env="NONE", **given)
    assert found == [served]


def test_an_answer_in_several_packets_waits_for_no_confirmation_of_the_first():
    async def main() -> None:
        options: asyncio.Queue[int] = asyncio.Queue()

        def note_option(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            options.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = _listener(GatewayConfig())
        async with await asyncio.start_server(note_option, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            assert await options.get() != 0
            writer.close()

    asyncio.run(main())


def test_a_token_may_have_colons_and_what_only_begins_like_it_is_none(tmp_path):
    async def main():
        registry = desk_of(saying("left"), Recordings(tmp_path), Flow("calls"), token="me:secret")
        good = registry.session("me:secret:good")
        assert good.episode.id == "good-1"
        assert registry.session("me:secret:good") is good
        assert registry.session("me:secret") is registry.session("me:secret:") is not good
        for wrong in ("me:good", "me", "", "me:secretgood", "me:secre:good", "me:wrong!:good"):
            with pytest.raises(CallRefusedError, match="token"):
                registry.session(wrong)

    asyncio.run(main())
