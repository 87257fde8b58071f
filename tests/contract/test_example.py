"""The main job's parts: manifest, Dataset, the script's one difference, and a proof that can fail."""

from __future__ import annotations

import gzip
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import fashion_files
import pytest
import torch
from fashion_files import EXAMPLE

from dataloaderjob.api import load_manifest

IMPORT = "from dataloaderjob import DataLoader"
VERDICT = r"run ok: accuracy [01]\.\d{3}, digest [0-9a-f]{16}, equal to the reference"


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return fashion_files.write(tmp_path_factory.mktemp("fashion"))


@pytest.fixture
def fashion(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "fashion", raising=False)
    return importlib.import_module("fashion")


def python(*words: str, cwd: Path, data: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of the example, without the variables of a job or of other runs of the example."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FASHION_", "DATALOADERJOB_"))}
    env |= {"FASHION_MNIST": str(data), "OMP_NUM_THREADS": "1"} | more
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=200
    )


def test_example_manifest_has_two_trainers_two_feeders_and_augmentation():
    spec = load_manifest(EXAMPLE / "dataloaderjob.yaml").spec
    assert (spec.trainers.job.replicas, spec.trainers.job.processes_per_pod, spec.feeders.count) == (2, 1, 2)
    assert spec.trainers.job.container.command == ("python", "train.py", "--augment", "--record", "out")


def test_script_depends_on_this_package_by_one_import_only(tmp_path, data):
    text = (EXAMPLE / "train.py").read_text()
    assert len(re.findall(r"^\s*(?:from|import) dataloaderjob", text, re.MULTILINE)) == 1
    plain = text.replace(IMPORT, "from torch.utils.data import DataLoader")
    assert plain != text
    (tmp_path / "train.py").write_text(plain)
    (tmp_path / "dataloaderjob.py").write_text("raise ImportError('not here')")
    shutil.copy(EXAMPLE / "fashion.py", tmp_path)
    done = python("train.py", "--epochs", "2", "--loader", "inprocess", cwd=tmp_path, data=data)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^epoch \d: accuracy ", done.stdout, re.MULTILINE)) == 2


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, data) -> Path:
    """What a run wrote: for proof.py, and the loader's own record within."""
    out = tmp_path_factory.mktemp("recorded") / "out"
    words = ("train.py", "--epochs", "2", "--loader", "inprocess", "--record", str(out))
    done = python(*words, cwd=EXAMPLE, data=data, DATALOADERJOB_RECORD=str(out / "record"))
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.slow
def test_proof_fails_if_a_digest_differs_or_a_record_is_missing(tmp_path, data, recorded):
    out = shutil.copytree(recorded, tmp_path / "out")
    done = python("proof.py", str(out), cwd=EXAMPLE, data=data)
    assert re.fullmatch(VERDICT, done.stdout.splitlines()[-1]), done.stdout + done.stderr
    assert done.stdout.count("and torch's DataLoader") == 3  # two tests, and the epoch without augmentation

    path = out / "rank-0.json"
    record = json.loads(path.read_text())
    true = record["passes"][2]["digest"]
    record["passes"][2]["digest"] = "0" * 64
    path.write_text(json.dumps(record))
    done = python("proof.py", str(out), cwd=EXAMPLE, data=data)
    assert (done.returncode, "run ok" in done.stdout) == (1, False)
    assert done.stdout.count("equal to") == 2, "what was equal before is shown as it goes"
    assert f"rank 0, epoch 2, train: the rank consumed {'0' * 16}, but num_workers=0 makes {true[:16]}" in (
        done.stderr
    )

    path.write_text(json.dumps(record | {"world": 2}))
    done = python("proof.py", str(out), cwd=EXAMPLE, data=data)
    assert done.returncode == 1
    assert "needs one record for each of 2 ranks, found 0 of 2: run again" in done.stderr


def test_recorded_run_verifies_and_differs_from_another_seeds_run(tmp_path, data, recorded):
    verify = ("-m", "dataloaderjob.local.cli", "verify", str(recorded / "record"))
    done = python(*verify, cwd=tmp_path, data=tmp_path)
    assert done.stdout == "equal: 12 batches of 1 rank, rebuilt with the recorded code\n", done.stderr

    other = str(tmp_path / "other")
    words = ("train.py", "--epochs", "1", "--loader", "inprocess", "--seed", "1")
    assert python(*words, cwd=EXAMPLE, data=data, DATALOADERJOB_RECORD=other).returncode == 0
    done = python(*verify, other, cwd=tmp_path, data=data)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("rank 0, loader 0, epoch 0, batch 0: the keys differ: key number 0 is ")


def test_images_are_normalised_and_augmentation_changes_them(fashion, data):
    plain = fashion.FashionMNIST("train", folder=str(data))
    image, label = plain[7]
    assert (image.shape, image.dtype, type(label)) == ((1, 28, 28), torch.float32, int)
    raw = torch.from_numpy(plain.images[7]).float() / 255
    torch.testing.assert_close(image[0], (raw - fashion.MEAN) / fashion.STD)
    plain.augment = True
    assert len({plain[7][0].numpy().tobytes() for _ in range(8)}) > 1
    assert torch.equal(torch.from_numpy(plain.images[7]).float() / 255, raw)


def test_missing_data_raise_an_error_with_install_instructions(fashion, tmp_path, data):
    with pytest.raises(
        fashion.MissingDataError, match=r"apt-get install dataset-fashion-mnist.*FASHION_MNIST"
    ):
        fashion.FashionMNIST("train", folder=str(tmp_path))
    done = python("train.py", cwd=EXAMPLE, data=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(f"train.py: Fashion-MNIST is needed, and {tmp_path} has no train-images")


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda content: content[:-1], id="cut-short"),
        pytest.param(lambda content: content[:7], id="half-a-header"),
        pytest.param(lambda content: b"\0\0\x0d" + content[3:], id="floats"),
    ],
)
def test_a_damaged_file_is_named(fashion, tmp_path, data, spoil):
    folder = shutil.copytree(data, tmp_path / "data")
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(spoil(gzip.decompress(path.read_bytes()))))
    with pytest.raises(ValueError, match=re.escape(str(path))):
        fashion.FashionMNIST("test", folder=str(folder))


def test_uncompressed_files_are_read_as_well(fashion, tmp_path, data):
    for path in data.glob("*.gz"):
        (tmp_path / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    packed = fashion.FashionMNIST("test", folder=str(data))
    assert (fashion.FashionMNIST("test", folder=str(tmp_path)).images == packed.images).all()
