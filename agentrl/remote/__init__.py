"""An environment over HTTP: `agentrl serve` on one machine, `env: http://host:port` on another."""
