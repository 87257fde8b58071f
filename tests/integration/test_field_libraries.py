"""Libraries of fields: graphs, speech, detection, medical imaging. Each gives over feeders what it gives without."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import lhotse
import numpy as np
import pytest
import soundfile
import torch
import torchio
from lhotse.dataset import DynamicBucketingSampler, K2SpeechRecognitionDataset
from lhotse.dataset.input_strategies import AudioSamples
from mmengine.dataset import BaseDataset, DefaultSampler, pseudo_collate
from mmengine.structures import BaseDataElement, InstanceData
from rig import Rig
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import DataLoader as GraphLoader

from dataloaderjob import DataLoader, InputError, context


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """Feeders that can import speechbrain: only reading audio needs torchaudio, whose build is one for CUDA."""
    folder = tmp_path_factory.mktemp("modules") / "torchaudio"
    (folder / "compliance").mkdir(parents=True)
    for name in (
        "functional",
        "transforms",
        "models",
        "pipelines",
        "compliance/__init__",
        "compliance/kaldi",
    ):
        (folder / f"{name}.py").touch()
    (folder / "__init__.py").write_text(
        "__version__ = '2.11.0'\ndef list_audio_backends(): return ['none']\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder.parent))
        with Rig(feeders=2) as made:
            yield made
    for name in [name for name in sys.modules if name.partition(".")[0] in ("torchaudio", "speechbrain")]:
        del sys.modules[name]


class Graphs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> Data:
        x = torch.rand(2 + i % 3, 4) if i % 2 else torch.full((2 + i % 3, 4), float(i))
        return Data(x=x, edge_index=torch.tensor([[0, 1], [1, 0]]), y=i)


class TypedGraphs(Graphs):
    def __getitem__(self, i: int) -> HeteroData:
        made = HeteroData()
        made["a"].x = torch.full((2 + i % 3, 3), float(i))
        made["a", "to", "a"].edge_index = torch.tensor([[0, 1], [1, 0]])
        return made


@pytest.mark.thorough
@pytest.mark.quick("Graphs")
@pytest.mark.parametrize("make", [Graphs, TypedGraphs])
def test_pygs_own_loader_gives_its_batches_without_pickle(rig: Rig, make: Any):
    def given(**more: Any) -> list[Any]:
        torch.manual_seed(0)
        return list(GraphLoader(make(), batch_size=4, shuffle=True, **more))

    ours = [given(num_workers=2, multiprocessing_context=context()) for _ in range(2)]
    reference = given()
    assert [type(batch).__name__ for batch in ours[0]] == [type(batch).__name__ for batch in reference]
    assert [batch.num_graphs for batch in ours[0]] == [4, 4, 4]
    assert [repr(batch) for batch in ours[0]] == [repr(batch) for batch in reference]
    assert _graphs(ours[0]) == _graphs(ours[1]), "each run gives the same"
    assert [batch.ptr.tolist() if make is Graphs else 0 for batch in ours[0]] == [
        batch.ptr.tolist() if make is Graphs else 0 for batch in reference
    ]


def _graphs(batches: list[Any]) -> list[str]:
    return [str(g.to_dict()) for batch in batches for g in batch.to_data_list()]


def subjects(count: int = 8) -> torchio.SubjectsDataset:
    made = [
        torchio.Subject(image=torchio.ScalarImage(tensor=torch.arange(512.0).reshape(1, 8, 8, 8) + i), age=i)
        for i in range(count)
    ]
    noisy = torchio.Compose([torchio.RandomFlip(axes=("LR",)), torchio.RandomNoise(std=(0, 1))])
    return torchio.SubjectsDataset(made, transform=noisy)


@pytest.mark.slow
def test_torchios_loader_draws_the_same_in_each_run(rig: Rig):
    def given() -> list[bytes]:
        torch.manual_seed(0)
        loader = torchio.SubjectsLoader(
            subjects(), batch_size=2, num_workers=2, multiprocessing_context=context()
        )
        return [batch["image"]["data"].numpy().tobytes() for batch in loader]

    first = given()
    assert first == given()
    assert len(set(first)) == 4


def test_torchios_queue_is_refused_by_name(rig: Rig):
    queue = torchio.Queue(subjects(), 8, 2, torchio.UniformSampler(4))
    with pytest.raises(
        InputError, match="such as torchio's Queue, cannot leave the loader's process: with num_workers=0"
    ):
        iter(DataLoader(queue, batch_size=2, num_workers=1))


@pytest.fixture(scope="module")
def cuts(tmp_path_factory: pytest.TempPathFactory) -> lhotse.CutSet:
    folder, made = tmp_path_factory.mktemp("audio"), []
    for i in range(20):
        path = folder / f"{i}.wav"
        soundfile.write(path, np.sin(np.arange(4000 + 977 * i % 4000) / (10 + i)).astype("f4"), 8000)
        recording = lhotse.Recording.from_file(path)
        said = lhotse.SupervisionSegment(f"s{i}", recording.id, 0, recording.duration, text=f"word {i}")
        made.append(
            lhotse.MonoCut(f"c{i}", 0, recording.duration, 0, recording=recording, supervisions=[said])
        )
    return lhotse.CutSet.from_cuts(made)


@pytest.mark.quick("cuts-in-the-batch")
@pytest.mark.parametrize("with_cuts", [False, True], ids=["plain", "cuts-in-the-batch"])
def test_lhotses_dataset_and_sampler_give_torchs_batches_in_each_epoch(rig: Rig, cuts: Any, with_cuts: bool):
    def given(kind: Any) -> list[Any]:
        sampler = DynamicBucketingSampler(cuts, max_duration=2, shuffle=True, num_buckets=2, seed=7)
        dataset = K2SpeechRecognitionDataset(input_strategy=AudioSamples(), return_cuts=with_cuts)
        loader, found = kind(dataset, sampler=sampler, batch_size=None, num_workers=2), []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            found += [
                (b["inputs"].numpy().tobytes(), b["supervisions"]["text"],
                 [c.id for c in b["supervisions"].get("cut", ())]) for b in loader
            ]  # fmt: skip
        return found

    ours = given(DataLoader)
    assert ours == given(torch.utils.data.DataLoader)
    assert sorted(word for _, text, _ in ours for word in text) == sorted(
        2 * [f"word {i}" for i in range(20)]
    )


class Boxes(BaseDataset):
    """A dataset of mmengine's, with samples as mmdet packs them."""

    def load_data_list(self) -> list[dict[str, Any]]:
        return [{"boxes": 1 + i % 3} for i in range(16)]


def pack(found: dict[str, Any]) -> dict[str, Any]:
    sample = BaseDataElement(metainfo={"number": found["sample_idx"]})
    sample.instances = InstanceData(boxes=torch.rand(found["boxes"], 4), labels=torch.arange(found["boxes"]))
    return {"inputs": torch.from_numpy(np.random.rand(3, 4, 4)), "data_samples": sample}


@pytest.mark.slow
def test_mmengine_structures_arrive_and_draws_repeat_in_each_run(rig: Rig):
    def given() -> list[Any]:
        torch.manual_seed(0)
        dataset = Boxes(pipeline=[pack])
        sampler = DefaultSampler(dataset, shuffle=True, seed=1)
        loader = DataLoader(dataset, 4, sampler=sampler, collate_fn=pseudo_collate, num_workers=2)
        return [
            (image.numpy().tobytes(), type(s), s.number, len(s.instances), s.instances.boxes.tolist())
            for batch in loader
            for image, s in zip(batch["inputs"], batch["data_samples"], strict=True)
        ]

    first = given()
    assert first == given()
    assert len({image for image, *_ in first}) == 16
    assert {kind for _, kind, *_ in first} == {BaseDataElement}
    assert [boxes for *_, boxes, _ in first] == [1 + number % 3 for _, _, number, *_ in first]


def words(n: int) -> torch.Tensor:
    return torch.rand(n)


@pytest.mark.slow
def test_speechbrains_padded_batches_arrive_without_pickle(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    # SpeechBrain's import replaces `__init__` and `_reset`, so torchdata's persistent iterators skip their reset.
    for name in ("__init__", "_reset"):
        monkeypatch.setattr(_BaseDataLoaderIter, name, getattr(_BaseDataLoaderIter, name))
    from speechbrain.dataio.batch import PaddedBatch
    from speechbrain.dataio.dataloader import SaveableDataLoader
    from speechbrain.dataio.dataset import DynamicItemDataset
    from speechbrain.utils.data_pipeline import DynamicItem

    def given() -> list[Any]:
        torch.manual_seed(0)
        items = {f"u{i}": {"n": 10 + i % 7} for i in range(12)}
        signal = DynamicItem(takes=["n"], func=words, provides=["signal"])
        dataset = DynamicItemDataset(items, dynamic_items=[signal], output_keys=["id", "signal"])
        loader = SaveableDataLoader(
            dataset, batch_size=4, num_workers=2, collate_fn=PaddedBatch, multiprocessing_context=context()
        )
        return [(type(b), b.id, b.signal.data.numpy().tobytes(), b.signal.lengths.tolist()) for b in loader]

    first = given()
    assert first == given()
    assert [name for _, ids, *_ in first for name in ids] == [f"u{i}" for i in range(12)]
    assert {kind for kind, *_ in first} == {PaddedBatch}
