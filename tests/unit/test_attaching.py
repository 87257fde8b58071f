"""Trainers that others start: the variables of their shells, messages about them, and when feeders stop."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core.errors import InputError
from dataloaderjob.local import attaching
from dataloaderjob.local.attaching import (
    VARIABLES,
    Activity,
    Attached,
    Idleness,
    exports,
    find_attachable,
    how_to_attach,
    variables,
)
from dataloaderjob.local.plan import Lifecycle, RunEvent, RunState, stopped_by
from dataloaderjob.local.status import LiveRun

ATTACH = {"env": {"DATALOADERJOB_FEEDERS": "2"}, "processes": 4}


def live(name: str, **about: Any) -> LiveRun:
    return LiveRun(
        Path(f"/tmp/dlj-run-{name}"), {"job": name, "manifest": "job.yaml", "socket": "/s", **about}
    )


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40))
def test_every_value_survives_the_shell_unchanged(value: str):
    lines = "\n".join(exports({"DATALOADERJOB_SOCKET": value}))
    done = subprocess.run(
        ["/bin/sh", "-c", f'{lines}\nprintf %s "$DATALOADERJOB_SOCKET"'], capture_output=True, check=True
    )
    assert done.stdout == value.encode()


def test_variables_of_an_earlier_run_are_unset():
    *set_, unset = exports({"DATALOADERJOB_SOCKET": "/s", "DATALOADERJOB_FEEDERS": "2"})
    assert set_ == ["export DATALOADERJOB_SOCKET=/s", "export DATALOADERJOB_FEEDERS=2"]
    assert unset == "unset DATALOADERJOB_PREFETCH DATALOADERJOB_ALLOW_PICKLE DATALOADERJOB_RECORD"
    assert list(exports(dict.fromkeys(VARIABLES, "x")))[-1].startswith("export")


def test_name_with_odd_characters_is_quoted_in_the_hint():
    assert how_to_attach("bert") == 'eval "$(dataloaderjob env bert)"'
    assert how_to_attach("a b") == "eval \"$(dataloaderjob env 'a b')\""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[LiveRun]:
    found = [live("one", attach=ATTACH), live("own")]
    monkeypatch.setattr(attaching, "live_runs", lambda folder: found)
    return found


@pytest.mark.parametrize(("name", "found"), [(None, "one"), ("one", "one"), ("own", "own")])
def test_run_is_found_by_name_or_as_the_only_attachable_one(
    runs: list[LiveRun], name: str | None, found: str
):
    assert find_attachable(name, None).name == found


def test_run_that_is_not_found_is_reported_with_the_others(runs: list[LiveRun]):
    with pytest.raises(
        InputError, match="no run named 'none' of yours is running on this machine; found: one, own"
    ):
        find_attachable("none", None)
    runs.append(live("one", attach=ATTACH))
    for name in ("one", None):
        with pytest.raises(InputError, match="found 2 runs; choose one of them with --dir: /tmp/dlj-run-one"):
            find_attachable(name, None)
    runs.clear()
    with pytest.raises(InputError, match="start one with `dataloaderjob run"):
        find_attachable(None, None)


def test_run_without_attach_names_the_field_to_set():
    assert variables(live("one", attach=ATTACH)) == {
        "DATALOADERJOB_SOCKET": "/s",
        "DATALOADERJOB_FEEDERS": "2",
    }
    with pytest.raises(InputError, match=r"set spec\.trainers\.attach instead of spec\.trainers\.job"):
        variables(live("own"))


def test_changes_of_attached_processes_are_told_once():
    attached, both = Attached(), [{"rank": "0", "trainer": 11}, {"rank": "0-12", "trainer": 12}]
    assert list(attached.update(both)) == [
        "rank 0 (process 11) is attached", "rank 0-12 (process 12) is attached",
    ]  # fmt: skip
    assert list(attached.update(both)) == []
    assert list(attached.update(both[1:])) == ["rank 0 (process 11) has left"]
    assert (len(attached), str(attached)) == (1, "rank 0-12 (process 12)")


def test_feeders_stop_after_the_idle_time_and_return_with_a_trainer():
    idle = Idleness(10.0, now=0.0)
    assert idle.look(0, 4, 9.0) is None
    assert idle.look(1, 4, 9.5) is None
    assert idle.look(0, 4, 19.0) is None, "the time begins when the last trainer leaves"
    assert idle.look(0, 4, 19.5) == 0
    assert idle.look(0, 4, 30.0) is None, "the supervisor has not answered yet"
    assert idle.look(0, 0, 31.0) is None
    assert idle.activity is Activity.IDLE
    assert idle.look(2, 0, 40.0) == 4
    assert idle.look(2, 0, 40.2) is None
    assert idle.activity is Activity.BUSY


def test_trainer_that_comes_while_feeders_stop_keeps_them():
    idle = Idleness(0.0, now=0.0)
    assert idle.look(0, 3, 0.0) == 0
    assert idle.look(1, 3, 0.2) == 3


def test_feeders_that_a_user_asks_for_while_idle_stay_for_the_idle_time():
    idle = Idleness(10.0, now=0.0)
    assert idle.look(0, 2, 10.0) == 0
    idle.look(0, 0, 11.0)
    assert idle.look(0, 5, 12.0) is None
    assert idle.look(0, 5, 21.0) is None
    assert idle.look(0, 5, 22.0) == 0
    idle.look(0, 0, 23.0)
    assert idle.look(1, 0, 24.0) == 5


STEPS = st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.integers(0, 5), st.floats(0, 8)), max_size=40)


@given(STEPS)
def test_an_attached_trainer_always_ends_up_with_feeders(
    steps: list[tuple[int, bool, int, float]],
):
    idle, desired, pending, now = Idleness(5.0, 0.0), 3, None, 0.0
    for attached, answers, by_user, pause in steps:
        now += pause
        asked = idle.look(attached, desired, now)
        pending = asked if asked is not None else pending
        if answers and pending is not None:
            desired, pending = pending, None
        elif by_user and not attached and pending is None:
            desired = by_user
    for _ in range(2):
        asked = idle.look(1, desired, now)
        pending = asked if asked is not None else pending
        desired, pending = (desired if pending is None else pending), None
    assert desired > 0


def test_service_for_others_ends_at_once_when_it_is_stopped():
    lifecycle = Lifecycle(0)
    assert lifecycle.move(RunEvent.OPENED) is RunState.SERVING
    assert lifecycle.move(RunEvent.SERVED) is None
    assert lifecycle.halt(stopped_by(15, "the service")) is RunState.OVER
    assert (lifecycle.code, lifecycle.stop and lifecycle.stop.why) == (
        143, "received SIGTERM: ending the service",
    )  # fmt: skip
