"""The cache folders of agentrl and of the libraries that it uses."""

import logging
import os
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """The folder `agentrl` in `$XDG_CACHE_HOME`, or in `~/.cache`. It may be deleted any time."""
    return _caches() / "agentrl"


def prepare_caches() -> None:
    """Set where this process, and all that it starts, keep caches: if nothing can be written into
    the user's folder, in the folder for temporary files. This is said then.
    """
    wanted = cache_folder()
    if (problem := _why_unwritable(wanted)) is not None:
        instead = _private_folder()
        logger.warning(
            "nothing can be written into %s (%s): caches go into %s; XDG_CACHE_HOME names another"
            " folder",
            wanted,
            problem,
            instead,
        )
        hub = _caches() / "huggingface"
        if hub.is_dir():  # what is there can still be read
            os.environ.setdefault("HF_HOME", str(hub))
        os.environ["XDG_CACHE_HOME"] = str(instead)
        os.environ.setdefault("XDG_CONFIG_HOME", str(instead / "config"))
        os.environ.setdefault("TRITON_HOME", str(instead))
    # PyTorch makes this folder when it is imported, and otherwise in the folder for temporary
    # files.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))


def _caches() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))


def _why_unwritable(folder: Path) -> str | None:
    """The reason why a folder, which is made, cannot be written into; None if it can."""
    if not folder.is_absolute():
        return "there is no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"written")
    except OSError as error:
        return error.strerror
    return None


def _private_folder() -> Path:
    """A folder of this user for temporary files, the same each time: Python code is imported from
    it.
    """
    folder = Path(tempfile.gettempdir()) / f"agentrl-cache-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix="agentrl-cache-"))
