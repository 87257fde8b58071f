"""The Ray actor that is a feeder: one process, one `FeederServer`. Imported by Ray's workers, never run.

Everything runs in threads that the constructor starts, so a feeder that Ray starts again by itself
serves again without anybody calling it. Its output reaches the supervisor under its name, or the main
process of its pod where there is one.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import ray
from ray._private import services as ray_services

from dataloaderjob.core.settings import IN_FEEDER_VARIABLE, NODE_FOLDER_VARIABLE, FeederSettings
from dataloaderjob.feeder import handover

EXIT_BROKEN = 70
_ANY = ("0.0.0.0", "::", "")  # noqa: S104  compared with, not bound


class Feeder:
    """One feeder of a job."""

    def __init__(self, settings: FeederSettings) -> None:
        """Raises InputError, OSError when the server cannot start, ImportError; Ray tells the supervisor."""
        self._settings = settings  # first: Ray asks for the name of one that fails below, too
        if folder := os.environ.get(NODE_FOLDER_VARIABLE):
            settings = handover.at_home(settings, Path(folder))
            handover.hand_over(settings.name, Path(folder))
        # Here, because the supervisor, too, imports this module: torch would cost it 1.7 s and 200 MB.
        from dataloaderjob.feeder.registration import Registration
        from dataloaderjob.feeder.server import FeederServer

        logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
        os.environ[IN_FEEDER_VARIABLE] = "1"
        self._settings = settings
        self._server = FeederServer(settings)
        self._server.start()
        host = settings.advertise_host or settings.bind_host
        self._host = _node_address() if host in _ANY else host
        node = ray.get_runtime_context().get_node_id()
        Registration(settings, self._server, host=self._host, node=node).start()
        threading.Thread(target=self._end_when_broken, name="dlj-watch", daemon=True).start()

    def __repr__(self) -> str:
        return self._settings.name

    def describe(self) -> dict[str, Any]:
        """Where this feeder serves."""
        return {
            "name": self._settings.name,
            "host": self._host,
            "port": self._server.port,
            "instance": self._server.instance,
            "pid": os.getpid(),
        }

    def _end_when_broken(self) -> None:
        """A process without a working server is of no use: Ray starts another."""
        self._server.join()
        os._exit(EXIT_BROKEN)


def _node_address() -> str:
    return str(ray_services.get_node_ip_address())  # type: ignore[no-untyped-call]
