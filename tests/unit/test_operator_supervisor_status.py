"""What a supervisor's status means to the operator, and which metrics are worth a write."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as profile
from hypothesis import strategies as st

from dataloaderjob.api.status import LoaderStatus
from dataloaderjob.core.errors import RemoteProtocolError
from dataloaderjob.core.sockets import pack_message
from dataloaderjob.core.supervision import MAX_FEEDERS, READ, Rates, brief
from dataloaderjob_operator.decide.observed import Cause, SupervisorStatus
from dataloaderjob_operator.decide.supervisor_status import (
    LARGEST,
    check_shape,
    digits,
    loader_status,
    notable,
    pack,
    parse,
    readings,
    unpack,
)
from dataloaderjob_operator.observe.supervisor_poller import MAX_STATUS_NBYTES

STATUS: dict[str, Any] = {"type": "status", "desired": 2, "ready": 2}


def feeder(number: int, state: str = "ready", cause: str | None = None, why: str = "") -> dict[str, Any]:
    return {
        "name": f"feeder-{number}",
        "state": state,
        "cause": cause,
        "why": why,
        "host": f"10.0.0.{number}",
    }


def test_fields_missing_from_a_report_have_defaults():
    assert parse(STATUS) == SupervisorStatus(desired=2, ready=2)
    assert readings(STATUS) == {}


def test_worst_cause_is_reported_and_the_first_among_equals():
    waiting = [
        feeder(0),
        feeder(1, "placing", "NoRoom", "no node has room"),
        feeder(2, "backoff", "WorkerRegisterTimeout", "too short"),
        feeder(3, "backoff", "FeederFails", "no torch"),
    ]
    assert parse({**STATUS, "feeders": waiting}).cause == Cause(
        "WorkerRegisterTimeout", "feeder-2: too short", "10.0.0.2"
    )
    assert parse({**STATUS, "feeders": waiting[:2]}).cause == Cause(
        "NoRoom", "feeder-1: no node has room", "10.0.0.1"
    )
    assert parse({**STATUS, "feeders": waiting[:1]}).cause is None


def test_a_failure_names_the_trainer_and_where_its_feeder_is():
    reported = {
        "sidecar": "sidecar-t-0",
        "rank": "1",
        "feeder": "feeder-1",
        "reason": "ModuleMissing",
        "text": "no x",
    }
    found = parse({**STATUS, "feeders": [feeder(1)], "failures": [reported]}).failure
    assert found == Cause("ModuleMissing", "sidecar-t-0, rank 1, received from feeder-1: no x", "10.0.0.1")


def test_effective_ray_settings_are_those_the_supervisor_reports():
    reported = {"version": "2.60.0", "worker_register_timeout_seconds": 7, "health_check_period_ms": "x"}
    ray = parse({**STATUS, "ray": reported}).ray
    assert (ray.version, ray.worker_register_timeout_seconds, ray.health_check_period_ms) == ("2.60.0", 7, 0)


def test_counters_of_each_sidecar_are_read():
    reported = {
        "a": {"metrics": {"next_calls": 3, "used_nbytes": 1}, "receivers": 1},
        "b": {"receivers": 0},
        "c": 7,
    }
    found = readings({**STATUS, "sidecars": reported})
    assert list(found) == ["a"]
    assert (found["a"]["next_calls"], found["a"]["used_nbytes"], found["a"]["wait_ns"]) == (3, 1, 0)


FEEDERS = st.builds(
    feeder,
    st.integers(0, 9),
    st.sampled_from(["ready", "placing", "backoff"]),
    st.sampled_from(["NoRoom", "WorkerRegisterTimeout", "FeederFails", None]),
    st.sampled_from(["", "no node has room", "no torch"]),
)
SIDECARS = st.fixed_dictionaries({
    "metrics": st.dictionaries(st.sampled_from([*READ, "asks"]), st.integers(0, 5)), "receivers": st.just(1),
})  # fmt: skip
FAILURES = st.fixed_dictionaries({
    "sidecar": st.just("s"), "rank": st.just("0"), "feeder": st.integers(0, 9).map("feeder-{}".format),
    "reason": st.just("UserCodeFailed"), "text": st.just("x"),
})  # fmt: skip
WHOLE = st.fixed_dictionaries({
    "type": st.just("status"), "desired": st.just(3), "ready": st.just(1), "notes": st.just(["slow"]),
    "feeders": st.lists(FEEDERS, max_size=6, unique_by=lambda f: f["name"]),
    "sidecars": st.dictionaries(st.sampled_from("abc"), SIDECARS), "failures": st.lists(FAILURES, max_size=3),
    "ray": st.just({"version": "2.60.0"}),
})  # fmt: skip


@given(WHOLE)
def test_brief_status_keeps_everything_the_operator_reads(whole: dict[str, Any]):
    assert parse(brief(whole)) == parse(whole)
    assert readings(brief(whole)) == readings(whole)


def test_a_brief_status_of_the_largest_job_is_accepted():
    large = {
        **STATUS,
        "feeders": [feeder(n, "backoff", "FeederFails", "x" * 1000) for n in range(MAX_FEEDERS)],
        "sidecars": {
            f"{n:0>63}": {"metrics": {**dict.fromkeys(READ, 1 << 50), "asks": 1}, "receivers": 8}
            for n in range(1000)
        },
        "failures": [{"feeder": "feeder-3", "text": "x" * 1000}] * 100,
        "notes": ["x" * 1000] * 1000,
    }
    assert len(pack_message(large)) > 4 * MAX_STATUS_NBYTES
    sent = pack_message(brief(large))
    assert len(sent) < MAX_STATUS_NBYTES
    check_shape(sent)


@pytest.mark.parametrize("item", [b"{}", b"[]", b"0", b'{"a":[]}'])
def test_status_of_too_many_objects_or_values_is_refused_unparsed(item: bytes):
    check_shape(b'{"feeders":[' + b",".join([item] * 4096) + b"]}")
    with pytest.raises(RemoteProtocolError, match="a status may have at most 16384 objects and 65536 values"):
        check_shape(b'{"feeders":[' + b",".join([item] * 70_000) + b"]}")


@given(
    st.dictionaries(st.text(), st.lists(st.integers(0, LARGEST - 1), min_size=len(READ), max_size=len(READ)))
)
def test_packed_counters_give_the_same_rates(found: dict[str, list[int]]):
    whole = {name: dict(zip(READ, counters, strict=True)) for name, counters in found.items()}
    packed = unpack(pack(whole))
    assert sorted(map(tuple, (c.items() for c in packed.values()))) == sorted(
        map(tuple, (c.items() for c in whole.values()))
    )
    assert unpack(pack(whole)) == packed
    assert len(pack(whole)) == len(whole) * (8 + 8 * len(READ))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(["type", "desired", "ready", "feeders", "failures", "ray", "sidecars"])


@profile(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(st.dictionaries(FIELDS, JSON))
def test_any_message_is_parsed_or_refused_as_a_protocol_error(message: dict[str, Any]):
    for reported in (message, {**STATUS, **message}):
        readings(reported)
        with contextlib.suppress(RemoteProtocolError):
            parse(reported)


def test_malformed_reason_is_replaced_in_a_condition():
    assert parse({**STATUS, "feeders": [feeder(0, "placing", "a b", "x")]}).cause.reason == "FeederFails"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.5, "0.5"), (12.345, "12.3"), (1234.5, "1230"), (3_456_789, "3460000"), (0.00012345, "0.000123"),
     (1e-9, "0"), (99.96, "100")],
)  # fmt: skip
def test_metrics_are_rounded_to_three_digits(value: float, text: str):
    assert digits(value) == text


def test_metrics_are_shown_in_the_units_of_the_status():
    rates = Rates(batches_per_s=10, nbytes_per_s=2.5e9, stall=0.125, occupancy=1.0)
    assert loader_status(rates) == LoaderStatus(
        batches_per_second="10", gb_per_second="2.5", stall_percent="12.5", occupancy_percent="100"
    )
    nothing = loader_status(Rates())
    assert {nothing.batches_per_second, nothing.gb_per_second, nothing.stall_percent} == {"0"}


@pytest.mark.parametrize(
    ("field", "old", "new", "worth"),
    [
        pytest.param("batches_per_second", "100", "104", False, id="noise"),
        pytest.param("batches_per_second", "100", "106", True, id="faster"),
        pytest.param("gb_per_second", "1", "0.94", True, id="slower"),
        pytest.param("gb_per_second", "0", "0.001", True, id="from zero"),
        pytest.param("gb_per_second", "0.001", "0", True, id="to zero"),
        pytest.param("stall_percent", "0.2", "0.9", False, id="a small share is noise"),
        pytest.param("stall_percent", "0", "0.9", False, id="also from zero"),
        pytest.param("stall_percent", "3", "5", True, id="it stalls"),
        pytest.param("stall_percent", "80", "83", False, id="it stalls as before"),
        pytest.param("occupancy_percent", "40", "49", False, id="a pool breathes"),
        pytest.param("occupancy_percent", "40", "60", True, id="a pool fills"),
        pytest.param("gb_per_second", "nonsense", "1", True, id="somebody else's words"),
    ],
)
def test_only_a_meaningful_change_is_worth_a_write(field: str, old: str, new: str, worth: bool):
    assert notable(LoaderStatus(**{field: old}), LoaderStatus(**{field: new})) is worth
