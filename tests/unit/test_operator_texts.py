"""Texts of others on their way to the API server and to people."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from observed_jobs import FEEDERS, HEAD, T0, condition, decided, failed_trainers, job, live, pod, serving

from dataloaderjob.api.status import ConditionType, DataLoaderJobStatus, Phase
from dataloaderjob.core.texts import clean
from dataloaderjob_operator.client import apply_body
from dataloaderjob_operator.decide import conditions, events, supervisor_status
from dataloaderjob_operator.decide.observed import Observed

ANY = st.text(st.characters())
PROPER = st.text(st.characters(exclude_categories=["Cs"]))
EMOJI = "\U0001f622"


@given(st.dictionaries(PROPER, st.lists(PROPER)))
def test_body_reads_the_same_as_json_and_as_yaml(value: dict[str, list[str]]) -> None:
    sent = apply_body(value)
    assert json.loads(sent) == value
    assert yaml.safe_load(sent.decode()) == value


def test_emoji_is_sent_unescaped_and_lone_surrogates_are_replaced() -> None:
    assert apply_body({"a": EMOJI}) == f'{{"a": "{EMOJI}"}}'.encode()
    assert apply_body("a\ud83d\ude22\udcff") == '"a\ufffd\ufffd\ufffd"'.encode()
    assert apply_body("\\ud83d") == b'"\\\\ud83d"', "text that resembles one stays text"


@given(ANY, st.integers(0, 40))
def test_cut_text_is_short_and_has_whole_characters(text: str, nbytes: int) -> None:
    cut = events.cut(text, nbytes)
    assert len(cut.encode()) <= nbytes
    assert clean(text, nbytes + 1).encode().decode().startswith(cut)


@pytest.mark.parametrize(
    ("text", "word"),
    [("Evicted", "Evicted"), ("Node lost!", "Nodelost"), ("", "Unknown"), (EMOJI, "Unknown"), ("a" * 300, "a" * 128)],
)  # fmt: skip
def test_reason_is_reduced_to_one_valid_identifier(text: str, word: str) -> None:
    assert conditions.reason_word(text) == word


@given(ANY)
def test_status_and_events_accept_any_last_output(words: str) -> None:
    ended = [{"name": "trainer", "state": {"terminated": {"exitCode": 7, "message": words}}}]
    observed = replace(failed_trainers(serving()), pods=(pod("trainer", containerStatuses=ended),))
    made = decided(observed).status
    assert made.trainers.restarts == 1
    for event in events.events_of(observed.status, made):
        assert len(event.message.encode()) <= events.MAX_MESSAGE_NBYTES
        assert events.manifest(event, observed.job.metadata, T0, "h")["message"] == event.message


@given(ANY)
def test_status_accepts_any_reason_of_a_pod(text: str) -> None:
    evicted = pod("feeder", started=False) | {
        "status": {"phase": "Failed", "reason": text or "x", "message": text}
    }
    observed = replace(
        serving(), pods=(evicted,), children=live(HEAD, FEEDERS), refused=text, supervisor=None
    )
    made = decided(observed)
    assert condition(made, ConditionType.READY).status == "False"
    assert condition(made, ConditionType.FEEDERS_READY).reason == conditions.reason_word(text or "x")


def test_malformed_ray_version_does_not_invalidate_the_report() -> None:
    reported = {
        "type": "status",
        "desired": 1,
        "ready": 1,
        "feeders": [],
        "failures": [],
        "ray": {"version": "\udcff2"},
    }
    assert supervisor_status.parse(reported).ray.version == "\ufffd2"


def test_refused_text_is_left_out_and_the_rest_is_written() -> None:
    observed = failed_trainers(serving())
    loud = condition(decided(observed), ConditionType.PROGRESSING).message
    assert "CUDA error" in loud
    quiet = decided(replace(observed, refused_texts=frozenset({loud})))
    assert condition(quiet, ConditionType.PROGRESSING).message == conditions.WITHHELD
    assert condition(quiet, ConditionType.HEAD_READY).message != conditions.WITHHELD
    assert quiet.status.trainers.restarts == 1


def test_status_without_its_texts_keeps_everything_else() -> None:
    status = decided(failed_trainers(serving())).status
    bare, messages = conditions.without_messages(status)
    assert {c.message for c in status.conditions} == messages | {""}
    assert {c.message for c in bare.conditions} == {conditions.WITHHELD, ""}
    assert [c.status for c in bare.conditions] == [c.status for c in status.conditions]
    assert (bare.trainers, bare.phase) == (status.trainers, status.phase)
    assert conditions.without_messages(bare) == (bare, frozenset())


@pytest.mark.parametrize(
    "before", [DataLoaderJobStatus(), decided(serving()).status], ids=["new", "serving"]
)  # fmt: skip
def test_undecidable_job_is_marked_not_ready_and_otherwise_unchanged(
    before: DataLoaderJobStatus,
) -> None:
    why = conditions.ConditionState(False, "NotUnderstood", f"TypeError: {EMOJI}")
    after = conditions.not_ready(before, why, 3, T0, refused_texts=frozenset())
    ready = after.condition(ConditionType.READY)
    assert ready is not None
    assert (ready.status, ready.reason, ready.message) == ("False", "NotUnderstood", f"TypeError: {EMOJI}")
    assert ready.observed_generation == 3
    assert after.phase is before.phase
    others = [c for c in after.conditions if c.type not in ("Ready", "Stalled")]
    assert others == [c for c in before.conditions if c.type not in ("Ready", "Stalled")]
    stalled = after.condition(ConditionType.STALLED)
    assert stalled is not None
    assert stalled.status == "True"
    assert after.observed_generation == 3
    assert conditions.not_ready(after, why, 3, T0, refused_texts=frozenset()) == after
    assert decided(Observed(job=job(), status=after)).status.phase in (Phase.STARTING, Phase.DEGRADED)
