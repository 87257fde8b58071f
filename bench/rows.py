"""Turns the figures of the rounds into the rows of the table. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.plan import BEST_PEER, Claim
from bench.stats import Interval, bootstrap, median, paired_ratios, verdict

Figures = Mapping[tuple[str, str, str], Mapping[int, float]]
"""Maps (party, case, figure) to {round: value}."""
OURS = "ours"
MISSING = "missing"


def collect(cells: list[dict[str, Any]]) -> dict[tuple[str, str, str], dict[int, float]]:
    """Sorts the cells' reports {"party", "round", "figures"} by figure. A repeated round replaces the earlier one."""
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for cell in cells:
        for case, figures in cell.get("figures", {}).items():
            for figure, value in figures.items():
                found.setdefault((cell["party"], case, figure), {})[cell["round"]] = float(value)
    return found


def row(claim: Claim, figures: Figures) -> dict[str, Any]:
    """Returns one row. Figures of a side that was not measured are null, and `met` is `missing`."""
    ours = figures.get((OURS, claim.case, claim.figure), {})
    peer_name, peer = _peer(claim, figures)
    made = {
        "benchmark": claim.benchmark,
        "case": f"{claim.case}: {claim.says}" if claim.says else claim.case,
        "unit": claim.unit,
        "ours": _middle(ours),
        "peer": _middle(peer),
        "peer_name": peer_name,
        "ratio": None, "ratio_low": None, "ratio_high": None,
        "floor": claim.floor, "target": claim.target,
        "met": MISSING,
        "rounds": len(ours.keys() & peer.keys()) if claim.peer else len(ours),
    }  # fmt: skip
    if claim.peer is None:
        return made if not ours else {**made, **_own(claim, bootstrap(list(ours.values())))}
    ratios = paired_ratios(ours, peer, lower_is_better=claim.lower_is_better)
    if not ratios:
        return made
    interval = bootstrap(ratios)
    met = verdict(interval.low, floor=claim.floor, target=claim.target, lower_is_better=False)
    return {
        **made, "ratio": interval.median, "ratio_low": interval.low, "ratio_high": interval.high, "met": met,
    }  # fmt: skip


def _own(claim: Claim, interval: Interval) -> dict[str, Any]:
    """Returns the fields of a claim about our own figure. Its interval is in `ours_low` and `ours_high`."""
    worst = interval.high if claim.lower_is_better else interval.low
    met = verdict(worst, floor=claim.floor, target=claim.target, lower_is_better=claim.lower_is_better)
    return {"ours": interval.median, "ours_low": interval.low, "ours_high": interval.high, "met": met}


def _peer(claim: Claim, figures: Figures) -> tuple[str | None, Mapping[int, float]]:
    if claim.peer != BEST_PEER:
        return claim.peer, figures.get((claim.peer or "", claim.case, claim.figure), {})
    all_peers = {
        party: values
        for (party, case, figure), values in figures.items()
        if party != OURS and case == claim.case and figure == claim.figure
    }
    if not all_peers:
        return BEST_PEER, {}
    choose = min if claim.lower_is_better else max
    best = choose(all_peers, key=lambda party: median(list(all_peers[party].values())))
    return f"{BEST_PEER} ({best})", all_peers[best]


def _middle(values: Mapping[int, float]) -> float | None:
    return median(list(values.values())) if values else None
