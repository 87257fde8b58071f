"""The hook that watches the loaders of a process. `site/sitecustomize.py` installs it once torch's loader is imported.

The hook times calls of next(). It then replays the last batches, to measure a step that need not wait for input. After
that, it makes a few batches itself and writes the results. It then blocks the training loop until the command
terminates the script. The hook draws no random numbers before it makes batches, so all batches up to then are the same
as without it.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from pathlib import Path
from typing import Any

from dataloaderjob.advise.observation import LEAST, Observation, Steps, WatchPhase, steps_of
from dataloaderjob.advise.source import Source
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.places import IN_FEEDER_VARIABLE

FINISH, STEPS = "finish", "steps"
"""Names of files in the results folder. `FINISH` exists once the time is up; `STEPS` contains the number of steps to
observe."""
KEPT = 4
"""Number of batches that the replay returns in rotation."""
REPORT_S = 0.5


class _Loader:
    """One loader of this process, identified by its dataset and batch size."""

    def __init__(self, source: Source, steps: int, now: float) -> None:
        self.source, self.observation = source, Observation(steps_of(steps, source.batches), now)
        self.kept: deque[Any] = deque(maxlen=KEPT)
        self.cpu_s = self.wall_s = 0.0
        """CPU time and wall time of this process at the start of the replay, in seconds; 0 before the replay."""
        self.step = -1
        """The last step of another loader's replay in which this loader replayed a batch, too; -1 if none."""


def _again(loader: _Loader) -> Any:
    batch = loader.kept[0]
    loader.kept.rotate(-1)
    return batch


class Watcher:
    """All loaders of this process. The first one with enough steps is replayed and judged."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder, self._steps = folder, steps
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._loaders: dict[tuple[Any, ...], _Loader] = {}
        self._threads = threading.local()
        self._reported = 0.0
        self._replaying: _Loader | None = None
        self.is_over = False

    def next(self, iterator: Any, original: Any) -> Any:
        """Runs in place of an iterator's next() while its script is watched."""
        if os.getpid() != self._pid:
            if sys.modules["torch"].utils.data.get_worker_info() is not None:
                return original(iterator)  # a loader inside a dataset, in a worker process
            self._reset()
        # A subclass may call its base class, and a dataset may have a loader of its own.
        if getattr(self._threads, "is_inside", False) or self.is_over:
            return original(iterator)
        self._threads.is_inside = True
        began = time.perf_counter()
        loader = self._loader(iterator)
        try:
            return self._next(iterator, loader, original)
        finally:
            self._threads.is_inside = False
            for other in self._loaders.values():
                if other is not loader:
                    other.observation.waited_elsewhere(time.perf_counter() - began)

    def _next(self, iterator: Any, loader: _Loader, original: Any) -> Any:
        observation, now = loader.observation, time.perf_counter()
        if self._replaying is not None and self._replaying is not loader:
            return self._beside(self._replaying.observation.replayed.count, loader, iterator, original)
        observation.called(now, is_first=not vars(iterator).get("_dataloaderjob_seen"))
        vars(iterator)["_dataloaderjob_seen"] = True
        if now - self._reported > REPORT_S:
            self._report(loader, now)
        if observation.phase is WatchPhase.DONE:
            _quietly(getattr(iterator, "_shutdown_workers", None))
            self._judge(loader)
            while True:  # the command terminates the script
                time.sleep(60)
        if observation.phase is WatchPhase.REPLAYING:
            if self._replaying is None:
                self._replaying = loader
                _wait_for_device()
                loader.cpu_s, loader.wall_s = time.process_time(), time.perf_counter()
            batch = _again(loader)
            observation.called(time.perf_counter(), is_first=True)  # a replayed batch takes no time
        else:
            batch = original(iterator)
            loader.kept.append(batch)
        observation.returned(time.perf_counter())
        return batch

    @staticmethod
    def _beside(step: int, loader: _Loader, iterator: Any, original: Any) -> Any:
        """Returns a batch of a loader that is iterated alongside the replayed one. In each replayed step, this loader's
        first batch is replayed, too.

        An evaluation takes many batches in one step. After the first batch, it gets its own batches, so that it ends.
        """
        if loader.step == step or not loader.kept:
            return original(iterator)
        loader.step = step
        return _again(loader)

    def _loader(self, iterator: Any) -> _Loader:
        key = id(iterator._dataset), getattr(iterator._index_sampler, "batch_size", None)  # noqa: SLF001
        if key not in self._loaders:
            # The source keeps the dataset alive, so no other dataset can get the same id.
            self._loaders[key] = _Loader(Source.of(iterator), self._steps, time.perf_counter())
        return self._loaders[key]

    def _report(self, loader: _Loader, now: float) -> None:
        """Reports progress, and ends the observation if the time is up."""
        self._reported = now
        observation = loader.observation
        steps = {"observed": observation.observed.count, "replayed": observation.replayed.count}
        self.write("progress", steps)
        if (self._folder / FINISH).exists() and self._most() is loader and observation.observed.count:
            observation.finish()

    def _most(self) -> _Loader:
        """Returns the loader with the most observed steps."""
        return max(self._loaders.values(), key=lambda one: one.observation.observed.count)

    def at_end(self) -> None:
        """Judges the steps observed so far, because the script is ending on its own."""
        if self.is_over or os.getpid() != self._pid or not self._loaders:
            return
        if self._most().observation.observed.count >= LEAST:
            self._judge(self._most())

    def write(self, kind: str, found: dict[str, Any]) -> None:
        path = self._folder / f"{os.getpid()}.{kind}"
        made = path.with_suffix(f".{kind}.new")
        made.write_text(json.dumps(found))
        made.rename(path)

    def _judge(self, loader: _Loader) -> None:
        """Writes the times of the steps. On local rank 0, then also measures and writes the cost of a batch."""
        self.is_over = True
        found = self._found(loader)
        self.write("result", found)
        if int(os.environ.get("LOCAL_RANK") or 0) == 0:
            from dataloaderjob.advise import making

            try:
                found["made"] = dataclasses.asdict(making.make(loader.source))
                found["cannot_ship"], found["shipped_nbytes"] = making.shipping(loader.source)
            except InputError as exc:
                found["trouble"] = str(exc)
            except Exception:
                found["trouble"] = traceback.format_exc(limit=-3)
            found["is_complete"] = True
            self.write("result", found)

    def _found(self, loader: _Loader) -> dict[str, Any]:
        observed, replayed = loader.observation.observed, loader.observation.replayed
        _wait_for_device()
        wall_s = time.perf_counter() - loader.wall_s if loader.wall_s else 0.0
        return {
            "world": int(os.environ.get("WORLD_SIZE") or 1),
            "local_world": int(os.environ.get("LOCAL_WORLD_SIZE") or 1),
            "steps": observed.count,
            "replayed": replayed.count,
            "period_s": observed.period_s(is_queued=_has_device()),
            "step_s": _step_s(observed, replayed, wall_s),
            "busy_cpus": (time.process_time() - loader.cpu_s) / wall_s if wall_s else None,
            **_described(loader.source),
        }


def _step_s(observed: Steps, replayed: Steps, wall_s: float) -> float:
    """Returns the duration of a step that need not wait for input, in seconds. On a GPU, a step's work continues after
    the loop has called next(). The duration of the whole replay is then divided by its number of steps."""
    if replayed.count < LEAST:
        return observed.step_s()
    return wall_s / replayed.count if _has_device() else replayed.step_s()


def _described(source: Source) -> dict[str, Any]:
    from torch.utils.data import IterableDataset

    return {
        "dataset": type(source.dataset).__name__,
        "batch_size": source.batch_size,
        "workers": source.workers,
        "has_feeders": source.has_feeders,
        "slots": max(1, source.workers) if isinstance(source.dataset, IterableDataset) else None,
    }


def _has_device() -> bool:
    return bool(sys.modules["torch"].cuda.is_initialized())


def _wait_for_device() -> None:
    if _has_device():
        sys.modules["torch"].cuda.synchronize()


def _quietly(function: Any) -> None:
    """Calls one of the script's functions, if it exists. Its errors do not matter, because the script is about to
    end."""
    with contextlib.suppress(Exception):
        if function is not None:
            function()


def install(module: Any, folder: str) -> None:
    """Watches all loaders of this process, unless it is a feeder. `module` is the module torch.utils.data.dataloader,
    which has just been imported."""
    if os.environ.get(IN_FEEDER_VARIABLE):
        return
    watcher = Watcher(Path(folder), int((Path(folder) / STEPS).read_text()))
    watcher.write("installed", {})
    atexit.register(watcher.at_end)

    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def watched_next(self: Any) -> Any:
            return watcher.next(self, original)

        return watched_next

    def of_subclass(cls: Any, /, **keywords: Any) -> None:
        super(base, cls).__init_subclass__(**keywords)
        if "__next__" in vars(cls):
            cls.__next__ = watched(vars(cls)["__next__"])

    base = module._BaseDataLoaderIter  # noqa: SLF001
    base.__next__ = watched(base.__next__)
    base.__init_subclass__ = classmethod(of_subclass)
    if hasattr(base, "next"):
        base.next = base.__next__
