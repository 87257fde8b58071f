"""Peers of B7: torch DataLoader, with and without persistent workers, and Ray Data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.raybox import ray_box
from bench.start import SIDE, Case, Small, measure, measure_next_script


def torch_loader(case: Case) -> dict[str, Any]:
    if case.follows:
        return measure_next_script("DataLoader", case)

    def new_loader() -> Any:
        return torch.utils.data.DataLoader(
            Small(case), batch_size=case.batch, num_workers=case.producers,
            persistent_workers=case.persistent,
        )  # fmt: skip

    return measure(new_loader, case)


class Maker:
    """A callable for map_batches that makes one batch of pictures."""

    def __init__(self, case: Case) -> None:
        self._dataset = Small(case)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        return {"pictures": self._dataset.stacked(int(rows["id"][0]) // self._dataset.case.batch)}


class _Epochs:
    def __init__(self, dataset: Any, case: Case) -> None:
        self._dataset, self._case = dataset, case

    def __iter__(self) -> Iterator[Any]:
        for batch in self._dataset.iter_torch_batches(batch_size=self._case.batch):
            yield batch["pictures"].reshape(-1, 3, SIDE, SIDE)


def ray_data(case: Case) -> dict[str, Any]:
    import ray

    # the tasks that make the ranges of indices need a slot in addition to the actors, or nothing ever runs
    with ray_box(num_cpus=case.producers + 1, store_nbytes=0):
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = False
        context.execution_options.preserve_order = True

        def new_loader() -> Any:
            rows = ray.data.range(case.batch * case.batches, override_num_blocks=case.batches)
            made = rows.map_batches(
                Maker, fn_constructor_args=(case,), batch_size=case.batch,
                num_cpus=1, compute=ray.data.ActorPoolStrategy(size=case.producers),
            )  # fmt: skip
            return _Epochs(made, case)

        return measure(new_loader, case)


PEERS = {
    "DataLoader": torch_loader,
    "Ray Data": ray_data,
}
