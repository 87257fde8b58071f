"""spec.loader: how batches reach the training loop, the same on one machine and on a cluster. Pure."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from dataloaderjob.api.base import Bytes, ByteSize, Flag, Immutable, Model, Rule, Whole


class LoaderSpec(Model):
    """How batches reach the training loop: how many ahead, in how much memory, and when one is late."""

    prefetch: Whole | None = Field(default=None, ge=2, le=512)
    """Batches that are asked for ahead of the trainer, for each iterator. Left out: twice the number of feeders, 16 at
    least."""
    memory_per_process: Bytes = Field(
        default_factory=lambda: ByteSize("1Gi"), json_schema_extra={"default": "1Gi"}
    )
    """Most shared memory that the batches of one trainer process may take."""
    pool_size: Bytes | None = None
    """Size of a process's pool. Left out: what the first batch's size and `prefetch` need, within memoryPerProcess."""
    checksum: Flag = False
    """The sidecar compares each batch with the digest that its feeder gave it, which costs the sidecar CPU."""
    allow_pickle: Flag = False
    """Batches may hold objects that only pickle can carry. The trainer then unpickles what feeders send."""
    batch_timeout_seconds: Whole = Field(default=300, ge=1, le=604_800)
    """Longest time for one batch, from the trainer's wait for it; what `timeout=0` of the DataLoader means."""
    warn_after_seconds: Whole = Field(default=30, ge=1, le=604_800)
    """A trainer that waits longer than this for a batch says so in its output, with who is late, every 30 s."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="memoryPerProcess",
            use="at least 1Mi, such as 1Gi",
            cel="!quantity(string(self.memoryPerProcess)).isLessThan(quantity('1Mi'))",
            found="string(self.memoryPerProcess)",
        ),
        Rule(
            field="memoryPerProcess",
            use="at most 16Ti",
            cel="!quantity(string(self.memoryPerProcess)).isGreaterThan(quantity('16Ti'))",
            found="string(self.memoryPerProcess)",
        ),
        Rule(
            field="poolSize",
            use="at least 1Mi, or leave it out: the first batch then decides",
            cel="!has(self.poolSize) || !quantity(string(self.poolSize)).isLessThan(quantity('1Mi'))",
            found="string(self.poolSize)",
        ),
        Rule(
            field="poolSize",
            use="a size up to memoryPerProcess, or raise memoryPerProcess",
            cel="!has(self.poolSize) ||"
            " !quantity(string(self.poolSize)).isGreaterThan(quantity(string(self.memoryPerProcess)))",
            found="string(self.poolSize) + ', above memoryPerProcess ' + string(self.memoryPerProcess)",
        ),
    )
    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = (
        Immutable(field="poolSize", use="a new job: the layout of pools is fixed when trainers start"),
    )
