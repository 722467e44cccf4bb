"""Conformance checks and public fakes for authors of plug-ins, and oracles to prove estimators
with. Each name is loaded when it is first used.
"""

from typing import TYPE_CHECKING

from agentrl.package.lazy_names import home_of, lazy_names

if TYPE_CHECKING:
    from agentrl.oracles.estimators import Oracle as Oracle
    from agentrl.oracles.estimators import residual as residual
    from agentrl.oracles.problems import chain as chain
    from agentrl.oracles.problems import corridor as corridor
    from agentrl.oracles.problems import stopping as stopping
    from agentrl.testing.engines import ScriptedEngine as ScriptedEngine
    from agentrl.testing.envs import check_env as check_env
    from agentrl.testing.judge_server import JudgeReply as JudgeReply
    from agentrl.testing.judge_server import JudgeServer as JudgeServer
    from agentrl.testing.rewards import check_reward as check_reward
    from agentrl.testing.rewards import trajectory as trajectory
    from agentrl.testing.sandboxes import FakeSandboxes as FakeSandboxes
    from agentrl.testing.staleness_rules import check_staleness_rule as check_staleness_rule
    from agentrl.testing.tokenizer import ByteTokenizer as ByteTokenizer
    from agentrl.testing.trainers import check_trainer as check_trainer

_HOMES = {
    "agentrl.oracles.estimators": "Oracle residual",
    "agentrl.oracles.problems": "chain corridor stopping",
    "agentrl.testing.engines": "ScriptedEngine",
    "agentrl.testing.envs": "check_env",
    "agentrl.testing.judge_server": "JudgeReply JudgeServer",
    "agentrl.testing.rewards": "check_reward trajectory",
    "agentrl.testing.sandboxes": "FakeSandboxes",
    "agentrl.testing.staleness_rules": "check_staleness_rule",
    "agentrl.testing.tokenizer": "ByteTokenizer",
    "agentrl.testing.trainers": "check_trainer",
}
"""The module of each public name; the same as above, where type checkers look."""

_HOME_OF = home_of(_HOMES)
__all__ = sorted(_HOME_OF)  # noqa: PLE0605
__getattr__, __dir__ = lazy_names(globals(), _HOME_OF)
