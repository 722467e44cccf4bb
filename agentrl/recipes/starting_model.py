"""The model that a run starts from: a folder or a randomly initialised model, after its
demonstrations, if any.
"""

import asyncio
import json
import logging
from functools import partial
from pathlib import Path

from agentrl.assembly.players import agent_player, env_host
from agentrl.config.run_config import RunConfig
from agentrl.conversation.renderer import TemplateRenderer
from agentrl.errors import EnvError, RolloutError
from agentrl.files.durable import finish_folder, new_unfinished
from agentrl.gateway.player import PlayerEngine
from agentrl.models.tiny import SIZES, create_tiny_model
from agentrl.recipes.demonstrations import DemonstrationsConfig, imitate
from agentrl.recipes.evaluate import play_all
from agentrl.rollout.engine_policy import EnginePolicy
from agentrl.rollout.next_task import next_task
from agentrl.runs.run import Run
from agentrl.runs.task_sources import task_source
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.tokenizer import ByteTokenizer

logger = logging.getLogger(__name__)


async def starting_model(run: Run, demonstrations: DemonstrationsConfig | None) -> Path:
    """The folder of the model that reinforcement learning starts from: the configured one, after
    its demonstrations.
    """
    base = await base_model(run)
    if demonstrations is None:
        return base
    final = run.folder / "demonstrations"
    if not final.exists():
        await imitate(run, demonstrations, base, new_unfinished(final))
        finish_folder(final)
    return final


async def base_model(run: Run) -> Path:
    """The folder of the model to start from; if the config names a size instead of a folder, the
    model is made first.

    Its tokenizer is then learned from the environment's texts, so that the environment's words are
    single tokens.
    """
    name = run.config.model.name
    if name not in SIZES:
        return run.source_model()
    folder = run.folder / "model"
    if not folder.exists():
        corpus = await (texts_of_agent if run.config.env.is_agent else opening_texts)(run.config)
        make = partial(create_tiny_model, corpus=corpus, size=SIZES[name], seed=run.config.seed)
        await asyncio.to_thread(make, new_unfinished(folder))
        finish_folder(folder)
    return folder


async def opening_texts(config: RunConfig, episodes: int = 64) -> list[str]:
    """The environment's texts at the start of some episodes of the split "corpus". Failed episodes
    are left out.

    Raises:
        RolloutError: all failed, or more than `rollout.max_failed_tasks` in a row.
    """
    source = task_source(config, "corpus")
    texts: list[str] = []
    in_a_row = 0
    async with env_host(config, shown=False) as envs:
        for index in range(episodes):
            task = next_task(source, index)
            env = envs.acquire(task.env)
            try:
                observation, _ = await env.reset(task.seed, task.options)
                texts += [env.system_prompt, observation, *(json.dumps(tool) for tool in env.tools)]
                in_a_row = 0
            except RolloutError as error:
                in_a_row += 1
                if in_a_row > config.rollout.max_failed_tasks or (
                    index == episodes - 1 and not texts
                ):
                    raise
                logger.warning(
                    "reading the environment's texts for the tokenizer: %s; it is left out", error
                )
            finally:
                await envs.release(task.env, env)
    return texts


async def texts_of_agent(config: RunConfig, episodes: int = 16) -> list[str]:
    """The messages of a program to the model in some episodes of the split "corpus", in which all
    answers are empty.

    A program may fail over such answers; what it has written until then is kept.

    Raises:
        EnvError: no episode has a text.
    """
    renderer = TemplateRenderer(ByteTokenizer())
    engine = PlayerEngine(lambda prompt, rng: "", renderer)
    source = task_source(config, "corpus")
    async with agent_player(config, renderer) as agents:
        runner = agents(
            EnginePolicy(engine, SamplingParams(), config.rollout.deadlines.generate, trained=False)
        )
        played = await play_all(runner, [source.task(index) for index in range(episodes)], config)
    texts = [
        message.content
        for trajectory in played
        for message in trajectory.messages
        if message.content
    ]
    if not texts:
        raise EnvError(
            f"{config.env.name} has asked the model nothing in {episodes} episodes:"
            f" {played[0].status}"
        )
    return texts
