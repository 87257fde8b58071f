"""The cells that run and the claims about them. Pure: tables, no measuring.

`Cell` is one party on one case in one process. `Claim` is one row of the table. Floors and targets exist only here. A
claim with a peer is about the ratio; a claim without a peer is about our own figure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.cell import OURS
from bench.iterables import STREAMS, TAIL
from bench.links import Case as Link
from bench.pictures import FEEDERS as FEEDERS_DECODE
from bench.pictures import KINDS as PICTURES
from bench.raydata import named as ray_data_case
from bench.tables import PANDAS, PYARROW
from bench.tables import Case as TableCase
from bench.work import LARGE_NBYTES, MIDDLE_NBYTES, SMALL_NBYTES, size_name

ROUNDS = 5
ROUNDS_WITH_FLOOR = 7
FULL_ROUNDS = 7
TITLES = {
    "B1": "Hand-off: from a ready batch to torch tensors",
    "B2": "Transport: from another process into a warm pool",
    "B3": "End to end, with a sleeping trainer",
    "B7": "Start and turnaround",
    "B8": "Heavy tail: one sample in a hundred takes fifty times as long",
    "B10": "Samplers: drawing an order of indices",
    "B14": "The dispatcher alone, by number of feeders",
    "B15": "Links slower than memory, and paced senders",
    "B16": "Eight ranks on one node",
    "B17": "Streams: our slots and torch's workers",
    "B18": "Ray Data: feeding a trainer through the pool",
    "B19": "Images decoded by the trainer's stage, by feeders or by torch's workers",
    "B20": "Tables: Parquet files for one trainer",
}
FILES = {
    "B1": "b1-handoff",
    "B2": "b2-transport",
    "B3": "b3-end-to-end",
    "B7": "b7-start",
    "B8": "b8-heavy-tail",
    "B10": "b10-samplers",
    "B14": "b14-dispatcher",
    "B15": "b15-links",
    "B16": "b16-ranks",
    "B17": "b17-streams",
    "B18": "b18-ray-data",
    "B19": "b19-pictures",
    "B20": "b20-tables",
}

DATALOADER_FD = "DataLoader, file_descriptor"
DATALOADER_FS = "DataLoader, file_system"
SPDL = "SPDL segment pool"
RAY_GET = "ray.get"
CONTEXT = "torch's iterator on our feeders"
FLIGHT = "Arrow Flight"
RAY_COPY_FAR = "ray.get with copy, two raylets"
TRANSPORTS = (FLIGHT, "grpcio", "pyzmq", "asyncio streams", RAY_COPY_FAR, "ray.get with copy, same store")
LOADERS = ("DataLoader", "Ray Data", "Ray actors")
STARTERS = ("DataLoader", "Ray Data")
KEEPING = STARTERS[:1]
"""Parties that can keep their workers from one epoch to the next."""
SAMPLERS = ("DistributedSampler", "RandomSampler")
LISTED, UNLISTED = 10_000_000, 1_000_000_000
"""Numbers of samples: one whose list fits into memory here, and one whose list does not (40 GB)."""
FEEDERS = (8, 64, 256)
LINK_ROUNDS = 3
PACED_MB = 20.0
RANKS = 8
UNDER_TLS, THROUGH_STUNNEL = "ours under TLS", "ours through stunnel"
LINK_PEERS = (UNDER_TLS, THROUGH_STUNNEL, FLIGHT, "pyzmq", RAY_COPY_FAR)
RAY_DATA: tuple[dict[str, Any], ...] = tuple(
    {"trainers": trainers, "elsewhere": elsewhere, "small_blocks": small_blocks}
    for elsewhere, small_blocks in ((False, False), (False, True), (True, False))
    for trainers in (1, 2)
)
ITER_TORCH = "iter_torch_batches"
TABLE_PEERS = {
    PANDAS: ("DataLoader", "Petastorm, batches", "Petastorm, rows"),
    PYARROW: ("DataLoader", "Petastorm, batches"),
}
BEST_PEER = "best peer"
"""A peer name of claims: the peer with the best median."""


@dataclass(frozen=True, slots=True)
class Cell:
    benchmark: str
    party: str
    case: dict[str, Any] = field(hash=False)
    rounds: int
    processes: int = 1
    """Number of copies that run at the same time; figures are their means."""

    @property
    def label(self) -> str:
        case = ", ".join(f"{k} {v}" for k, v in self.case.items() if k != "smoke")
        return f"{self.benchmark} {self.party} ({case}{copies(self.processes)})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    benchmark: str
    case: str
    """Name of the case, as reported by the cells."""
    figure: str
    unit: str
    says: str = ""
    """The meaning of the figure, shown after the case's name in the table."""
    lower_is_better: bool = True
    peer: str | None = None
    floor: float | None = None
    target: float | None = None


def cells(benchmark: str, *, full: bool, smoke: bool) -> list[Cell]:
    """Returns the cells of one round, ours first."""
    makers = {
        "B1": _handoff,
        "B2": _transport,
        "B3": _end_to_end,
        "B7": _start,
        "B8": _heavy_tail,
        "B10": _samplers,
        "B14": _dispatcher,
        "B15": _links,
        "B16": _ranks,
        "B17": _streams,
        "B18": _ray_data,
        "B19": _pictures,
        "B20": _tables,
    }
    made = list(makers[benchmark](full))
    if full:
        made = [Cell(c.benchmark, c.party, c.case, FULL_ROUNDS, c.processes) for c in made]
    if smoke:
        made = [Cell(c.benchmark, c.party, {**c.case, **_short(c.case)}, 1, c.processes) for c in made]
    return made


def _short(case: dict[str, Any]) -> dict[str, Any]:
    return {"smoke": True, **{k: 0.5 for k in case if k.endswith("_s") or k == "seconds"}}


def _sizes(full: bool) -> tuple[int, ...]:
    return (SMALL_NBYTES, MIDDLE_NBYTES, LARGE_NBYTES) if full else (SMALL_NBYTES, LARGE_NBYTES)


def _tensors(full: bool) -> tuple[int, ...]:
    return (1, 8, 32) if full else (1, 8)


def _handoff(full: bool) -> Iterator[Cell]:
    floored = (OURS, DATALOADER_FD)
    for processes in (1, 2, 8) if full else (1,):
        for nbytes in _sizes(full):
            for tensors in _tensors(full):
                others = (DATALOADER_FS, SPDL, RAY_GET, *((CONTEXT,) if nbytes == SMALL_NBYTES else ()))
                for party in (*floored, *others):
                    rounds = ROUNDS_WITH_FLOOR if party in floored else ROUNDS
                    yield Cell("B1", party, {"nbytes": nbytes, "tensors": tensors}, rounds, processes)
    for part in ("B1 ticket", "B1 state"):
        yield Cell(part, OURS, {"nbytes": SMALL_NBYTES, "tensors": 1}, ROUNDS)


def _transport(full: bool) -> Iterator[Cell]:
    for nbytes in _sizes(full):
        for party in (OURS, *TRANSPORTS):
            if party == RAY_COPY_FAR and nbytes != LARGE_NBYTES and not full:
                continue  # 20 s a cell, for small objects that Ray sends without its store anyway
            rounds = ROUNDS_WITH_FLOOR if party == OURS else ROUNDS
            yield Cell("B2", party, {"nbytes": nbytes, "seconds": 4.0 if full else 1.5}, rounds)


def _end_to_end(full: bool) -> Iterator[Cell]:
    times = {"flat_out_s": 6.0, "paced_s": 8.0} if full else {"flat_out_s": 2.5, "paced_s": 4.0}
    for producers in (1, 2):
        for party in (OURS, *LOADERS):
            if producers == 1 and party not in (OURS, "DataLoader") and not full:
                continue  # the comparison on equal cores uses both cores
            rounds = ROUNDS_WITH_FLOOR if party == OURS else ROUNDS
            yield Cell("B3", party, {"producers": producers, **times}, rounds)


def _start(full: bool) -> Iterator[Cell]:
    for party in (OURS, *STARTERS):
        yield Cell("B7", party, {}, ROUNDS)
        if party in (OURS, *KEEPING):
            yield Cell("B7", party, {"persistent": True}, ROUNDS)
            yield Cell("B7", party, {"follows": True}, ROUNDS)


def _samplers(full: bool) -> Iterator[Cell]:
    yield Cell("B10", OURS, {"samples": UNLISTED}, ROUNDS_WITH_FLOOR)
    for party in (OURS, *SAMPLERS):
        yield Cell("B10", party, {"samples": LISTED}, ROUNDS)


def _dispatcher(full: bool) -> Iterator[Cell]:
    for feeders in FEEDERS:
        yield Cell("B14", OURS, {"feeders": feeders, "tickets": 20_000}, ROUNDS_WITH_FLOOR)


def _link_cases(full: bool) -> Iterator[dict[str, Any]]:
    """Yields the link's rate (0: loopback), senders and bytes of a batch; or MB a second of each paced sender."""
    if full:
        shared = [
            (gbit, senders, nbytes)
            for gbit in (1.0, 2.5, 10.0)
            for senders in (1, 4, 16)
            for nbytes in (SMALL_NBYTES, MIDDLE_NBYTES, LARGE_NBYTES)
        ]
    else:
        shared = [
            (1.0, 1, SMALL_NBYTES), (1.0, 1, LARGE_NBYTES), (1.0, 16, MIDDLE_NBYTES), (2.5, 1, LARGE_NBYTES),
            (10.0, 1, LARGE_NBYTES),
        ]  # fmt: skip
    for gbit, senders, nbytes in shared:
        yield {"gbit": gbit, "senders": senders, "nbytes": nbytes, "seconds": _link_seconds(senders)}
    for senders in (16, 64) if full else (16,):
        yield {
            "paced_mb": PACED_MB,
            "senders": senders,
            "nbytes": MIDDLE_NBYTES,
            "seconds": _link_seconds(senders),
        }


def _link_seconds(senders: int) -> float:
    """Returns more for many senders: up to a window of their batches arrives before the one that is next in order."""
    return 4.0 if senders == 1 else 10.0


def _links(full: bool) -> Iterator[Cell]:
    for case in _link_cases(full):
        for party in (OURS, *(LINK_PEERS if "gbit" in case else ())):
            yield Cell("B15", party, case, LINK_ROUNDS)


def _ranks(full: bool) -> Iterator[Cell]:
    for party in (OURS, "DataLoader"):
        yield Cell("B16", party, {"ranks": RANKS, "batches": 60 if full else 30, "step_s": 0.25}, LINK_ROUNDS)


def _of_kinds(benchmark: str, kinds: Iterable[str], full: bool) -> Iterator[Cell]:
    times = {"flat_out_s": 6.0, "paced_s": 8.0} if full else {"flat_out_s": 2.0, "paced_s": 3.0}
    for kind in kinds:
        for party in (OURS, "DataLoader"):
            case = {"kind": kind, "producers": 2, **times, **({"batches": 1600} if full else {})}
            yield Cell(benchmark, party, case, ROUNDS)


def _streams(full: bool) -> Iterator[Cell]:
    yield from _of_kinds("B17", STREAMS, full)


def _ray_data(full: bool) -> Iterator[Cell]:
    # Flat out for longer than elsewhere: the batches read while the actors started last a second or two.
    times = {"flat_out_s": 6.0, "paced_s": 8.0 if full else 4.0}
    for party in (OURS, ITER_TORCH):
        for case in RAY_DATA:
            yield Cell("B18", party, {"producers": 2, **case, **times}, ROUNDS)


def _pictures(full: bool) -> Iterator[Cell]:
    times = {"flat_out_s": 6.0, "paced_s": 8.0} if full else {"flat_out_s": 3.0, "paced_s": 4.0}
    for party in (OURS, "DataLoader"):
        for kind in PICTURES:
            yield Cell("B19", party, {"kind": kind, "producers": 2, **times}, ROUNDS)


def _tables(full: bool) -> Iterator[Cell]:
    for reader, peers in TABLE_PEERS.items():
        for party in (OURS, *peers):
            yield Cell("B20", party, {"reader": reader, "seconds": 10.0 if full else 4.0}, ROUNDS)


def _heavy_tail(full: bool) -> Iterator[Cell]:
    yield from _of_kinds("B8", (TAIL,), full)


def claims(benchmark: str, *, full: bool) -> list[Claim]:
    """Returns the rows of one benchmark, in the table's order."""
    makers = {
        "B1": _handoff_claims,
        "B2": _transport_claims,
        "B3": _end_to_end_claims,
        "B7": _start_claims,
        "B8": _heavy_tail_claims,
        "B10": _sampler_claims,
        "B14": _dispatcher_claims,
        "B15": _link_claims,
        "B16": _rank_claims,
        "B17": _stream_claims,
        "B18": _ray_data_claims,
        "B19": _picture_claims,
        "B20": _table_claims,
    }
    return list(makers[benchmark](full))


def _handoff_claims(full: bool) -> Iterator[Claim]:
    for nbytes in _sizes(full):
        for tensors in _tensors(full):
            case = f"{size_name(nbytes)}, {tensors} tensor{'s' if tensors > 1 else ''}"
            promised = {1: (10.0, 25.0, 20.0), 8: (20.0, 50.0, 40.0)}.get(tensors, (None, None, None))
            floor, target, own_us = promised
            for way in ("ready", "as they come"):
                cpu: dict[str, Any] = {
                    "benchmark": "B1",
                    "case": f"{case}, {way}",
                    "figure": "cpu_us",
                    "unit": "µs CPU/batch",
                }
                yield Claim(**cpu, peer=DATALOADER_FD, floor=floor, target=target)
                yield Claim(**cpu, peer=DATALOADER_FS, target=target)
                yield Claim(**cpu, peer=SPDL, target=8.0)
                yield Claim(**cpu, peer=RAY_GET)
                if nbytes == SMALL_NBYTES:
                    yield Claim(**cpu, peer=CONTEXT)
                yield Claim(**cpu, target=own_us)
            late: dict[str, Any] = {"benchmark": "B1", "case": f"{case}, ready"}
            yield Claim(**late, figure="p99_us", unit="µs", says="p99 of next()", target=100.0)
            for peer in (DATALOADER_FD, SPDL):
                yield Claim(
                    **late,
                    figure="touched_us",
                    unit="µs CPU/batch",
                    says="with one read of each page",
                    peer=peer,
                )
    if full:
        yield from _shared_claims()
    yield Claim(
        benchmark="B1", case="a ticket of 256 indices", figure="cpu_us", unit="µs CPU", says="making and sending it",
        target=15.0,
    )  # fmt: skip
    yield Claim(
        benchmark="B1", case="a loader's state", figure="cpu_us", unit="µs CPU", says="state_dict() in an epoch",
        target=5.0,
    )  # fmt: skip


def _shared_claims() -> Iterator[Claim]:
    """Yields claims about several trainer processes at the same time, each with its own loader."""
    for processes in (2, 8):
        for nbytes in _sizes(True):
            for tensors in _tensors(True):
                case = f"{size_name(nbytes)}, {tensors} tensor{'s' if tensors > 1 else ''}"
                for peer in (DATALOADER_FD, SPDL):
                    yield Claim(
                        benchmark="B1", case=f"{case}, as they come{copies(processes)}", figure="cpu_us",
                        unit="µs CPU/batch", peer=peer,
                    )  # fmt: skip


def copies(processes: int) -> str:
    """Returns the suffix that several copies add to a case's name."""
    return f", {processes} processes" if processes > 1 else ""


def _transport_claims(full: bool) -> Iterator[Claim]:
    for nbytes in _sizes(full):
        large = nbytes == LARGE_NBYTES
        case: dict[str, Any] = {"benchmark": "B2", "case": size_name(nbytes)}
        cost: dict[str, Any] = {
            **case,
            "figure": "rx_cpu_s_per_gb",
            "unit": "CPU-s/GB",
            "says": "receiver's CPU",
        }
        yield Claim(**cost, floor=0.3 if large else None, target=0.2 if large else None)
        for peer in TRANSPORTS:
            yield Claim(**cost, peer=peer, target=7.0 if large and peer == FLIGHT else None)
        if not large:
            yield Claim(
                **case, figure="batches_per_core_s", unit="batch/s", says="rate per core of the receiver",
                lower_is_better=False, target=12_500.0 if nbytes == SMALL_NBYTES else None,
            )  # fmt: skip
        for peer in TRANSPORTS:
            yield Claim(
                **case, figure="gb_per_s", unit="GB/s", says="throughput", lower_is_better=False, peer=peer
            )


def _end_to_end_claims(full: bool) -> Iterator[Claim]:
    for producers in (1, 2):
        case: dict[str, Any] = {
            "benchmark": "B3",
            "case": f"{producers} producer{'s' if producers > 1 else ''}",
        }
        peers = LOADERS if producers == 2 or full else LOADERS[:1]
        busy: dict[str, Any] = {
            **case,
            "figure": "utilisation",
            "unit": "share",
            "says": "utilisation at 0.9 of the rate",
        }
        yield Claim(**busy, lower_is_better=False, floor=0.97, target=0.99)
        for peer in peers:
            yield Claim(**busy, lower_is_better=False, peer=peer)
        for peer in peers:
            yield Claim(
                **case, figure="node_cpu_s_per_gb", unit="CPU-s/GB", says="CPU on the trainer's node",
                peer=peer, target=5.0 if peer == "DataLoader" else None,
            )  # fmt: skip
        rate: dict[str, Any] = {
            **case,
            "figure": "batches_per_s",
            "unit": "batch/s",
            "says": "flat out",
            "lower_is_better": False,
        }
        for peer in peers:
            yield Claim(**rate, peer=peer)
        yield Claim(**rate, peer=BEST_PEER, target=0.98)


def _start_claims(full: bool) -> Iterator[Claim]:
    rows = (
        ("cold_s", "s", "process start to first batch", 0.5),
        ("warm_s", "s", "second loader to its first batch", None),
        ("gap_ms", "ms", "gap between epochs", 1.0),
    )
    for figure, unit, says, target in rows:
        for case, peers in (("2 producers", STARTERS), ("2 producers, persistent", KEEPING)):
            for peer in peers:
                yield Claim(
                    benchmark="B7", case=case, figure=figure, unit=unit, says=says, peer=peer,
                    target=target if peer == STARTERS[0] else None,
                )  # fmt: skip
    first: dict[str, Any] = {"benchmark": "B7", "unit": "s", "peer": STARTERS[0]}
    yield Claim(
        **first, case="2 producers, next script", figure="cold_s",
        says="process start to first batch, DATALOADERJOB_KEEP", target=1 / 1.15,
    )  # fmt: skip
    yield Claim(
        **first,
        case="2 producers",
        figure="later_s",
        says="a loader 5 s after the last one, to its first batch",
    )


def _sampler_claims(full: bool) -> Iterator[Claim]:
    rows: tuple[tuple[str, str, str, float | None, float | None], ...] = (
        ("ns_per_index", "ns CPU", "drawing one index, in lists of 256", 150.0, 120.0),
        ("peak_mb", "MB", "growth of peak memory", 10.0, 10.0),
        ("resume_ms", "ms", "resuming halfway, to the next index", 10.0, 10.0),
    )
    for figure, unit, says, floor, target in rows:
        yield Claim(
            benchmark="B10", case=f"{UNLISTED:,} samples", figure=figure, unit=unit, says=says, floor=floor,
            target=target,
        )  # fmt: skip
    for figure, unit, says, _, _ in rows:
        for peer in SAMPLERS:
            yield Claim(
                benchmark="B10", case=f"{LISTED:,} samples", figure=figure, unit=unit, says=says, peer=peer
            )


def _dispatcher_claims(full: bool) -> Iterator[Claim]:
    for feeders in FEEDERS:
        yield Claim(
            benchmark="B14", case=f"{feeders} feeders", figure="cpu_us", unit="µs CPU", says="one ticket and its batch",
            floor=25.0,
        )  # fmt: skip


def _link_claims(full: bool) -> Iterator[Claim]:
    for settings in _link_cases(full):
        gbit = settings.get("gbit", 0.0)
        case: dict[str, Any] = {"benchmark": "B15", "case": Link(**settings).name}
        share: dict[str, Any] = {
            **case,
            "figure": "share",
            "unit": "share",
            "says": "share of the link's capacity",
            "lower_is_better": False,
        }
        yield Claim(**share, floor=None if gbit > 2.5 else 0.95, target=0.90 if gbit > 2.5 else 0.95)
        for peer in LINK_PEERS if gbit else ():
            yield Claim(**share, peer=peer)
            yield Claim(**case, figure="rx_cpu_s_per_gb", unit="CPU-s/GB", says="receiver's CPU", peer=peer)


def _rank_claims(full: bool) -> Iterator[Claim]:
    case = {"benchmark": "B16", "case": f"{RANKS} ranks"}
    for figure, unit, says in (
        ("node_cpu_s_per_gb", "CPU-s/GB", "CPU of all processes on the node"),
        ("node_mb", "MB", "memory of all processes on the node"),
        ("waited_share", "share", "share of the time spent waiting for a batch"),
    ):
        yield Claim(
            **case,
            figure=figure,
            unit=unit,
            says=says,
            peer="DataLoader" if figure != "waited_share" else None,
        )


def _fed_claims(benchmark: str, cases: Iterable[str], peer: str, throughput: float) -> Iterator[Claim]:
    """Yields three claims for each case. `throughput` is the target for the ratio of the flat-out rates."""
    for name in cases:
        case: dict[str, Any] = {"benchmark": benchmark, "case": name, "peer": peer}
        yield Claim(
            **case,
            figure="batches_per_s",
            unit="batch/s",
            says="flat out",
            lower_is_better=False,
            target=throughput,
        )
        yield Claim(
            **case, figure="node_cpu_s_per_gb", unit="CPU-s/GB", says="CPU on the trainer's node", target=5.0
        )
        yield Claim(
            **case,
            figure="utilisation",
            unit="share",
            says="utilisation at 0.9 of the rate",
            lower_is_better=False,
        )


def _stream_claims(full: bool) -> Iterator[Claim]:
    yield from _fed_claims("B17", _of_two(STREAMS), "DataLoader", 0.95)


def _ray_data_claims(full: bool) -> Iterator[Claim]:
    yield from _fed_claims("B18", [ray_data_case(**case) for case in RAY_DATA], ITER_TORCH, 1.0)
    for case in RAY_DATA:
        if case["trainers"] > 1:
            yield Claim(
                benchmark="B18", case=ray_data_case(**case), peer=ITER_TORCH, figure="all_cpu_s_per_gb",
                unit="CPU-s/GB", says="CPU on the trainer's node, including the coordinating actor", target=5.0,
            )  # fmt: skip


def _picture_claims(full: bool) -> Iterator[Claim]:
    for kind in PICTURES:
        yield Claim(
            benchmark="B19",
            case=kind,
            figure="link_kb_per_picture",
            unit="kB/picture",
            says="sent over the link",
        )
        case: dict[str, Any] = {"benchmark": "B19", "case": kind, "peer": "DataLoader"}
        yield Claim(
            **case, figure="batches_per_s", unit="batch/s", says="flat out", lower_is_better=False,
            target=0.95 if kind == FEEDERS_DECODE else None,
        )  # fmt: skip
        yield Claim(
            **case, figure="node_cpu_s_per_gb", unit="CPU-s/GB", says="CPU on the trainer's node",
            target=5.0 if kind == FEEDERS_DECODE else None,
        )  # fmt: skip


def _heavy_tail_claims(full: bool) -> Iterator[Claim]:
    yield from _fed_claims("B8", _of_two((TAIL,)), "DataLoader", 0.95)


def _of_two(kinds: Iterable[str]) -> Iterator[str]:
    return (f"{kind}, 2 producers" for kind in kinds)


def _table_claims(full: bool) -> Iterator[Claim]:
    for reader, peers in TABLE_PEERS.items():
        case: dict[str, Any] = {"benchmark": "B20", "case": TableCase(reader).name}
        for peer in peers:
            yield Claim(
                **case, figure="rows_per_s", unit="row/s", says="flat out", lower_is_better=False, peer=peer
            )
        for figure, says in (
            ("node_cpu_s_per_gb", "CPU on the trainer's node"),
            ("all_cpu_s_per_gb", "CPU of all processes"),
        ):
            for peer in peers:
                yield Claim(**case, figure=figure, unit="CPU-s/GB", says=says, peer=peer)
