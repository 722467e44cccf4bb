"""A Docker engine of the tests' own, and an image made of this machine's programs: no registry is
needed.

Where there is no engine, tests that need one are skipped; in CI they fail.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agentrl.sandbox.base_image import base_image
from tests.processes import PATIENCE_SECONDS

BASE = "agentrl-test-base"
needs_docker = pytest.mark.xdist_group("docker")
"""One engine serves all tests: they run in one process."""


@pytest.fixture(scope="session")
def docker_host() -> Iterator[str]:
    """Where an engine listens that has the image `BASE`."""
    if os.environ.get("DOCKER_HOST"):
        _import_base(os.environ["DOCKER_HOST"])
        yield os.environ["DOCKER_HOST"]
        return
    with own_engine() as engine:
        yield engine.host


@contextmanager
def own_engine() -> Iterator["OwnEngine"]:
    """An engine of the test's own, which it may stop, with the image `BASE`."""
    dockerd = shutil.which("dockerd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if dockerd is None or os.geteuid() != 0:
        missing = "no Docker engine: neither DOCKER_HOST nor a `dockerd` that this user may start"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)
    with tempfile.TemporaryDirectory(prefix="agentrl-engine-") as folder:
        engine = OwnEngine(dockerd, Path(folder))
        engine.start()
        try:
            _import_base(engine.host)
            yield engine
        finally:
            engine.stop()


class OwnEngine:
    """A `dockerd` with folders and a socket of its own, and no network."""

    def __init__(self, dockerd: str, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/docker.sock"
        self._command = [
            # A killed pytest ends it, too, with its containers.
            *("setpriv", "--pdeathsig", "TERM"),
            dockerd,
            *("--data-root", str(folder / "data"), "--exec-root", str(folder / "exec")),
            *("-H", self.host, "-p", str(folder / "pid")),
            *("--iptables=false", "--bridge=none"),
        ]

    def start(self) -> None:
        """Start it, and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        until = time.monotonic() + PATIENCE_SECONDS
        while subprocess.run(
            docker(self.host, "version"), capture_output=True, check=False
        ).returncode:
            log_text = (self.folder / "log").read_text()
            assert self._process.poll() is None, log_text[-2000:]
            assert time.monotonic() < until, log_text[-2000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """End it, with its containers."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(60)
        self._process.kill()
        self._process.wait()
        for mount in sorted(Path("/proc/mounts").read_text().split("\n"), reverse=True):
            path = mount.split(" ")[1] if " " in mount else ""
            if path.startswith(str(self.folder)):
                subprocess.run(["umount", "-l", path], check=False)

    def kill(self) -> None:
        """Kill it, so that it restores nothing and tells nobody."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()


def _import_base(host: str) -> None:
    if subprocess.run(
        docker(host, "image", "inspect", BASE), capture_output=True, check=False
    ).returncode:
        subprocess.run(
            docker(host, "import", "-", BASE), input=base_image(), check=True, capture_output=True
        )


def docker(host: str, *words: str) -> list[str]:
    """A command line of Docker's client."""
    return ["docker", "--host", host, *words]
