"""Folders that are this user's alone, where others may write beside them: made, checked, entered, emptied.

In a shared temporary folder anybody may be there first, with a folder or a link of the name that is wanted. So every
component that is made here is looked at without following links, nothing is resolved, and nothing is removed but by
name, through a descriptor, out of a folder that has our mark.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from dataloaderjob.core.errors import DataLoaderJobError, ServiceUnavailable

MARK = ".dataloaderjob"
"""A file of every folder that may be emptied."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def make(path: Path, remedy: str) -> None:
    """Makes `path`, and what is missing above it, with mode 0700, unless it is there.

    Raises ServiceUnavailable, with `remedy`, unless it is then a real folder of this user's that nobody else may
    change or put another in the place of; OSError.
    """
    if os.path.exists(path.parent):
        check_above(path.parent, remedy)
    else:
        make(path.parent, remedy)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    check(path, remedy)


def check(path: Path, remedy: str) -> None:
    """Raises ServiceUnavailable, with `remedy`, unless `path` is a real folder that only this user may write to."""
    found = os.lstat(path)
    if (what := _wrong(found)) is not None:
        raise ServiceUnavailable(
            f"a folder that belongs to user {os.getuid()} alone is needed at {path}, found {what}: {remedy}"
        )


def is_own(path: Path, *, hidden: bool = False) -> bool:
    """Whether `path` is a real folder that only this user may write to, or even look into."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return _wrong(found) is None and not (hidden and found.st_mode & 0o077)


def mark(path: Path) -> None:
    """Makes a folder of ours one that `remove` may remove."""
    fd = os.open(path / MARK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.close(fd)


def remove(path: Path, names: Iterable[str]) -> None:
    """Removes these files of a folder with our mark, and the folder if nothing else is in it."""
    with _entered(path) as fd:
        if fd is not None:
            for name in (*names, MARK):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=fd)
            _remove_empty(path, fd)


def remove_tree(path: Path) -> None:
    """Removes a folder with our mark and all that is in it; what links in it lead to stays."""
    with _entered(path) as fd:
        if fd is not None:
            for name in os.listdir(fd):
                _remove_entry(name, fd)
            _remove_empty(path, fd)


def remove_child(path: Path, name: str) -> None:
    """Removes a folder with all that is in it from a folder with our mark."""
    with _entered(path) as fd:
        if fd is not None:
            _remove_entry(name, fd)


@contextlib.contextmanager
def room(path: Path, error: type[DataLoaderJobError]) -> Iterator[None]:
    """Raises `error`, which says what to do, where an OSError means that there is no room at `path`."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        text = f"the disk of {path} is full ({exc.strerror}): free space there, or set TMPDIR to a folder elsewhere"
        raise error(text) from exc


def _wrong(found: os.stat_result) -> str | None:
    """What is there instead of a folder of ours alone."""
    if stat.S_ISLNK(found.st_mode):
        return f"a symbolic link of user {found.st_uid}"
    if not stat.S_ISDIR(found.st_mode):
        return "something that is no folder"
    if found.st_uid != os.getuid():
        return f"a folder of user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return f"one that others may write to (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def check_above(path: Path, remedy: str) -> None:
    """Checks a folder that we did not make, and that may be reached by a link: nobody else may rename what is in it.

    Raises ServiceUnavailable, with `remedy`; OSError.
    """
    found = os.stat(path)
    if found.st_uid not in (0, os.getuid()):
        what = f"one of user {found.st_uid}"
    elif found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        what = f"others may rename what is in it (mode {stat.S_IMODE(found.st_mode):04o}, no sticky bit)"
    else:
        return
    raise ServiceUnavailable(
        f"{path} is needed as a folder in which nobody but user {os.getuid()} can change what that user makes, "
        f"found {what}: {remedy}"
    )


@contextlib.contextmanager
def _entered(path: Path) -> Iterator[int | None]:
    """A descriptor of a folder with our mark; None if it is not one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield fd if _wrong(os.fstat(fd)) is None and _is_marked(fd) else None
    finally:
        os.close(fd)


def _is_marked(fd: int) -> bool:
    try:
        found = os.stat(MARK, dir_fd=fd, follow_symlinks=False)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.getuid()


def _remove_entry(name: str, fd: int) -> None:
    import shutil  # it takes longer to import than all else that needs this module at a start

    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
        else:
            os.unlink(name, dir_fd=fd)


def _remove_empty(path: Path, fd: int) -> None:
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), os.fstat(fd)):
            os.rmdir(path)
