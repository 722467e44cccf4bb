"""`python -m agentrl`: the command, where its script is not on PATH."""

from agentrl.cli import main

if __name__ == "__main__":
    main()
