"""A folder of blobs that are named by the hash of their content. So unchanged code and data are sent only once.

A *bundle* is everything that is needed to make batches. It consists of the pickle of (dataset, collate_fn,
worker_init_fn), its large buffers, and facts about the process that created it. The pickle and each buffer are stored
as one blob. The manifest is JSON, and its id is the first 16 bytes of the manifest's SHA-256. At 1.1 GB/s, SHA-256 is
the fastest collision-resistant hash in the standard library (blake2b: 0.48 GB/s).

A trainer and its sidecar share one such folder, and so do the feeders of a node. On one machine, all processes share
one.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dataloaderjob.core import sockets
from dataloaderjob.core.errors import RemoteProtocolError, ScratchTooSmall, ServiceUnavailable
from dataloaderjob.core.memory import size_text

CHUNK_NBYTES = 4 * 1024 * 1024
NODE_KEEP_S = 600.0
"""Seconds after which an unused blob is removed from the node of a feeder or head. It can be fetched again."""
PART_KEEP_S = 3600.0
"""Seconds after which a partial file that has not grown is removed. One write of 2 GiB takes minutes on a slow disk."""
SLOTS = "slots"
"""Key of a fact. In a bundle, the fact means that the trainer needs a feeder that makes slots. From a feeder or
sidecar, it means that the sender supports slots."""
LAUNCH = "launch"
"""Key of the fact that identifies a trainer's launch. It is set if feeders outlive launches, so that no launch uses
code that another launch loaded."""
_PART = ".part-"
SLOWEST = 1e6
"""Minimum average rate, in bytes per second, at which a blob must arrive. A slower transfer fails."""
MAX_NBYTES = 1 << 48
"""Maximum size of one blob in bytes, because an untrusted manifest may claim any number."""
MAX_MANIFEST_NBYTES = 144 * 1024
"""Maximum size of a manifest, enough for about 2,000 blobs. It also limits the manifest's size as a JSON string,
because a feeder forwards that string in one packet."""
SPARE = 16
"""1/SPARE of a scratch volume stays free, because Ray's logs share the volume, and files occupy whole blocks."""
_MAX_THREADS = 4
"""Maximum number of threads that hash in parallel. Each may hold a copy of a blob."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The code and data that make batches. `blobs[0]` is the pickle. The others are its out-of-band buffers, in order.

    `id` identifies the bundle of one session, because each session has its own builders. `code` identifies the bundle's
    code without the session.
    """

    blobs: tuple[tuple[str, int], ...]
    """(SHA-256 in hex, size in bytes) of each blob."""
    allow_pickle: bool = False
    """True if feeders may pickle leaves that they cannot send in any other way."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the trainer, such as its versions of Python, torch and numpy."""
    loader: int = 0
    """Number of the loader in its process. It is the same in all ranks that run the same script."""
    epoch: int = 0
    """Number of the loader's iterator. User code starts afresh with each iterator."""
    workers: int = 0
    """The loader's `num_workers`, which get_worker_info() reports to user code. 0 stands for the number of feeders."""
    slot: int | None = None
    """This session's slot among the `workers` slots of an IterableDataset. None for a map-style dataset, or for all
    slots."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables that contain the rank, for user code. Set only for an IterableDataset, which may use them
    for sharding."""
    ranks: int = 0
    """Number of ranks that receive the batches of all slots in turn, or 0 if each rank has its own slots."""
    taken: tuple[int, ...] = ()
    """Number of batches that were dealt before the epoch was resumed, for each slot."""
    held: dict[str, int] = field(default_factory=dict)
    """States of the RNGs that library classes hold. These RNGs are not pickled with the objects that use them
    (`making.held`)."""

    @property
    def first(self) -> int:
        """The first batch of this slot that any rank may request."""
        return self.taken[self.slot] if self.slot is not None and self.slot < len(self.taken) else 0

    def manifest(self) -> bytes:
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        # Fields are left out if unused, so that a feeder of the previous release computes the same id.
        for name, unused in (("slot", None), ("env", {}), ("ranks", 0), ("taken", ()), ("held", {})):
            if body[name] == unused:
                del body[name]
        return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()

    @property
    def id(self) -> bytes:
        return hashlib.sha256(self.manifest()).digest()[:16]

    @property
    def code(self) -> bytes:
        """Identifies the code that is loaded, independently of the session that uses it."""
        loaded = [*(digest for digest, _ in self.blobs), str(self.facts.get(LAUNCH, ""))]
        return hashlib.sha256("".join(loaded).encode()).digest()[:16]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, nbytes in self.blobs)

    @staticmethod
    def parse(manifest: bytes | memoryview) -> Bundle:
        """Parses a manifest. Raises RemoteProtocolError if it is malformed."""
        if len(manifest) > MAX_MANIFEST_NBYTES:
            raise RemoteProtocolError(
                f"a bundle's manifest of {len(manifest)} bytes exceeds {MAX_MANIFEST_NBYTES}"
            )
        try:
            body = json.loads(bytes(manifest))
            blobs = tuple((str(d), int(n)) for d, n in body["blobs"])
            bundle = Bundle(
                blobs=blobs, allow_pickle=bool(body["allow_pickle"]), facts=dict(body["facts"]),
                loader=int(body.get("loader", 0)), epoch=int(body.get("epoch", 0)), workers=int(body.get("workers", 0)),
                slot=None if body.get("slot") is None else int(body["slot"]),
                env={str(k): str(v) for k, v in dict(body.get("env") or {}).items()}, ranks=int(body.get("ranks", 0)),
                taken=tuple(int(n) for n in body.get("taken", ())),
                held={str(k): int(v) for k, v in dict(body.get("held") or {}).items()},
            )  # fmt: skip
            nbytes = len(json.dumps(bundle.manifest().decode()))
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as exc:
            raise RemoteProtocolError(f"a bundle's manifest cannot be read: {exc}") from exc
        if not blobs or any(not _DIGEST.match(d) or not 0 <= n <= MAX_NBYTES for d, n in blobs):
            raise RemoteProtocolError("a bundle's manifest names a blob by something that is not a SHA-256")
        if nbytes > MAX_MANIFEST_NBYTES:
            raise RemoteProtocolError(
                f"a bundle's manifest of {nbytes} bytes in JSON exceeds {MAX_MANIFEST_NBYTES}"
            )
        return bundle


class BlobStore:
    """A folder of blobs. Several processes may share it, because a rename makes each blob appear as a whole."""

    def __init__(
        self, folder: Path, scratch: Mapping[str, int] | None = None, *, anyone: bool = False
    ) -> None:
        """`scratch` maps manifest fields to numbers of bytes. Each field sets the size of a volume that receives these
        blobs.

        With `anyone`, processes of other users share the folder, and each process makes its files readable to the
        others.
        """
        self.folder, self._scratch = folder, scratch or {}
        folder.mkdir(parents=True, exist_ok=True, mode=0o750)
        if anyone:
            with contextlib.suppress(PermissionError):  # another user's trainer created the folder
                folder.chmod(0o777)

    def path(self, digest: str) -> Path:
        if not _DIGEST.match(digest):
            raise RemoteProtocolError(f"{digest!r} is not a SHA-256")
        return self.folder / digest

    def has(self, digest: str, nbytes: int) -> bool:
        try:
            found = self.path(digest).lstat()  # not stat: a link would be somebody else's
            return found.st_size == nbytes and stat.S_ISREG(found.st_mode)
        except FileNotFoundError:
            return False

    def missing(self, bundle: Bundle) -> list[tuple[str, int]]:
        return [(d, n) for d, n in bundle.blobs if not self.has(d, n)]

    def put(self, data: bytes | memoryview) -> tuple[str, int]:
        """Stores `data` unless it is already stored. Returns (digest, size in bytes)."""
        view = memoryview(data).cast("B")
        digest = hashlib.sha256(view).hexdigest()
        if self.has(digest, view.nbytes):
            with contextlib.suppress(OSError):
                os.utime(self.path(digest))  # so that it is not swept before its bundle is announced
        else:
            self.check_room(view.nbytes, self._nbytes() if self._scratch else 0)
            self.write(digest, (view,), check=False)
        return digest, view.nbytes

    def check_room(self, nbytes: int, kept: int = 0) -> None:
        """Raises ScratchTooSmall if `nbytes` bytes do not fit in addition to `kept` bytes, because a pod that exceeds
        its limit is evicted."""
        for where, limit in self._scratch.items():
            if nbytes + kept > limit - limit // SPARE:
                beside = f" in addition to {size_text(kept)} already stored" if kept else ""
                raise ScratchTooSmall(
                    f"the dataset and its code need {size_text(nbytes)}{beside}, but scratch has "
                    f"{size_text(limit)}: raise {where}, or have the dataset open files instead of holding "
                    "arrays"
                )

    def _nbytes(self) -> int:
        sizes = 0
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                sizes += path.stat().st_size
        return sizes

    def touch(self, bundle: Bundle) -> None:
        """Marks the bundle's blobs as just used."""
        for digest, _ in bundle.blobs:
            with contextlib.suppress(OSError):
                os.utime(self.path(digest))

    def put_all(self, blobs: Iterable[Callable[[], bytes | memoryview]]) -> list[tuple[str, int]]:
        """Stores the result of each function, in several threads, because hashing and writing release the GIL."""
        with ThreadPoolExecutor(min(_MAX_THREADS, len(os.sched_getaffinity(0)))) as pool:
            return list(pool.map(lambda make: self.put(make()), blobs))

    def send(self, sock: socket.socket, digest: str, nbytes: int) -> None:
        """Sends a blob to the peer that requested it: {"type": "blob"}, then its bytes. Raises OSError if it is
        missing."""
        with self.path(digest).open("rb") as data:
            with contextlib.suppress(OSError):  # owned by another user
                os.utime(data.fileno())  # so that it is not swept: another peer may request it next
            sockets.send_message(sock, {"type": "blob", "digest": digest, "nbytes": nbytes})
            sock.sendfile(data, count=nbytes)  # os.sendfile would fail if the peer is slower

    def sweep(self, keep: set[str], older_than_s: float) -> int:
        """Removes blobs that are not in `keep` and have not been used for `older_than_s` seconds. Also removes partial
        files that have not grown for PART_KEEP_S or longer.

        Returns the number of files removed. A process that has mapped a removed blob keeps its mapping.
        """
        removed, now = 0, time.time()
        for path in self.folder.iterdir():
            is_part = path.name.startswith(_PART)
            if is_part or (_DIGEST.match(path.name) and path.name not in keep):
                with contextlib.suppress(OSError):
                    if now - path.stat().st_mtime > (
                        max(older_than_s, PART_KEEP_S) if is_part else older_than_s
                    ):
                        path.unlink()
                        removed += 1
        return removed

    def write(self, digest: str, chunks: Iterable[bytes | memoryview], *, check: bool = True) -> None:
        """Stores the chunks under `digest`. With `check`, raises RemoteProtocolError if their hash differs.

        Raises ServiceUnavailable if the folder was removed with the service that owns it. Raises OSError.
        """
        try:
            self._write(digest, chunks, check=check)
        except FileNotFoundError as exc:
            if self.folder.is_dir():
                raise
            raise ServiceUnavailable(
                f"the service ended while it was receiving data, and its folder is gone ({self.folder}): "
                "find out what ended it, and iterate again"
            ) from exc

    def _write(self, digest: str, chunks: Iterable[bytes | memoryview], *, check: bool) -> None:
        target, found = self.path(digest), hashlib.sha256() if check else None
        fd, name = tempfile.mkstemp(dir=self.folder, prefix=_PART)
        try:
            with os.fdopen(fd, "wb") as out:
                for chunk in chunks:
                    if found is not None:
                        found.update(chunk)
                    out.write(chunk)
            if found is not None and found.hexdigest() != digest:
                raise RemoteProtocolError(
                    f"a blob arrived damaged: expected {digest}, got {found.hexdigest()}"
                )
            os.chmod(name, 0o644 if self._is_open() else 0o640)
            os.rename(name, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise

    def _is_open(self) -> bool:
        """Returns True if the folder's owner shares it with processes of other users."""
        return bool(self.folder.stat().st_mode & stat.S_IWOTH)

    @contextlib.contextmanager
    def lock(self, digest: str) -> Iterator[None]:
        """Holds a lock on `digest`, so that only one process on this node fetches the blob at a time."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(self.folder / f".lock-{digest}", flags, 0o640)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)


def chunks(sock: socket.socket, nbytes: int) -> Iterator[memoryview]:
    """Yields the next `nbytes` of a blocking socket in pieces. Each piece is overwritten by the next one."""
    buffer = memoryview(bytearray(min(nbytes, CHUNK_NBYTES)))
    left = nbytes
    while left:
        got = sock.recv_into(buffer[: min(left, len(buffer))])
        if not got:
            raise ConnectionError("the peer closed the connection in the middle of a blob")
        left -= got
        yield buffer[:got]
