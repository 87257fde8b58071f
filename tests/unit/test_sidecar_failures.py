"""Failures of trainers as others see them: in a line, and for how long."""

from __future__ import annotations

import json

import pytest

from dataloaderjob.core.supervision import MAX_TEXT, describe_failure, failure_passed
from dataloaderjob.making.failures import pack_failure
from dataloaderjob.making.fetcher import SampleError
from dataloaderjob.sidecar.supervisor_client import Failures

TOLD = {"type": "failure", "feeder": "feeder-1", "reason": "UserCodeFailed", "text": "ValueError: no"}


@pytest.mark.parametrize(
    ("payload", "reason", "text"),
    [
        pytest.param(
            pack_failure(SampleError("__getitem__", ValueError("bad\nsample"), position=3, key=17), feeder="feeder-1"),
            "UserCodeFailed", "ValueError: bad sample (for index 17)", id="a sample",
        ),
        pytest.param(
            pack_failure(ModuleNotFoundError("No module named 'x'"), phase="loading", feeder="feeder-1"),
            "ModuleMissing", "ModuleNotFoundError: No module named 'x' (in loading)", id="a module",
        ),
    ],
)  # fmt: skip
def test_user_code_failure_is_described_in_one_line(payload: bytes, reason: str, text: str):
    assert describe_failure(payload) == {"feeder": "feeder-1", "reason": reason, "text": text}


def test_service_failure_keeps_its_name_and_unreadable_ones_count_too():
    add = describe_failure(json.dumps({"service": "FeederLost", "message": "x" * 9999}).encode())
    assert (add["feeder"], add["reason"], len(add["text"])) == ("", "FeederLost", MAX_TEXT)
    for payload in (b"", b"[]", b'{"type": 3}', b'{"service": 1}', b"\xff"):
        assert describe_failure(payload)["reason"] == "BatchFailed"


@pytest.mark.parametrize(
    ("stream", "awaited", "over"),
    [
        pytest.param(2, 5, False, id="not yet reached"),
        pytest.param(2, 6, False, id="raised, which counts as taken"),
        pytest.param(2, 7, True, id="the next one is taken"),
        pytest.param(1, 99, False, id="an iterator of before"),
        pytest.param(3, 0, False, id="the next epoch begins"),
        pytest.param(3, 1, True, id="the next epoch has a batch"),
    ],
)
def test_failure_has_passed_once_a_later_batch_is_taken(stream: int, awaited: int, over: bool):
    assert failure_passed((2, 5), stream, awaited) is over


def test_a_failure_outlives_its_trainer_until_the_next_one_has_a_batch():
    failures = Failures()
    failures.add("0", 10, TOLD)
    for rank, pid, taken in (("0", 10, 4), ("0", 11, 0), ("1", 12, 9)):
        failures.update(rank, pid, taken)
        assert failures.current() == [
            {"rank": "0", "feeder": "feeder-1", "reason": "UserCodeFailed", "text": "ValueError: no"}
        ], "batches before it, none yet, another rank's"
    failures.update("0", 11, 1)
    assert failures.current() == []


def test_receiver_withdraws_a_failure():
    failures = Failures()
    failures.add("0", 10, TOLD)
    failures.add("0", 10, {"type": "failure"})
    assert failures.current() == []
