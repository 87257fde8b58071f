"""The service of this process: the job's sidecar, or a private one, which the first loader that needs it starts."""

from __future__ import annotations

import os

import torch
import torch.utils.data

from dataloaderjob.core.blobs import LAUNCH
from dataloaderjob.core.errors import InputError, ServiceUnavailable, say
from dataloaderjob.core.keep import keep_seconds
from dataloaderjob.core.places import (
    ALLOW_PICKLE_VARIABLE,
    FEEDERS_VARIABLE,
    IN_FEEDER_VARIABLE,
    RANK_VARIABLES,
    SOCKET_VARIABLE,
)
from dataloaderjob.core.processes import hold_standard_descriptors
from dataloaderjob.trainer.session import private

TYPE_CHECKING = False
if TYPE_CHECKING:  # at run time it is imported while the private service starts
    from dataloaderjob.trainer.session.client import Client

_logged: set[str] = set()
_most_workers = 0
"""Largest number of feeders that any loader of this process has requested from the private service so far."""


class LeftOut(int):
    """The number of workers if the user omitted `num_workers`. The type survives if a library rebuilds the loader."""

    __slots__ = ()


def begin(workers: int) -> None:
    """Starts the private service for a loader that is about to need it, unless the job provides a service."""
    hold_standard_descriptors()
    if is_private():
        expect(workers)
        private.ensure(_most_workers)


def connect(client: Client | None, workers: int) -> Client:
    """Returns the client of this process's service. `client` is the loader's previous client, if any. Raises
    ServiceUnavailable."""
    hold_standard_descriptors()
    if os.environ.get(IN_FEEDER_VARIABLE):
        raise ServiceUnavailable(
            "a dataloaderjob.DataLoader cannot be iterated inside a feeder: use num_workers=0. If a module "
            "iterates it at its top level, move that code into a function or under if __name__ == "
            "'__main__', because feeders import the module, too"
        )
    if is_private():
        expect(workers)
    if client is None or client.dead is not None:
        client = _attach_private() if is_private() else _attach_announced(os.environ[SOCKET_VARIABLE])
    elif is_private():
        private.ensure(_most_workers)
    return client


def _attach_announced(path: str) -> Client:
    """Attaches to a sidecar that this process did not start. The sidecar may be restarting."""
    from dataloaderjob.trainer.session import process_clients
    from dataloaderjob.trainer.session.attach import Absence

    absence = Absence(path)
    while True:
        try:
            return process_clients.connect(path, _rank())
        except (ConnectionError, FileNotFoundError) as exc:
            if not os.path.isdir(os.path.dirname(path)):
                raise ServiceUnavailable(
                    f"no sidecar listens at {path} ({SOCKET_VARIABLE}): is the sidecar container running, and is its "
                    "socket's folder mounted here?"
                ) from exc
            absence.wait(exc)
        except OSError as exc:
            raise ServiceUnavailable(f"the sidecar at {path} does not respond: {exc}") from exc


def _attach_private() -> Client:
    """Attaches to the private service. A service that exited after it was found is restarted."""
    for attempt in range(3):
        private.ensure(_most_workers)
        path = private.wait()
        from dataloaderjob.trainer.session import (
            closing,
            process_clients,  # not during the service's own start
        )
        from dataloaderjob.trainer.session.attach import failure

        try:
            client = process_clients.connect(path, _rank(), keep=True)
            closing.prepare(client, path)
            return client
        except OSError as exc:
            if attempt == 2 or os.path.exists(path):
                why = failure(path) or f"its sidecar does not respond: {exc}"
                raise ServiceUnavailable(f"the service at {path} failed: {why}") from exc
    raise AssertionError("the last attempt returns or raises")


def expect(workers: int) -> None:
    """Records the number of feeders that a loader wants at its `iter()`. The private service gets the largest of these
    numbers."""
    global _most_workers
    _most_workers = max(_most_workers, int(workers))


def is_private() -> bool:
    return not os.environ.get(SOCKET_VARIABLE) and not os.environ.get(IN_FEEDER_VARIABLE)


def launch_facts() -> dict[str, str]:
    """Returns the facts about this launch for a bundle, if feeders may outlive the launch."""
    return {LAUNCH: private.run_key()} if is_private() and keep_seconds() else {}


def is_pickle_allowed() -> bool:
    """Returns True if the job allows pickles in batches."""
    return os.environ.get(ALLOW_PICKLE_VARIABLE) == "1"


def _rank() -> str:
    """Returns the name under which this process attaches to the sidecar: its rank in the job, or else its own PID."""
    for name in RANK_VARIABLES:
        if os.environ.get(name):
            return os.environ[name]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return str(torch.distributed.get_rank())
    return f"pid-{os.getpid()}"


def default_feeders() -> int:
    return max(1, number(FEEDERS_VARIABLE, min(8, len(os.sched_getaffinity(0)) - 1)))


def compare_with_feeders(window: int) -> None:
    """Prints a note if some of a job's feeders cannot get any work."""
    feeders, ranks = number(FEEDERS_VARIABLE, 0), max(1, number("WORLD_SIZE", 1))
    per_rank = -(-feeders // ranks)
    if not is_private() and window < per_rank:
        say_once(
            f"{window} prefetched batches cannot keep {per_rank} feeders busy (the job has {feeders} for "
            f"{ranks} ranks): omit num_workers, or raise prefetch_factor * num_workers"
        )


def number(variable: str, default: int) -> int:
    """Returns a whole number from an environment variable that the job sets. Raises InputError."""
    text = os.environ.get(variable)
    try:
        return int(text) if text else default
    except ValueError:
        raise InputError(f"{variable} must be a whole number, but is {text!r}: correct or unset it") from None


def say_once(text: str, about: str = "") -> None:
    if (about or text) not in _logged:
        _logged.add(about or text)
        say(text)
