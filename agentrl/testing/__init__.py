"""Conformance checks and public fakes for authors of plug-ins."""

from agentrl.testing.engines import ScriptedEngine
from agentrl.testing.envs import check_env
from agentrl.testing.judge_server import JudgeServer
from agentrl.testing.rewards import check_reward

__all__ = ["JudgeServer", "ScriptedEngine", "check_env", "check_reward"]
