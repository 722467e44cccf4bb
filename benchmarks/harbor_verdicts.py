"""Whether Harbor's own runs and ours come to the same verdicts on one Docker engine.

    python -m benchmarks.harbor_verdicts                      # examples/harbor, and more
    python -m benchmarks.harbor_verdicts 01-hello half late   # some of them
    python -m benchmarks.harbor_verdicts --root /var/harbor   # keeps the Debian 13 that it makes

Harbor needs Python 3.12, so it is installed in a Debian 13 in a folder of its own, by `debootstrap`
(as root, minutes, 950 MB). Its program `harbor run` calls the programs of Docker in there,
and these an engine of this program's own. Each task is run with Harbor's agents `oracle`, which
does what the solution does, and `nop`. Beside the examples there are tasks that earn neither 1 nor
0 (`BETWEEN`). It ends with status 1 if a verdict differs that should not.

Tasks without a network have none here by a Compose file that says so: Harbor's own way takes images
of a registry.
"""

import argparse
import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.sandbox.harbor.task import read_task, task_folders
from agentrl.sandbox.harbor.trial import HarborTrial, TrialSettings
from agentrl.sandbox.providers import open_provider
from tests.docker_engine import BASE, docker, own_engine

EXAMPLES = Path(__file__).parents[1] / "examples" / "harbor"
IMAGE = "agentrl-base"
"""The image that the examples begin with."""
SUITE = "trixie"
PACKAGES = "python3,python3-venv,ca-certificates,docker-cli,docker-compose,docker-buildx"
HARBOR = "harbor==0.26.0"
CERTIFICATES = Path("etc/ssl/certs/ca-certificates.crt")
AGENTS = ("oracle", "nop")
NO_NETWORK = """services:
  main:
    network_mode: none
    build: {network: none}
"""
WALL = re.compile(r"^(network_mode|allow_internet) *=.*\n", re.MULTILINE)
"""The lines of a task that ask for no network."""
DIFFERS = {
    "silent": "no reward: Harbor's trial has failed, and counts as 0 in its mean",
    "empty": "a reward that cannot be read: the same",
    "late": "a verifier that is late: the same, and what it wrote before does not count",
}
"""Tasks to which Harbor gives no verdict, and we a reward of 0."""


@dataclass(frozen=True, slots=True)
class Between:
    """A task whose verdict is not simply 1 or 0, as a change of the first example."""

    test: str
    """What its verifier does, after the solution and after nothing."""
    seconds: float = 60.0


BETWEEN = {
    "half": Between("echo 0.5 > /logs/verifier/reward.txt"),
    "several": Between("""echo '{"reward": 0.25, "style": 1}' > /logs/verifier/reward.json"""),
    "both": Between(
        "echo 1 > /logs/verifier/reward.txt; echo '{\"tests\": 0.75}' > /logs/verifier/reward.json"
    ),
    "failed": Between("echo 0.5 > /logs/verifier/reward.txt; exit 3"),
    "silent": Between("echo nothing to say"),
    "empty": Between(": > /logs/verifier/reward.txt"),
    "late": Between("echo 1 > /logs/verifier/reward.txt; sleep 600", seconds=10.0),
}


class MissingError(Exception):
    """Something that this machine lacks, by name."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a trial."""

    rewards: Mapping[str, float] = field(default_factory=dict)
    why: str = ""
    """What there is in place of rewards."""

    def __str__(self) -> str:
        names = (f"{name} {value:g}" for name, value in sorted(self.rewards.items()))
        return ", ".join(names) or self.why


Outcomes = dict[tuple[str, str], Outcome]
"""By the names of the task and of Harbor's agent."""


class HarborRoot:
    """A Debian 13 in a folder, with Harbor and the programs that it calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ready = folder / "harbor-is-installed"

    def make(self) -> None:
        """Install it, unless it is there.

        Raises:
            MissingError: it cannot be installed here.
        """
        if self._ready.exists():
            return
        debootstrap = shutil.which("debootstrap", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if debootstrap is None or os.geteuid() != 0:
            raise MissingError(
                "no debootstrap that this user may run (Debian's package of its name)"
            )
        options = ["--variant=minbase", f"--include={PACKAGES}"]
        self._install([debootstrap, *options, SUITE, str(self.folder), _mirror()])
        for path in (CERTIFICATES, Path("etc/resolv.conf"), Path("etc/pip.conf")):
            if (Path("/") / path).exists():
                shutil.copy(Path("/") / path, self.folder / path)
        self._install(self._inside("python3", "-m", "venv", "/opt/harbor"))
        pip = ("/opt/harbor/bin/pip", "install", "--quiet", HARBOR)
        self._install(self._inside(*pip), _environment())
        self._ready.touch()

    def harbor(self, *words: str, shared: Sequence[Path], host: str) -> str:
        """Run Harbor's program, which sees these folders and files where they are here. Returns
        what it wrote.
        """
        command = self._inside("/opt/harbor/bin/harbor", *words, shared=shared)
        environment = _environment() | {"DOCKER_HOST": host, "HARBOR_TELEMETRY": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr)[-4000:]
            sys.exit(f"harbor {' '.join(words)} failed:\n{said}")
        return done.stdout

    def _inside(self, *words: str, shared: Sequence[Path] = ()) -> list[str]:
        """A command line in there. No other process sees its mounts, which end with it."""
        lines = ["set -e", f"mount -t proc proc {self.folder}/proc"]
        for path in shared:
            there = self.folder / path.relative_to("/")
            make = f"mkdir -p {there}" if path.is_dir() else f"mkdir -p {there.parent}; : > {there}"
            lines += [make, f"mount --bind {path} {there}"]
        script = "; ".join([*lines, f'exec chroot {self.folder} "$@"'])
        return ["unshare", "--mount", "sh", "-c", script, "sh", *words]

    def _install(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            said = (done.stdout + done.stderr)[-2000:]
            raise MissingError(f"no Debian 13 with Harbor: {' '.join(command[:2])} failed:\n{said}")


def _mirror() -> str:
    """Where this machine gets its packages from."""
    asked = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise MissingError(f"no mirror of Debian: {error}") from error
    mirrors = [uri for uri in found if "security" not in uri]
    if not mirrors:
        raise MissingError("no mirror of Debian among the sources of apt-get")
    return mirrors[0]


def _environment() -> dict[str, str]:
    """The variables of a program in there: an own home, and this machine's ways to the network."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.lower() in {"http_proxy", "https_proxy", "no_proxy", "pip_index_url"}
    }
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    # A build by BuildKit would look for the base image in a registry first.
    builds = {"DOCKER_BUILDKIT": "0", "COMPOSE_BAKE": "false"}
    certificates = {"PIP_CERT": f"/{CERTIFICATES}", "SSL_CERT_FILE": f"/{CERTIFICATES}"}
    return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", **builds, **certificates, **kept}


def write_tasks(names: Sequence[str], folder: Path) -> list[Path]:
    """The tasks of these names, or all, as Harbor can run them here."""
    known = {path.name: path for path in task_folders(EXAMPLES)}
    if unknown := sorted(set(names) - known.keys() - BETWEEN.keys()):
        sys.exit(f"there is no task {unknown[0]!r}: {', '.join([*known, *BETWEEN])}")
    for name in names or [*known, *BETWEEN]:
        target = folder / name
        shutil.copytree(known.get(name, known["01-hello"]), target)
        file = target / "task.toml"
        text = WALL.sub("", file.read_text())
        if name in BETWEEN:
            task = BETWEEN[name]
            text = text.replace("timeout_sec = 60.0", f"timeout_sec = {task.seconds}")
            (target / "tests" / "test.sh").write_text(f"#!/bin/bash\n{task.test}\n")
        file.write_text(text)
    return sorted(folder.iterdir())


def harbors_outcomes(root: HarborRoot, tasks: Path, host: str, jobs: Path) -> Outcomes:
    """What Harbor's own runs say."""
    overlay = jobs / "no-network.yaml"
    overlay.write_text(NO_NETWORK)
    shared = [tasks, jobs, Path(host.removeprefix("unix://"))]
    found: Outcomes = {}
    for agent in AGENTS:
        where = ("--path", str(tasks), "--jobs-dir", str(jobs), "--job-name", agent)
        how = ("--agent", agent, "--env", "docker", "--extra-docker-compose", str(overlay))
        root.harbor("run", *where, *how, "--n-concurrent", "2", "--yes", shared=shared, host=host)
        for path in sorted((jobs / agent).glob("*/result.json")):
            trial = json.loads(path.read_text())
            found[Path(trial["task_id"]["path"]).name, agent] = _harbors_outcome(trial)
    return found


def _harbors_outcome(trial: Mapping[str, object]) -> Outcome:
    verified, raised = trial["verifier_result"], trial["exception_info"]
    rewards = verified["rewards"] if isinstance(verified, dict) else None
    if rewards is not None:
        return Outcome({name: float(value) for name, value in rewards.items()})
    return Outcome(why=raised["exception_type"] if isinstance(raised, dict) else "no reward")


async def our_outcomes(tasks: Sequence[Path], host: str) -> Outcomes:
    """What our trials say, as `agentrl check-tasks` runs them."""
    provider = await open_provider({"name": "docker", "host": host})
    found: Outcomes = {}
    try:
        for folder in tasks:
            for agent in AGENTS:
                trial = HarborTrial(read_task(folder), provider, TrialSettings(network=False))
                try:
                    await trial.start()
                    if agent == "oracle":
                        await trial.solve()
                    verdict = await trial.judge()
                finally:
                    await trial.close()
                found[folder.name, agent] = Outcome(verdict.rewards, verdict.why)
    finally:
        await provider.close()
    return found


@dataclass(frozen=True, slots=True)
class Comparison:
    """The verdicts of both."""

    harbor: Outcomes
    ours: Outcomes

    @property
    def differing(self) -> list[str]:
        """What differs, and should not."""
        return [
            f"{task} by {agent}: {theirs} in Harbor, {self.ours[task, agent]} here"
            for (task, agent), theirs in self.harbor.items()
            if not self._as_it_should(task, theirs, self.ours[task, agent])
        ]

    @property
    def table(self) -> Table:
        """All verdicts."""
        table = Table("task", "agent", "Harbor", "agentrl")
        for (task, agent), theirs in sorted(self.harbor.items()):
            table.add_row(task, agent, str(theirs), str(self.ours[task, agent]))
        return table

    def _as_it_should(self, task: str, theirs: Outcome, ours: Outcome) -> bool:
        if task in DIFFERS:
            return not theirs.rewards and not ours.rewards and bool(theirs.why and ours.why)
        return bool(ours.rewards) and theirs.rewards == ours.rewards


def compare(names: Sequence[str], root: HarborRoot, host: str) -> Comparison:
    """Run tasks both ways on an engine.

    Raises:
        MissingError: Harbor cannot be installed here.
    """
    if not host.startswith("unix://"):
        raise MissingError(f"no socket of Docker that Harbor could be shown: {host} is none")
    root.make()
    subprocess.run(docker(host, "tag", BASE, IMAGE), check=True, capture_output=True)
    with tempfile.TemporaryDirectory(prefix="agentrl-verdicts-") as folder:
        tasks, jobs = Path(folder) / "tasks", Path(folder) / "jobs"
        tasks.mkdir()
        jobs.mkdir()
        written = write_tasks(names, tasks)
        harbors = harbors_outcomes(root, tasks, host, jobs)
        return Comparison(harbors, asyncio.run(our_outcomes(written, host)))


def main() -> int:
    """Compare, and print all verdicts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="TASK")
    parser.add_argument("--root", type=Path, help="where the Debian 13 is, or is made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="agentrl-debian-") as made, own_engine() as engine:
        root = HarborRoot((args.root or Path(made) / "root").resolve())
        try:
            found = compare(args.names, root, engine.host)
        except MissingError as error:
            sys.exit(str(error))
    Console(width=120).print(found.table)
    print(*found.differing, sep="\n")
    return int(bool(found.differing))


if __name__ == "__main__":
    sys.exit(main())
