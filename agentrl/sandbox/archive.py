"""Archives of files that an agent has made, which may hold anything.

A tar can name paths outside of the folder that it is unpacked in, and links that lead there: a
"solution" that is a link to the file of the expected results. So an archive is written again with
what is harmless. It may also be made to cost its reader hours: the time that this takes grows with
the bytes of the archive, whatever is in it.
"""

import io
import posixpath
import tarfile
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

LARGEST_ARCHIVE = 256 << 20
"""Bytes that the files of an archive may have together."""
LONGEST_PATH = 4096
"""Characters that a path may have, as on Linux."""
_NO_ARCHIVE = (
    tarfile.TarError,
    ArithmeticError,  # an infinite time
    EOFError,
    LookupError,
    OSError,
    RecursionError,
    UnicodeError,
)
"""Raised by `tarfile` where bytes are no archive, besides `ValueError`."""


def checked_archive(archive: bytes) -> bytes:
    """The archive with its folders, files and harmless links only: the rest is left out.

    A link is harmless if it leads to a path of the archive's own folder, and through no other link.
    Owners, special bits of modes, devices and pipes are left out; a hard link becomes a copy.

    Raises:
        ValueError: it is no archive, has a path outside of its folder, below a link or of more than
            `LONGEST_PATH` characters, or more than `LARGEST_ARCHIVE` bytes.
    """
    written = io.BytesIO()
    try:
        with (
            tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as read,
            tarfile.open(fileobj=written, mode="w") as new,
        ):
            _copy(read, new)
    except _NO_ARCHIVE as error:
        raise ValueError(f"this is no archive: {type(error).__name__}: {error}") from error
    return written.getvalue()


def _copy(read: tarfile.TarFile, new: tarfile.TarFile) -> None:
    members = _members_of(read)
    links = _Links.at({_check_path(member.name) for member in members if member.issym()})
    total = 0
    for member in members:
        path = _check_path(member.name)
        if links.stand_above(path):
            raise ValueError(f"the archive has a file below a link: {member.name!r:.200}")
        # A new entry: owners, special bits and whatever else a tar may hold are not copied.
        entry = tarfile.TarInfo(path)
        entry.mtime = max(0, int(member.mtime))
        entry.mode = member.mode & 0o777
        if member.isdir():
            entry.type = tarfile.DIRTYPE
            entry.mode |= 0o700
            if path != ".":
                new.addfile(entry)
        elif member.issym():
            if _is_harmless(path, member.linkname, links):
                entry.type, entry.linkname = tarfile.SYMTYPE, member.linkname
                new.addfile(entry)
        elif member.isfile() or member.islnk():
            content = read.extractfile(member)  # of a hard link: that of the file it names
            if content is None or links.stand_at(path):
                continue
            data = content.read(LARGEST_ARCHIVE + 1 - total)
            total += len(data)
            if total > LARGEST_ARCHIVE:
                raise ValueError(f"the archive's files have more than {LARGEST_ARCHIVE} bytes")
            entry.size = len(data)
            new.addfile(entry, io.BytesIO(data))


def _members_of(read: tarfile.TarFile) -> Sequence[tarfile.TarInfo]:
    """All members.

    Raises:
        ValueError: one ends before it begins, by which `tarfile` would read in a circle, for ever.
    """
    members, end = [], 0
    while (member := read.next()) is not None:
        if read.offset <= end:
            raise ValueError("the archive has a member of a negative size")
        end = read.offset
        members.append(member)
    return members


@dataclass(frozen=True, slots=True)
class _Links:
    """The paths of an archive's links, and their lengths: a long path is compared only where one
    may end, and else an archive of deep folders would take hours.
    """

    paths: Set[str]
    lengths: Set[int]

    @classmethod
    def at(cls, paths: Set[str]) -> "_Links":
        """The links at these paths."""
        return cls(paths, {len(path) for path in paths})

    def stand_at(self, path: str) -> bool:
        """True if the path is that of a link."""
        return len(path) in self.lengths and path in self.paths

    def stand_above(self, path: str) -> bool:
        """True if a folder above the path is a link."""
        return any(
            path[length : length + 1] == "/" and path[:length] in self.paths
            for length in self.lengths
        )


def _is_harmless(path: str, target: str, links: _Links) -> bool:
    """True if a link at this path leads to a path of the archive, and through none of its links."""
    if target.startswith("/") or len(target) > LONGEST_PATH:
        return False
    place = posixpath.dirname(path)
    for part in target.split("/"):
        # Not by the normal form of the target: `link/..` is the folder above where the link leads.
        if part == "..":
            if not place:
                return False
            place = posixpath.dirname(place)
        elif part not in ("", "."):
            place = f"{place}/{part}" if place else part
        if links.stand_at(place):
            return False
    return True


def _check_path(name: str) -> str:
    if len(name) > LONGEST_PATH:
        raise ValueError(f"the archive has a path of {len(name)} characters: {name!r:.200}")
    path = posixpath.normpath(name)
    if path.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"the archive has a path outside of its folder: {name!r:.200}")
    return path


def archive_of(files: Mapping[str, bytes | str]) -> bytes:
    """A tar of these files, by their relative paths."""
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as new:
        for path, content in files.items():
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o755 if data.startswith(b"#!") else 0o644
            new.addfile(entry, io.BytesIO(data))
    return written.getvalue()


def files_of(archive: bytes) -> dict[str, bytes]:
    """The regular files of an archive, by their relative paths.

    Raises:
        ValueError: as `checked_archive`.
    """
    with tarfile.open(fileobj=io.BytesIO(checked_archive(archive))) as read:
        return {
            member.name: content.read()
            for member in read.getmembers()
            if member.isfile() and (content := read.extractfile(member)) is not None
        }


def archive_of_folder(folder: Path) -> bytes:
    """A tar of a folder of this machine.

    Raises:
        OSError: there is no such folder, or a file of it cannot be read.
    """
    if not folder.is_dir():
        raise NotADirectoryError(f"there is no folder {str(folder)!r}")
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as new:
        for path in sorted(folder.rglob("*")):
            new.add(
                path, arcname=str(path.relative_to(folder)), recursive=False, filter=_owned_by_root
            )
    return written.getvalue()


def _owned_by_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry
