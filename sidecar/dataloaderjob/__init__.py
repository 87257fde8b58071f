"""DataLoaderJob: a training job's input work, moved to CPU processes and pods.

A trainer needs only `from dataloaderjob import DataLoader`. The package also exports samplers for any number of ranks
and the exception classes. Names are resolved on first use (PEP 562), so the sidecar, which imports only
`dataloaderjob.core`, never loads torch.
"""

from __future__ import annotations

TYPE_CHECKING = False  # importing typing would add 4 ms to the startup of each process of the service
if TYPE_CHECKING:
    from dataloaderjob.core.errors import (
        AuthError,
        DataLoaderJobError,
        DeadlineExceeded,
        FeederLost,
        InputError,
        OutOfMemory,
        ProtocolError,
        RemoteProtocolError,
        ScratchTooSmall,
        ServiceError,
        ServiceUnavailable,
        UnsupportedBatch,
        UserCodeError,
    )
    from dataloaderjob.ray_data import RayData
    from dataloaderjob.samplers.balanced import ElasticBalancedBatchSampler
    from dataloaderjob.samplers.distributed import ElasticDistributedSampler
    from dataloaderjob.samplers.mixture import ElasticMixtureSampler
    from dataloaderjob.samplers.tokens import ElasticTokenBatchSampler
    from dataloaderjob.samplers.weighted import ElasticWeightedSampler
    from dataloaderjob.trainer.interop.context import context
    from dataloaderjob.trainer.loader import DataLoader

__all__ = [
    "AuthError",
    "DataLoader",
    "DataLoaderJobError",
    "DeadlineExceeded",
    "ElasticBalancedBatchSampler",
    "ElasticDistributedSampler",
    "ElasticMixtureSampler",
    "ElasticTokenBatchSampler",
    "ElasticWeightedSampler",
    "FeederLost",
    "InputError",
    "OutOfMemory",
    "ProtocolError",
    "RayData",
    "RemoteProtocolError",
    "ScratchTooSmall",
    "ServiceError",
    "ServiceUnavailable",
    "UnsupportedBatch",
    "UserCodeError",
    "__version__",
    "context",
]
__version__ = "0.1.0"
_MODULES = {
    "DataLoader": "trainer.loader",
    "ElasticBalancedBatchSampler": "samplers.balanced",
    "ElasticDistributedSampler": "samplers.distributed",
    "ElasticMixtureSampler": "samplers.mixture",
    "ElasticTokenBatchSampler": "samplers.tokens",
    "ElasticWeightedSampler": "samplers.weighted",
    "RayData": "ray_data",
    "context": "trainer.interop.context",
}
"""The module that defines each name; all other names are exceptions of `core.errors`."""


def __getattr__(name: str) -> object:
    if name in __all__:
        from importlib import import_module

        try:
            module = import_module(f"dataloaderjob.{_MODULES.get(name, 'core.errors')}")
        except ModuleNotFoundError as exc:
            if exc.name != "torch":
                raise
            message = f"dataloaderjob.{name} requires torch>=2.6, which is not installed: pip install torch"
            raise ModuleNotFoundError(message, name="torch") from None
        return getattr(module, name)
    raise AttributeError(f"module 'dataloaderjob' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
