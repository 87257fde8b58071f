"""Which feeder's versions fit which trainer's code: compared once for each pair. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from dataloaderjob.sidecar.dispatch.facts import caution, mismatch
from dataloaderjob.sidecar.dispatch.streams import Link, Stream


class Versions:
    """What was found so far."""

    def __init__(self) -> None:
        self._any_refused = False
        self._cautions: set[str] = set()

    def compare(self, stream: Stream, link: Link) -> str | None:
        """Marks what does not fit in `link.refused`. Returns what people should hear, once for each difference."""
        if reason := mismatch(stream.facts, link.facts):
            link.refused[stream.bundle] = f"{link.endpoint.name}: {reason}"
            self._any_refused = True
        elif (reason := caution(stream.facts, link.facts)) and reason not in self._cautions:
            self._cautions.add(reason)
            return f"{link.endpoint.name}: {reason}"
        return None

    def refusal(self, stream: Stream, links: Iterable[Link]) -> str | None:
        """Why no feeder can serve this stream; None while one can, or none is connected."""
        if not self._any_refused:
            return None
        up = [link for link in links if link.up and not link.draining]
        if not up or not all(stream.bundle in link.refused for link in up):
            return None
        reasons = "; ".join(sorted({link.refused[stream.bundle] for link in up})[:3])
        return f"no feeder can run this trainer's code: {reasons}"
