"""A pod of feeders: one raylet that joins the job's Ray, with room for so many feeders.

    python -m dataloaderjob.pod.feeder --settings FILE.json

The supervisor, in the head's pod, places the feeders. What they print is shown here, each line under its
feeder's name. Without its raylet this process ends, and the kubelet starts a fresh container.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from pathlib import Path

from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.places import NODE_FOLDER_VARIABLE
from dataloaderjob.core.settings import NODE_OUTPUT
from dataloaderjob.pod import entry
from dataloaderjob.pod.entry import (
    ADDRESS_VARIABLE,
    ANY_PORTS,
    PLAIN,
    REMEDY,
    FeederPodSettings,
    Watch,
    await_started,
    fresh_folder,
    read_token,
    split_address,
)
from dataloaderjob.pod.output import Output
from dataloaderjob.providers.ray.node import RayNode, without_ray

log = logging.getLogger(__name__)

VITAL = ("raylet",)
CONNECT_TIMEOUT_S = 2.0
RETRY_S = 0.5
LOOK_S = 2.0
GONE_AFTER = 3
"""Refusals in a row: a GCS that is busy may miss one."""


class FeederPod:
    """`run`, then `close`, in the main thread."""

    def __init__(self, settings: FeederPodSettings, watch: Watch) -> None:
        """Clears the folder. Raises InputError for what cannot work."""
        self._settings, self._watch = settings, watch
        read_token(settings.token_path)
        self._head = split_address(settings.head)
        self._node = RayNode(
            Path(settings.temp_dir), token_path=Path(settings.token_path), vital=VITAL, tuning=settings.tuning,
            resources={"feeder": float(settings.processes)},
            host=os.environ.get(ADDRESS_VARIABLE) or "127.0.0.1", remedy=REMEDY,
        )  # fmt: skip
        self._folder = fresh_folder(self._node.folder)
        self._output = Output(self._folder / NODE_OUTPUT)

    def run(self) -> None:
        """Serves for as long as it can. Raises ServiceError when it cannot go on, Stopped, OSError."""
        address = self._await_head()
        env = {**without_ray(os.environ), NODE_FOLDER_VARIABLE: str(self._folder)}
        self._node.launch([f"--address={address}", *ANY_PORTS, PLAIN], env=env, cwd=Path.cwd())
        what = (
            f"this node of the Ray at {self._settings.head}, with the token of {self._settings.token_path},"
        )
        there = StillThere(split_address(address))
        vital = await_started(self._node, self._watch, self._settings.join_timeout_s, what, check=there)
        log.info("joined the Ray at %s with room for %d feeders", address, self._settings.processes)
        self._watch.wait(None, vital.values())
        raise ServiceError("raylet ended: this container cannot go on, a fresh one can")

    def _await_head(self) -> str:
        """The address of the head's GCS, host by number, once it accepts.

        By number, because a new head's pod is another cluster under the same name: a raylet that followed the
        name would ask that one for what it does not know. This way it misses its GCS, and ends.
        """
        settings, (host, port) = self._settings, self._head
        began = time.monotonic()
        logged_s = 0.0
        while True:
            try:
                with socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S) as sock:
                    number = str(sock.getpeername()[0])
                    return f"[{number}]:{port}" if ":" in number else f"{number}:{port}"
            except OSError as exc:
                waited_s = time.monotonic() - began
                if waited_s > settings.head_timeout_s:
                    raise ServiceError(
                        f"the head's GCS was needed at {settings.head}, and did not accept within "
                        f"{settings.head_timeout_s:.0f} s ({exc}): see the pod of the head"
                    ) from exc
                if waited_s >= logged_s:
                    log.info("waiting for the head's GCS at %s: %s", settings.head, exc)
                    logged_s += settings.progress_every_s
            self._watch.wait(RETRY_S)

    def close(self) -> None:
        """Ends everything that was started here, and shows the last lines."""
        self._node.stop(self._settings.grace_s)
        self._output.close()


class StillThere:
    """Whether the GCS that is being joined still accepts: Ray itself would ask a dead one for minutes, and another head
    may long be there under the name."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address, self._due, self._misses = address, 0.0, 0

    def __call__(self) -> None:
        """Looks now and then. Raises ServiceError once it did not accept several times in a row."""
        if time.monotonic() < self._due:
            return
        try:
            socket.create_connection(self._address, timeout=CONNECT_TIMEOUT_S).close()
            self._misses = 0
        except OSError as exc:
            self._misses += 1
            if self._misses == GONE_AFTER:
                host, port = self._address
                raise ServiceError(
                    f"the head's GCS at {host}:{port} is gone while this node joins it: {exc}; "
                    "a fresh container finds the one that is there now"
                ) from exc
        self._due = time.monotonic() + LOOK_S


if __name__ == "__main__":
    sys.exit(entry.serve(FeederPodSettings, FeederPod, name="pod"))
