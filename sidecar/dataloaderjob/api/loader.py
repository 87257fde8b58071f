"""spec.loader: delivery of batches to the training loop, the same on one machine and on a cluster. Pure."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from dataloaderjob.api.base import Bytes, ByteSize, Flag, Immutable, Model, Rule, Whole


class LoaderSpec(Model):
    """Delivery of batches to the training loop: prefetching, memory, and time limits."""

    prefetch: Whole | None = Field(default=None, ge=2, le=512)
    """Number of batches requested ahead of the trainer, per iterator. If omitted: twice the number of feeders, but at
    least 16."""
    memory_per_process: Bytes = Field(
        default_factory=lambda: ByteSize("1Gi"), json_schema_extra={"default": "1Gi"}
    )
    """Maximum shared memory for the batches of one trainer process."""
    pool_size: Bytes | None = None
    """Size of each process's pool. If omitted: enough for `prefetch` batches of the first batch's size, up to
    memoryPerProcess."""
    checksum: Flag = False
    """Verify each batch against its feeder's digest. This costs the sidecar CPU time."""
    allow_pickle: Flag = False
    """Allow batches that contain objects that only pickle can serialize. The trainer then unpickles data from
    feeders."""
    batch_timeout_seconds: Whole = Field(default=300, ge=1, le=604_800)
    """Maximum time that the trainer waits for one batch. The DataLoader's `timeout=0` selects this limit."""
    warn_after_seconds: Whole = Field(default=30, ge=1, le=604_800)
    """A trainer that waits longer than this for a batch prints a warning every 30 s. The warning names who is late."""

    tls: Flag = False
    """Protect all TCP connections between trainers, feeders and the head with TLS 1.3. Each job has its own
    certificates. The sidecar then takes about four times as much CPU time for each byte. Batches on one machine stay in
    shared memory. YAML reads On and Off as true and false."""

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
            use="at least 1Mi, or omit it, so that the first batch determines the size",
            cel="!has(self.poolSize) || !quantity(string(self.poolSize)).isLessThan(quantity('1Mi'))",
            found="string(self.poolSize)",
        ),
        Rule(
            field="poolSize",
            use="at most memoryPerProcess, or raise memoryPerProcess",
            cel="!has(self.poolSize) ||"
            " !quantity(string(self.poolSize)).isGreaterThan(quantity(string(self.memoryPerProcess)))",
            found="string(self.poolSize) + ', above memoryPerProcess ' + string(self.memoryPerProcess)",
        ),
    )
    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = (
        Immutable(
            field="poolSize", use="a new job, because the layout of pools is fixed when trainers start"
        ),
        Immutable(field="tls", use="a new job, because all of a job's pods start with the same setting"),
    )
