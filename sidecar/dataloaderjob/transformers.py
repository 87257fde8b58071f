"""Feeders for Hugging Face's Trainer."""

from __future__ import annotations

from typing import Any

from dataloaderjob.accelerate import adopt
from dataloaderjob.core.errors import InputError


class FeedersMixin:
    """`class MyTrainer(FeedersMixin, Trainer)`: feeders make the batches of training, evaluation and prediction.

    `dataloader_num_workers` in the training arguments must be at least 1, because with 0 the process itself makes the
    batches. Without a job, it is the number of feeders. `resume_from_checkpoint` resumes with the same batches as an
    uninterrupted run, including their augmentation.
    """

    def get_train_dataloader(self) -> Any:
        return self._with_feeders("get_train_dataloader")

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_feeders("get_eval_dataloader", *args, **kwargs)

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        return self._with_feeders("get_test_dataloader", *args, **kwargs)

    def _with_feeders(self, method: str, *args: Any, **kwargs: Any) -> Any:
        made = getattr(super(), method, None)
        if made is None:
            raise InputError(
                "FeedersMixin must be followed by Trainer in the class's bases: class "
                "MyTrainer(FeedersMixin, Trainer)"
            )
        loader = made(*args, **kwargs)
        base = getattr(loader, "base_dataloader", None)
        if base is None or (base.batch_sampler is None and base.batch_size is not None):
            return loader  # a loader of an IterableDataset
        return adopt(loader)
