"""DataLoaderJob: a training job's input work, moved to CPU processes and pods.

`from dataloaderjob import DataLoader` is all that a trainer needs. Names are resolved on first
use (PEP 562), so that the sidecar, which imports `dataloaderjob.core` only, never loads torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own would cost each process of the service 4 ms at its start
if TYPE_CHECKING:
    from dataloaderjob.trainer.loader import DataLoader

__all__ = ["DataLoader", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "DataLoader":
        from dataloaderjob.trainer.loader import DataLoader

        return DataLoader
    raise AttributeError(f"module 'dataloaderjob' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
