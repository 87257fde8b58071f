"""Labelled pods that a second mutating webhook changes after ours: mended, or refused with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from injecting import pod
from injector import Installed
from processes_of_operator import until
from second_webhook import second_webhook, without

from apiserver import ApiServer
from dataloaderjob_operator.decide.refused_pods import refused_pods

PROBE = "startupProbe: Forbidden: may not be set for init containers without restartPolicy=Always"
GUARD = "the sidecar of DataLoaderJob bert has lost its restartPolicy Always"


@pytest.fixture(scope="module")
def installed(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    made = Installed(server, tmp_path_factory.mktemp("second"))
    made.job()
    made.started("--check-seconds=0.2", "--settle-seconds=1")
    until(lambda: made.accepts(pod()), 30, "the first pod is injected")
    yield made
    made.close()


@pytest.mark.parametrize(
    ("fields", "again", "message"),
    [
        pytest.param(("restartPolicy",), "Never", "", id="mended"),
        pytest.param(("restartPolicy", "startupProbe"), "Never", "", id="mended-with-its-probe"),
        pytest.param(("restartPolicy",), "IfNeeded", PROBE, id="refused-by-kubernetes"),
        pytest.param(("restartPolicy", "startupProbe"), "IfNeeded", GUARD, id="refused-by-the-guard"),
    ],
)
def test_sidecar_that_another_webhook_strips_is_mended_or_refused(
    fields: tuple[str, ...], again: str, message: str, installed: Installed, tmp_path: Path
) -> None:
    arguments = installed.server, "zz-second", installed.namespace, tmp_path, without(*fields), again
    with second_webhook(*arguments) as patched:
        until(lambda: (installed.accepts(pod()) or True) and patched, 30, "the other webhook is asked")
        if message:
            text = installed.refusal(pod())
            assert message in text
            assert "another webhook with old API types has removed it; exclude" in reported(text)
        else:
            (sidecar,) = installed.create(pod())["spec"]["initContainers"]
            assert sidecar["restartPolicy"] == "Always"
            assert "startupProbe" in sidecar


def reported(text: str) -> str:
    """The cause that the operator reports on the DataLoaderJob, from the event of the pods' controller."""
    about = {"kind": "Job", "name": "train", "uid": "u"}
    now = datetime.now(UTC).isoformat()
    event = {
        "type": "Warning",
        "message": f"Error creating: {text}",
        "involvedObject": about,
        "lastTimestamp": now,
    }
    (found,) = refused_pods([event])
    return found.cause
