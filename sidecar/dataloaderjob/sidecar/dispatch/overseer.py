"""Acts on lateness, at every tick: suspects silent feeders, hedges, gives up, tells who is late. Pure."""

from __future__ import annotations

from dataloaderjob.core import frames
from dataloaderjob.sidecar.dispatch import choose, streams
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.dispatch.instructions import Close, Note, Replace
from dataloaderjob.sidecar.dispatch.streams import Attempt, AttemptState, FeederState, State, Stream, Ticket

TICK_S = 0.1
NOTE_EVERY_S = 30.0


def tick(machine: Dispatcher, now: float) -> None:
    """Looks at every connection and every awaited ticket once."""
    _check_feeders(machine, now)
    for stream in list(machine.streams.values()):
        ticket = stream.wanted()
        if ticket is not None and ticket.state in (State.QUEUED, State.ASKED):
            _check_awaited(machine, now, stream, ticket)
    if machine.starved:
        machine.grant(now)
    machine.dispatch(now)


def _check_feeders(machine: Dispatcher, now: float) -> None:
    up = [feeder for feeder in machine.feeders.values() if feeder.up]
    for feeder in list(machine.feeders.values()):
        if not feeder.up:
            _maybe_replace(machine, feeder, now - feeder.down_since)
            continue
        stuck = next((a for a in feeder.attempts.values() if _transfer_late(now, a)), None)
        if stuck is not None:
            reason = (
                f"{feeder.endpoint.name} has sent nothing of a batch of {stuck.nbytes} bytes for "
                f"{streams.TRANSFER_FLOOR_S} s since its grant"
            )
            machine.report(Close(feeder.endpoint.instance, reason, True))
            machine.feeder_down(now, feeder.endpoint.instance, reason)
        elif feeder.suspect_since is not None:
            _maybe_replace(machine, feeder, now - max(feeder.received_at, feeder.suspect_since))
        elif _overdue(now, feeder):
            _maybe_suspect(machine, now, feeder, up)


def _head(feeder: FeederState) -> Attempt | None:
    """The ask that this feeder should be making: within a stream it takes the lowest ticket first."""
    asked = [a for a in feeder.attempts.values() if a.state is AttemptState.ASKED]
    return min(asked, key=lambda a: a.ticket.number - a.ticket.stream.awaited, default=None)


def _waiting(now: float, feeder: FeederState, attempt: Attempt) -> float:
    return now - max(attempt.asked_at, feeder.answered_at)


def _overdue(now: float, feeder: FeederState) -> bool:
    head = _head(feeder)
    if head is None or (limit := streams.overdue_after(head.ticket.stream.pace)) is None:
        return False
    return _waiting(now, feeder, head) > limit


def _healthy(now: float, feeder: FeederState) -> bool:
    if not feeder.up or feeder.draining or feeder.suspect_since is not None:
        return False
    head = _head(feeder)
    if head is None or (limit := streams.overdue_after(head.ticket.stream.pace)) is None:
        return True
    return streams.healthy(_waiting(now, feeder, head), limit)


def _transfer_late(now: float, attempt: Attempt) -> bool:
    sending = attempt.state in (AttemptState.GRANTED, AttemptState.RECEIVING)
    return sending and now - max(attempt.granted_at, attempt.feeder.moved_at) > streams.TRANSFER_FLOOR_S


def _maybe_suspect(machine: Dispatcher, now: float, feeder: FeederState, up: list[FeederState]) -> None:
    """Gives nothing more to a silent feeder, and what it has to others, while another one is well."""
    if not any(_healthy(now, other) for other in up if other is not feeder):
        return
    head = _head(feeder)
    feeder.suspect_since = now
    for attempt in list(feeder.attempts.values()):
        ticket = attempt.ticket
        if attempt.state is not AttemptState.ASKED:
            continue
        if attempt is head:
            if ticket.retries >= streams.MAX_REASKS:
                continue  # slow or hanging by itself: it waits for its deadline here
            ticket.retries += 1
            ticket.probe = True
        machine.counters.retries += 1
        machine.drop_attempt(attempt, cancel=True)
    machine.dispatch(now)


def _maybe_replace(machine: Dispatcher, feeder: FeederState, silent_s: float) -> None:
    paces = [s.pace for s in machine.streams.values()]
    limit = max(map(streams.replace_after, paces), default=streams.REPLACE_AFTER_S)
    if silent_s > limit and not feeder.replace_asked and not feeder.draining:
        feeder.replace_asked = True
        what = "silent with work to do" if feeder.up else "not reachable"
        machine.report(Replace(feeder.endpoint, f"{what} for {silent_s:.0f} s"))


def _check_awaited(machine: Dispatcher, now: float, stream: Stream, ticket: Ticket) -> None:
    _unblock(machine, ticket)
    since = _waiting_since(machine, ticket)
    waited = now - since
    if waited > machine.settings.batch_deadline_s:
        _give_up(machine, ticket, waited)
        return
    if waited > machine.settings.progress_after_s and now - ticket.noted_at > NOTE_EVERY_S:
        ticket.noted_at = now
        machine.report(
            Note(f"batch {ticket.number} has been awaited for {waited:.0f} s: {_who(machine, ticket)}")
        )
    _maybe_hedge(machine, now, stream, ticket)


def _waiting_since(machine: Dispatcher, ticket: Ticket) -> float:
    """The time since the trainer sleeps for it; and since it was asked or, with no feeder, since the last one went."""
    if ticket.attempts:
        since = (
            min(a.asked_at for a in ticket.attempts) if ticket.retries == 0 else ticket.first_asked_at or 0.0
        )
    else:
        since = max(ticket.queued_at, machine.feeders_lost_at or 0.0)
    return max(since, ticket.stream.waiting_since or 0.0)


def _give_up(machine: Dispatcher, ticket: Ticket, waited: float) -> None:
    """Feeders that still make it are told by its end to stop, and end the process that does not."""
    machine.fail_service(
        ticket,
        "DeadlineExceeded",
        f"batch {ticket.number} was not ready after {waited:.0f} s (the deadline is "
        f"{machine.settings.batch_deadline_s:.0f} s, spec.deadlines.batchSeconds): {_who(machine, ticket)}",
    )


def _maybe_hedge(machine: Dispatcher, now: float, stream: Stream, ticket: Ticket) -> None:
    after = streams.hedge_after(stream.pace)
    if (
        after is None
        or ticket.retries
        or len(ticket.attempts) != 1
        or ticket.attempts[0].state is not AttemptState.ASKED
    ):
        return
    if now - max(ticket.attempts[0].asked_at, ticket.attempts[0].feeder.answered_at) < after:
        return
    counters = machine.counters
    if not streams.hedge_allowed(counters.hedges, counters.batches):
        return
    up = [feeder for feeder in machine.feeders.values() if feeder.up]
    slow = [feeder for feeder in up if feeder.attempts and now - feeder.answered_at > after]
    if streams.all_slow(len(slow), len(up)):
        return
    feeder = choose.idle(up, stream, without=[a.feeder for a in ticket.attempts])
    if feeder is not None:
        counters.hedges += 1
        ticket.retries += 1
        machine.ask(now, ticket, feeder)


def _unblock(machine: Dispatcher, ticket: Ticket) -> None:
    """Makes way for an awaited ticket that came to its feeder behind later ones which wait for space.

    A feeder builds nothing more for us while it holds two batches without a place, so an awaited ticket
    that was asked again would wait for their space, and they for the trainer, which waits for it.
    """
    feeders = {id(a.feeder): a.feeder for a in ticket.attempts} if ticket.attempts else None
    if ticket.attempts and any(a.state is not AttemptState.ASKED for a in ticket.attempts):
        return
    held = [
        a
        for feeder in machine.feeders.values()
        if feeder.up and (feeders is None or id(feeder) in feeders)
        for a in feeder.attempts.values()
        if a.state is AttemptState.ANNOUNCED and a.ticket is not ticket
    ]
    if len(held) >= (1 if feeders is None else 2):
        held.sort(key=lambda a: a.ticket.number - a.ticket.stream.awaited)
        machine.drop_attempt(held[-1], cancel=True)


def who_is_late(machine: Dispatcher, stream: int, number: int) -> str:
    """Names feeder, phase and index of a ticket; empty where there is none."""
    found = machine.streams.get(stream)
    ticket = None if found is None else found.tickets.get(number)
    return "" if ticket is None else _who(machine, ticket)


def _who(machine: Dispatcher, ticket: Ticket) -> str:
    """Names feeder, phase and index of a late ticket."""
    if ticket.attempts:
        parts = [
            f"{a.feeder.endpoint.name} is {'making' if a.state is AttemptState.ASKED else a.state.value}"
            f" {frames.describe_keys(ticket.payload, a.position)}"
            for a in ticket.attempts
        ]
        return "; ".join(parts)
    up = sum(feeder.up for feeder in machine.feeders.values())
    if up:
        return f"{up} feeders are connected and busy with other batches or silent"
    notes = f" ({'; '.join(machine.supervisor_notes[:3])})" if machine.supervisor_notes else ""
    wanted = "" if machine.desired_feeders is None else f" of {machine.desired_feeders}"
    return f"no feeder is connected, {len(machine.feeders)}{wanted} known{notes}"
