"""The whole examination: `examine`."""

import asyncio
import io
import logging
import tempfile
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from agentrl import plugins
from agentrl.config.loading import LoadedConfig
from agentrl.config.run_config import RunConfig
from agentrl.conversation.renderer import renderer_of
from agentrl.conversation.template_check import template_findings
from agentrl.doctor.addresses import address_diagnoses
from agentrl.doctor.counting import counting_config, counting_diagnosis
from agentrl.doctor.diagnosis import Diagnosis
from agentrl.doctor.machine import MachineFacts, machine_facts
from agentrl.doctor.machine_checks import machine_diagnoses
from agentrl.errors import AgentRLError, ConfigError
from agentrl.flow import now
from agentrl.models.source import description_folder
from agentrl.models.tiny import SIZES
from agentrl.runs.preflight import check_config
from agentrl.runs.run import Run

_LARGE_LR = 1e-3


async def examine(
    loaded: LoadedConfig, *, quick: bool = False, facts: MachineFacts | None = None
) -> AsyncGenerator[Diagnosis, None]:
    """All diagnoses, in the order of what has to be right first. `facts`: by default asked here.
    A caller that stops early closes the generator (`contextlib.aclosing`), so that its trial ends.

    `quick`: without what starts engines, trainers or environments.
    """
    config = loaded.config
    if facts is None:
        facts = await asyncio.to_thread(machine_facts, config.run_dir)
    for one in machine_diagnoses(facts, config):
        yield one
    async with aclosing(address_diagnoses(config)) as diagnoses:
        async for one in diagnoses:
            yield one
    model = await asyncio.to_thread(_model, config)
    yield model
    yield await asyncio.to_thread(_config, loaded)
    if quick:
        yield Diagnosis(
            "trial", "left out by --quick: logprobs, weights, episodes, counting", skipped=True
        )
        return
    with tempfile.TemporaryDirectory(prefix="agentrl-doctor-") as folder:
        async with aclosing(_trial(loaded, Path(folder) / "trial")) as diagnoses:
            async for one in diagnoses:
                yield one
        yield await _counting(config, Path(folder) / "counting")


def _model(config: RunConfig) -> Diagnosis:
    """Its template and tokenizer, as `agentrl check-model` tries them."""
    name = config.model.name
    if name in SIZES:
        return Diagnosis("model", f"{name} is made when the run starts")
    try:
        folder = description_folder(name, config.model.revision, config.model.hf_overrides)
        wrong = [
            one for one in template_findings(renderer_of(folder, config.model)) if not one.right
        ]
    except ConfigError as error:
        return Diagnosis("model", str(error), "name a folder of a model, or one on the hub")
    if wrong:
        words = "; ".join(f"{one.subject}: {one.words}" for one in wrong)
        remedy = (
            f"`agentrl check-model {name}` shows it; model.chat_template=FILE replaces a template"
        )
        return Diagnosis("model", words, remedy)
    return Diagnosis("model", f"{name}: its template keeps what was sampled")


def _config(loaded: LoadedConfig) -> Diagnosis:
    """What a run checks before it starts anything: extras, data, the model, the placement."""
    try:
        check_config(loaded, new_model=True)
    except ConfigError as error:
        return Diagnosis("config", str(error), "change the config as the message says")
    return Diagnosis("config", f"a run of {loaded.config.recipe.name} could start")


def _trial_config(loaded: LoadedConfig, folder: Path) -> LoadedConfig:
    """The config of the trial: in a separate folder, with large steps, and without trackers."""
    config = loaded.config
    # A learning rate at which the effect of one step shows.
    large = {"lr": _LARGE_LR, "schedule": "constant", "warmup_steps": 0, "minibatches": 1}
    fields = type(config.trainer.settings).model_fields
    known = {name: value for name, value in large.items() if name in fields}
    trainer = replace(config.trainer, settings=config.trainer.settings.model_copy(update=known))
    changed = {"run_dir": folder, "trackers": (), "trainer": trainer}
    return LoadedConfig(config.model_copy(update=changed), loaded.origins)


async def _trial(loaded: LoadedConfig, folder: Path) -> AsyncGenerator[Diagnosis, None]:
    # As a recipe is loaded: by its address, since it imports all that recipes import.
    trial_diagnoses = plugins.load("recipes", "agentrl.doctor.trial:trial_diagnoses")
    try:
        with _quiet(), Run(_trial_config(loaded, folder), Console(file=io.StringIO())) as run:
            async with aclosing(trial_diagnoses(run)) as diagnoses:
                async for one in diagnoses:
                    yield one
    except (AgentRLError, OSError) as error:
        yield Diagnosis("trial", str(error), "mend what the message names")


async def _counting(config: RunConfig, folder: Path) -> Diagnosis:
    loaded = counting_config(config, str(folder))
    began = now()
    try:
        with _quiet(), Run(loaded, Console(file=io.StringIO())) as run:
            await loaded.config.recipe.call(run)
            rewards = [float(row["reward"]) for row in run.metrics.rows() if "reward" in row]
    except (AgentRLError, OSError) as error:
        return Diagnosis("counting", str(error), "mend what the message names")
    return counting_diagnosis(rewards, now() - began)


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of a short run are about learning, not about the machine."""
    logger = logging.getLogger("agentrl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
