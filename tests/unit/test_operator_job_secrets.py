"""When the operator tries to create a job's Secret, which it cannot see."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from attached_jobs import attached_pod, decided
from attached_jobs import serving as attached_serving
from observed_jobs import SUPERVISOR, pod, serving

from dataloaderjob_operator.client import ApiError
from dataloaderjob_operator.decide.observed import Observed
from dataloaderjob_operator.keys import AGAIN_S, NEW_S, JobSecrets

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

    def reconcile(self, observed: Observed, at: float, name: str | None = None) -> bool:
        self.now = at
        return asyncio.run(self.secrets.keep(KEY, {"metadata": {"name": name or self.name}}, observed))


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


# The Secret of attached pods, whose name an earlier job of the same name has used


CREATED = "1970-01-01T00:00:00Z"


def attaching(*pods: dict[str, Any], connected: bool = True, created: str = CREATED) -> Observed:
    """A job with attached pods; `connected`: their sidecars have reached the supervisor."""
    supervisor = SUPERVISOR if connected else replace(SUPERVISOR, sidecars=0)
    observed = attached_serving(*pods, **({} if connected else {"supervisor": supervisor}))
    metadata = observed.job.metadata.model_copy(update={"creation_timestamp": created})
    observed = replace(observed, job=observed.job.model_copy(update={"metadata": metadata}))
    return replace(observed, status=decided(observed, 1000).status)


class Taken(Server):
    """A name that is taken until the garbage collector comes."""

    def __init__(self, free_at: int) -> None:
        super().__init__()
        self.free_at = free_at

    async def create(self, manifest: Any) -> bool:
        self.asked += 1
        return self.asked == self.free_at


def taken(free_at: int) -> Run:
    run = Run()
    run.server = Taken(free_at)
    run.secrets = JobSecrets(run.server, lambda: run.now, now=lambda: run.now)  # type: ignore[arg-type]
    return run


def test_stale_secret_of_an_earlier_job_is_replaced_once_it_is_gone() -> None:
    run, observed = taken(free_at=4), attaching()
    made = [run.reconcile(observed, 5.0 * n, "mnist-attach") for n in range(20)]
    assert (made.index(True), run.server.asked) == (6, 4), "each ten seconds, and not after the creation"


def test_old_job_does_not_ask_again_for_a_secret_that_serves() -> None:
    run, observed = taken(free_at=99), attaching(attached_pod())
    for n in range(100):
        run.reconcile(observed, NEW_S + n * AGAIN_S, "mnist-attach")
    assert run.server.asked == 1


def test_secret_that_a_stranger_made_is_asked_for_until_sidecars_connect() -> None:
    run, observed = taken(free_at=3), attaching(attached_pod(), connected=False)
    made = [run.reconcile(observed, NEW_S + n * AGAIN_S, "mnist-attach") for n in range(5)]
    assert (made.index(True), run.server.asked) == (2, 5)


def test_attached_pod_that_gets_a_node_has_only_its_own_secret_created() -> None:
    run = taken(free_at=1)
    for name in ("mnist-key-u", "mnist-attach"):
        run.reconcile(attaching(), NEW_S, name)
    before = run.server.asked
    for name in ("mnist-key-u", "mnist-attach"):
        run.reconcile(attaching(attached_pod()), NEW_S + 1, name)
    assert run.server.asked == before + 1
