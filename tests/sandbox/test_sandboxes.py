"""Sandboxes with a shell: one contract for all providers, and what hostile commands can do."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from aiodocker.exceptions import DockerError

from agentrl import plugins
from agentrl.errors import ConfigError, SandboxError, SandboxOutageError
from agentrl.flow import Flow, note_played, now
from agentrl.protocols import (
    Command,
    Dockerfile,
    Executed,
    Folder,
    Image,
    Resources,
    Sandbox,
    SandboxProvider,
    SandboxSpec,
    shell,
)
from agentrl.sandbox.archive import archive_of, checked_archive, files_of
from agentrl.sandbox.cut_output import CutOutput, KeptOutput
from agentrl.sandbox.docker import DockerSandbox, DockerSandboxes, _Running, translated
from agentrl.sandbox.jails import JailSandboxes
from agentrl.sandbox.providers import (
    borrow_provider,
    give_back_provider,
    open_provider,
)
from agentrl.sandbox.sandbox_pool import SandboxPool
from agentrl.testing import FakeSandboxes
from agentrl.trajectory import Failed
from tests.docker_engine import BASE
from tests.processes import still_alive, title

SMALL = Resources(memory=256 << 20, cpus=1.0, processes=48, disk=16 << 20)
SPEC = SandboxSpec(resources=SMALL)
DEADLINE = 60.0
"""Seconds: what has to happen does so on a busy machine, too."""

real = [
    pytest.param("docker", marks=[pytest.mark.xdist_group("docker"), pytest.mark.slow]),
    pytest.param("jail", marks=pytest.mark.slow),
]
each_provider = pytest.mark.parametrize("name", ["fake", *real])
each_real = pytest.mark.parametrize("name", real)
docker = pytest.mark.xdist_group("docker")


@pytest.fixture
def play(name: str, request: pytest.FixtureRequest) -> Callable[..., None]:
    """Run a test's coroutine with a provider, and see that nothing is left."""
    host = request.getfixturevalue("docker_host") if name == "docker" else ""
    return lambda test: play_with(name, host, test)


def play_with(name: str, host: str, test: Callable[[SandboxProvider], Awaitable[None]]) -> None:
    async def main() -> None:
        provider = await opened(name, host)
        try:
            await test(provider)
        finally:
            await provider.close()

    asyncio.run(main())
    assert left(name, host) == []


async def opened(name: str, host: str = "") -> SandboxProvider:
    match name:
        case "docker":
            return await DockerSandboxes.open(DockerSandboxes.Config(host=host, image=BASE))
        case "jail":
            return await JailSandboxes.open(JailSandboxes.Config())
    return FakeSandboxes()


def left(name: str, host: str) -> list[str]:
    """What a provider has left behind."""
    if name == "docker":
        return [
            *listed(host, "ps", "-aq"),
            *listed(host, "images", "-q", "-f", "label=agentrl.owner"),
        ]
    jails = [p for p in psutil.Process().children(recursive=True) if "agentrl.sandbox" in title(p)]
    return still_alive(jails, DEADLINE)


def listed(host: str, *words: str) -> list[str]:
    done = subprocess.run(["docker", "--host", host, *words], capture_output=True, check=True)
    return done.stdout.decode().split()


async def sh(sandbox: Sandbox, line: str, **more: Any) -> Executed:
    return await sandbox.run(Command(shell(line), **{"deadline": DEADLINE, **more}))


async def said(sandbox: Sandbox, line: str, **more: Any) -> str:
    """What a sound command has printed."""
    done = await sh(sandbox, line, **more)
    assert (done.exit, done.ended_by, done.stderr) == (0, "itself", ""), done
    return done.stdout


@each_provider
def test_a_command_has_streams_a_status_an_environment_and_a_folder(play) -> None:
    async def main(provider: SandboxProvider) -> None:
        spec = SandboxSpec(resources=SMALL, environment={"COLOUR": "red"})
        sandbox = await provider.start(spec)
        done = await sh(sandbox, "echo out; echo err >&2; exit 3")
        assert (done.exit, done.stdout, done.stderr, done.ended_by) == (
            3,
            "out\n",
            "err\n",
            "itself",
        )
        assert await said(
            sandbox, "printenv COLOUR; printenv SHAPE", environment={"SHAPE": "x y"}
        ) == ("red\nx y\n")
        assert await said(sandbox, "cat", stdin=b"given\n" * 9) == "given\n" * 9
        assert await said(sandbox, "pwd") == f"{sandbox.folder}\n"
        assert (await sh(sandbox, "no-such-program")).exit == 127
        assert (await sandbox.run(Command(["true"]))).exit == 0

    play(main)


@each_provider
def test_long_output_is_cut_in_the_middle_with_a_notice(play) -> None:
    async def main(provider: SandboxProvider) -> None:
        sandbox = await provider.start(SPEC)
        flood = "echo begin; head -c 300000 /dev/zero; echo end"
        done = await sh(sandbox, flood, output=100)
        assert done.exit == 0
        assert done.stdout.startswith("begin\n\0")
        assert done.stdout.endswith("\0end\n")
        assert f"\n[... {300_000 + len('begin end ') - 100} bytes left out ...]\n" in done.stdout
        assert len(done.stdout) < 200

    play(main)


@each_provider
def test_a_command_that_misses_its_deadline_is_killed_and_the_sandbox_goes_on(play) -> None:
    async def main(provider: SandboxProvider) -> None:
        sandbox = await provider.start(SPEC)
        done = await sh(sandbox, "echo begun; sleep 600", deadline=2.0)
        assert (done.exit, done.ended_by) == (137, "deadline")
        assert done.seconds < 600  # it did not sleep to the end
        assert await said(sandbox, "echo still here") == "still here\n"

    play(main)


@each_provider
def test_files_are_written_and_read_and_stay(play) -> None:
    async def main(provider: SandboxProvider) -> None:
        sandbox = await provider.start(SPEC)
        await sandbox.write("deep/er/file", b"\0\xff" * 40_000)
        await sandbox.write("empty", b"")
        assert await sandbox.read("deep/er/file") == b"\0\xff" * 40_000
        assert await sandbox.read(f"{sandbox.folder}/empty") == b""
        await sh(sandbox, "echo made > made")
        assert await sandbox.read("made") == b"made\n"
        assert await said(sandbox, "cat made") == "made\n"
        with pytest.raises(FileNotFoundError, match="nothing"):
            await sandbox.read("nothing")
        with pytest.raises(OSError, match="more than 10 bytes"):
            await sandbox.read("deep/er/file", most=10)

    play(main)


@each_provider
def test_archives_go_in_and_out_and_snapshots_are_started_from(play, tmp_path: Path) -> None:
    async def main(provider: SandboxProvider) -> None:
        (tmp_path / "sub").mkdir()
        (tmp_path / "sub" / "a").write_text("of the folder")
        sandbox = await provider.start(SandboxSpec(Folder(tmp_path), resources=SMALL))
        assert await sandbox.read("sub/a") == b"of the folder"
        await sandbox.upload(archive_of({"x/b": b"uploaded"}), "to")
        downloaded = files_of(await sandbox.download())
        assert downloaded == {"sub/a": b"of the folder", "to/x/b": b"uploaded"}
        with pytest.raises(OSError, match="more than"):
            await sandbox.download(most=100)
        snapshot = await sandbox.snapshot()
        await sandbox.write("sub/a", b"later")
        again = await provider.start(SandboxSpec(snapshot, resources=SMALL))
        assert await again.read("sub/a") == b"of the folder"
        assert await again.read("to/x/b") == b"uploaded"
        assert await sandbox.read("sub/a") == b"later"
        await again.close()
        await provider.remove(snapshot)
        await provider.remove(snapshot)

    play(main)


@each_provider
def test_a_closed_sandbox_raises_and_gives_no_result(play) -> None:
    async def main(provider: SandboxProvider) -> None:
        sandbox = await provider.start(SPEC)
        await sandbox.close()
        await sandbox.close()
        for call in (
            sh(sandbox, "true"),
            sandbox.read("x"),
            sandbox.write("x", b""),
            sandbox.download(),
        ):
            with pytest.raises(SandboxError, match="closed"):
                await call

    play(main)


@each_provider
def test_closing_the_provider_closes_what_is_open_and_cancelling_leaves_nothing(play) -> None:
    async def start_and_wait(provider: SandboxProvider) -> None:
        await provider.start(SPEC)
        await asyncio.sleep(600)

    async def main(provider: SandboxProvider) -> None:
        for _ in range(2):
            await provider.start(SPEC)
        sandbox = await provider.start(SPEC)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(sh(sandbox, "sleep 600", deadline=700), 0.5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(start_and_wait(provider), 0.01)

    play(main)


@each_provider
def test_a_pool_starts_ahead_and_few_at_a_time(play) -> None:
    async def main(provider: SandboxProvider) -> None:
        starting, most = 0, 0
        start = provider.start

        async def counted(spec: SandboxSpec) -> Sandbox:
            nonlocal starting, most
            starting += 1
            most = max(most, starting)
            try:
                await asyncio.sleep(0.01)
                return await start(spec)
            finally:
                starting -= 1

        provider.start = counted  # type: ignore[method-assign]
        async with SandboxPool(provider, starts_at_once=2) as pool:
            pool.keep_ahead(SPEC, 3)
            while len(pool._stocks[0][1].waiting) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            ready = {sandbox for _, sandbox in pool._stocks[0][1].waiting}
            assert await pool.start(SPEC) in ready
            async with Flow("test") as flow:
                for number in range(4):
                    flow.start(pool.start(SandboxSpec(lease=100.0 + number)), name=str(number))
        assert most == 2

    play(main)


def test_a_sandbox_that_is_lost_is_started_ahead_in_vain_and_does_not_end_the_pool(virtual) -> None:
    async def main() -> None:
        provider = FakeSandboxes()
        provider.fail_next()
        async with SandboxPool(provider) as pool:
            pool.keep_ahead(SPEC, 1)
            await asyncio.sleep(1)
            assert await said(await pool.start(SPEC), "echo one") == "one\n"
            begun = now()
            assert (
                await sh(await pool.start(SPEC), "sleep 100", deadline=5.0)
            ).ended_by == "deadline"
            assert now() - begun == 5.0

    virtual(main)


# What only real ones do.


@each_real
def test_what_a_command_writes_in_one_sandbox_no_other_one_sees(play) -> None:
    async def main(provider: SandboxProvider) -> None:
        one, other = await provider.start(SPEC), await provider.start(SPEC)
        await sh(one, "echo mine > mine; echo mine > /tmp/mine")
        assert (await sh(other, "cat mine /tmp/mine")).stdout == ""

    play(main)


HOSTILE = {
    "a fork bomb": "f() { f | f & }; f; sleep 2",
    "memory": "python3 -c 'x = bytearray(2 << 30); x[::4096] = b\"1\" * len(x[::4096])'",
    "a flood": "yes",
    "deaf to signals": "trap '' TERM INT HUP; while :; do sleep 1; done",
    "a daemon": "setsid sh -c 'sleep 600 > /dev/null 2>&1' & "
    "python3 -c 'import os, time; os.fork() or os.setsid() or time.sleep(600)'",
    "kill everybody": "kill -9 -1; kill -9 1",
    "a huge file": "head -c 500000000 /dev/zero > huge",
}


@each_real
@pytest.mark.long
def test_hostile_commands_hit_their_limits_and_the_sandbox_goes_on(play) -> None:
    async def main(provider: SandboxProvider) -> None:
        for what, line in HOSTILE.items():
            sandbox = await provider.start(SPEC)
            done = await sh(sandbox, line, deadline=5.0)
            assert len(done.stdout) < 80_000, what
            after = await sh(sandbox, "kill -9 -1 2> /dev/null; echo after")
            assert after.stdout == "after\n" or after.ended_by == "processes", (what, after)
            sizes = await sh(sandbox, "rm -f huge; ls")
            assert sizes.ended_by in {"itself", "processes"}
            await sandbox.close()

    play(main)


@each_real
def test_nothing_of_the_host_is_reached(play, tmp_path: Path) -> None:
    async def main(provider: SandboxProvider) -> None:
        (tmp_path / "secret").write_text("of the host")
        sandbox = await provider.start(SPEC)
        for line in (
            f"cat {tmp_path}/secret",
            "cat /etc/shadow | grep root",
            "mount -t proc proc /mnt || mount none /mnt -t tmpfs",
            "python3 -c 'import socket; socket.create_connection((\"1.1.1.1\", 53), 3)'",
            "echo x > /proc/sys/kernel/hostname",
            "echo b > /proc/sysrq-trigger",
            "mknod disk b 253 0",
        ):
            done = await sh(sandbox, line)
            assert done.exit != 0, (line, done)
        assert f"{os.getpid()}" not in (await sh(sandbox, "ls /proc")).stdout.split() or (
            "pytest" not in (await sh(sandbox, f"cat /proc/{os.getpid()}/cmdline")).stdout
        )

    play(main)


@each_real
def test_files_that_are_links_or_pipes_stay_inside(play, tmp_path: Path) -> None:
    async def main(provider: SandboxProvider) -> None:
        (tmp_path / "secret").write_text("of the host")
        sandbox = await provider.start(SPEC)
        await sh(sandbox, f"ln -s {tmp_path}/secret link; mkdir a; ln -s / a/root; mkfifo pipe")
        with pytest.raises(OSError):  # noqa: PT011
            await sandbox.read("link")
        archive = await sandbox.download()
        assert files_of(archive) == {}
        other = await provider.start(SPEC)
        await other.upload(archive)
        assert (await said(other, "ls -R")).split() == [".:", "a", "./a:"]

    play(main)


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../../out"])
def test_an_archive_that_names_a_path_outside_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="outside of its folder"):
        checked_archive(archive_of({path: b"x"}))


def test_links_of_an_archive_that_lead_out_are_left_out() -> None:
    import io
    import tarfile

    def made(*entries: tuple[str, str]) -> bytes:
        written = io.BytesIO()
        with tarfile.open(fileobj=written, mode="w") as tar:
            for name, target in entries:
                entry = tarfile.TarInfo(name)
                if target:
                    entry.type, entry.linkname = tarfile.SYMTYPE, target
                tar.addfile(entry)
        return written.getvalue()

    def kept(*entries: tuple[str, str]) -> list[str]:
        with tarfile.open(fileobj=io.BytesIO(checked_archive(made(*entries)))) as tar:
            return tar.getnames()

    assert kept(("a", ""), ("good", "a"), ("bad", "/tests/expected"), ("up", "../x")) == [
        "a",
        "good",
    ]
    assert kept(("d/l", ".."), ("l2", "d/l/.."), ("l3", "d/l")) == ["d/l"]
    for below in ("a/x", "a/x/y"):
        with pytest.raises(ValueError, match="below a link"):
            kept(("a", "b"), (below, ""))
    assert kept(("a", "b"), ("ab/x", ""), ("b", "")) == ["a", "ab/x", "b"]
    assert kept(("far", "a/" * 3000)) == []
    with pytest.raises(ValueError, match="no archive"):
        checked_archive(b"no tar at all")


def test_an_archive_whose_member_has_a_negative_size_is_refused_and_not_read_for_ever() -> None:
    import tarfile

    first = tarfile.TarInfo("first").tobuf()
    back = bytearray(tarfile.TarInfo("back").tobuf(tarfile.GNU_FORMAT))
    back[124:136] = (-512).to_bytes(12, "big", signed=True)
    back[148:156] = b" " * 8  # the checksum counts its own field as spaces
    back[148:156] = b"%06o\0 " % sum(back)
    with pytest.raises(ValueError, match="negative size"):
        checked_archive(first + bytes(back) + bytes(1024))


def test_an_archive_with_an_infinite_time_is_refused() -> None:
    import io
    import tarfile

    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        entry = tarfile.TarInfo("a")
        entry.pax_headers = {"mtime": "inf"}
        tar.addfile(entry)
    with pytest.raises(ValueError, match="no archive"):
        checked_archive(written.getvalue())


def test_a_path_of_an_archive_may_be_as_long_as_a_path_of_linux() -> None:
    longest = f"{'a/' * 2047}bc"
    assert files_of(archive_of({longest: b"x"})) == {longest: b"x"}
    with pytest.raises(ValueError, match="a path of 4098 characters"):
        checked_archive(archive_of({f"{longest}de": b"x"}))


def test_output_is_cut_as_it_comes() -> None:
    output = CutOutput(10)
    for part in (b"abc", b"defghij" * 20_000, b"xyz"):
        output.add(part)
    assert output.kept() == KeptOutput(b"abcdeijxyz", 5, 140_006 - 10)
    assert output.kept().text() == "abcde\n[... 139996 bytes left out ...]\nijxyz"
    whole = CutOutput(10)
    whole.add("äö".encode())
    assert (whole.kept().text(), whole.cut) == ("äö", 0)


# Providers by name.


def test_providers_are_found_by_name_and_their_settings_checked() -> None:
    assert {plugin.name for plugin in plugins.installed("sandboxes")} >= {"docker", "jail"}
    with pytest.raises(ConfigError, match=r"no sandbox named 'dokcer'. Did you mean 'docker'"):
        asyncio.run(open_provider({"name": "dokcer"}))
    with pytest.raises(ConfigError, match=r"'imgae'.*settings of 'docker' are: host, image"):
        asyncio.run(open_provider({"name": "docker", "imgae": "x"}))
    with pytest.raises(ConfigError, match="DOCKER_HOST"):
        asyncio.run(open_provider({"name": "docker", "host": "unix:///nowhere"}))


def test_environments_that_choose_the_same_share_a_provider() -> None:
    async def main() -> None:
        choice = {"name": "agentrl.testing.sandboxes:FakeSandboxes"}
        one, two = await borrow_provider(choice), await borrow_provider(choice)
        assert one is two
        sandbox = await one.start(SPEC)
        await give_back_provider(one)
        await sandbox.run(Command(["true"]))
        await give_back_provider(two)
        with pytest.raises(SandboxError):
            await sandbox.run(Command(["true"]))

    asyncio.run(main())


class Restarted(FakeSandboxes):
    """A provider whose engine can be reached the first time, and the third."""

    opened = 0

    @classmethod
    async def open(cls, settings: FakeSandboxes.Config) -> "Restarted":
        cls.opened += 1
        if cls.opened == 2:
            raise ConfigError("could not reach the engine")
        return cls(settings)


def test_a_provider_that_was_open_before_is_away_and_not_wrong() -> None:
    async def main() -> None:
        choice = {"name": f"{__name__}:Restarted"}
        await give_back_provider(await borrow_provider(choice))
        with pytest.raises(SandboxOutageError, match="could not reach the engine"):
            await borrow_provider(choice)
        again = await borrow_provider(choice)
        await (await again.start(SPEC)).close()
        await give_back_provider(again)

    async def elsewhere() -> None:
        note_played()
        await borrow_provider({"name": f"{__name__}:Restarted"})

    Restarted.opened = 0
    asyncio.run(main())
    Restarted.opened = 1
    with pytest.raises(SandboxOutageError, match="could not reach the engine"):
        asyncio.run(elsewhere())
    Restarted.opened = 1
    with pytest.raises(ConfigError, match="could not reach the engine"):
        asyncio.run(borrow_provider({"name": f"{__name__}:Restarted"}))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionRefusedError("nobody listens"), SandboxOutageError),
        (aiohttp.ServerDisconnectedError(), SandboxOutageError),
        (DockerError(900, "Cannot connect to Docker Engine"), SandboxOutageError),
        (DockerError(500, "no space left on device"), SandboxError),
        (DockerError(404, "no such container"), SandboxError),
        (TimeoutError(), SandboxError),
    ],
)
def test_an_engine_that_cannot_be_reached_is_waited_for_and_one_that_refuses_is_not(
    error: Exception, kind: type[SandboxError]
) -> None:
    with pytest.raises(SandboxError, match="could not start") as raised, translated("start"):
        raise error
    assert type(raised.value) is kind
    assert Failed.by(raised.value).outage == (kind is SandboxOutageError)


def test_a_jail_refuses_what_it_does_not_have() -> None:
    async def main(provider: SandboxProvider) -> None:
        for spec, what in (
            (SandboxSpec(Image("debian")), "an image"),
            (SandboxSpec(Dockerfile(Path("."))), "a Dockerfile"),
            (SandboxSpec(network="open", user="bob"), "a network and a user"),
            (SandboxSpec(folder="/app"), "a folder outside of /box"),
        ):
            with pytest.raises(ConfigError, match=f"{what}.*docker"):
                await provider.start(spec)

    play_with("jail", "", main)


# Only containers.


def of_docker(sandbox: Sandbox) -> DockerSandbox:
    assert isinstance(sandbox, DockerSandbox)
    return sandbox


@docker
@pytest.mark.slow
def test_a_killed_container_is_a_failure_and_never_a_result(docker_host: str) -> None:
    async def main(provider: SandboxProvider) -> None:
        sandbox = await provider.start(SPEC)
        async with Flow("test") as flow:
            running = flow.start(fails(sh(sandbox, "sleep 30; echo 137", deadline=100)), name="run")
            await asyncio.sleep(1)
            await asyncio.to_thread(listed, docker_host, "kill", of_docker(sandbox).container_id)
        assert running.result()
        assert await fails(sh(sandbox, "true"))
        assert await fails(sandbox.read("x"))

    async def fails(call: Awaitable[object]) -> bool:
        with pytest.raises(SandboxError) as failed:
            await call
        # The engine is there: a task that always kills its container is not tried for ever.
        assert not isinstance(failed.value, SandboxOutageError)
        return True

    play_with("docker", docker_host, main)


@docker
@pytest.mark.long
def test_an_image_is_built_once_and_removed_at_the_end(docker_host: str, tmp_path: Path) -> None:
    async def main(provider: SandboxProvider) -> None:
        (tmp_path / "greeting").write_text("hello")
        (tmp_path / "Dockerfile").write_text(
            f"FROM {BASE}\nWORKDIR /app\nCOPY greeting .\nRUN echo built > built\n"
            "ENV COLOUR=blue\nRUN chown -R agent /app\nUSER agent\n"
        )
        spec = SandboxSpec(Dockerfile(tmp_path), resources=SMALL)
        one = await provider.start(spec)
        assert await said(one, "cat greeting built; echo $COLOUR; pwd; id -un") == (
            "hellobuilt\nblue\n/app\nagent\n"
        )
        before = listed(docker_host, "images", "-q")
        other = await provider.start(spec)
        assert listed(docker_host, "images", "-q") == before
        await other.write("mine", b"x")  # as its own user
        assert await said(other, "id -un", user="root") == "root\n"
        (tmp_path / "Dockerfile").write_text(f"FROM {BASE}\nRUN exit 7\n")
        with pytest.raises(SandboxError, match=r"could not build an image.*7"):
            await provider.start(spec)

    play_with("docker", docker_host, main)


@docker
@pytest.mark.slow
def test_what_a_killed_run_leaves_ends_at_the_next_start_or_with_its_lease(
    docker_host: str,
) -> None:
    program = textwrap.dedent(f"""
        import asyncio
        from agentrl.protocols import SandboxSpec
        from agentrl.sandbox.docker import DockerSandboxes

        async def main():
            config = DockerSandboxes.Config(host={docker_host!r}, image={BASE!r})
            provider = await DockerSandboxes.open(config)
            sandbox = await provider.start(SandboxSpec(lease={{lease}}))
            await sandbox.snapshot()
            print("started", flush=True)
            await asyncio.sleep(600)

        asyncio.run(main())
    """)

    def kill_a_run(lease: int) -> None:
        run = subprocess.Popen(
            [sys.executable, "-c", program.format(lease=lease)], stdout=subprocess.PIPE
        )
        assert run.stdout is not None
        assert run.stdout.readline() == b"started\n"
        run.send_signal(signal.SIGKILL)
        run.wait()
        run.stdout.close()

    async def nothing(provider: SandboxProvider) -> None:
        assert left("docker", docker_host) == []

    kill_a_run(3600)
    assert len(left("docker", docker_host)) == 2
    play_with("docker", docker_host, nothing)
    kill_a_run(1)

    async def main() -> None:
        async with asyncio.timeout(DEADLINE):
            while listed(docker_host, "ps", "-aq"):  # noqa: ASYNC110  it removes itself
                await asyncio.sleep(0.1)

    asyncio.run(main())
    play_with("docker", docker_host, nothing)


@docker
@pytest.mark.slow
def test_orphans_are_reaped_and_background_processes_go_on(docker_host: str) -> None:
    async def main(provider: SandboxProvider) -> None:
        sandbox = await provider.start(SPEC)
        begun = now()
        await sh(sandbox, "for i in 1 2 3 4 5; do (sleep 0.1 &); done; sleep 300 & echo $! > pid")
        assert now() - begun < 250
        await sh(sandbox, "sleep 1")
        alive = await said(
            sandbox, "kill -0 $(cat pid) && echo alive; ps -e | grep -c defunct || true"
        )
        assert alive == "alive\n0\n"

    play_with("docker", docker_host, main)


@docker
@pytest.mark.slow
@pytest.mark.long
def test_memory_that_is_used_up_is_named(docker_host: str) -> None:
    async def main(provider: SandboxProvider) -> None:
        sandbox = await provider.start(SPEC)
        done = await sh(sandbox, HOSTILE["memory"])
        assert (done.exit, done.ended_by) == (137, "memory")
        assert (await sh(sandbox, "kill -9 $$")).ended_by == "itself"

    play_with("docker", docker_host, main)


def test_a_shell_that_never_ends_its_first_line_fills_no_memory() -> None:
    running = _Running(Command(("true",)))
    for _ in range(8):
        running._take_output(1, b"7" * (1 << 16))
    assert not running.group
    assert len(running._begun) <= 64
