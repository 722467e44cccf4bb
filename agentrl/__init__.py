"""agentrl: reinforcement learning for language-model agents over many turns."""

__version__ = "0.2.0"
