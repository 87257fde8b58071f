"""`dataloaderjob verify`: compares two records, or one with its dataset, and names the first difference."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.errors import InputError, RemoteProtocolError
from dataloaderjob.core.records import NO_BUNDLE, Record, Recorded, RowKind
from dataloaderjob.local import trust
from dataloaderjob.local.remake import remake

_MAX_SHOWN = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first batch that differs between two runs."""

    rank: str
    loader: int
    place: tuple[int, int]
    """Epoch and batch."""
    one: Recorded | None
    """The batch of the first run; None if the run has no such batch."""
    other: Recorded | None

    @property
    def where(self) -> str:
        epoch, batch = self.place
        return f"rank {self.rank}, loader {self.loader}, epoch {epoch}, batch {batch}"


# Two records


def compare(
    one: Path, other: Path, *, epoch: int | None = None, trusted: Collection[str] = ()
) -> tuple[bool, list[str]]:
    """Returns a tuple: True if two runs consumed the same batches, and lines for the user. Raises InputError.

    Digests are compared first. The code of the records runs only if there is a difference and their owners are trusted.
    """
    a, b = Record.open(one), Record.open(other)
    if a.ranks.keys() != b.ranks.keys():
        raise InputError(
            f"only runs with the same ranks can be compared, but {one} has {', '.join(sorted(a.ranks))} "
            f"and {other} has {', '.join(sorted(b.ranks))}"
        )
    count = 0
    found: Difference | None = None
    for rank in sorted(a.ranks):
        mine, theirs = a.batches(rank), b.batches(rank)
        for loader in sorted(mine.keys() | theirs.keys()):
            left, right = _of_epoch(mine.get(loader, ()), epoch), _of_epoch(theirs.get(loader, ()), epoch)
            count += len(left)
            difference = first_difference(rank, loader, left, right)
            if difference is not None and (found is None or difference.place < found.place):
                found = difference
    if found is None and not count:
        raise InputError(f"{one} and {other} have no batch{_of_none(a, epoch)} to compare")
    if found is None:
        return True, [f"equal: {count} batches of {_ranks(a)}"]
    return False, [f"{found.where}: {line}" for line in _explain(found, a, b, trusted)]


def first_difference(
    rank: str, loader: int, left: list[Recorded], right: list[Recorded]
) -> Difference | None:
    """Compares the batches that one loader returned in two runs, in order."""
    for at in range(max(len(left), len(right))):
        one = left[at] if at < len(left) else None
        other = right[at] if at < len(right) else None
        if one is not None and other is not None and one.row.place != other.row.place:
            # One of them ended its epoch earlier: name the missing batch.
            one, other = (one, None) if one.row.place < other.row.place else (None, other)
        elif one is not None and other is not None and one.row.digest == other.row.digest:
            continue
        there = one or other
        assert there is not None  # noqa: S101  one of the lists has this index
        return Difference(rank=rank, loader=loader, place=there.row.place, one=one, other=other)
    return None


def _of_epoch(batches: Iterable[Recorded], epoch: int | None) -> list[Recorded]:
    return [batch for batch in batches if epoch is None or batch.row.epoch == epoch]


def _explain(found: Difference, a: Record, b: Record, trusted: Collection[str]) -> list[str]:
    one, other = found.one, found.other
    if one is None or other is None:
        has, lacks = (a, b) if other is None else (b, a)
        return [f"{has.folder} has this batch, but {lacks.folder} does not"]
    failed = [record.folder for batch, record in ((one, a), (other, b)) if batch.row.kind == RowKind.FAILED]
    if len(failed) == 2:
        return ["next() raised errors of different types"]
    if failed:
        return [f"next() raised an error in {failed[0]}, and returned a batch in the other"]
    left, right = one.piece.ticket(one.row), other.piece.ticket(other.row)
    try:
        if any(map(ticket_codec.has_pickled_keys, (left, right))):
            _check_owners((a, b), trusted)
    except (InputError, RemoteProtocolError) as exc:
        return [f"the batches differ, but the difference is unknown: {exc}"]
    if left[ticket_codec.TICKET_HEAD_NBYTES :] != right[ticket_codec.TICKET_HEAD_NBYTES :]:
        said = _other_keys(left, right)
        if said:
            return [said]
    lines = ["the keys are the same, but the content differs"]
    if ticket_codec.base_seed_of(left) != ticket_codec.base_seed_of(right):
        lines.append("the seeds differ: check torch.manual_seed and the loader's generator")
    return lines + _compare_content(a, one, b, other, trusted)


def _check_owners(records: Iterable[Record], trusted: Collection[str]) -> None:
    names, owned = set(trusted), [(record, trust.owners(record.folder)) for record in records]
    for record, owners in owned:
        trust.check(record.folder, names & owners)
    if unknown := sorted(names.difference(*(owners for _, owners in owned))):
        raise InputError(f"--trust names {unknown[0]}, who does not own anything in these records")


def _other_keys(left: bytes, right: bytes) -> str:
    """Names the first key that differs; empty if all keys are equal, even if their pickles differ."""
    try:
        mine, theirs = (list(ticket_codec.unpack_ticket(payload).keys) for payload in (left, right))
    except Exception:  # the user's classes may be missing in this process
        return "the keys differ"
    if len(mine) != len(theirs):
        return f"the keys differ: {len(mine)} in one and {len(theirs)} in the other"
    for at, (x, y) in enumerate(zip(mine, theirs, strict=True)):
        if not _same(x, y):
            return f"the keys differ: key number {at} is {_cut(x)} in one and {_cut(y)} in the other"
    return ""


def _same(x: Any, y: Any) -> bool:
    try:
        return bool(x == y)
    except Exception:  # user code may raise anything
        return False


def _compare_content(
    a: Record, one: Recorded, b: Record, other: Recorded, trusted: Collection[str]
) -> list[str]:
    """Rebuilds both batches. Returns lines that name the leaf that differs, and any rebuilt batch that differs from the
    consumed batch."""
    from dataloaderjob.batches.differences import first_difference as difference_of

    lines, bodies = [], []
    try:
        _check_owners((a, b), trusted)
    except InputError as exc:
        return [f"the leaf is unknown: {exc}"]
    for record, batch in ((a, one), (b, other)):
        try:
            (result,) = remake(record, [batch], bodies=True)
        except InputError as exc:
            return [f"the leaf is unknown: {exc}"]
        if result.error:
            lines.append(f"rebuilt from {record.folder}, it raises {result.error}")
        elif result.digest != batch.row.digest:
            lines.append(f"rebuilt from {record.folder}, it differs from the batch that was consumed")
        if result.body is not None:
            bodies.append(result.body)
    if len(bodies) == 2:
        try:
            said = difference_of(*bodies)
        except RemoteProtocolError as exc:
            said = str(exc)
        lines.append(
            said or "both rebuilt batches are equal: the batch depends on more than code, data, keys and seed"
        )
    return lines


def _cut(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


# A record and its dataset


def check(
    folder: Path, *, epoch: int | None = None, sample: int | None = None, trusted: Collection[str] = ()
) -> tuple[bool, list[str]]:
    """Rebuilds batches of a run. Returns a tuple: True if the rebuilt batches equal the consumed ones, and lines for
    the user. Raises InputError."""
    record = Record.open(folder)
    wanted = [
        (rank, batch)
        for rank in sorted(record.ranks)
        for batches in record.batches(rank).values()
        for batch in _of_epoch(batches, epoch)
    ]
    known = [(rank, b) for rank, b in wanted if b.row.bundle != NO_BUNDLE and b.row.nbytes]
    if sample is not None and sample < len(known):
        known = [known[i * len(known) // sample] for i in range(sample)]
    if not wanted:
        raise InputError(f"{folder} has no batch{_of_none(record, epoch)} to rebuild")
    if not known:
        raise InputError(
            f"{folder} has no batch to rebuild: none of {len(wanted)} was recorded with its code and data"
        )
    _check_owners((record,), trusted)
    lines, first = [], None
    for batches in _by_bundle(known):
        said = _first_wrong(record, batches, before=None if first is None else first[0])
        first = said or first
    if first is not None:
        return False, [first[1]]
    if len(known) < len(wanted):
        lines.append(f"{len(wanted) - len(known)} batches were not rebuilt")
    return True, [
        f"equal: {len(known)} batches of {_ranks(record)}, rebuilt with the recorded code",
        *lines,
    ]


def _by_bundle(batches: list[tuple[str, Recorded]]) -> list[list[tuple[str, Recorded]]]:
    """Groups batches that one process can rebuild, and sorts each group by epoch and batch."""
    groups: dict[Any, list[tuple[str, Recorded]]] = {}
    for rank, batch in batches:
        found = batch.piece.bundle(batch.row)
        assert found is not None  # noqa: S101  filtered by the caller
        bundle, in_process = found
        groups.setdefault((bundle.code, bundle.workers, bundle.allow_pickle, in_process), []).append(
            (rank, batch)
        )
    return [
        sorted(group, key=lambda one: (one[1].row.place, one[0], one[1].row.loader))
        for group in groups.values()
    ]


def _first_wrong(
    record: Record, batches: list[tuple[str, Recorded]], *, before: tuple[int, int] | None
) -> tuple[tuple[int, int], str] | None:
    """Finds the first batch that differs from the consumed batch. Returns a tuple: the batch's place (epoch and batch)
    and a message; None if no batch differs. `before`: only batches before this place are rebuilt."""
    wanted = [(rank, b) for rank, b in batches if before is None or b.row.place < before]
    if not wanted:
        return None
    results = remake(record, [batch for _, batch in wanted])
    for (rank, batch), result in zip(wanted, results, strict=True):
        row = batch.row
        if result.digest == row.digest:
            continue
        where = f"rank {rank}, loader {row.loader}, epoch {row.epoch}, batch {row.ticket}"
        if row.kind == RowKind.FAILED:
            why = "next() raised an error, but the recorded code and data do not raise it here"
        elif result.error:
            why = f"a batch was consumed, but the recorded code and data raise {result.error}"
        else:
            why = (
                "the recorded code and data produce a different batch: the one consumed has digest "
                f"{row.digest:016x}, the rebuilt one {result.digest:016x}"
            )
        return row.place, f"{where}: {why}"
    return None


def _of_none(record: Record, epoch: int | None) -> str:
    """Describes an epoch without batches, and names the epochs that have batches."""
    if epoch is None:
        return ""
    there = {
        batch.row.epoch
        for rank in record.ranks
        for batches in record.batches(rank).values()
        for batch in batches
    }
    found = ", ".join(map(str, sorted(there))) or "none"
    return f" of epoch {epoch} (epochs are counted from 0; recorded: {found})"


def _ranks(record: Record) -> str:
    return f"{len(record.ranks)} rank{'s' * (len(record.ranks) != 1)}"
