"""Output of user code in feeders, as lines `[feeder-0] ...` of the supervisor's own output.

Ray brings workers' output to the driver that started them; a supervisor that adopted its feeders is
another driver, so the filter by driver is taken off (as Ray Serve does) and lines are chosen by name.
"""

from __future__ import annotations

import sys
from typing import Any

from ray._private import ray_logging
from ray._private import worker as ray_worker

from dataloaderjob.core.supervision import index_of

_HANDLER = "dataloaderjob"


def show() -> None:
    """Shows feeders' output from now on. Call once, after ray.init with log_to_driver."""
    ray_worker.global_worker._filter_logs_by_job = False  # noqa: SLF001
    dispatcher = ray_logging.global_worker_stdstream_dispatcher
    for name in [key for key, _ in list(dispatcher.handlers)]:
        dispatcher.remove_handler(name)
    dispatcher.add_handler(_HANDLER, _print)


def _print(data: dict[str, Any]) -> None:
    name = str(data.get("actor_name") or "")
    if index_of(name) is None and name != "Feeder":  # before it is constructed it is called by its class
        return
    out = sys.stderr if data.get("is_err") else sys.stdout
    for line in data.get("lines", ()):
        print(f"[{name}] {line}", file=out)
    out.flush()
