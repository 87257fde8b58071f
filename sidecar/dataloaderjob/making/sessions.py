"""Sessions, in which a process looks to user code like a torch worker of one loader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import _utils

from dataloaderjob.making.fetcher import seed_worker
from dataloaderjob.making.held import NOTHING_HELD, HeldGenerators
from dataloaderjob.shipping.bundles import UserCode

_MASK63 = (1 << 63) - 1


def begin_session(
    code: UserCode, *, index: int, num_workers: int, base_seed: int, held: HeldGenerators = NOTHING_HELD
) -> None:
    """Begins a session as torch's worker does: seeds the process, then calls worker_init_fn. Raises the errors of
    worker_init_fn.

    `held` is the result of `held_by`, which must be called before any random number is drawn.
    """
    introduce(code.dataset, index=index, num_workers=num_workers, base_seed=base_seed)
    seed_worker(base_seed & _MASK63, index)
    if code.worker_init_fn is not None:
        held.mark()
        code.worker_init_fn(index)
        held.look_again()


def held_by(code: UserCode, of_classes: Mapping[str, int]) -> HeldGenerators:
    """Returns the generators that newly loaded user code holds. For `of_classes`, see `HeldGenerators`."""
    return HeldGenerators(code.dataset, code.collate_fn, of_classes=of_classes)


def introduce(dataset: Any, *, index: int, num_workers: int, base_seed: int) -> None:
    """Makes torch's get_worker_info() describe worker `index`, with the seed of the iterator that is being served."""
    worker = _utils.worker
    seed = (base_seed & _MASK63) + index
    info = worker._worker_info  # noqa: SLF001  torch offers no other way to be a worker
    if info is None or info.seed != seed:
        worker._worker_info = worker.WorkerInfo(  # noqa: SLF001
            id=index, num_workers=max(num_workers, index + 1), seed=seed, dataset=dataset
        )
