"""A small image made of this machine's own programs, for machines that reach no registry of images.

It holds a shell, what scripts call most, and this Python with its standard library, with the
libraries that they load. It is as large as these files, and takes a second to make.
"""

import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = (
    "sh",
    "bash",
    "awk",
    "basename",
    "cat",
    "chmod",
    "chown",
    "cmp",
    "cp",
    "cut",
    "date",
    "dd",
    "diff",
    "dirname",
    "du",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "grep",
    "head",
    "id",
    "kill",
    "ln",
    "ls",
    "md5sum",
    "mkdir",
    "mktemp",
    "mv",
    "nproc",
    "printenv",
    "ps",
    "pwd",
    "readlink",
    "realpath",
    "rm",
    "rmdir",
    "sed",
    "seq",
    "sha256sum",
    "sleep",
    "sort",
    "stat",
    "tail",
    "tar",
    "tee",
    "test",
    "timeout",
    "touch",
    "tr",
    "true",
    "uname",
    "uniq",
    "wc",
    "which",
    "whoami",
    "xargs",
    "yes",
)
"""Looked for on this machine; those that it lacks are left out."""
_USERS = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n"
_GROUPS = "root:x:0:\nagent:x:1000:\n"
_OWN = {"/root": 0o700, "/tmp": 0o1777, "/etc": 0o755, "/proc": 0o755, "/dev": 0o755, "/var": 0o755}
_NOT_NEEDED = re.compile(
    r"(^|/)(test|tests|idlelib|tkinter|turtledemo|ensurepip|lib2to3|pydoc_data|"
    r"site-packages|config-[^/]*)/|\.pyc$"
)


def base_image() -> bytes:
    """The files of the image, as the tar that `docker import` reads.

    Raises:
        OSError: this machine has no shell or no `ldd`, or its files cannot be read.
    """
    if not shutil.which("sh") or not shutil.which("ldd"):
        raise OSError("a base image needs `sh` and `ldd` on this machine: it is made of its files")
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for path, mode in _OWN.items():
            tar.addfile(_entry(path, mode, tarfile.DIRTYPE))
        agent = _entry("/home/agent", 0o755, tarfile.DIRTYPE)
        agent.uid = agent.gid = 1000
        tar.addfile(agent)
        for path, text in (("/etc/passwd", _USERS), ("/etc/group", _GROUPS)):
            entry = _entry(path, 0o644)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
        for inside, outside in sorted(_files().items()):
            entry = _entry(inside, 0o755 if os.access(outside, os.X_OK) else 0o644)
            entry.size = outside.stat().st_size
            with outside.open("rb") as file:
                tar.addfile(entry, file)
        for inside, target in _LINKS.items():
            link = _entry(inside, 0o777, tarfile.SYMTYPE)
            link.linkname = target
            tar.addfile(link)
    return written.getvalue()


_LINKS = {
    "/usr/bin/env": "/bin/env",  # where scripts look for it
    "/usr/bin/python3": sys.base_prefix + f"/bin/python3.{sys.version_info.minor}",
    "/usr/bin/python": "python3",
}


def _entry(path: str, mode: int, kind: bytes = tarfile.REGTYPE) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(path.lstrip("/"))
    entry.mode, entry.type = mode, kind
    return entry


def _files() -> dict[str, Path]:
    """Each file's path in the image, and here. Symbolic links become what they lead to."""
    found: dict[str, Path] = {}
    for name in PROGRAMS:
        if path := shutil.which(name):
            found[f"/bin/{name}"] = Path(path).resolve()
    python = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    found[str(python)] = python.resolve()
    found |= {str(path): path.resolve() for path in _standard_library()}
    return found | _libraries([str(path) for path in found.values() if _is_elf(path)])


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _standard_library() -> Iterator[Path]:
    # Without these, sysconfig may name folders of a virtual environment.
    base = {
        "installed_base": sys.base_prefix,
        "base": sys.base_prefix,
        "installed_platbase": sys.base_exec_prefix,
        "platbase": sys.base_exec_prefix,
    }
    for key in ("stdlib", "platstdlib"):
        root = Path(sysconfig.get_path(key, vars=base))
        for path in root.rglob("*"):
            inside = f"{path.relative_to(root)}"
            if path.is_file() and not _NOT_NEEDED.search(inside):
                yield path


def _libraries(paths: list[str]) -> dict[str, Path]:
    """The shared libraries that files load, by the paths at which the loader looks for them."""
    # vLLM preloads libraries into what this process starts; no file of the image needs those.
    plain = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    listed = subprocess.run(
        ["ldd", *paths], capture_output=True, text=True, check=False, env=plain
    ).stdout
    named = re.findall(r"(?:=>\s*)?(/\S+)\s+\(0x", listed)
    return {name: Path(name).resolve() for name in named}


if __name__ == "__main__":
    sys.stdout.buffer.write(base_image())
