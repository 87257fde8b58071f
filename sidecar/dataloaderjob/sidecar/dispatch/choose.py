"""Which feeder makes a batch. Another policy is another `choose`."""

from __future__ import annotations

from collections.abc import Iterable

from dataloaderjob.core.tickets import DEPTH
from dataloaderjob.sidecar.dispatch.streams import FeederState, Stream

DEPTH_QUICK = 6
QUICK_S = 0.005


def depth(stream: Stream) -> int:
    """Tickets out at one feeder: two hide the round trip; batches made in a few ms need more.

    Not more than needed: what lies at a slow feeder holds up all that comes after it.
    """
    typical = stream.pace.typical
    return DEPTH_QUICK if typical is not None and typical < QUICK_S else DEPTH


def eligible(feeder: FeederState, stream: Stream) -> bool:
    fit = stream.bundle not in feeder.refused and stream.bundle not in feeder.not_loaded
    return feeder.up and not feeder.draining and feeder.suspect_since is None and fit


def choose(
    feeders: Iterable[FeederState], stream: Stream, *, without: Iterable[FeederState] = ()
) -> FeederState | None:
    """The least busy feeder that may take one more ticket of `stream`, None if all are full.

    Busy is what we have out there first, then what the feeder last said that all its sidecars have. A
    feeder is filled up when it is down to half, so that several tickets go in one system call.
    """
    best: FeederState | None = None
    limit = depth(stream)
    skip = list(without)
    for feeder in feeders:
        out = len(feeder.attempts)
        if out >= limit:
            feeder.filling = False
        elif out <= limit // 2:
            feeder.filling = True
        if not feeder.filling or not eligible(feeder, stream) or feeder in skip:
            continue
        if best is None or (len(feeder.attempts), feeder.load) < (len(best.attempts), best.load):
            best = feeder
    return best


def idle(
    feeders: Iterable[FeederState], stream: Stream, *, without: Iterable[FeederState]
) -> FeederState | None:
    """A feeder with nothing to do for us, for a hedge."""
    skip = list(without)
    for feeder in feeders:
        if not feeder.attempts and eligible(feeder, stream) and feeder not in skip:
            return feeder
    return None
