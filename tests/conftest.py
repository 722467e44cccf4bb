pytest_plugins = ["agentrl.testing.fixtures"]
