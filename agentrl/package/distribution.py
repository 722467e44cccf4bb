"""The distribution that agentrl is installed from. The index has another project under the name of
the package.
"""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "agentrl-train"
"""`pip install agentrl-train`, `import agentrl`."""


def install_command(*extras: str) -> str:
    """The command that installs these extras: `pip install 'agentrl-train[ray]'`."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}]'"


def installed_version() -> str:
    """The version of this installation; "unknown" where agentrl is only on the module path."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"


__all__ = ["DISTRIBUTION", "install_command", "installed_version"]
