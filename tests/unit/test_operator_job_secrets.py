"""When the operator tries to create a job's Secret, which it cannot see."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from observed_jobs import pod, serving

from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.keys import AGAIN_S, JobSecrets

KEY = ("team", "mnist")
STEADY = serving()
SCHEDULED = {"conditions": [{"type": "PodScheduled", "status": "True"}]}


def with_pod(**status: Any) -> Observed:
    return replace(STEADY, pods=(*STEADY.pods, pod("feeder", started=False, **status)))


STARTING, QUEUEING = with_pod(**SCHEDULED), with_pod()


class Server:
    def __init__(self) -> None:
        self.asked, self.error = 0, None

    async def create(self, manifest: Any) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.asked == 1


class Run:
    """The reconciles of one operator, at moments of the test's choice."""

    def __init__(self) -> None:
        self.server, self.now, self.name = Server(), 0.0, "mnist-keys"
        self.secrets = JobSecrets(self.server, lambda: self.now)  # type: ignore[arg-type]

    def reconcile(self, observed: Observed, at: float) -> bool:
        self.now = at
        return asyncio.run(self.secrets.keep(KEY, {"metadata": {"name": self.name}}, observed))


def test_secret_is_created_at_the_first_reconcile_and_not_while_idle():
    run = Run()
    assert run.reconcile(STEADY, 0.0)
    assert not any(run.reconcile(observed, 600.0 * n) for n, observed in enumerate((STEADY, QUEUEING), 1))
    assert run.server.asked == 1


def test_secret_of_another_root_key_is_created_at_once():
    run = Run()
    run.reconcile(STEADY, 0.0)
    run.name = "mnist-keys-of-the-new-root"
    run.reconcile(STEADY, 1.0)
    assert run.server.asked == 2


def test_starting_pods_have_the_secret_created_at_once_and_periodically():
    run = Run()
    run.reconcile(STEADY, 0.0)
    run.reconcile(STARTING, 600.0)
    assert run.server.asked == 2
    for n in range(100):
        run.reconcile(STARTING, 600.0 + n * AGAIN_S / 50)
    assert run.server.asked == 3


def test_pod_that_gets_a_node_has_the_secret_created_at_once():
    run = Run()
    run.reconcile(STEADY, 0.0)
    run.reconcile(STARTING, AGAIN_S / 10)
    assert run.server.asked == 2


def test_failed_secret_creation_is_retried_at_the_next_reconcile():
    run = Run()
    run.server.error = ApiError(500, "not now")
    with pytest.raises(ApiError):
        run.reconcile(STEADY, 0.0)
    run.server.error = None
    run.reconcile(STEADY, 0.1)
    assert run.server.asked == 2


def test_new_job_of_the_same_name_gets_its_own_secret():
    run = Run()
    run.reconcile(STEADY, 0.0)
    run.secrets.forget(KEY)
    run.reconcile(STEADY, 0.1)
    assert run.server.asked == 2
