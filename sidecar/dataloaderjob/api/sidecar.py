"""spec.sidecar: the process beside the trainer that keeps rings of ready batches in shared memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field

from dataloaderjob.api.base import Flag, Immutable, Model, Path, Rule, Whole
from dataloaderjob.api.pods import Image
from dataloaderjob.api.quantities import MIB, TIB, Bytes, ByteSize, Resources, resources

MIN_RING_NBYTES = MIB
MAX_SHARED_NBYTES = 16 * TIB
FIRST_RING_OVERHEAD_NBYTES = 64 * MIB
"""Memory of a sidecar with one ring, beside the ring (40 MB measured bound, and head-room)."""
FURTHER_RING_OVERHEAD_NBYTES = 16 * MIB
"""Memory of a sidecar for each further ring, beside the ring."""


def _no_room(sidecar: SidecarSpec) -> Iterator[tuple[Path, str]]:
    if sidecar.shared_memory.nbytes < MIN_RING_NBYTES:
        yield ("sharedMemory",), f"{sidecar.shared_memory}"


def _too_large(sidecar: SidecarSpec) -> Iterator[tuple[Path, str]]:
    if sidecar.shared_memory.nbytes > MAX_SHARED_NBYTES:
        yield ("sharedMemory",), f"{sidecar.shared_memory}"


def _small_ring(sidecar: SidecarSpec) -> Iterator[tuple[Path, str]]:
    if sidecar.ring_size is not None and sidecar.ring_size.nbytes < MIN_RING_NBYTES:
        yield ("ringSize",), f"{sidecar.ring_size}"


def _ring_over_limit(sidecar: SidecarSpec) -> Iterator[tuple[Path, str]]:
    if sidecar.ring_size is not None and sidecar.ring_size > sidecar.shared_memory:
        yield ("ringSize",), f"{sidecar.ring_size}, above sharedMemory {sidecar.shared_memory}"


class SidecarSpec(Model):
    """The sidecar: one for each trainer pod, one ring for each trainer process."""

    shared_memory: Bytes = Field(
        default_factory=lambda: ByteSize("2Gi"), json_schema_extra={"default": "2Gi"}
    )
    """Most memory that all rings of one trainer pod may take together."""
    ring_size: Bytes | None = None
    """Size of each ring. Left out: what the first batch's size and `prefetch` need, within sharedMemory."""
    prefetch: Whole = Field(default=16, ge=2, le=512)
    """Batches that are asked for ahead of the trainer, for each iterator."""
    checksum: Flag = False
    """Feeders hash each batch and the sidecar verifies it. docs/benchmarks.md has the cost."""
    image: Image | None = None
    """Image of the sidecar. Left out: the operator's default. Ignored on one machine."""
    resources: Resources = resources(requests={"cpu": "250m"}, limits={"cpu": "2"})
    """Resources of the sidecar. Memory left out: sharedMemory plus what the sidecar itself needs."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="sharedMemory",
            use="at least 1Mi, such as 2Gi",
            cel="!quantity(string(self.sharedMemory)).isLessThan(quantity('1Mi'))",
            found="string(self.sharedMemory)",
            check=_no_room,
        ),
        Rule(
            field="sharedMemory",
            use="at most 16Ti",
            cel="!quantity(string(self.sharedMemory)).isGreaterThan(quantity('16Ti'))",
            found="string(self.sharedMemory)",
            check=_too_large,
        ),
        Rule(
            field="ringSize",
            use="at least 1Mi, or leave it out: the first batch then decides",
            cel="!has(self.ringSize) || !quantity(string(self.ringSize)).isLessThan(quantity('1Mi'))",
            found="string(self.ringSize)",
            check=_small_ring,
        ),
        Rule(
            field="ringSize",
            use="a size up to sharedMemory, or raise sharedMemory",
            cel="!has(self.ringSize) ||"
            " !quantity(string(self.ringSize)).isGreaterThan(quantity(string(self.sharedMemory)))",
            found="string(self.ringSize) + ', above sharedMemory ' + string(self.sharedMemory)",
            check=_ring_over_limit,
        ),
    )
    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = (
        Immutable(field="ringSize", use="a new job: the layout of rings is fixed when trainers start"),
    )

    def overhead_nbytes(self, num_rings: int) -> int:
        """Memory that the sidecar needs beside its rings."""
        return FIRST_RING_OVERHEAD_NBYTES + (num_rings - 1) * FURTHER_RING_OVERHEAD_NBYTES
