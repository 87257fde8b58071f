"""The readiness of a pod of feeders, which a file reports to the kubelet. Rolling updates depend on it.

A pod is ready if all feeders on it serve. During an update, the feeders are still on other pods, so the new pod has
none. A trial feeder, which serves no receiver, then shows that the image can run feeders. `next_step` makes the
decision (pure).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from enum import Enum, auto
from pathlib import Path

from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.processes import last_word
from dataloaderjob.core.settings import NODE_BLOBS, FeederSettings
from dataloaderjob.core.supervision import ended_text
from dataloaderjob.providers.ray.node import start_host

log = logging.getLogger(__name__)

END_TIMEOUT_S = 5.0
MAX_WORDS_NBYTES = 16 * 1024


class Step(Enum):
    WAIT = auto()
    """The pod is not ready; feeders may still be placed on it."""
    TRY = auto()
    """The pod is not ready, and a trial must show whether it can run feeders."""
    READY = auto()


def next_step(
    *, placed: int, serving: int, empty_since: float, shown: bool, patience_s: float, now: float
) -> Step:
    """Returns the next step of a pod that has joined Ray. `placed`: number of feeders on this pod. `serving`: number of
    those that serve. `empty_since`: time since which the pod has had no feeder. `shown`: True if a feeder, or a trial,
    has served on this pod."""
    if placed:
        return Step.READY if serving == placed else Step.WAIT
    if now - empty_since < patience_s:
        return Step.WAIT
    return Step.READY if shown else Step.TRY


class Feeders:
    """The feeders on this pod, according to their own reports. The thread that reads their pipes updates this object,
    and another thread reads it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serving: dict[int, bool] = {}
        self._numbers = 0
        self._failed = False
        self._empty_since = time.monotonic()

    def begins(self) -> int:
        """Records that a feeder has begun. Returns its number on this pod."""
        with self._lock:
            self._numbers += 1
            self._serving[self._numbers] = False
            return self._numbers

    def serves(self, number: int) -> None:
        with self._lock:
            self._serving[number] = True

    def ends(self, number: int) -> None:
        """Records that a feeder has ended, for any reason."""
        with self._lock:
            self._failed |= not self._serving.pop(number)
            self._empty_since = time.monotonic()

    def counts(self) -> tuple[int, int, float]:
        """Returns a tuple: the number of feeders, the number of serving feeders, and the time since which there has
        been no feeder. The time is valid only while there is none."""
        with self._lock:
            return len(self._serving), sum(self._serving.values()), self._empty_since

    def take_failed(self) -> bool:
        """Returns True if, since the last call, a feeder has ended without having served."""
        with self._lock:
            failed, self._failed = self._failed, False
            return failed


class Readiness:
    """The file that reports readiness. One thread calls `look` at intervals, and `close` at the end."""

    def __init__(
        self,
        path: Path,
        feeders: Feeders,
        *,
        patience_s: float,
        trial_timeout_s: float,
    ) -> None:
        self._path, self._feeders = path, feeders
        self._patience_s, self._trial_timeout_s = patience_s, trial_timeout_s
        self._joined_at = time.monotonic()
        self._shown = False
        self._trial: Trial | None = None
        self._path.unlink(missing_ok=True)

    def joined(self) -> None:
        """Records that feeders may be placed on this pod from now on."""
        self._joined_at = time.monotonic()

    def look(self) -> None:
        """Updates the file. Raises ServiceError if the trial shows that this image cannot run feeders. The kubelet then
        retries in a fresh container, with growing pauses, and reports this container's last message."""
        placed, serving, empty_since = self._feeders.counts()
        failed = self._feeders.take_failed()
        self._shown = (self._shown and not failed) or serving > 0
        if self._trial is not None:
            self._judge(self._trial, placed)
        step = next_step(
            placed=placed, serving=serving, empty_since=max(empty_since, self._joined_at), shown=self._shown,
            patience_s=self._patience_s, now=time.monotonic(),
        )  # fmt: skip
        if step is Step.TRY and self._trial is None:
            log.info(
                "no feeder has been placed here yet: starting one to test whether this image can run feeders"
            )
            self._trial = Trial(self._trial_timeout_s)
        self._write(step is Step.READY)

    def _judge(self, trial: Trial, placed: int) -> None:
        if not placed:
            passed = trial.passed()
            if passed is None:
                return
            self._shown = passed
        self._trial = None  # once feeders are placed, no trial is needed
        trial.close()

    def _write(self, ready: bool) -> None:
        if ready == self._path.exists():
            return
        if ready:
            self._path.touch()
        else:
            self._path.unlink(missing_ok=True)
        log.info("this pod is ready" if ready else "this pod is no longer ready")

    def close(self) -> None:
        """Removes the file and ends the trial. The pod is no longer ready."""
        self._path.unlink(missing_ok=True)
        if self._trial is not None:
            self._trial.close()
            self._trial = None


class Trial:
    """A trial feeder, started like the pod's own feeders. Once it serves, the image is known to have torch and
    everything else that a feeder needs. The trial feeder knows neither the supervisor nor the job's key, and listens
    only on this machine."""

    def __init__(self, timeout_s: float) -> None:
        """Starts the feeder. Raises OSError."""
        self._deadline, self._timeout_s = time.monotonic() + timeout_s, timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="dlj-trial-")
        folder = Path(self._folder.name)
        (folder / "key").write_bytes(secrets.token_bytes(32))
        settings = FeederSettings(
            job="trial", name="trial", key_path=str(folder / "key"), blob_folder=str(folder / NODE_BLOBS)
        )
        self._words = folder / "words"
        with self._words.open("wb") as words:
            self._process, self._ready = start_host(
                settings, folder, stdout=words, stderr=words, own_session=True
            )
        os.set_blocking(self._ready, False)

    def passed(self) -> bool | None:
        """Returns True once the feeder serves, and None while it may still do so. Raises ServiceError, with the
        feeder's last line, if the feeder ended or did not serve in time."""
        with contextlib.suppress(BlockingIOError):
            if os.read(self._ready, 4096):
                return True
        code = self._process.poll()
        if code is None and time.monotonic() < self._deadline:
            return None
        words = self._words.read_bytes()[-MAX_WORDS_NBYTES:].decode(errors="replace")
        sys.stderr.write(words)
        last = functools.reduce(last_word, words.splitlines(), "")
        late = f"a feeder did not start serving within {self._timeout_s:.0f} s" + (
            f"; its last line: {last}" if last else ""
        )
        why = late if code is None else ended_text(code, last)
        raise ServiceError(f"this image cannot run feeders: {why}")

    def close(self) -> None:
        """Ends the feeder and everything that it started."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._ready)
        self._folder.cleanup()
