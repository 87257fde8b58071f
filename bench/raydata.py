"""B18: a pipeline of Ray Data that makes B3's pictures for one trainer or two. Phases and figures are B3's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench import endtoend
from bench.endtoend import SIDE

STORE_NBYTES = 4_000_000_000
"""With 1 GB Ray holds its tasks back for lack of space, and all parties have half the rate in one run of two."""


@dataclass(frozen=True, slots=True)
class Case(endtoend.Case):
    batches: int = 2000
    trainers: int = 1
    elsewhere: bool = False
    """True if the pipeline's tasks run as on another machine."""
    small_blocks: bool = False
    """True if a block has one batch; otherwise it has ten, 96 MB of the 128 MiB that Ray aims at."""

    @property
    def batches_per_block(self) -> int:
        return 1 if self.small_blocks else 10

    def dealt(self, rank: int, *, together: int = 1) -> Callable[[int], int]:
        """Returns the number of a rank's batch as a function of the count before it. Ranks get `together` at a time."""
        return lambda before: (before // together * self.trainers + rank) * together + before % together

    def checked(self, rank: int) -> Callable[[int], int]:
        """Returns the numbers of the batches to compare. The rank has them whether blocks or batches are dealt."""
        if self.trainers == 1:
            return endtoend.every_so_many
        return lambda before: 40 * before + 11 * rank

    @property
    def name(self) -> str:
        return named(self.trainers, elsewhere=self.elsewhere, small_blocks=self.small_blocks)


def named(trainers: int, *, elsewhere: bool, small_blocks: bool) -> str:
    """Returns the name of a case."""
    where = "tasks elsewhere" if elsewhere else "one machine"
    return (
        f"{trainers} trainer{'s' if trainers > 1 else ''}, {where}{', small blocks' if small_blocks else ''}"
    )


class Maker:
    """The pipeline's actor, which makes pictures from a batch of numbers."""

    def __init__(self, case: Case) -> None:
        self._dataset = endtoend.Images(case)

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        pictures, indices = self._dataset.stacked(rows["id"])
        return {"pictures": pictures, "indices": indices}


def pipeline(case: Case) -> Any:
    """Returns a dataset of batches in order, made by `producers` actors."""
    import ray

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    blocks = case.batches // case.batches_per_block
    rows = ray.data.range(case.batch * case.batches, override_num_blocks=blocks)
    return rows.map_batches(
        Maker, fn_constructor_args=(case,), batch_size=case.batch,
        num_cpus=1, compute=ray.data.ActorPoolStrategy(size=case.producers),
    )  # fmt: skip


def cpus(case: Case) -> int:
    """Returns Ray's number of CPUs: one per actor, plus one for the tasks that make the numbers. Without the latter
    nothing ever runs."""
    return case.producers + 1


def pairs(batches: Any) -> Any:
    """Yields batches as `endtoend.measure` takes them: pictures and indices."""
    for batch in batches:
        yield batch["pictures"].reshape(-1, 3, SIDE, SIDE), batch["indices"]


def together(case: Case, found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Combines the measurements of several trainers with equal shares. Each counted its own CPU; the first one also
    counted the CPU of shared processes."""
    of_each = [one["figures"][case.name] for one in found]
    means = {name: sum(one[name] for one in of_each) / len(of_each) for name in of_each[0]}
    figures = {**means, "batches_per_s": sum(one["batches_per_s"] for one in of_each)}
    return {"figures": {case.name: figures}, "proof": found[0]["proof"]}
