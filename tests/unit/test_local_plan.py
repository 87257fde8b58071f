"""What one machine makes of a manifest: commands, environments, settings, and what it ignores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from dataloaderjob.api import parse_object
from dataloaderjob.api.environment import expand
from dataloaderjob.core.errors import InputError
from dataloaderjob.local.plan import RunPlan, inherited_env, plan
from dataloaderjob.local.run import check, recorded
from dataloaderjob.local.service import plan as private_plan

FOLDER = Path("/job")


def job(*, trainer: dict[str, Any] | None = None, container: dict[str, Any] | None = None, **spec: Any):
    first = {"name": "trainer", "image": "x", "command": ["python", "train.py"], **(container or {})}
    return parse_object(
        {
            "apiVersion": "dataloading.dev/v1alpha1",
            "kind": "DataLoaderJob",
            "metadata": {"name": "small"},
            "spec": {
                "trainers": {"job": {"template": {"spec": {"containers": [first]}}, **(trainer or {})}},
                **spec,
            },
        }
    )


def planned(env: dict[str, str] | None = None, **parts: Any) -> RunPlan:
    return plan(job(**parts), folder=FOLDER, env=env or {}, master_port=4567)


def test_replicas_of_one_process_are_ranks_of_this_machine():
    trainers = planned(trainer={"replicas": 2}).trainers
    wanted = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [[t.env[name] for name in wanted] for t in trainers] == [
        ["0", "2", "0", "2", "127.0.0.1", "4567"],
        ["1", "2", "1", "2", "127.0.0.1", "4567"],
    ]


def test_replicas_of_more_processes_are_nodes_of_torchrun():
    (env,) = [t.env for t in planned(trainer={"processesPerPod": 2}).trainers]
    assert [env[f"PET_{name}"] for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE")] == ["1", "0", "2"]
    assert "RANK" not in env


def test_loader_variables_come_from_the_manifest():
    (trainer,) = planned(feeders={"replicas": 2, "processesPerPod": 3}, loader={"prefetch": 5}).trainers
    assert trainer.env["DATALOADERJOB_FEEDERS"] == "6"
    assert trainer.env["DATALOADERJOB_PREFETCH"] == "5"
    assert "DATALOADERJOB_ALLOW_PICKLE" not in trainer.env
    (usual,) = planned().trainers
    assert "DATALOADERJOB_PREFETCH" not in usual.env, "the number of feeders decides"
    (trusting,) = planned(loader={"allowPickle": True}).trainers
    assert trusting.env["DATALOADERJOB_ALLOW_PICKLE"] == "1", "the trainer's side alone decides"


def test_without_ray_the_manifests_ray_part_is_reported_as_ignored():
    found = job(ray={"managed": {"version": "2.60"}})
    assert "spec.ray" not in plan(found, folder=FOLDER, env={}, master_port=1).ignored
    made = plan(found, folder=FOLDER, env={}, master_port=1, provider="local")
    assert "spec.ray" in made.ignored
    assert made.service.provider == "local"
    assert made.service.feeder_env["PYTHONHASHSEED"] == "0"


def test_launcher_and_run_variables_are_not_inherited():
    env = {
        "RANK": "3",
        "PET_NNODES": "9",
        "DATALOADERJOB_SOCKET": "/x",
        "RAY_ADDRESS": "y",
        "HOME": "/h",
        "PATH": "/a",
    }
    assert inherited_env(env) == {"HOME": "/h", "PATH": f"{Path(sys.executable).parent}:/a"}


def test_variables_and_command_are_expanded_as_in_kubernetes():
    env = [
        {"name": "A", "value": "1"},
        {"name": "B", "value": "$(A)$(RANK)-$$(A)-$(NONE)"},
        {"name": "C", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    ]
    (trainer,) = planned(container={"env": env, "args": ["--b=$(B)"]}).trainers
    assert trainer.env["B"] == "10-$(A)-$(NONE)"
    assert "C" not in trainer.env
    assert trainer.command == ("python", "train.py", "--b=10-$(A)-$(NONE)")


@pytest.mark.parametrize(
    ("text", "expanded"), [("$(A)", "1"), ("$$(A)", "$(A)"), ("$A ${A} $", "$A ${A} $"), ("$(B)", "$(B)")]
)
def test_references_in_a_text_are_expanded(text: str, expanded: str):
    assert expand(text, {"A": "1"}) == expanded


def test_service_is_sized_for_all_replicas_together():
    made = planned(
        trainer={"replicas": 2, "processesPerPod": 2},
        loader={
            "memoryPerProcess": "512Mi",
            "poolSize": "100Mi",
            "checksum": True,
            "batchTimeoutSeconds": 9,
            "allowPickle": True,
        },
        feeders={"replicas": 3},
        ray={
            "managed": {
                "tuning": {"workerRegisterTimeoutSeconds": 77, "healthCheck": {"periodMs": 2500}},
                "tasks": {"cpus": 3},
            }
        },
    ).service
    loader = made.loader
    assert (loader.processes, loader.shared_memory_nbytes, loader.pool_nbytes) == (4, 2 << 30, 100 << 20)
    assert (made.num_feeders, loader.checksum, loader.batch_deadline_s) == (3, True, 9.0)
    assert made.tuning.worker_register_timeout_s == 77
    assert made.tuning.health_check_period_s == 2.5
    assert made.tasks.cpus == 3


def test_feeders_see_only_the_variables_of_their_own_container():
    made = planned(
        {"HOME": "/h"},
        feeders={
            "template": {"spec": {"containers": [{"name": "feeder", "env": [{"name": "X", "value": "1"}]}]}}
        },
        container={"env": [{"name": "Y", "value": "1"}]},
    )
    assert made.service.feeder_env["X"] == "1"
    assert "Y" not in made.service.feeder_env
    assert "X" not in made.service.env
    assert made.service.feeder_env["HOME"] == "/h"


def test_data_variables_reach_trainers_and_feeders_below_their_own():
    made = planned(
        data={
            "volumes": [{"name": "d", "emptyDir": {}}],
            "volumeMounts": [{"name": "d", "mountPath": "/d"}],
            "envFrom": [{"secretRef": {"name": "s"}}],
            "env": [
                {"name": "ROOT", "value": "/d"},
                {"name": "A", "value": "1"},
                {"name": "K", "valueFrom": {}},
            ],
        },
        container={"env": [{"name": "TRAIN", "value": "$(ROOT)/train"}, {"name": "A", "value": "2"}]},
    )
    (trainer,), feeders = made.trainers, made.service.feeder_env
    assert (trainer.env["TRAIN"], trainer.env["A"]) == ("/d/train", "2")
    assert (feeders["ROOT"], feeders["A"]) == ("/d", "1")
    assert "TRAIN" not in feeders
    assert "ROOT" not in made.service.env
    for ignored in ("volumes", "volumeMounts", "envFrom", "env[2].valueFrom (K)"):
        assert f"spec.data.{ignored}" in made.ignored


def test_sidecar_variables_reach_only_the_sidecar():
    made = planned(
        {"HOME": "/h"},
        sidecar={"env": [{"name": "MALLOC_ARENA_MAX", "value": "2"}], "securityContext": {"runAsUser": 1}},
    )
    assert made.service.sidecar_env is not None
    assert (made.service.sidecar_env["MALLOC_ARENA_MAX"], made.service.sidecar_env["HOME"]) == ("2", "/h")
    assert "MALLOC_ARENA_MAX" not in {**made.service.env, **made.service.feeder_env, **made.trainers[0].env}
    assert "spec.sidecar.securityContext" in made.ignored


def test_trainers_and_feeders_run_in_or_below_the_manifests_folder():
    assert planned().folder == planned().service.feeder_cwd == FOLDER
    assert planned(container={"workingDir": "src"}).folder == FOLDER / "src"


def test_ignored_fields_are_reported_and_defaults_are_not():
    assert planned().ignored == ("spec.trainers.job.template.spec.containers[0].image",)
    made = planned(
        container={
            "resources": {"limits": {"cpu": "1"}},
            "volumeMounts": [],
            "env": [{"name": "C", "valueFrom": {}}],
        },
        feeders={"image": "y", "resources": {"limits": {"cpu": "2", "memory": "3Gi"}}},
        ttlSecondsAfterFinished=2,
    )
    assert made.ignored == (
        "spec.ttlSecondsAfterFinished",
        "spec.feeders.resources",
        "spec.feeders.image",
        "spec.trainers.job.template.spec.containers[0].image",
        "spec.trainers.job.template.spec.containers[0].resources",
        "spec.trainers.job.template.spec.containers[0].volumeMounts",
        "spec.trainers.job.template.spec.containers[0].env[0].valueFrom (C)",
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        pytest.param({"container": {"workingDir": "no"}}, "is not a folder", id="folder"),
        pytest.param(
            {"container": {"command": ["no-such-program"]}},
            "'no-such-program' was found neither",
            id="program",
        ),
        pytest.param({"container": {"command": ["./train"]}}, "'./train' was found neither", id="file"),
        pytest.param(
            {"ray": {"managed": {"version": "2.99.1"}}},
            "version is 2.99.1, but this machine has Ray 2",
            id="ray",
        ),
    ],
)
def test_impossible_plan_is_refused_before_anything_starts(tmp_path: Path, parts: dict, message: str):
    with pytest.raises(InputError, match=message):
        check(plan(job(**parts), folder=tmp_path, env={}, master_port=1))
    check(plan(job(), folder=tmp_path, env={}, master_port=1))


def test_private_service_serves_local_ranks_with_their_import_path():
    env = {"LOCAL_WORLD_SIZE": "2", "RANK": "1", "DATALOADERJOB_PATH": "/a:/b", "X": "1"}
    made = private_plan(FOLDER, 3, env)
    assert (made.num_feeders, made.loader.processes) == (3, 2)
    assert made.feeder_env["PYTHONPATH"] == "/a:/b"
    assert "PYTHONPATH" not in made.env
    assert made.env == {"LOCAL_WORLD_SIZE": "2", "X": "1"}
    assert (made.provider, made.feeder_env["PYTHONHASHSEED"]) == ("local", "0")
    assert private_plan(FOLDER, 1, {"PYTHONHASHSEED": "7"}).feeder_env["PYTHONHASHSEED"] == "7"


def test_recorded_run_passes_the_folder_to_trainers_and_not_to_feeders(tmp_path: Path) -> None:
    made = recorded(planned(trainer={"replicas": 2}), tmp_path / "new" / "record")
    assert [t.env["DATALOADERJOB_RECORD"] for t in made.trainers] == [str(tmp_path / "new" / "record")] * 2
    assert (tmp_path / "new" / "record").is_dir()
    assert "DATALOADERJOB_RECORD" not in made.service.feeder_env


def test_a_record_needs_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--record requires a writable folder, .*file is not one"):
        recorded(planned(), tmp_path / "file")


def test_image_entrypoint_applies_on_clusters_only():
    with pytest.raises(
        InputError,
        match=r"has no command, and `dataloaderjob run` does not use the image.*containers\[0\]\.command",
    ):
        planned(container={"command": [], "args": ["--lr", "1"]})
