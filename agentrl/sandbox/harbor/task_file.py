"""`task.toml` of a Harbor task, schemas 1.0 to 1.4: the fields of `harbor.models.task.config` that
decide how a task is run.

Fields that are not here (names, authors, keywords) are passed over, as Harbor does with those that
it does not know.
"""

import math
import re
import tomllib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

Network = Literal["no-network", "public", "allowlist"]
_SIZES = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


class Table(BaseModel):
    """A table of the file."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class Healthcheck(Table):
    """A command that must succeed before the agent begins."""

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class TaskMachine(Table):
    """The table `environment`, also of a verifier."""

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    os: Literal["linux", "windows"] = "linux"
    cpus: int | float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: Network = "public"
    allowed_hosts: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_older_fields(cls, data: Any) -> Any:
        """`memory`, `storage` and `allow_internet` of schema 1.0."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for old in ("memory", "storage"):
            size = data.pop(old, None)
            if isinstance(size, str):
                new, megabytes = f"{old}_mb", _megabytes(size)
                if data.get(new, megabytes) != megabytes:
                    raise ValueError(f"{old} = {size!r} and {new} = {data[new]} differ")
                data[new] = megabytes
        internet = data.pop("allow_internet", None)
        if internet is not None and "network_mode" not in data and not data.get("allowed_hosts"):
            data["network_mode"] = "public" if internet else "no-network"
        return data

    @field_validator("os", mode="before")
    @classmethod
    def _lower_case(cls, name: Any) -> Any:
        return name.lower() if isinstance(name, str) else name

    @field_validator("cpus")
    @classmethod
    def _whole_cpus(cls, cpus: int | float | None) -> int | float | None:
        if isinstance(cpus, float) and not math.isfinite(cpus):
            raise ValueError(f"cpus must be finite, and not {cpus}")
        return int(cpus) if isinstance(cpus, float) and cpus.is_integer() else cpus


class Collect(Table):
    """A command that runs after the agent, so that artifacts have what a service knows."""

    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: str | int | None = None


class AgentTable(Table):
    """The table `agent`."""

    timeout_sec: float | None = None
    user: str | int | None = None
    network_mode: Network | None = None
    allowed_hosts: list[str] | None = None


class VerifierTable(Table):
    """The table `verifier`."""

    timeout_sec: float = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    network_mode: Network | None = None
    allowed_hosts: list[str] | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: TaskMachine | None = None
    collect: list[Collect] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_environment_mode(self) -> "VerifierTable":
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode = 'shared' contradicts [verifier.environment]")
        return self

    @property
    def is_separate(self) -> bool:
        """True if the verifier has a machine of its own."""
        return self.environment_mode == "separate" or self.environment is not None


class Artifact(Table):
    """What a separate verifier gets of the agent's machine."""

    source: str
    destination: str | None = None
    exclude: list[str] = Field(default_factory=list)
    service: str | None = None

    @field_validator("source")
    @classmethod
    def _check_source(cls, source: str) -> str:
        if ".." in source.split("/"):
            raise ValueError(f"the source of an artifact has '..': {source!r}")
        return source


class Solution(Table):
    """The table `solution`."""

    env: dict[str, str] = Field(default_factory=dict)


class TaskFile(Table):
    """The whole file."""

    schema_version: str = "1.4"
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    environment: TaskMachine = TaskMachine()
    solution: Solution = Solution()
    steps: list[dict[str, Any]] | None = None
    artifacts: list[Artifact] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _read_older_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        if "version" in data:
            data.setdefault("schema_version", data.pop("version"))
        data["artifacts"] = [
            {"source": one} if isinstance(one, str) else one for one in data.get("artifacts", [])
        ]
        return data


def read_task_file(text: str) -> TaskFile:
    """Parse a `task.toml`.

    Raises:
        ValueError: it is no TOML, or has a field of a wrong type.
    """
    return TaskFile.model_validate(tomllib.loads(text))


def _megabytes(size: str) -> int:
    found = re.fullmatch(r"\s*([0-9.]+)\s*([GMK])\s*", size.upper())
    if found is None:
        raise ValueError(f"{size!r} is no size: write 1G, 512M or 64K")
    return int(float(found[1]) * _SIZES[found[2]])
