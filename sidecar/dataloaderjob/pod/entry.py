"""What both main processes do around their work: settings, signals, exit code, and the end of all they started."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.settings import load
from dataloaderjob.pod import init
from dataloaderjob.pod.watch import Stopped, Watch

log = logging.getLogger(__name__)

EXIT_FAILED = 1
S = TypeVar("S")


class Part(Protocol):
    """A pod's work, in the main thread."""

    def run(self) -> None:
        """Serves for as long as it can. Raises ServiceError when it cannot go on, OSError, Stopped."""

    def close(self) -> None:
        """Ends everything that was started here."""


def serve(kind: type[S], make: Callable[[S, Watch], Part], *, name: str) -> int:
    """The exit code: 0 after SIGTERM, else EXIT_FAILED, which has the kubelet start the container anew."""
    parser = argparse.ArgumentParser(description=f"the main process of a pod: {name}")
    parser.add_argument("--settings", type=Path, required=True, help=f"JSON file of {kind.__name__}")
    path = parser.parse_args().settings
    logging.basicConfig(format=f"{name}: %(levelname)s %(message)s", level=logging.INFO)
    return init.run(lambda: _serve(kind, make, path))


def _serve(kind: type[S], make: Callable[[S, Watch], Part], path: Path) -> int:
    watch = Watch()
    try:
        part = make(load(kind, path), watch)
        try:
            part.run()
        finally:
            part.close()
    except Stopped:
        log.info("ended as asked")
        return 0
    except (DataLoaderJobError, OSError) as exc:
        log.error("%s", exc)
    return EXIT_FAILED
