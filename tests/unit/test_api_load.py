"""Reading manifests: every way in which a file can be wrong is a clear error with its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dataloaderjob.api import ManifestError, load_manifest, parse_manifest
from dataloaderjob.api.load import MAX_NBYTES

GOOD = """\
apiVersion: dataloading.dev/v1alpha1
kind: DataLoaderJob
metadata:
  name: mnist
spec:
  feeders:
    replicas: 2
  trainers:
    job:
      template:
        spec:
          containers:
            - name: trainer
              image: example/mnist:1
              command: [python, train.py]
"""


def refusal(text: str | bytes) -> str:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(text, source="job.yaml")
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param(
            "", "job.yaml: found an empty file; use a manifest that begins with apiVersion", id="empty"
        ),
        pytest.param("# a comment\n---\n", "job.yaml: found an empty file", id="comments-only"),
        pytest.param(
            GOOD + "---\nkind: ConfigMap\n",
            "job.yaml:17: found 2 YAML documents (DataLoaderJob at line 1, ConfigMap at line 17); "
            "use a file with only the DataLoaderJob, without ---",
            id="two-documents",
        ),
        pytest.param(
            "- a\n- b\n", "job.yaml:1: found a list of 2; use a mapping with apiVersion, kind", id="list"
        ),
        pytest.param("just text", 'job.yaml:1: found "just text"; use a mapping', id="text"),
        pytest.param(
            GOOD.replace("    replicas", "\treplicas"), "job.yaml:7: found text that is not YAML", id="tab"
        ),
        pytest.param(GOOD.replace("    replicas", "\treplicas"), "use spaces, not tabs", id="tab-remedy"),
        pytest.param(GOOD + "  - x\n", "job.yaml:16: found text that is not YAML", id="indentation"),
        pytest.param("a: [1, 2\n", "found text that is not YAML", id="open-bracket"),
        pytest.param('a: "x\n', "found text that is not YAML", id="open-quote"),
        pytest.param(
            "a: *nowhere\n", "job.yaml:1: found text that is not YAML (found undefined alias", id="alias"
        ),
        pytest.param(
            "a: !!python/name:os.system\n", "could not determine a constructor for the tag", id="tag"
        ),
        pytest.param("a: \x00\n", "found text that is not YAML", id="control-character"),
        pytest.param("[" * 5000, "found text that is not YAML", id="deep"),
        pytest.param(
            GOOD.replace("    replicas: 2\n", "    replicas: 2\n    replicas: 3\n"),
            "job.yaml:8: spec.feeders.replicas: found the key a second time (first at line 7); use it once",
            id="duplicate-key",
        ),
        pytest.param(
            GOOD.replace("  name: mnist\n", "  name: mnist\n  labels: {yes: a}\n"),
            "job.yaml:5: metadata.labels.yes: found the key yes, which is not a string; use the key in quotes",
            id="bool-key",
        ),
        pytest.param(
            GOOD.replace("replicas: 2", "replicas: 2000"),
            "job.yaml:7: spec.feeders.replicas: found 2000; use a whole number from 0 to 1024",
            id="line-of-a-value",
        ),
        pytest.param(
            GOOD.replace("              image: example/mnist:1\n", ""),
            "job.yaml:13: spec.trainers.job.template.spec.containers[0].image: found no image; use",
            id="line-of-the-part-that-lacks-a-field",
        ),
        pytest.param(
            GOOD.replace("kind: DataLoaderJob", "kind: DataloaderJob"),
            'job.yaml:2: kind: found "DataloaderJob"; use DataLoaderJob',
            id="kind",
        ),
        pytest.param(
            GOOD.encode().replace(b"mnist", b"mn\xffist", 1),
            "job.yaml:4: found byte 0xff, which is not UTF-8; use UTF-8: save the file in that encoding",
            id="latin-1",
        ),
        pytest.param(GOOD.encode("utf-16"), "job.yaml: found UTF-16; use UTF-8", id="utf-16"),
    ],
)
def test_invalid_manifest_text_is_refused_with_its_line(text: str | bytes, message: str) -> None:
    assert message in refusal(text)


def test_problems_are_reported_in_the_order_of_the_file() -> None:
    text = GOOD.replace("replicas: 2", "replicas: 0\n    imge: x").replace(
        "train.py]", "train.py]\n              env: 3"
    )
    assert refusal(text).splitlines() == [
        "job.yaml has 2 problems:",
        "  job.yaml:8: spec.feeders.imge: found an unknown field; use image",
        "  job.yaml:17: spec.trainers.job.template.spec.containers[0].env: found 3; use a list",
    ]


def test_aliases_that_multiply_are_refused_at_once() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    assert "found more than 100000 values that aliases repeat; use fewer aliases" in refusal("\n".join(lines))


def test_an_alias_to_itself_is_refused() -> None:
    assert "found more than 64 levels; use fewer aliases" in refusal("a: &a [*a]\n")


def test_anchors_and_merges_work() -> None:
    text = GOOD.replace(
        "replicas: 2", "resources: {limits: &l {cpu: 2, memory: 1Gi}, requests: {<<: *l, cpu: 1}}"
    )
    assert parse_manifest(text).spec.feeders.resources.requests["memory"].text == "1Gi"


def test_a_date_is_a_string_as_in_kubernetes() -> None:
    text = GOOD.replace("  name: mnist", "  name: mnist\n  annotations: {made: 2026-11-21}")
    assert parse_manifest(text).metadata.annotations == {"made": "2026-11-21"}


def test_a_manifest_is_read_from_a_path_or_a_text(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(GOOD, encoding="utf-8-sig")
    assert load_manifest(path) == load_manifest(str(path)) == load_manifest(GOOD)
    assert load_manifest(GOOD).spec.feeders.replicas == 2


def test_trailing_separator_starts_no_second_document() -> None:
    assert parse_manifest("---\n" + GOOD + "---\n").name == "mnist"


def test_json_is_a_manifest_too() -> None:
    job = parse_manifest(GOOD)
    assert load_manifest(job.model_dump_json(by_alias=True)) == job


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ManifestError, match=r"absent\.yaml: found no such file; use the path of a DataLoaderJob"
    ):
        load_manifest(tmp_path / "absent.yaml")
    with pytest.raises(ManifestError, match="found a folder; use the path of the manifest in it"):
        load_manifest(tmp_path)
    with pytest.raises(ManifestError, match="cannot be read"):
        load_manifest("a\x00b")


def test_file_too_large_for_a_manifest_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "weights.bin"
    with path.open("wb") as file:
        os.truncate(file.fileno(), MAX_NBYTES + 1)
    with pytest.raises(ManifestError, match="found more than 1 MiB"):
        load_manifest(path)
