"""What the service of one machine says and does when its disk is full. Nothing is started."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataloaderjob.core.errors import InputError
from dataloaderjob.local import cluster as stacks
from dataloaderjob.local.children import Loop
from dataloaderjob.local.cluster import LocalCluster
from dataloaderjob.local.restarts import ServicePart
from dataloaderjob.local.service_plan import ServicePlan


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    plan = ServicePlan(job="j", num_feeders=1, env={}, feeder_env={}, feeder_cwd=Path("/"), provider="local")
    made = LocalCluster(plan, Loop(), show=lambda *_: None, broken=lambda _: None)
    yield made
    made.close()
    assert not made.home.exists()


def test_full_disk_is_reported_with_its_path_and_a_remedy(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stacks, "dump", full)
    with pytest.raises(
        InputError, match=f"the disk of {cluster.home} is full .*set TMPDIR to a folder elsewhere"
    ):
        cluster._dump("sidecar", cluster._sidecar_settings())


def test_settings_are_written_once_so_restarts_need_no_disk_space(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
):
    written: list[Path] = []
    monkeypatch.setattr(stacks, "dump", lambda _, path: written.append(path))
    for _ in range(2):
        cluster._dump("sidecar", cluster._sidecar_settings())
    assert written == [cluster.home / "sidecar.json"]


def test_a_line_that_does_not_fit_on_the_disk_does_not_end_the_run(cluster: LocalCluster):
    (cluster.home / "sidecar.log").symlink_to("/dev/full")
    cluster._words["sidecar"] = []  # type: ignore[assignment]
    cluster._log(ServicePart.SIDECAR, "a line")
    assert cluster._words["sidecar"] == ["a line"]
