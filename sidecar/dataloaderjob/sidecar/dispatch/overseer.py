"""The response to lateness, at every tick. It suspects silent feeders, hedges slow tickets and fails hopeless ones.
Pure.

User code may take any amount of time, so lateness is judged against the recent times of the same stream's batches. A
report that the feeder is alive proves little, because the feeder stays alive while its user code hangs.
"""

from __future__ import annotations

from dataloaderjob.core import ticket_codec
from dataloaderjob.sidecar.dispatch.dispatcher import Dispatcher
from dataloaderjob.sidecar.dispatch.instructions import Close, Note, Replace
from dataloaderjob.sidecar.dispatch.placing import turn
from dataloaderjob.sidecar.dispatch.streams import Attempt, AttemptState, FeederState, Ticket, TicketState

TICK_S = 0.1
NOTE_EVERY_S = 30.0
OVERDUE_FLOOR_S = 1.5
"""Minimum time without an answer, in seconds, after which a feeder is suspected. Including the tick and the rebuilding
of one batch, a trainer then waits less than 3 s."""
OVERDUE_FACTOR = 4.0
HEDGE_FLOOR_S = 0.25
HEDGE_FACTOR = 3.0
HEDGE_SHARE = 0.05
"""Largest share of tickets that are sent to a second feeder only because the first is slow."""
SLOT_SILENT_S = 12.0
"""Silence after which a feeder that makes a slot's batch is suspect. Such a feeder reports every 5 s that it is
alive."""
TRANSFER_FLOOR_S = 1.5
"""If nothing of a granted body arrives for this long, the body is given up and requested again. The limit is not a
rate, because many feeders share one network, and a slow feeder is not dead."""
STRIKE_AFTER_S = 10.0
"""Time without reconnecting after which a feeder is assumed to have exited, even if nobody reports it."""
LAST_WORDS_S = 4.0
"""Time to wait, after a feeder's process has exited, for the supervisor's report that memory ran out."""
UNCONNECTED_NOTE_S = 5.0
"""Time without a connection after which a note explains why no feeder is connected. It counts from the first ticket, or
from the loss of the last connection."""
REPLACE_AFTER_S = 20.0
REPLACE_FACTOR = 10.0
MAX_REASKS = 2
"""Maximum number of repeated requests for a ticket. A ticket that is late at three feeders is itself slow, and waits
for its deadline."""


def tick(machine: Dispatcher, now: float) -> None:
    """Checks every connection and every awaited ticket once, and sends the bundles that feeders lack."""
    machine.send_asked_bundles()
    _check_feeders(machine, now)
    _note_unconnected(machine, now)
    for stream in list(machine.streams.values()):
        ticket = stream.wanted()
        if ticket is not None and ticket.state in (TicketState.QUEUED, TicketState.ASKED):
            _check_awaited(machine, now, ticket)
    if machine.starved:
        machine.grant(now)
    machine.dispatch(now)


def _check_feeders(machine: Dispatcher, now: float) -> None:
    up = [feeder for feeder in machine.feeders.values() if feeder.up]
    for feeder in list(machine.feeders.values()):
        for bundle in [bundle for bundle, until in feeder.not_loaded.items() if now > until]:
            del feeder.not_loaded[bundle]
        if not feeder.up:
            if feeder.struck and now - feeder.down_since > (
                LAST_WORDS_S if feeder.draining else STRIKE_AFTER_S
            ):
                machine.confirm_strikes(feeder)
                machine.retire(feeder)
            _maybe_replace(machine, now, feeder, now - feeder.down_since)
            continue
        stuck = next((a for a in feeder.attempts.values() if _transfer_late(now, a)), None)
        if stuck is not None:
            reason = (
                f"{feeder.endpoint.name} has sent nothing of a batch of {stuck.nbytes} bytes in "
                f"{TRANSFER_FLOOR_S} s since its grant"
            )
            machine.report(Close(feeder.endpoint.instance, reason, True))
            machine.feeder_down(now, feeder.endpoint.instance, reason)
        elif feeder.suspect_since is not None:
            silent = not feeder.is_silent and _silence(now, feeder) > SLOT_SILENT_S
            if silent and any(_healthy(now, other) for other in up):
                feeder.is_silent = True
                _take_back(machine, feeder, _head(feeder))
            _maybe_replace(machine, now, feeder, now - max(feeder.received_at, feeder.suspect_since))
        elif now - feeder.answered_at <= OVERDUE_FLOOR_S:
            pass  # its lateness is below 1 then, and need not be computed
        elif _lateness(now, feeder) > 1:
            _maybe_suspect(machine, now, feeder, up)


def _head(feeder: FeederState) -> Attempt | None:
    """Returns the attempt that this feeder should be making: within a stream, it takes the lowest ticket first."""
    asked = [a for a in feeder.attempts.values() if a.state is AttemptState.ASKED]
    return min(asked, key=turn, default=None)


def _waiting(now: float, attempt: Attempt) -> float:
    return now - max(attempt.asked_at, attempt.feeder.answered_at)


def _lateness(now: float, feeder: FeederState) -> float:
    """Returns the time that a feeder has taken so far for its current batch, divided by the limit. Above 1, the feeder
    becomes suspect.

    Returns 0 until the stream's first batch is made, because loading the dataset may take minutes.
    """
    head = _head(feeder)
    if head is not None and head.ticket.slot is not None:
        # Another feeder would have to rebuild all earlier batches. A live feeder reports that it is alive while user
        # code takes long.
        return _silence(now, feeder) / SLOT_SILENT_S
    if head is None or (typical := head.ticket.stream.pace.typical) is None:
        return 0.0
    return _waiting(now, head) / max(OVERDUE_FLOOR_S, OVERDUE_FACTOR * typical)


def _silence(now: float, feeder: FeederState) -> float:
    """Returns the seconds for which a feeder that makes a slot's batch has been silent.

    Returns 0 for other feeders, and while the feeder waits for space or is sending, because it then has nothing to
    report.
    """
    attempts = feeder.attempts.values()
    asked = [a.asked_at for a in attempts if a.ticket.slot is not None]
    if not asked or any(attempt.state is not AttemptState.ASKED for attempt in attempts):
        return 0.0
    return now - max(min(asked), feeder.received_at, feeder.moved_at)


def _healthy(now: float, feeder: FeederState) -> bool:
    """Returns True if this feeder is on time. If other feeders are late, the cause is then their own."""
    trusted = feeder.up and not feeder.draining and feeder.suspect_since is None
    return trusted and _lateness(now, feeder) < 0.5


def _transfer_late(now: float, attempt: Attempt) -> bool:
    sending = attempt.state in (AttemptState.GRANTED, AttemptState.RECEIVING)
    return sending and now - max(attempt.granted_at, attempt.feeder.moved_at) > TRANSFER_FLOOR_S


def _maybe_suspect(machine: Dispatcher, now: float, feeder: FeederState, up: list[FeederState]) -> None:
    """Suspects a silent feeder if another one is healthy. The suspect gets no more tickets, and others get its
    tickets."""
    if not any(_healthy(now, other) for other in up if other is not feeder):
        return
    head = _head(feeder)
    is_silent = head is not None and head.ticket.slot is not None
    machine.suspect(feeder, now, is_silent=is_silent)
    _take_back(machine, feeder, head)
    machine.dispatch(now)


def _take_back(machine: Dispatcher, feeder: FeederState, head: Attempt | None) -> None:
    """Takes back a suspect feeder's tickets, for other feeders. Takes tickets of slots only if the feeder is silent."""
    for attempt in list(feeder.attempts.values()):
        ticket = attempt.ticket
        if attempt.state is not AttemptState.ASKED or (ticket.slot is not None and not feeder.is_silent):
            continue
        if attempt is head:
            if ticket.retries >= MAX_REASKS and ticket.slot is None:
                continue  # the ticket itself is slow or hangs: it waits for its deadline here
            ticket.retries += 1
            ticket.probe = True
        machine.counters.retries += 1
        machine.drop_attempt(attempt, cancel=True)


def _maybe_replace(machine: Dispatcher, now: float, feeder: FeederState, silent_s: float) -> None:
    typical = max((stream.pace.typical or 0.0 for stream in machine.streams.values()), default=0.0)
    limit = max(REPLACE_AFTER_S, REPLACE_FACTOR * typical) if feeder.up else REPLACE_AFTER_S
    asked = feeder.replace_asked_at is not None and now - feeder.replace_asked_at < limit
    if silent_s > limit and not asked and not feeder.draining:
        feeder.replace_asked_at = now
        what = "silent while it had work to do" if feeder.up else "not reachable"
        machine.report(Replace(feeder.endpoint, f"{what} for {silent_s:.0f} s", feeder.up))


def _check_awaited(machine: Dispatcher, now: float, ticket: Ticket) -> None:
    _unblock(machine, ticket)
    waited = now - _waiting_since(machine, ticket)
    deadline_s, awaits = machine.settings.batch_deadline_s, _awaits_first_feeder(machine)
    if machine.ended and not any(feeder.up for feeder in machine.feeders.values()):
        text = f"batch {ticket.number} cannot be made, because the job has ended: {machine.ended}"
        machine.fail_service(ticket, "ServiceUnavailable", text)
        return
    if waited > deadline_s and not awaits:
        # Feeders that are still making the batch stop, and kill a process that does not stop.
        message = (
            f"batch {ticket.number} was not ready after {waited:.0f} s (the deadline is "
            f"{deadline_s:.0f} s, spec.loader.batchTimeoutSeconds): {_who(machine, ticket)}"
        )
        machine.fail_service(ticket, "DeadlineExceeded", message)
        return
    if waited > machine.settings.progress_after_s and now - ticket.noted_at > NOTE_EVERY_S:
        ticket.noted_at = now
        until = "; its deadline starts with the first feeder" if awaits else ""
        machine.report(
            Note(
                f"the trainer has been waiting for batch {ticket.number} for {waited:.0f} s: "
                f"{_who(machine, ticket)}{until}"
            )
        )
    _maybe_hedge(machine, now, ticket)


def _waiting_since(machine: Dispatcher, ticket: Ticket) -> float:
    """Returns the time from which the wait for a ticket counts. This is the latest of three times: when the trainer
    began to sleep, when the slot last progressed, and when the ticket was sent to a feeder. If no feeder has the
    ticket, the last time is when the ticket was queued or when the last feeder was lost, whichever is later."""
    if not ticket.attempts:
        since = max(ticket.queued_at, machine.feeders_lost_at or 0.0)
        if machine.settings.awaits_feeders:
            since = max(since, machine.served_at or 0.0)
    elif ticket.retries or (ticket.strikes and ticket.slot is not None):
        since = ticket.first_asked_at or 0.0
    else:
        since = min(attempt.asked_at for attempt in ticket.attempts)
    progressed = max((attempt.progressed_at for attempt in ticket.attempts), default=0.0)
    return max(since, progressed, ticket.stream.waiting_since or 0.0)


def _awaits_first_feeder(machine: Dispatcher) -> bool:
    """Returns True if no feeder has connected yet, and this job's deadlines start when the first one connects."""
    return machine.settings.awaits_feeders and machine.served_at is None


def _maybe_hedge(machine: Dispatcher, now: float, ticket: Ticket) -> None:
    typical = ticket.stream.pace.typical
    if typical is None or ticket.slot is not None or ticket.retries or len(ticket.attempts) != 1:
        return
    attempt, after_s = ticket.attempts[0], max(HEDGE_FLOOR_S, HEDGE_FACTOR * typical)
    if attempt.state is not AttemptState.ASKED or _waiting(now, attempt) < after_s:
        return
    counters = machine.counters
    if counters.hedges >= 1 + HEDGE_SHARE * counters.batches:
        return
    up = [feeder for feeder in machine.feeders.values() if feeder.up]
    slow = [feeder for feeder in up if feeder.attempts and now - feeder.answered_at > after_s]
    if len(up) > 1 and len(slow) * 2 > len(up):
        return  # the work is slow, not the feeders
    feeder = machine.ranks.idle(ticket.stream, without=[attempt.feeder])
    if feeder is not None:
        counters.hedges += 1
        ticket.retries += 1
        machine.ask(now, ticket, feeder)


def _unblock(machine: Dispatcher, ticket: Ticket) -> None:
    """Drops a later batch that waits for space, if it keeps a feeder from making the awaited batch.

    A feeder builds nothing more for a receiver while it holds two batches without a place. An awaited ticket that is
    sent to such a feeder would cause a deadlock: the two batches wait for the trainer to free space, and the trainer
    waits for the ticket.
    """
    if any(a.state is not AttemptState.ASKED for a in ticket.attempts):
        return
    asked = [a.feeder for a in ticket.attempts]
    held = [
        a for a in machine.announced
        if a.feeder.up and (not asked or a.feeder in asked) and a.ticket is not ticket
    ]  # fmt: skip
    if len(held) >= (2 if asked else 1):
        held.sort(key=turn)
        machine.drop_attempt(held[-1], cancel=True)


def who_is_late(machine: Dispatcher, stream: int, number: int) -> str:
    """Names the feeders that have a ticket, their phases and their current samples. Returns "" if no such ticket
    exists."""
    found = machine.streams.get(stream)
    ticket = None if found is None else found.tickets.get(number)
    return "" if ticket is None else _who(machine, ticket)


def _who(machine: Dispatcher, ticket: Ticket) -> str:
    """Names the feeders that have a ticket, their phases and their current samples, or explains why no feeder has
    it."""
    if ticket.attempts:
        return "; ".join(
            f"{a.feeder.endpoint.name} is {'making' if a.state is AttemptState.ASKED else a.state.value}"
            f" {ticket_codec.describe_keys(ticket.payload, a.position)}"
            for a in ticket.attempts
        )
    up = sum(feeder.up for feeder in machine.feeders.values())
    if up:
        return f"{up} feeders are connected, but they are silent or busy with other batches"
    return _unconnected(machine)


def _unconnected(machine: Dispatcher) -> str:
    """Explains why no feeder is connected. Quotes the supervisor, and the errors of connections that could not be
    opened."""
    why = sorted({feeder.why_down for feeder in machine.feeders.values() if feeder.why_down})[:3]
    reasons = [*machine.supervisor_notes[:3], *why]
    notes = f" ({'; '.join(reasons)})" if reasons else ""
    wanted = "" if machine.desired_feeders is None else f" of {machine.desired_feeders}"
    return f"no feeder is connected; the supervisor lists {len(machine.feeders)}{wanted} feeders{notes}"


def _note_unconnected(machine: Dispatcher, now: float) -> None:
    """Reports why connections cannot be opened, while tickets wait for one."""
    feeders = machine.feeders.values()
    if any(feeder.up for feeder in feeders) or not any(feeder.why_down for feeder in feeders):
        return
    tickets = [ticket for stream in machine.streams.values() for ticket in stream.tickets.values()]
    queued = [ticket.queued_at for ticket in tickets if ticket.state is TicketState.QUEUED]
    if not queued:
        return
    since = max(min(queued), machine.feeders_lost_at or 0.0)
    if now - since > UNCONNECTED_NOTE_S and now - machine.unconnected_noted_at > NOTE_EVERY_S:
        machine.unconnected_noted_at = now
        machine.report(Note(_unconnected(machine)))
