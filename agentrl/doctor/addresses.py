"""Checks of the addresses in a config: the reward's judge answers, ports are free, and the clocks
of servers agree with this machine's.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx

from agentrl.assembly.rollouts import reward_of
from agentrl.config.run_config import RunConfig
from agentrl.doctor.diagnosis import Diagnosis
from agentrl.errors import AgentRLError
from agentrl.flow import now
from agentrl.net.http_client import http_client
from agentrl.protocols.component_settings import ServerOffers
from agentrl.scoring.config import RewardsConfig

_TIMEOUT = 5.0
"""Seconds for the answer of a server; a judge is retried within them."""
_LARGEST_SKEW = 60.0
"""Seconds of a clock; the header `Date` has whole ones, and answers take some."""


async def address_diagnoses(config: RunConfig) -> AsyncGenerator[Diagnosis, None]:
    """Everything about addresses that the config names."""
    for diagnosis in _check_port(config):
        yield diagnosis
    yield await _check_reward(config)
    for url in _endpoints(config):
        yield await _check_endpoint(url)


def _check_port(config: RunConfig) -> Iterator[Diagnosis]:
    """The port that the run will listen on, if the config names one."""
    gateway = config.gateway
    if gateway.port == 0:
        yield Diagnosis("ports", "any free one is taken")
        return
    where = f"port {gateway.port} of {gateway.host} (gateway.port)"
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the gateway does
        try:
            listening.bind((gateway.host, gateway.port))
            listening.listen(1)
        except OSError as error:
            remedy = (
                "end what listens there (`ss -ltnp` names it), or write gateway.port=0 for any free"
                " one"
            )
            yield Diagnosis("ports", f"{where} cannot be used: {error.strerror}", remedy)
            return
    yield Diagnosis("ports", f"{where} is free")


async def _check_reward(config: RunConfig) -> Diagnosis:
    """Start all parts of the reward. Judges are asked which models they serve."""
    began = now()
    names = ", ".join(part.name for part in config.reward.parts)
    quick = config.model_copy(update={"reward": _with_few_retries(config.reward)})
    try:
        async with reward_of(quick):
            return Diagnosis("reward", f"{names}: ready in {now() - began:.1f} s")
    except (AgentRLError, OSError) as error:
        remedy = "start what it needs, or mend its address or key in the section reward"
        return Diagnosis("reward", str(error), remedy)


def _with_few_retries(rewards: RewardsConfig) -> RewardsConfig:
    """The same parts, in which judges give up soon."""
    parts = []
    for part in rewards.parts:
        settings = part.settings
        if "budget" in type(settings).model_fields:
            settings = settings.model_copy(update={"budget": _TIMEOUT, "retries": 2})
        parts.append(replace(part, settings=settings))
    return replace(rewards, parts=tuple(parts))


def _endpoints(config: RunConfig) -> Iterator[str]:
    """The addresses of HTTP servers in the config, each server once."""
    parts = [part.settings for part in config.reward.parts]
    written = [ServerOffers.of(one).url for one in [config.engine.settings, *parts]]
    written += [env.name for env in config.envs.values()]
    seen = set()
    for url in written:
        split = urlsplit(url) if isinstance(url, str) else None
        if split is None or split.scheme not in ("http", "https") or split.netloc in seen:
            continue
        seen.add(split.netloc)
        yield f"{split.scheme}://{split.netloc}"


async def _check_endpoint(url: str) -> Diagnosis:
    """Check that a server answers, and that its clock agrees with ours."""
    began = now()
    try:
        async with http_client() as client, asyncio.timeout(_TIMEOUT):
            answer = await client.get(url)
    except (httpx.HTTPError, TimeoutError) as error:
        words = f"no answer in {_TIMEOUT:g} s" if isinstance(error, TimeoutError) else str(error)
        remedy = "start the server, or mend its address; HTTP_PROXY and NO_PROXY count here"
        return Diagnosis("server", f"{url}: {words}", remedy)
    seconds = now() - began
    skew = _skew(answer.headers.get("date", ""))
    words = f"{url} answers in {1e3 * seconds:.0f} ms"
    if abs(skew) > _LARGEST_SKEW:
        words = f"{url} is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} this machine"
        return Diagnosis("clock", words, "set both clocks by NTP: `timedatectl set-ntp true`")
    return Diagnosis("server", words)


def _skew(date: str) -> float:
    """Seconds by which the clock that wrote a header `Date` is ahead; 0 if there is none."""
    try:
        there = parsedate_to_datetime(date)
    except (TypeError, ValueError):
        return 0.0
    return (there - datetime.now(UTC)).total_seconds()
