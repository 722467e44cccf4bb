"""The sandbox: programs run, limits hold, nobody gets out, and nothing is left."""

import asyncio
import hashlib
import logging
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random

import psutil
import pytest

from agentrl.errors import ConfigError
from agentrl.flow import Flow, now
from agentrl.sandbox import cgroup, jail, pool
from agentrl.sandbox.jail import Jail
from agentrl.sandbox.order import PIECE, JailReport, Order, pack
from agentrl.sandbox.outcome import LimitHit, Outcome, Ran, SandboxLost
from agentrl.sandbox.pool import BACKENDS, ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig, SandboxLimits
from tests.processes import still_alive, title
from tests.sandbox.hostile import KINDS

SMALL = SandboxLimits(
    wall=0.5, cpu=0.2, memory=256 << 20, processes=16, disk=4 << 20, output=1 << 16
)

each_backend = pytest.mark.parametrize(
    "backend",
    [BACKENDS[0], *(pytest.param(backend, marks=pytest.mark.slow) for backend in BACKENDS[1:])],
)


def run(test: Callable[[ProgramSandbox], Awaitable[None]], config: SandboxConfig) -> None:
    async def main() -> None:
        async with ProgramSandbox(config) as sandbox:
            started.extend(jails())
            await test(sandbox)

    started: list[psutil.Process] = []
    asyncio.run(main())
    assert still_alive(started, 60) == []
    assert jails() == []


def jails() -> list[psutil.Process]:
    """Every process that this one has started and that lives."""
    return [p for p in psutil.Process().children(recursive=True) if "agentrl.sandbox" in title(p)]


def ran(outcome: Outcome) -> str:
    """What a sound program has written."""
    assert isinstance(outcome, Ran), outcome
    assert (outcome.exit, outcome.stderr) == (0, ""), outcome
    return outcome.stdout


@each_backend
def test_a_program_reads_stdin_writes_stdout_and_has_an_exit_status(backend: str) -> None:
    async def main(sandbox: ProgramSandbox) -> None:
        assert ran(await sandbox.run("print(int(input()) ** 2)", "12")) == "144\n"
        assert (
            ran(await sandbox.run("import sys; print(len(sys.stdin.read()))", "é" * 300_000))
            == "300000\n"
        )
        assert (
            ran(await sandbox.run("print(__name__, __file__, __import__('sys').argv)"))
            == "__main__ main.py ['main.py']\n"
        )
        for program, status in (
            ("raise SystemExit(3)", 3),
            ("import sys; sys.exit('no')", 1),
            ("exit()", 0),
            ("quit(2)", 2),
            ("1/0", 1),
            ("def", 1),
            ("import os; os.kill(os.getpid(), 9)", -9),
            ("import os; os._exit(7)", 7),
        ):
            outcome = await sandbox.run(program)
            assert isinstance(outcome, Ran)
            assert outcome.exit == status
        outcome = await sandbox.run("def f(x):\n    return 1 / x\n\nf(0)")
        assert isinstance(outcome, Ran)
        marks = re.compile(r"^[ ~^]+\n", re.MULTILINE)  # which Pythons set differently
        assert (
            marks.sub("", outcome.stderr) == "Traceback (most recent call last):\n"
            '  File "main.py", line 4, in <module>\n    f(0)\n'
            '  File "main.py", line 2, in f\n    return 1 / x\n'
            "ZeroDivisionError: division by zero\n"
        )

    run(main, SandboxConfig(backend=backend, size=1))


@each_backend
def test_what_an_interpreter_does_at_its_end_is_done(backend: str) -> None:
    program = """
import atexit, os, sys, tempfile, threading
atexit.register(print, "last")
written = threading.Event()
threading.Thread(target=lambda: (written.wait(), print("thread"))).start()
with tempfile.NamedTemporaryFile("w+") as file:
    file.write("kept"); file.seek(0)
    print(file.read(), os.path.dirname(file.name) == os.getcwd() == os.environ["HOME"])
sys.stdout.write("no newline")
written.set()
"""

    async def main(sandbox: ProgramSandbox) -> None:
        assert ran(await sandbox.run(program)) == "kept True\nno newlinethread\nlast\n"

    run(main, SandboxConfig(backend=backend, size=1))


def test_programs_may_have_processes_threads_and_an_event_loop() -> None:
    program = """
import asyncio, multiprocessing, subprocess, sys
from concurrent.futures import ProcessPoolExecutor

def square(x): return x * x

async def main():
    return await asyncio.to_thread(square, 4)

if __name__ == "__main__":
    print(asyncio.run(main()))
    with ProcessPoolExecutor(2, multiprocessing.get_context("fork")) as pool:
        print(list(pool.map(square, range(4))))
    child = subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True)
    print(child.stdout, end="")
"""

    async def main(sandbox: ProgramSandbox) -> None:
        assert ran(await sandbox.run(program)) == "16\n[0, 1, 4, 9]\n5\n"

    run(main, SandboxConfig(backend="namespaces", size=1))


@each_backend
def test_the_limit_that_was_hit_is_named_and_what_was_written_is_kept(backend: str) -> None:
    programs = {
        "cpu": ("while True: pass", SandboxLimits(cpu=0.1)),
        "wall": ("import time; time.sleep(100)", SandboxLimits(wall=0.2)),
        "output": ("while True: print('x' * 1000)", SandboxLimits(output=1 << 16)),
    }

    async def main(sandbox: ProgramSandbox) -> None:
        for limit, (program, limits) in programs.items():
            begun = now()
            outcome = await sandbox.run(f"print('begun', flush=True)\n{program}", limits=limits)
            assert isinstance(outcome, LimitHit), outcome
            assert outcome.which == limit
            assert outcome.stdout.startswith("begun\n")
            assert len(outcome.stdout) <= limits.output
            assert now() - begun < (limits.wall if limit == "wall" else 5) + 1
        outcome = await sandbox.run("x = bytearray(1 << 30)")
        assert isinstance(outcome, Ran)
        assert "MemoryError" in outcome.stderr

    run(main, SandboxConfig(backend=backend, size=1))


@pytest.mark.slow
def test_the_memory_of_all_processes_together_is_limited_but_what_they_share_is_counted_once() -> (
    None
):
    program = """
import os, time
shared = b"x" * ({shared} << 20)
for _ in range(6):
    if os.fork() == 0:
        own = b"x" * ({own} << 20)
        time.sleep({seconds})
        os._exit(0)
time.sleep({seconds})
print("done")
"""

    async def main(sandbox: ProgramSandbox) -> None:
        assert ran(await sandbox.run(program.format(shared=100, own=1, seconds=0.2))) == "done\n"
        outcome = await sandbox.run(program.format(shared=1, own=60, seconds=9))
        assert isinstance(outcome, LimitHit)
        assert outcome.which == "memory"

    run(main, SandboxConfig(backend="namespaces", size=1, limits=SandboxLimits(memory=256 << 20)))


@pytest.fixture(params=["control group", "filter"])
def means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By which means memory of the kernel and CPU time of lost children are limited."""
    if request.param == "filter":
        monkeypatch.setattr(cgroup, "make", lambda name: ())
    elif not (made := cgroup.make("agentrl-test")):
        pytest.skip("this machine does not let its user make a control group")
    else:
        cgroup.remove(made)
    return str(request.param)


UNNAMED = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
def write(fd):
    for _ in range(3): os.write(fd, b"x" * (1 << 20))
def unlinked(name):
    write(os.open(name, os.O_CREAT | os.O_RDWR)); os.unlink(name)
def without_a_name(name):
    write(os.open(".", os.O_TMPFILE | os.O_RDWR))
def mapped(name):
    fd = os.open(name, os.O_CREAT | os.O_RDWR)
    write(fd)
    libc.mmap(None, ctypes.c_size_t(4096), 1, 1, fd, ctypes.c_long(0))
    os.unlink(name); os.close(fd)
try:
    for number in range(FILES):
        HOW(f"f{number}")
except OSError as error:
    print(error.errno)
time.sleep(0.5)
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_files_that_have_no_name_count_as_disk_for_as_long_as_they_are_held(backend: str) -> None:
    async def main(sandbox: ProgramSandbox) -> None:
        for how in ("unlinked", "without_a_name", "mapped"):
            outcome = await sandbox.run(UNNAMED.replace("HOW", how).replace("FILES", "40"))
            if backend == "namespaces":
                assert ran(outcome) == "28\n"
            else:
                assert isinstance(outcome, LimitHit), (how, outcome)
                assert outcome.which == "disk"
            assert ran(await sandbox.run(UNNAMED.replace("HOW", how).replace("FILES", "1"))) == ""

    run(main, SandboxConfig(backend=backend, size=1, limits=SandboxLimits(disk=8 << 20)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_threads_than_processes_are_allowed_are_refused(backend: str) -> None:
    program = """
import concurrent.futures, threading, time
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    print(sum(pool.map(abs, range(-9, 9))))
threading.stack_size(1 << 16)
ended, count = threading.Event(), 0
try:
    while True:
        threading.Thread(target=ended.wait).start()
        count += 1
except RuntimeError as error:
    print(count, error)
ended.set()
"""

    async def main(sandbox: ProgramSandbox) -> None:
        for _ in range(2):
            assert ran(await sandbox.run(program)) == "81\n11 can't start new thread\n"

    run(main, SandboxConfig(backend=backend, size=1, limits=SandboxLimits(processes=12)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_locks_on_a_programs_own_files_work(backend: str) -> None:
    program = """
import fcntl, os, sqlite3
with open("own", "w") as file, open("own", "w") as again:
    fcntl.lockf(file, fcntl.LOCK_EX)
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("held")
one, other = sqlite3.connect("data"), sqlite3.connect("data")
one.execute("pragma journal_mode = wal")
one.execute("create table t (x)")
one.commit()
other.execute("insert into t values (1)")
other.commit()
print(one.execute("select x from t").fetchall())
"""

    async def main(sandbox: ProgramSandbox) -> None:
        assert ran(await sandbox.run(program)) == "held\n[(1,)]\n"

    run(main, SandboxConfig(backend=backend, size=1))


def test_processes_of_a_program_exclude_each_other_by_locks_of_its_files() -> None:
    program = """
import fcntl, os
file = open("own", "w")
fcntl.lockf(file, fcntl.LOCK_EX)
if os.fork() == 0:
    try:
        fcntl.lockf(open("own", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("held", flush=True)
    os._exit(0)
os.wait()
"""

    async def main(sandbox: ProgramSandbox) -> None:
        assert ran(await sandbox.run(program)) == "held\n"

    run(main, SandboxConfig(backend="namespaces", size=1))


@pytest.mark.parametrize("backend", BACKENDS)
def test_programs_that_run_at_a_time_tell_each_other_nothing_by_locks(backend: str) -> None:
    program = """
import fcntl, os, struct, sys, time
file = open(os.__file__, "rb")
free = struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 7, 1, 0)
if sys.stdin.read() == "send":
    for take in (lambda: fcntl.lockf(file, fcntl.LOCK_SH, 1, 7),
                 lambda: fcntl.flock(file, fcntl.LOCK_SH)):
        try:
            take()
            print("sent")
        except OSError:
            pass
    time.sleep(1)
else:
    time.sleep(0.5)
    for ask in (lambda: fcntl.fcntl(file, fcntl.F_GETLK, free) != free,
                lambda: fcntl.flock(file, fcntl.LOCK_EX | 4)):
        try:
            print("received", ask())
        except OSError:
            pass
"""

    async def main(sandbox: ProgramSandbox) -> None:
        outcomes = await sandbox.run_all([(program, "send"), (program, "receive")])
        assert [ran(outcome) for outcome in outcomes] == ["", ""]

    run(main, SandboxConfig(backend=backend, size=2))


@pytest.mark.parametrize("seed", range(3))
def test_buffers_of_sockets_count_as_memory(means: str, seed: int) -> None:
    limits = SandboxLimits(wall=60, cpu=60, memory=64 << 20)

    async def main(sandbox: ProgramSandbox) -> None:
        outcome = await sandbox.run(KINDS["socket_buffers"].write(Random(seed)))
        assert isinstance(outcome, LimitHit), outcome
        assert outcome.which == "memory"

    run(main, SandboxConfig(backend="namespaces", size=1, limits=limits))


@pytest.mark.parametrize("seed", range(3))
def test_the_cpu_time_of_children_that_nobody_waits_for_counts(means: str, seed: int) -> None:
    limits = SandboxLimits(wall=3600 if means == "control group" else 1, cpu=0.5)

    async def main(sandbox: ProgramSandbox) -> None:
        outcome = await sandbox.run(KINDS["hidden_cpu"].write(Random(seed)))
        assert isinstance(outcome, LimitHit), outcome
        # With the filter the children stay, count as processes, and no more can be started.
        assert outcome.which == ("cpu" if means == "control group" else "wall")

    run(main, SandboxConfig(backend="namespaces", size=1, limits=limits))


def test_shells_and_children_run_with_either_means(means: str) -> None:
    # With the filter, `wait` of dash waits for ever.
    wait = " true & wait;" if means == "control group" else ""
    program = """
import asyncio, subprocess, multiprocessing
piped = ["/bin/sh", "-c", "WAIT (echo a; sleep 0.01; echo b) | cat"]
print(subprocess.run(piped, capture_output=True).stdout)
print(subprocess.run(["/bin/bash", "-c", "sleep 0.01 & wait; echo c"], capture_output=True).stdout)
async def main():
    process = await asyncio.create_subprocess_exec("/bin/echo", "d", stdout=subprocess.PIPE)
    print((await process.communicate())[0], process.returncode)
asyncio.run(main())
print(multiprocessing.get_context("fork").Process(target=print, args=("e",)).run())
"""

    async def main(sandbox: ProgramSandbox) -> None:
        assert ran(await sandbox.run(program.replace("WAIT", wait))).splitlines() == [
            r"b'a\nb\n'",
            r"b'c\n'",
            r"b'd\n' 0",
            "e",
            "None",
        ]

    run(main, SandboxConfig(backend="namespaces", size=1))


@each_backend
def test_a_program_finds_nothing_of_earlier_ones_in_its_memory(backend: str) -> None:
    async def main(sandbox: ProgramSandbox) -> None:
        secret = f"# LOOT-0123abcd {'x' * 50_000}\nimport sys; print(sys.stdin.read())"
        for seed in range(4):
            for _ in range(3):
                assert "LOOT" in ran(await sandbox.run(secret, "LOOT-4567cdef" * 1000))
            assert "ESCAPED" not in ran(await sandbox.run(KINDS["thief"].write(Random(seed))))

    run(main, SandboxConfig(backend=backend, size=1))


@each_backend
def test_a_cancelled_run_ends_with_its_processes_and_the_next_one_finds_a_jail(
    backend: str,
) -> None:
    fork = "os.fork()\n" if backend == "namespaces" else ""

    async def main(sandbox: ProgramSandbox) -> None:
        async with Flow("test") as flow:
            task = flow.start(sandbox.run(f"import os, time\n{fork}time.sleep(100)"), name="run")
            # the server, its supervisor and the program; with namespaces, two that wait for them,
            # and the fork
            while len(before := jails()) < (6 if sandbox.backend == "namespaces" else 3):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task.cancel()
        assert still_alive(before, 60) == []
        assert ran(await sandbox.run("print(1)")) == "1\n"

    run(main, SandboxConfig(size=1, backend=backend))


def test_a_jail_that_dies_is_a_loss_and_no_result_and_is_replaced() -> None:
    async def main(sandbox: ProgramSandbox) -> None:
        async with Flow("test") as flow:
            task = flow.start(sandbox.run("import time; time.sleep(100)"), name="run")
            await asyncio.sleep(0.1)
            jails()[0].kill()
        assert isinstance(task.result(), SandboxLost)
        assert ran(await sandbox.run("print(1)")) == "1\n"

    run(main, SandboxConfig(size=1))


def test_a_program_that_two_jails_were_lost_of_is_set_aside_and_others_run() -> None:
    async def main(sandbox: ProgramSandbox) -> None:
        lethal = "import time; time.sleep(100)"
        for number in range(4):
            async with Flow("test") as flow:
                task = flow.start(sandbox.run(lethal, "in"), name="run")
                await asyncio.sleep(0.1)
                if number < 2:
                    jails()[0].kill()
            outcome = task.result()
            assert isinstance(outcome, SandboxLost)
            assert outcome.final == (number > 0)
            assert (
                number == 0 or "2 sandboxes were lost in runs of the same program" in outcome.error
            )
            assert ran(await sandbox.run("print(1)")) == "1\n"
        assert sandbox.lost == 2

    run(main, SandboxConfig(size=1))


def test_a_sandbox_that_is_closed_during_a_run_loses_it_and_can_be_entered_again() -> None:
    async def main() -> None:
        sandbox = ProgramSandbox(SandboxConfig(size=1))
        async with Flow("test") as flow, sandbox:
            task = flow.start(sandbox.run("import time; time.sleep(100)"), name="run")
            await asyncio.sleep(0.1)
        assert task.result() == SandboxLost("the sandbox was closed during the run")
        with pytest.raises(RuntimeError, match="async with ProgramSandbox"):
            await sandbox.run("print(1)")
        async with sandbox:
            assert ran(await sandbox.run("print(1)")) == "1\n"

    asyncio.run(main())


@pytest.mark.slow
def test_a_server_that_says_nothing_is_a_loss_after_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jail, "_GRACE_SECONDS", 0.2)

    async def main(sandbox: ProgramSandbox) -> None:
        for process in jails():
            process.suspend()
        assert isinstance(
            await sandbox.run("print(1)", limits=SandboxLimits(wall=0.1)), SandboxLost
        )

    run(main, SandboxConfig(size=1))


MOST = 1 << 16
REPORTED = {"hit": "", "exit": 0, "seconds": 0.0, "cut": [0, 0]}
ENDLESS = {
    "a report of a terabyte": pack({**REPORTED, "sizes": [1 << 40, 0]}, 1 << 40),
    "more than its report has": pack({**REPORTED, "sizes": [MOST, MOST]}, 2 * MOST),
    "anything": b"\0" * 1000 + b"\xff",
}


def test_a_report_without_an_end_or_with_other_bytes_than_it_says_is_none() -> None:
    for other in ({"exit": None}, {"exit": "x"}, {"hit": "luck"}, {"cut": 3}, {"cut": [0]}):
        with pytest.raises((ValueError, TypeError)):
            JailReport.read({**REPORTED, **other}, (b"", b""), MOST)
    assert JailReport.read(REPORTED, (b"a", b""), MOST).stdout.text() == "a"


@pytest.mark.parametrize("begin", ENDLESS.values(), ids=ENDLESS)
def test_a_jail_that_sends_without_end_is_cut(begin: bytes) -> None:
    async def main() -> tuple[object, int]:
        jailed = await Jail.start("namespaces", SandboxConfig(preload=()))
        assert jailed._writer is not None
        jailed._writer.close()
        ours, hostile = socket.socketpair()
        jailed._reader, jailed._writer = await asyncio.open_connection(sock=ours, limit=PIECE)
        sending = asyncio.to_thread(flood, hostile, begin)
        limits = SMALL.model_dump() | {"wall": 60.0, "output": MOST}
        async with Flow("test") as flow:
            flooding = flow.start(sending, name="flood")
            report = await jailed.report_on(Order("", b"", **limits, cut=True))
        return report, await flooding

    report, sent = asyncio.run(main())
    assert isinstance(report, SandboxLost)
    assert sent < 16 * PIECE


def flood(hostile: socket.socket, begin: bytes) -> int:
    """Bytes that a jail could send until nobody listened."""
    with hostile:
        hostile.settimeout(60)
        sent = 0
        try:
            hostile.sendall(begin)
            while sent < 1 << 30:
                sent += hostile.send(bytes(1 << 16))
        except ConnectionError:
            pass
        return sent


def test_an_input_that_is_longer_than_pipes_reaches_whoever_reads_it() -> None:
    async def main(sandbox: ProgramSandbox) -> None:
        given = "0123456789abcdef" * (1 << 16)
        count = "import hashlib, sys; print(hashlib.md5(sys.stdin.buffer.read()).hexdigest())"
        expected = hashlib.md5(given.encode()).hexdigest()
        assert ran(await sandbox.run(count, given)) == f"{expected}\n"
        for partly in ("import sys; print(len(sys.stdin.read(5)))", "print(5)"):
            assert ran(await sandbox.run(partly, given)) == "5\n"
        closes = "import os, time; os.close(0); time.sleep(0.2); print(5)"
        assert ran(await sandbox.run(closes, given)) == "5\n"

    run(main, SandboxConfig(size=1))


def test_a_child_that_cannot_be_confined_is_a_loss_and_no_result() -> None:
    async def main(sandbox: ProgramSandbox) -> None:
        outcome = await sandbox.run("print(1)")
        assert isinstance(outcome, SandboxLost), outcome
        assert "could not be confined: ValueError" in outcome.error

    # More than the hard limit of this process, which nobody may give itself.
    run(main, SandboxConfig(size=1, limits=SandboxLimits(processes=1 << 62)))


@pytest.mark.slow
@each_backend
def test_the_driver_dying_ends_its_jails(backend: str) -> None:
    code = f"""
import asyncio
from agentrl.sandbox.pool import ProgramSandbox
from agentrl.sandbox.settings import SandboxConfig
async def main():
    async with ProgramSandbox(SandboxConfig(backend={backend!r}, size=1)) as sandbox:
        print("started", flush=True)
        await sandbox.run("import time; time.sleep(1000)")
asyncio.run(main())
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "started\n"
        started = psutil.Process(driver.pid).children(recursive=True)
        assert started
        driver.kill()
    assert still_alive(started, 60) == []


def test_the_strongest_backend_is_chosen_and_logged_and_without_any_it_refuses(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def enter(config: SandboxConfig) -> str:
        async with ProgramSandbox(config) as sandbox:
            return sandbox.backend

    with caplog.at_level(logging.INFO):
        assert asyncio.run(enter(SandboxConfig(size=1))) == "namespaces"
    assert "isolates by namespaces" in caplog.text

    whole = jail._START
    # A machine without them: the calls that make the walls are not there.
    missing = (
        "import os, errno; from agentrl.sandbox import kernel\n"
        "def gone(*_): raise OSError(errno.ENOSYS, 'not here')\n"
        "kernel.unshare = gone\n"
    )
    start = "import sys; sys.path.insert(0, {source!r})\n" + missing + whole
    monkeypatch.setattr(jail, "_START", start)
    assert asyncio.run(enter(SandboxConfig(size=1))) == "landlock"
    monkeypatch.setattr(
        jail, "_START", start.replace("kernel.unshare", "kernel.landlock_version = kernel.unshare")
    )
    with pytest.raises(
        ConfigError,
        match=r"cannot isolate.*namespaces: .*not here.*landlock: .*not here.*allow_unsafe",
    ):
        asyncio.run(enter(SandboxConfig(size=1)))
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(enter(SandboxConfig(size=1, allow_unsafe=True))) == "unsafe"
    assert "does NOT isolate" in caplog.text


def test_walls_that_do_not_hold_are_found_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    hole = (
        "import agentrl.sandbox.walls as w; w.Landlock.confine = lambda *_: None; "
        + jail._START.split("; ", 2)[2]
    )
    monkeypatch.setattr(jail, "_START", "import sys; sys.path.insert(0, {source!r}); " + hole)

    async def main() -> None:
        async with ProgramSandbox(SandboxConfig(backend="landlock", size=1)):
            pass

    with pytest.raises(ConfigError, match=r"landlock does not hold on this machine.*open a socket"):
        asyncio.run(main())


def test_extra_folders_can_be_imported_from_and_nothing_else_of_them_is_writable(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "extra_of_ours.py").write_text("X = 5")

    async def main(sandbox: ProgramSandbox) -> None:
        assert ran(await sandbox.run("import extra_of_ours; print(extra_of_ours.X)")) == "5\n"
        outcome = await sandbox.run(f"open({str(tmp_path / 'x')!r}, 'w')")
        assert isinstance(outcome, Ran)
        assert "Read-only file system" in outcome.stderr

    run(main, SandboxConfig(paths=(str(tmp_path),), size=1, backend="namespaces"))


# Those that want out


@pytest.fixture
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """What a program would like to reach, by the marks in `tests/sandbox/hostile.py`."""
    secret = tmp_path / "secret"
    secret.write_text("the key")
    secret.chmod(0o644)
    monkeypatch.setenv("AGENTRL_SECRET_KEY", "the key")
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
    ):
        abstract.bind(f"\0agentrl-{os.getpid()}")
        port = str(server.getsockname()[1])
        yield {
            "@SECRET@": str(secret),
            "@DRIVER@": str(os.getpid()),
            "@PORT@": port,
            "@CHECKOUT@": str(Path(__file__).parents[2]),
        }
    assert secret.read_text() == "the key"


def program_of(kind: str, rng: Random, targets: dict[str, str]) -> str:
    program = KINDS[kind].write(rng)
    for mark, target in targets.items():
        program = program.replace(mark, target)
    return program


def escape(kind: str, program: str, outcome: Outcome, busy: bool = False) -> str:
    """What was not contained, or nothing. On a busy machine anything may take too long."""
    name = (
        "ran"
        if isinstance(outcome, Ran)
        else outcome.which
        if isinstance(outcome, LimitHit)
        else "lost"
    )
    wrote = "" if isinstance(outcome, SandboxLost) else outcome.stdout
    if name in KINDS[kind].outcomes | ({"wall"} if busy else set()) and "ESCAPED" not in wrote:
        return ""
    return f"{kind}: {outcome!r:.1500}\n{program[-1500:]}"


@each_backend
def test_hostile_programs_that_end_by_themselves_are_contained(
    backend: str, targets: dict[str, str]
) -> None:
    async def main(sandbox: ProgramSandbox) -> None:
        for kind in (name for name, kind in KINDS.items() if kind.quick):
            program = program_of(kind, Random(kind), targets)
            assert not (found := escape(kind, program, await sandbox.run(program))), found
        assert len(jails()) == (2 if backend == "namespaces" else 1)

    run(
        main,
        SandboxConfig(
            backend=backend, size=1, limits=SMALL.model_copy(update={"wall": 10.0, "cpu": 5.0})
        ),
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.long
def test_a_hundred_hostile_programs_are_contained_and_the_pool_lives(
    backend: str, targets: dict[str, str]
) -> None:
    seconds_of_hostile(backend, 100, targets)


@pytest.mark.long
@each_backend
def test_a_thousand_hostile_programs_are_contained_and_the_pool_lives(
    backend: str, targets: dict[str, str]
) -> None:
    seconds = seconds_of_hostile(backend, 1000, targets)
    assert sorted(seconds)[int(0.99 * len(seconds))] <= SMALL.wall + 1


def seconds_of_hostile(backend: str, count: int, targets: dict[str, str]) -> list[float]:
    """Run so many hostile programs of all kinds in a pool, and see that none gets out; how long
    each has taken.
    """
    rng = Random(7)
    kinds = list(KINDS)
    waiting = [
        (kind, program_of(kind, rng, targets))
        for kind in (kinds[i % len(kinds)] for i in range(count))
    ]
    assert len(kinds) >= 20
    found: list[str] = []
    seconds: list[float] = []
    outcomes: Counter[str] = Counter()

    async def worker(sandbox: ProgramSandbox) -> None:
        while waiting:
            kind, program = waiting.pop()
            begun = now()
            outcome = await sandbox.run(program)
            seconds.append(now() - begun)
            outcomes[type(outcome).__name__] += 1
            found.extend(filter(None, [escape(kind, program, outcome, busy=True)]))

    async def main(sandbox: ProgramSandbox) -> None:
        await sandbox.run_all([("import time; time.sleep(0.5)", "")] * sandbox.config.size)
        first = {process.pid for process in jails()}
        async with Flow("test") as flow:
            for number in range(sandbox.config.size):
                flow.start(worker(sandbox), name=f"worker-{number}")
        assert not found, "\n\n".join(found[:5])
        assert outcomes["SandboxLost"] == 0
        assert {
            process.pid for process in jails()
        } == first  # the very jails that there were, and nothing else in them
        # On a busy machine, even this may take longer than SMALL allows.
        for _ in range(2 * sandbox.config.size):
            assert ran(await sandbox.run("print(1)", limits=SandboxLimits(wall=60))) == "1\n"

    run(main, SandboxConfig(backend=backend, size=4, limits=SMALL))
    return seconds


def test_the_probe_of_the_start_is_one_that_an_open_machine_fails() -> None:
    async def main(sandbox: ProgramSandbox) -> None:
        with pytest.raises(ConfigError, match="does not hold"):
            await sandbox._test_isolation(next(iter(sandbox._jails)))

    async def unsafe() -> None:
        sandbox = ProgramSandbox(SandboxConfig(size=1))
        sandbox.backend = "unsafe"
        await sandbox._start()
        try:
            await main(sandbox)
        finally:
            await sandbox.__aexit__()

    asyncio.run(unsafe())
    assert pool.BACKENDS == ("namespaces", "landlock")
