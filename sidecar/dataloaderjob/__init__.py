"""DataLoaderJob: a training job's input work, moved to CPU processes and pods.

`from dataloaderjob import DataLoader` is all that a trainer needs; the classes of errors are here, too. Names are
resolved on first use (PEP 562), so that the sidecar, which imports `dataloaderjob.core` only, never loads torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would cost each process of the service 4 ms at its start
if TYPE_CHECKING:
    from dataloaderjob.core.errors import (
        AuthError,
        DataLoaderJobError,
        DeadlineExceeded,
        FeederLost,
        InputError,
        ProtocolError,
        RemoteProtocolError,
        ServiceError,
        ServiceUnavailable,
        UnsupportedBatch,
        UserCodeError,
    )
    from dataloaderjob.trainer.loader import DataLoader

__all__ = [
    "AuthError",
    "DataLoader",
    "DataLoaderJobError",
    "DeadlineExceeded",
    "FeederLost",
    "InputError",
    "ProtocolError",
    "RemoteProtocolError",
    "ServiceError",
    "ServiceUnavailable",
    "UnsupportedBatch",
    "UserCodeError",
    "__version__",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "DataLoader":
        from dataloaderjob.trainer.loader import DataLoader

        return DataLoader
    if name in __all__:
        from dataloaderjob.core import errors

        return getattr(errors, name)
    raise AttributeError(f"module 'dataloaderjob' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
