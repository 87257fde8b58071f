"""The check of whether a record's code may be run. A record contains the code of whoever wrote it, and of anyone who
can change its files."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from dataloaderjob.core.errors import InputError, say


def owners(folder: Path) -> set[str]:
    """Returns the names of the users who own files of a record."""
    return {_name(found.st_uid) for _, found in _files(folder)}


def check(folder: Path, trusted: Collection[str] = ()) -> None:
    """Prints who owns a record. Raises InputError if any file belongs to a user other than this one, root and those in
    `trusted`, or if anyone may change a file."""
    own, seen = {_name(0), _name(os.getuid()), *trusted}, set()
    for path, found in _files(folder):
        name = _name(found.st_uid)
        seen.add(name)
        if name not in own:
            raise InputError(
                f"the record {folder} contains code from user {name}, who owns {path}, but you are "
                f"{_name(os.getuid())}: pass --trust {name} if you want to run that user's code"
            )
        if found.st_mode & stat.S_IWOTH and not _is_safe(found):
            raise InputError(
                f"the record {folder} contains code, and anybody can change {path} (mode "
                f"{stat.S_IMODE(found.st_mode):04o}): if it is as you left it, chmod -R o-w {folder}"
            )
    say(f"the code in {folder} belongs to user {', '.join(sorted(seen))}, but runs as {_name(os.getuid())}")


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Yields each file and folder of a record, including links and their targets."""
    yield folder, folder.stat()
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(place, name)
            found = path.lstat()
            yield path, found
            if stat.S_ISLNK(found.st_mode) and path.exists():
                yield path, path.stat()


def _is_safe(found: os.stat_result) -> bool:
    """Returns True for a link, whose mode means nothing, and for a folder in which only owners may rename files."""
    return stat.S_ISLNK(found.st_mode) or (stat.S_ISDIR(found.st_mode) and bool(found.st_mode & stat.S_ISVTX))


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
