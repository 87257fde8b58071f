"""The first job of the notes, and that of `helm test`: they are taken, and they do what they promise."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from chart import notes, render
from dataloaderjob.api import DataLoaderJob, parse_object

OWN = ("--set", "imageRegistry=own:5000", "--set", "feederImage.tag=v2")
LONG = "a-release-with-a-name-of-which-there-is-much"


def pasted(*options: str, **names: str) -> str:
    """The manifest to paste, as the notes have it."""
    return notes(*options, **names).partition("<<'JOB'\n")[2].partition("\nJOB\n")[0]


def of_the_test(*options: str, release: str = "r") -> str:
    found = render(*options, release=release)
    (made,) = [
        thing for (kind, name), thing in found.items() if kind == "ConfigMap" and name.endswith("-test")
    ]
    return str(made["data"]["job.yaml"])


def job(text: str) -> DataLoaderJob:
    return parse_object(yaml.safe_load(text))


def test_sample_in_the_notes_is_a_job_with_the_releases_image() -> None:
    assert job(pasted()).spec.trainers.job.container.image == "ghcr.io/dataloaderjob/feeder:0.1.0"
    assert job(pasted(*OWN)).spec.trainers.job.container.image == "own:5000/dataloaderjob/feeder:v2"


@pytest.mark.parametrize("make", [pasted, of_the_test])
def test_sample_is_placed_in_a_namespace_of_the_operator(make: Any) -> None:
    assert job(make()).metadata.namespace == "ops"
    assert job(make("--set", "namespaces={a,b}")).metadata.namespace == "a"


@pytest.mark.parametrize("release", ["r", "9", LONG, "with.dots"])
def test_charts_test_job_has_a_valid_name_for_any_release(release: str) -> None:
    assert job(of_the_test(release=release)).name.startswith("test-")


def test_image_pull_secrets_are_passed_on() -> None:
    spec = yaml.safe_load(pasted("--set-json", 'imagePullSecrets=[{"name":"pull"}]'))["spec"]
    assert spec["trainers"]["job"]["template"]["spec"]["imagePullSecrets"] == [{"name": "pull"}]


def test_sample_pods_satisfy_the_restricted_profile() -> None:
    spec = yaml.safe_load(pasted())["spec"]["trainers"]["job"]["template"]["spec"]
    assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    assert spec["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


def test_notes_list_the_commands_for_a_failed_job() -> None:
    text = notes("--set", "namespaces={a}")
    for words in (
        "kubectl describe dlj/first-job -n a",
        "kubectl logs -n a -l dataloading.dev/job=first-job --all-containers",
        "kubectl logs -n ops deployment/r-operator",
        "helm test r -n ops",
    ):
        assert words in text


def test_sample_runs_on_one_machine_too(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(pasted())
    command = [sys.executable, "-m", "dataloaderjob.local.cli", "run", "job.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1024 samples came from feeders, in order and byte for byte" in done.stdout
