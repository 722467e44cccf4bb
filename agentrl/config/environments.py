"""The environments that a config names."""

from collections.abc import Iterator

from pydantic import ValidationError

from agentrl import plugins
from agentrl.config.run_config import RunConfig
from agentrl.protocols import options_class_of, shows_images
from agentrl.tasks.env_config import OneEnv


def envs_of(config: RunConfig) -> Iterator[tuple[tuple[str, ...], OneEnv]]:
    """The environments of a run that this interpreter can load, each with the section that names
    it.
    """
    sections: list[tuple[tuple[str, ...], OneEnv | None]] = [
        (("env",), None if config.env.mixture else config.env)
    ]
    sections += [(("env", "mixture", str(at)), one) for at, one in enumerate(config.env.mixture)]
    sections += [
        (("evaluation", "suites", str(at), "env"), suite.env)
        for at, suite in enumerate(config.evaluation.suites)
    ]
    yield from ((section, env) for section, env in sections if env is not None and not env.foreign)


def shows_pictures(env: OneEnv) -> bool:
    """True if an environment would show pictures with its options, as far as these stand in the
    config and are right. Wrappers may take some away.
    """
    shape = options_class_of(plugins.load("envs", env.name))
    if env.wrappers or shape is None:
        return False
    try:
        options = shape.model_validate(env.options)
    except ValidationError:
        return False
    return shows_images(options)


__all__ = ["envs_of", "shows_pictures"]
