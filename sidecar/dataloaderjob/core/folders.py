"""Functions that create and remove private folders, and that open files, in places where other users may write.

In a shared temporary folder, another user may already have created a folder or link with the wanted name. So this
module checks each path component that it creates without following links, and resolves no path. Entries are removed
only by name, through a file descriptor, and only from a folder with this package's mark.
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
"""Name of the file that marks a folder as this package's, so that the folder may be emptied."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OWNER_WRITES, OWNER_WRITES_FOLDER = 0o644, 0o755
"""Modes of files and folders that contain code. Only their owner may change them, whatever the umask permits."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def make(path: Path, remedy: str) -> None:
    """Creates the folder `path`, unless it exists, and any missing parents, each with mode 0700.

    Raises ServiceUnavailable, with `remedy`, unless the result is a real folder of this user that nobody else may
    change or replace. Raises OSError.
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
            f"{path} must be a folder that only user {os.getuid()} can write to, but is {what}: {remedy}"
        )


def is_own(path: Path, *, hidden: bool = False) -> bool:
    """Returns True if `path` is a real folder that only this user may write to and, with `hidden`, read."""
    try:
        found = os.lstat(path)
    except OSError:
        return False
    return _wrong(found) is None and not (hidden and found.st_mode & 0o077)


def mark(path: Path) -> None:
    """Marks a folder as this package's, so that `remove` may remove it."""
    fd = os.open(path / MARK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    os.close(fd)


def remove(path: Path, names: Iterable[str]) -> None:
    """Removes these files from a folder with this package's mark, and then the folder itself if it is empty."""
    with _entered(path) as fd:
        if fd is not None:
            for name in (*names, MARK):
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=fd)
            _remove_empty(path, fd)


def remove_tree(path: Path) -> None:
    """Removes a folder with this package's mark and everything in it, except the targets of links."""
    with _entered(path) as fd:
        if fd is not None:
            for name in os.listdir(fd):
                _remove_entry(name, fd)
            _remove_empty(path, fd)


def remove_child(path: Path, name: str) -> None:
    """Removes the folder `name`, and everything in it, from the folder `path` if `path` has this package's mark."""
    with _entered(path) as fd:
        if fd is not None:
            _remove_entry(name, fd)


# Files in folders where others may write


def make_for_owner(path: Path) -> None:
    """Creates a folder and its missing parents. Only this user may change them, whatever the umask permits. Raises
    OSError."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(OWNER_WRITES_FOLDER, exist_ok=True)
    if not path.is_dir():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))


def enter(path: Path, error: type[DataLoaderJobError], *, within: int | None = None) -> int:
    """Opens a folder. Returns its file descriptor, through which its files can be reached even if somebody renames it.

    Raises `error` for a link that belongs to neither this user nor root, because its owner could redirect it. `within`
    is the file descriptor of the folder that contains `path`. If it is given, raises `error` for any link. Raises
    OSError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    found = os.lstat(path, dir_fd=within)
    if stat.S_ISLNK(found.st_mode):
        if within is not None or found.st_uid not in (0, os.getuid()):
            raise error(
                f"{path} must be a real folder, but is a link of user {found.st_uid}, who could redirect "
                "writes: choose a folder of your own"
            )
        return os.open(path, flags)
    return os.open(path, flags | os.O_NOFOLLOW, dir_fd=within)


def make_within(name: str, within: int, error: type[DataLoaderJobError]) -> int:
    """Creates a folder in another folder, unless it exists, and returns its file descriptor. Raises the same errors as
    `enter`."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, OWNER_WRITES_FOLDER, dir_fd=within)
    return enter(Path(name), error, within=within)


def open_file(
    path: Path | str,
    flags: int,
    error: type[DataLoaderJobError],
    *,
    within: int | None = None,
    mode: int = 0o666,
) -> int:
    """Opens a regular file, as os.open does. Raises `error` for anything else, which another user may have planted."""
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode, dir_fd=within)
    except OSError as exc:
        if exc.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        found = "a link" if exc.errno == errno.ELOOP else "something else"
    else:
        if stat.S_ISREG(os.fstat(fd).st_mode):
            return fd
        os.close(fd)
        found = "something else"
    raise error(f"{path} must be a regular file, but is {found}: choose a folder that only you can write to")


def open_new(path: Path | str, flags: int, *, within: int | None = None, mode: int = 0o666) -> int:
    """Creates a new file, after removing any existing one of the same name."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path, dir_fd=within)
    return os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode, dir_fd=within)


def write(path: Path, data: bytes) -> None:
    """Writes a file atomically. Only this user may read it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with os.fdopen(open_new(part, os.O_WRONLY, mode=0o600), "wb") as out:
        out.write(data)
    part.rename(path)


@contextlib.contextmanager
def room(path: Path, error: type[DataLoaderJobError]) -> Iterator[None]:
    """Converts the OSError of a full disk at `path` into `error`, which states a remedy."""
    try:
        yield
    except OSError as exc:
        if exc.errno not in FULL:
            raise
        text = f"the disk of {path} is full ({exc.strerror}): free space there, or set TMPDIR to a folder elsewhere"
        raise error(text) from exc


def _wrong(found: os.stat_result) -> str | None:
    """Checks that a path is a folder that only this user may write to. Returns what it is instead, or None if it is
    one."""
    if stat.S_ISLNK(found.st_mode):
        return f"a symbolic link of user {found.st_uid}"
    if not stat.S_ISDIR(found.st_mode):
        return "something other than a folder"
    if found.st_uid != os.getuid():
        return f"a folder of user {found.st_uid}"
    if found.st_mode & _OTHERS_WRITE:
        return f"one that others can write to (mode {stat.S_IMODE(found.st_mode):04o})"
    return None


def check_above(path: Path, remedy: str) -> None:
    """Raises ServiceUnavailable, with `remedy`, if another user can rename the contents of an existing folder. `path`
    may contain links. Raises OSError."""
    found = os.stat(path)
    if found.st_uid not in (0, os.getuid()):
        what = f"it belongs to user {found.st_uid}"
    elif found.st_mode & _OTHERS_WRITE and not found.st_mode & stat.S_ISVTX:
        what = f"others can rename its contents (mode {stat.S_IMODE(found.st_mode):04o}, no sticky bit)"
    else:
        return
    raise ServiceUnavailable(
        f"{path} must be a folder in which nobody else can change the files of user {os.getuid()}, but "
        f"{what}: {remedy}"
    )


@contextlib.contextmanager
def _entered(path: Path) -> Iterator[int | None]:
    """Yields a file descriptor of the folder `path`, or None if it is not a folder with this package's mark."""
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
    import shutil  # its import would dominate the startup of processes that need this module

    with contextlib.suppress(OSError):
        if stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=fd)
        else:
            os.unlink(name, dir_fd=fd)


def _remove_empty(path: Path, fd: int) -> None:
    with contextlib.suppress(OSError):
        if os.path.samestat(os.lstat(path), os.fstat(fd)):
            os.rmdir(path)
