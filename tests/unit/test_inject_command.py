"""`dataloaderjob inject`: real files, the one that is written, and what is said about the others."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from injecting import FILES, FOLDER, JOB_FILE, LABELED, bert, container, pod, requesting, sidecars

from dataloaderjob.api.injection import inject
from dataloaderjob.local.cli import EXIT_INPUT, main

LABELS_NONE = {"training-runtime.yaml"}
NUM_TEMPLATES = {"pytorchjob.yaml": 2, "volcano.yaml": 2}
"""Templates that get a sidecar, by file; the others have one."""


def run(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    code = main(["inject", *map(str, words)])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def refused(*words: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inject", *map(str, words)]) == EXIT_INPUT
    out, err = capsys.readouterr()
    assert not out
    return err


def write(folder: Path, *documents: Any, name: str = "pods.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump_all(documents, sort_keys=False))
    return path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_real_file_is_injected_once_and_keeps_its_lines(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = ("--job", "bert") if path.name in LABELS_NONE else ()
    once = run("-f", path, "-j", JOB_FILE, *flag, capsys=capsys)
    found = [containers for containers in sidecars(once) if containers]
    assert len(found) == NUM_TEMPLATES.get(path.name, 1)
    assert all(len(containers) == 1 for containers in found)
    (tmp_path / path.name).write_text(once)
    assert run("-f", tmp_path / path.name, "-j", JOB_FILE, *flag, capsys=capsys) == once
    comments = [line for line in path.read_text().splitlines() if "#" in line and path.suffix == ".yaml"]
    left = iter(once.splitlines())
    texts = [line.partition("#")[2] for line in comments]
    assert all(any(text in line for line in left) for text in texts), "comments are kept, in their order"


def test_block_style_files_only_get_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = FOLDER / "documents.yaml"
    made = iter(run("-f", path, "-j", JOB_FILE, capsys=capsys).splitlines())
    assert all(line in made for line in path.read_text().splitlines())


def test_job_and_pods_may_be_in_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(JOB_FILE.read_text() + "---\n" + (FOLDER / "cronjob.yaml").read_text())
    assert sidecars(run("-f", path, capsys=capsys))


def test_file_may_come_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (FOLDER / "cronjob.yaml").read_text()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run("-f", "-", "-j", JOB_FILE, capsys=capsys) == run(
        "-f", FOLDER / "cronjob.yaml", "-j", JOB_FILE, capsys=capsys
    )


def test_in_place_changes_the_file_and_keeps_its_mode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, link = write(tmp_path, pod()), tmp_path / "link.yaml"
    path.chmod(0o640)
    link.symlink_to(path)
    assert run("-f", link, "-j", JOB_FILE, "--in-place", capsys=capsys) == ""
    assert sidecars(path.read_text())[0]
    assert path.stat().st_mode & 0o777 == 0o640
    assert link.is_symlink()
    before = path.stat()
    run("-f", path, "-j", JOB_FILE, "--in-place", capsys=capsys)
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert sorted(os.listdir(tmp_path)) == ["link.yaml", "pods.yaml"]


def test_output_goes_to_the_named_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, pod())
    run("-f", path, "-j", JOB_FILE, "-o", tmp_path / "out.yaml", capsys=capsys)
    assert sidecars((tmp_path / "out.yaml").read_text())[0]
    assert not sidecars(path.read_text())[0]


def test_file_has_the_renderers_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = run("-f", write(tmp_path, pod()), "-j", JOB_FILE, "--sidecar-image", "x:1", capsys=capsys)
    assert yaml.safe_load(made) == inject(pod(), bert(image="x:1"))


def test_image_and_pull_secret_come_from_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--sidecar-image", "mirror/sidecar:1", "--sidecar-pull-secret", "registry")
    made = yaml.safe_load(run("-f", write(tmp_path, pod()), "-j", JOB_FILE, *words, capsys=capsys))
    assert made["spec"]["initContainers"][0]["image"] == "mirror/sidecar:1"
    assert made["spec"]["imagePullSecrets"] == [{"name": "registry"}]


def test_helpers_are_injected_only_with_their_own_label(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ray: dict[str, Any] = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    workers = ray["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    del workers[0]["template"]["metadata"]
    made = run("-f", write(tmp_path, ray), "-j", JOB_FILE, "--job", "bert", capsys=capsys)
    assert [len(found) for found in sidecars(made)] == [1, 0]
    ray["spec"]["rayClusterSpec"]["headGroupSpec"]["template"] |= LABELED
    made = run("-f", write(tmp_path, ray), "-j", JOB_FILE, "--job", "bert", capsys=capsys)
    assert [len(found) for found in sidecars(made)] == [1, 1]


def test_flag_labels_the_templates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = {"apiVersion": "v1", "kind": "Pod", "spec": pod()["spec"]}
    made = yaml.safe_load(run("-f", write(tmp_path, bare), "-j", JOB_FILE, "--job", "bert", capsys=capsys))
    assert made["metadata"]["labels"] == {"dataloading.dev/inject": "bert"}


SET = {"apiVersion": "acme.dev/v1", "kind": "PodSet", "spec": {"template": {"spec": {"containers": []}}}}
TRAIN = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "metadata": {"name": "t"}}
ON_OBJECT = {
    "apiVersion": "batch/v1", "kind": "Job", **LABELED,
    "spec": {"template": {"spec": {"containers": [container("a")]}}},
}  # fmt: skip
NOTICES = {
    "an unknown kind with an image": (
        {"apiVersion": "sparkoperator.k8s.io/v1beta2", "kind": "SparkApplication", "spec": {"image": "spark:4"}},
        "SparkApplication of sparkoperator.k8s.io/v1beta2 is left unchanged, because the place",
    ),
    "a TrainJob whose own label reaches no pod": (
        {**TRAIN, "metadata": {"labels": {"dataloading.dev/inject": "bert"}}},
        "is left unchanged: its pods come from a",
    ),
    "a cron workflow": (
        {"apiVersion": "argoproj.io/v1alpha1", "kind": "CronWorkflow", "spec": {}},
        "left unchanged: its templates are not pod templates",
    ),
    "an unknown kind with containers": (SET, "line 1: PodSet of acme.dev/v1 is left unchanged, because the place"),
    "a TrainJob": (TRAIN, "line 1: TrainJob of trainer.kubeflow.org/v1alpha1 is left unchanged: its pods come from a"),
    "a label of the object": (
        ON_OBJECT, "the label dataloading.dev/inject is on the Job, not on its pods: move it to spec.template.metadata",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("thing", "notice"), NOTICES.values(), ids=NOTICES)
def test_object_that_is_left_alone_is_reported(
    thing: Any, notice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, thing, pod())
    assert main(["inject", "-f", str(path), "-j", str(JOB_FILE)]) == 0
    out, err = capsys.readouterr()
    assert notice in err
    assert next(yaml.safe_load_all(out)) == thing


def test_objects_without_pods_pass_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = {"apiVersion": "v1", "kind": "Service", **LABELED, "spec": {"selector": LABELED}}
    assert main(["inject", "-f", str(write(tmp_path, service, pod())), "-j", str(JOB_FILE)]) == 0
    assert capsys.readouterr().err == ""


TWO = pod(container("a"), container("b"))
ERRORS: dict[str, tuple[list[Any], tuple[str, ...], str]] = {
    "no label": ([{**pod(), "metadata": {}}], (), "no pod template has the label dataloading.dev/inject"),
    "another job": (
        [{**pod(), "metadata": {"labels": {"dataloading.dev/inject": "gpt"}}}], (),
        "line 1, the pod: the job is gpt, but",
    ),
    "another namespace": (
        [{**pod(), "metadata": {**LABELED["metadata"], "namespace": "b"}}], ("a",),
        "the pods are in namespace b, but DataLoaderJob bert is in a",
    ),
    "a label that is a number": (
        [{**pod(), "metadata": {"labels": {"dataloading.dev/inject": 83}}}], (),
        "line 5: the label dataloading.dev/inject is 83, not the name of a job: write the name, in quotes",
    ),
    "a list of objects": ([[pod(), pod()]], (), "line 1: a list of objects is left unchanged: make it the items of"),
    "only pods that the cluster injects": (
        [{"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "spec": {"templates": [LABELED]}}], (),
        "Workflow of argoproj.io/v1alpha1 is left unchanged: the cluster injects its pods when it creates them",
    ),
    "a field of a wrong type": (
        [pod(container("a", resources=["cpu"]))], (), "resources of the container a must be a mapping",
    ),
    "runtime without jobs": (
        [{
            "apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainingRuntime",
            "spec": {
                "template": {"spec": {"replicatedJobs": [None, 3, {"template": {"spec": {"template": LABELED}}}]}}
            },
        }], (), "the pod has no spec.containers",
    ),
    "which container": ([pod(), TWO], (), "line 11, the pod: the pod has the containers a, b, and none requests"),
    "a wrong amount": (
        [pod(container("a", resources={"limits": {"cpu": "much", "memory": "1"}}))], (),
        "limits.cpu of the container a: found 'much'",
    ),
    "in a template": (
        [{"apiVersion": "apps/v1", "kind": "Deployment", "spec": {"template": {**LABELED, "spec": TWO["spec"]}}}], (),
        "line 4, spec.template: the pod has the containers a, b",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("things", "namespace", "message"), ERRORS.values(), ids=ERRORS)
def test_error_names_file_line_and_path_and_nothing_is_written(
    things: list[Any],
    namespace: tuple[str, ...],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    job = yaml.safe_load(JOB_FILE.read_text())
    job["metadata"] |= {"namespace": name for name in namespace}
    path, jobs = write(tmp_path, *things), write(tmp_path, job, name="job.yaml")
    before = path.read_text()
    error = refused("-f", path, "-j", jobs, "--in-place", capsys=capsys)
    assert str(path) in error
    assert message in error
    assert path.read_text() == before


BAD = {
    "a Helm template": ("kind: Pod\nmetadata: {{ .Values.metadata }}\n", "use the output of helm template"),
    "no YAML": ("a: [", "not YAML"),
    "a key twice": (yaml.safe_dump(pod()) + "kind: Pod\n", "a second time"),
    "UTF-16": ("kind: Pod".encode("utf-16"), "UTF-16"),
    "aliases without end": ("a: &a [" + "1," * 400 + "]\nb: &b [" + "*a," * 400 + "]\n", "fewer aliases"),
}


@pytest.mark.parametrize(("content", "message"), BAD.values(), ids=BAD)
def test_unreadable_file_is_an_error(
    content: str | bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused("-f", path, "-j", JOB_FILE, capsys=capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-f", "missing.yaml", "-j", JOB_FILE), "missing.yaml cannot be read"),
        (("-f", JOB_FILE.parent, "-j", JOB_FILE), "cannot be read"),
        (("-f", "-", "-j", "-"), "standard input can be only one of the files"),
        (("-f", "-", "-j", JOB_FILE, "--in-place"), "--in-place changes the file"),
        (("-f", FILES[0], "-j", JOB_FILE, "--in-place", "-o", "x"), "--in-place changes the file"),
        (("-f", FILES[0]), "has no DataLoaderJob: give the job's manifest with -j"),
        (
            ("-f", FILES[0], "-j", JOB_FILE, "-o", "missing/x"),
            "missing/x cannot be written (No such file or directory)",
        ),
        (("-f", FILES[0], "-j", JOB_FILE, "-o", ""), "an empty name cannot be written"),
    ],
)
def test_wrong_words_are_an_error(words: Any, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(*words, capsys=capsys)


def test_job_as_the_cluster_reports_it_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(JOB_FILE.read_text())
    job["metadata"] |= {"uid": "1", "generation": 1, "managedFields": [{}], "namespace": "team"}
    job["status"] = {"phase": "Serving"}
    jobs = tmp_path / "live.json"
    jobs.write_text(json.dumps(job))
    assert sidecars(run("-f", write(tmp_path, pod()), "-j", jobs, capsys=capsys))[0]


def test_accelerator_decides_between_two_containers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thing = pod(container("a"), container("b", **requesting(nvidia_com__gpu="1")))
    made = yaml.safe_load(run("-f", write(tmp_path, thing), "-j", JOB_FILE, capsys=capsys))
    assert ["env" in c for c in made["spec"]["containers"]] == [False, True]


README_STYLE = """\
apiVersion: batch/v1
kind: Job
metadata: {name: t}   # the job
spec:
  template:
    metadata: {labels: {dataloading.dev/inject: bert}}   # this line
    spec: {restartPolicy: Never, containers: [
      # the one that trains
      {name: train, image: "acme:1", args: [--map, 22:22, '+.5'], env: [{name: START, value: 22:30}]}  # args
    ]}
"""


def test_braces_keep_comments_and_values_as_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(README_STYLE)
    once = run("-f", path, "-j", JOB_FILE, capsys=capsys)
    left = iter(once)
    assert all(character in left for character in README_STYLE), "characters are only added"
    assert [len(found) for found in sidecars(once)] == [1]
    path.write_text(once)
    assert run("-f", path, "-j", JOB_FILE, capsys=capsys) == once


CONFIG = """\
kind: ConfigMap
apiVersion: v1
data:
  9000: default/svc:9000
  on: =
  a: x\t# tab
---
"""


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_byte_order_mark_of_a_file_is_kept(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"pod.{suffix}"
    text = yaml.safe_dump(pod()) if suffix == "yaml" else json.dumps(pod())
    path.write_text(text, encoding="utf-8-sig")
    once = run("-f", path, "-j", JOB_FILE, capsys=capsys)
    path.write_text(text)
    assert once == "\ufeff" + run("-f", path, "-j", JOB_FILE, capsys=capsys)


def test_other_documents_pass_whatever_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "all.yaml"
    path.write_text(CONFIG + (FOLDER / "cronjob.yaml").read_text())
    assert run("-f", path, "-j", JOB_FILE, capsys=capsys).startswith(CONFIG)


def test_jobs_in_a_list_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(JOB_FILE.read_text())
    together = {"apiVersion": "v1", "kind": "List", "items": [job, pod()]}
    alone = {"apiVersion": "v1", "kind": "List", "items": [{**job, "metadata": {"name": "gpt"}}, job]}
    made = run("-f", write(tmp_path, together), capsys=capsys)
    assert [len(found) for found in sidecars(made)] == [1]
    jobs = write(tmp_path, alone, name="jobs.yaml")
    assert sidecars(run("-f", write(tmp_path, pod()), "-j", jobs, capsys=capsys))[0]


def test_one_of_two_jobs_of_a_name_is_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = yaml.safe_load(JOB_FILE.read_text())
    two = [{**job, "metadata": {**job["metadata"], "namespace": name}} for name in "ab"]
    jobs = write(tmp_path, *two, name="jobs.yaml")
    assert "namespaces: a, b" in refused("-f", write(tmp_path, pod()), "-j", jobs, capsys=capsys)
    placed = pod()
    placed["metadata"] = {**placed["metadata"], "namespace": "b"}
    assert sidecars(run("-f", write(tmp_path, placed), "-j", jobs, capsys=capsys))[0]


def test_pods_of_a_pod_list_need_no_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    item = {name: value for name, value in pod().items() if name not in ("apiVersion", "kind")}
    path = write(tmp_path, {"apiVersion": "v1", "kind": "PodList", "items": [item]})
    assert [len(found) for found in sidecars(run("-f", path, "-j", JOB_FILE, capsys=capsys))] == [1]


def test_json_with_tabs_and_several_values_is_injected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = {**pod(), "note": "\U0001f680 \x7f", "periodSeconds": 10.0}
    text = json.dumps(first, indent="\t").replace("10.0", "1e1") + "\n" + json.dumps(pod()) + "\n"
    path = tmp_path / "pods.json"
    path.write_text(text)
    once = run("-f", path, "-j", JOB_FILE, capsys=capsys)
    left = iter(once)
    assert all(character in left for character in text)
    decoder = json.JSONDecoder()
    one, end = decoder.raw_decode(once)
    two, _ = decoder.raw_decode(once, end + 1)
    assert one["note"] == first["note"]
    assert [len(made["spec"]["initContainers"]) for made in (one, two)] == [1, 1]
    path.write_text(once)
    assert run("-f", path, "-j", JOB_FILE, capsys=capsys) == once


def test_output_to_a_pipe_is_written_into_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        run("-f", write(tmp_path, pod()), "-j", JOB_FILE, "-o", pipe, capsys=capsys)
        assert sidecars(os.read(reader, 1 << 16).decode())[0]
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_placeholders_of_templates_pass_where_nothing_depends_on_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thing = pod(
        container("a", resources={"limits": {"nvidia.com/gpu": "${GPUS}", "cpu": None, "memory": None}})
    )
    assert sidecars(run("-f", write(tmp_path, thing), "-j", JOB_FILE, capsys=capsys))[0]


def test_merge_at_the_start_of_a_container_keeps_its_comments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "x: &m {image: acme:1}\n" + yaml.safe_dump({"apiVersion": "v1", "kind": "Pod", **LABELED})
        + "spec:\n  containers:\n  - <<: *m  # shared\n    name: a  # trains\n"
    )  # fmt: skip
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    left = iter(run("-f", path, "-j", JOB_FILE, capsys=capsys).splitlines())
    assert all(line in left for line in text.splitlines())
