"""The check that decides whether a record's code may run. A record contains code of its owner, and of anyone who can
change its files."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

from dataloaderjob.core.errors import InputError, say

_ACCESS_LIST = "system.posix_acl_access"


def owners(folder: Path) -> set[str]:
    """Returns the names of the users who own files of a record."""
    return {_name(found.st_uid) for _, found in _files(folder)}


def check(folder: Path, trusted: Collection[str] = ()) -> None:
    """Prints the owners of a record. Raises InputError if an owner is not this user, root or a user in `trusted`. Also
    raises it if anyone else can change a file of the record, or replace the record's folder."""
    own, seen = {_name(0), _name(os.getuid()), *trusted}, set()
    for path, found in _files(folder):
        name = _name(found.st_uid)
        seen.add(name)
        if name not in own:
            raise InputError(
                f"the record {folder} contains code from user {name}, who owns {path}, but you are "
                f"{_name(os.getuid())}: pass --trust {name} if you want to run that user's code"
            )
        if who := _others_who_write(path, found):
            raise InputError(
                f"the record {folder} contains code, and {who} can change {path} (mode "
                f"{stat.S_IMODE(found.st_mode):04o}): if nobody has changed it, run `chmod -R go-w {folder}`"
            )
    # Group-writable parents are accepted, because the group can replace the user's scripts there, too.
    for above in folder.resolve().parents:
        found = above.stat()
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise InputError(
                f"the record {folder} contains code, and anybody can replace it, because {above} has mode "
                f"{stat.S_IMODE(found.st_mode):04o}: copy the record to a folder that only you can write to"
            )
    me = _name(os.getuid())
    joined = "and" if seen == {me} else "but"
    say(f"the code in {folder} belongs to user {', '.join(sorted(seen))}, {joined} runs as {me}")


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


def _others_who_write(path: Path, found: os.stat_result) -> str:
    """Names the users other than the owner who may change a file; empty if there are none. A link's mode has no
    meaning. In a folder with the sticky bit, only owners may rename files."""
    if stat.S_ISLNK(found.st_mode) or (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "anybody"
    if not found.st_mode & stat.S_IWGRP:
        return ""
    with contextlib.suppress(OSError):  # a file system without such lists
        if _ACCESS_LIST in os.listxattr(path):  # the group's bits then limit the list's entries
            return "somebody on its access control list"
    return _others_in_group(found)


def _others_in_group(found: os.stat_result) -> str:
    """Names the file's group; empty if the owner is its only member. On many systems, each user has such a group, with
    the user's name. Root's own group is trusted as root is."""
    try:
        group = grp.getgrgid(found.st_gid)
    except KeyError:
        return f"group {found.st_gid}"
    owner = _name(found.st_uid)
    if found.st_gid == 0 or (group.gr_name == owner and _members(group) <= {found.st_uid}):
        return ""
    return f"group {group.gr_name}"


def _members(group: grp.struct_group) -> set[int]:
    """Returns the uids of a group's members. The group's own list omits users whose primary group it is. A directory
    service may not list those."""
    found = {user.pw_uid for user in pwd.getpwall() if user.pw_gid == group.gr_gid}
    for name in group.gr_mem:
        try:
            found.add(pwd.getpwnam(name).pw_uid)
        except KeyError:
            found.add(-1)  # a member whom nobody knows here
    return found


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
