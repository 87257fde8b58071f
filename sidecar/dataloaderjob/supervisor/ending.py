"""The termination of a job's feeders after a stop request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from dataloaderjob.core.errors import ServiceError
from dataloaderjob.core.supervision import name_of
from dataloaderjob.providers.provider import Provider

log = logging.getLogger(__name__)

END_TIMEOUT_S = 10.0
KILL_AGAIN_S = 2.0
LOOK_S = 0.05


def end_feeders(
    provider: Provider,
    feeders: Iterable[int],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Kills these feeders and waits until the provider no longer finds them. After END_TIMEOUT_S, logs a warning and
    returns.

    The wait is needed because Ray sends a kill in the background. The kill is lost if this process exits immediately.
    """
    left, deadline = set(feeders), clock() + END_TIMEOUT_S
    while left:
        for index in sorted(left):
            provider.kill(index)
        look_again = clock() + KILL_AGAIN_S
        while left and clock() < look_again:
            try:
                left &= set(provider.found())
            except ServiceError as exc:
                log.warning("feeders may still be running: %s", exc)
                return
            if left:
                sleep(LOOK_S)
        if left and clock() >= deadline:
            log.warning("%s did not end within %.0f s", ", ".join(map(name_of, sorted(left))), END_TIMEOUT_S)
            return
