"""The exception hierarchy, with one class for each `except` that a caller would write.

    DataLoaderJobError
    ├── InputError            the user's input cannot work: arguments, dataset, manifest (also ValueError)
    │   ├── ScratchTooSmall  dataset and code do not fit into feeders' scratch
    │   └── UnsupportedBatch  a leaf of the batch cannot be sent (also TypeError)
    ├── ServiceError          the service cannot do its work
    │   ├── ServiceUnavailable  no sidecar answers, or it refused this process
    │   ├── DeadlineExceeded    a wait ran past its deadline; names the late component (also TimeoutError)
    │   └── FeederLost          feeders died repeatedly on one batch
    │       └── OutOfMemory     the kernel killed them for lack of memory
    ├── UserCodeError         the user's code raised an exception that cannot be rebuilt in the trainer
    └── ProtocolError         a peer violated the protocol
        ├── RemoteProtocolError   the peer's fault
        └── AuthError             the peer does not hold the job's key

A message states what was needed, what was found and what to do.
"""

from __future__ import annotations

import contextlib
import sys

from dataloaderjob.core.texts import clean


class DataLoaderJobError(Exception):
    """Base class of all errors that this package raises on purpose."""


class InputError(DataLoaderJobError, ValueError):
    """Arguments, dataset or manifest cannot work; the message states what would."""


class ScratchTooSmall(InputError):
    """Dataset and code do not fit into the feeders' scratch; the message names the field to increase."""


class UnsupportedBatch(InputError, TypeError):
    """A leaf of a batch cannot be sent to a trainer; the message names the leaf and the option."""


class ServiceError(DataLoaderJobError, RuntimeError):
    """The service (sidecar, supervisor, feeders) cannot do its work."""


class ServiceUnavailable(ServiceError):
    """No sidecar answers, or it refused this process."""


class DeadlineExceeded(ServiceError, TimeoutError):
    """A wait ran past its deadline; the message names index, feeder and phase."""


class FeederLost(ServiceError):
    """Feeders died repeatedly while they made one batch."""


class OutOfMemory(FeederLost):
    """The kernel killed feeder processes for lack of memory; the message names the limit and the field to
    increase."""


class UserCodeError(DataLoaderJobError, RuntimeError):
    """The user's code raised an exception whose type cannot be rebuilt in the trainer; the message quotes it in
    full."""


class ProtocolError(DataLoaderJobError):
    """A peer violated the protocol."""


class RemoteProtocolError(ProtocolError):
    """A remote peer sent something it may not send."""


class AuthError(ProtocolError):
    """The peer does not hold the job's key, or speaks another protocol version."""


def first_line(error: BaseException) -> str:
    """Returns the type and the first line of an error, for one-line reports."""
    text = str(error).strip().splitlines()
    return clean(f"{type(error).__name__}: {text[0]}" if text else type(error).__name__)


def say(text: str) -> None:
    """Prints a message of this package to the stderr of the user's script."""
    if sys.stderr is None:  # in a daemon, or if a shell has closed it
        return
    with contextlib.suppress(OSError, ValueError):  # it may be closed
        sys.stderr.write(f"[dataloaderjob] {text}\n")
        sys.stderr.flush()


def named(name: str) -> type[DataLoaderJobError]:
    """Returns the error class of this name; ServiceError if this release has no class of that name."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, DataLoaderJobError) else ServiceError
