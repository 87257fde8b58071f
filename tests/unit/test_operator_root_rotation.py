"""A new root key under running jobs: a job keeps the keys that its pods started with, until its head starts anew."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

from observed_jobs import FEEDERS, HEAD, SETUP, T0, TRAINERS, job, serving

from dataloaderjob_operator import names
from dataloaderjob_operator.decide.decision import decide
from dataloaderjob_operator.decide.observed import Key, Observed
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects import OperatorConfig
from dataloaderjob_operator.objects.pods import secret_of
from dataloaderjob_operator.objects.settings import JOB_KEY

ROTATED = replace(SETUP, root_key=b"n" * 32, previous_root=SETUP.root_key)
OLD, NEW = (names.key_secret("mnist", "u", root) for root in (SETUP.root_key, ROTATED.root_key))


def wanted(observed: Observed, setup: OperatorConfig) -> dict[Key, Manifest]:
    found = decide(observed, setup, T0)
    assert found is not None
    return {(made["kind"], made["metadata"]["name"]): made for made in (*found.apply, *found.later)}


def mounted(made: dict[Key, Manifest]) -> dict[Key, str | None]:
    return {
        key: secret_of(thing["spec"]["template"])
        for key, thing in made.items()
        if key[0] in ("Deployment", "Job")
    }


def begun(setup: OperatorConfig) -> Observed:
    """A serving job whose children this setup made."""
    made = wanted(serving(), setup)
    children: dict[Key, Any] = {**serving().children}
    for key, thing in made.items():
        children[key] = {**thing, "status": children.get(key, {}).get("status", {})}
    return replace(serving(), children=children)


def test_running_job_keeps_its_keys_after_a_rotation():
    running = begun(SETUP)
    made = wanted(running, ROTATED)
    assert set(mounted(made).values()) == {OLD}
    (secret,) = [thing for key, thing in made.items() if key[0] == "Secret"]
    assert secret["metadata"]["name"] == OLD
    assert base64.b64decode(secret["data"][JOB_KEY]) == names.job_key(SETUP.root_key, "u")


def test_pods_that_a_change_of_the_spec_replaces_keep_the_jobs_keys():
    changed = replace(begun(SETUP), job=job(**{"feeders.image": "other:2"}))
    assert set(mounted(wanted(changed, ROTATED)).values()) == {OLD}


def test_next_attempt_of_trainers_keeps_the_keys_of_the_head():
    running = begun(SETUP)
    children = {key: child for key, child in running.children.items() if key != TRAINERS}
    assert mounted(wanted(replace(running, children=children), ROTATED))[HEAD] == OLD


def test_new_and_resumed_jobs_have_keys_of_the_new_root():
    made = wanted(Observed(job=job()), ROTATED)
    assert [name for kind, name in made if kind == "Secret"] == [NEW]
    ended = (HEAD, FEEDERS, TRAINERS)
    left = {key: child for key, child in begun(SETUP).children.items() if key not in ended}
    assert set(mounted(wanted(replace(serving(), children=left), ROTATED)).values()) == {NEW}


def test_job_with_keys_of_neither_root_gets_those_of_the_current_one():
    unknown = begun(replace(SETUP, root_key=b"x" * 32))
    made = wanted(unknown, ROTATED)
    assert [name for kind, name in made if kind == "Secret"] == [NEW]


def test_after_the_rotation_without_the_previous_root_nothing_changes():
    done = replace(ROTATED, previous_root=None)
    assert mounted(wanted(begun(done), done)) == mounted(wanted(begun(done), ROTATED))
