"""Which feeder makes a batch. Another policy is another `choose`."""

from __future__ import annotations

from collections.abc import Iterable

from dataloaderjob.core.tickets import DEPTH
from dataloaderjob.sidecar.dispatch.streams import Link, Stream

DEPTH_QUICK = 6
QUICK_S = 0.005


def depth(stream: Stream) -> int:
    """Tickets out at one feeder: two hide the round trip; batches made in a few ms need more.

    Not more than needed: what lies at a slow feeder holds up all that comes after it.
    """
    typical = stream.pace.typical
    return DEPTH_QUICK if typical is not None and typical < QUICK_S else DEPTH


def eligible(link: Link, stream: Stream) -> bool:
    fit = stream.bundle not in link.refused and stream.bundle not in link.not_loaded
    return link.up and not link.draining and link.suspect_since is None and fit


def choose(links: Iterable[Link], stream: Stream, *, without: Iterable[Link] = ()) -> Link | None:
    """The least busy feeder that may take one more ticket of `stream`, None if all are full.

    Busy is what we have out there first, then what the feeder last said that all its sidecars have. A
    feeder is filled up when it is down to half, so that several tickets go in one system call.
    """
    best: Link | None = None
    limit = depth(stream)
    skip = list(without)
    for link in links:
        out = len(link.asks)
        if out >= limit:
            link.filling = False
        elif out <= limit // 2:
            link.filling = True
        if not link.filling or not eligible(link, stream) or link in skip:
            continue
        if best is None or (len(link.asks), link.load) < (len(best.asks), best.load):
            best = link
    return best


def idle(links: Iterable[Link], stream: Stream, *, without: Iterable[Link]) -> Link | None:
    """A feeder with nothing to do for us, for a hedge."""
    skip = list(without)
    for link in links:
        if not link.asks and eligible(link, stream) and link not in skip:
            return link
    return None
