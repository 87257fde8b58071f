"""Crafted batches name every class of a process in every way: only listed classes come out, and nothing else happens.

The walk itself is `tests/support/class_walk.py`, a program, because it imports hundreds of modules.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FEW = ("PIL.Image", "PIL.PngImagePlugin", "transformers.tokenization_utils_base", "torch_geometric.data")
MORE = (
    "monai.data", "transformers.feature_extraction_utils", "transformers.image_processing_base", "datasets", "lhotse",
    "mmengine.structures", "lightning.pytorch", "accelerate", "torchio", "albumentations", "webdataset", "streaming",
)  # fmt: skip
MAPPINGS = {
    "collections.ChainMap", "collections.Counter", "collections.OrderedDict", "collections.UserDict",
    "transformers.tokenization_utils_base.BatchEncoding", "transformers.feature_extraction_utils.BatchFeature",
    "transformers.image_processing_base.BatchFeature", "lightning.fabric.utilities.data.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict", "lightning.pytorch.utilities.parsing.AttributeDict",
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "addict.addict.Dict", "mmengine.config.config.ConfigDict",
}  # fmt: skip
LHOTSE = {
    "lhotse.cut.mono.MonoCut", "lhotse.cut.multi.MultiCut", "lhotse.cut.data.DataCut", "lhotse.cut.padding.PaddingCut",
    "lhotse.cut.mixed.MixedCut", "lhotse.cut.mixed.MixTrack", "lhotse.supervision.SupervisionSegment",
    "lhotse.supervision.AlignmentItem", "lhotse.audio.recording.Recording", "lhotse.audio.source.AudioSource",
    "lhotse.features.base.Features", "lhotse.array.Array", "lhotse.array.TemporalArray",
}  # fmt: skip
RECORDS = {
    "torch.nn.utils.rnn.PackedSequence", "torch_geometric.loader.neighbor_sampler.Adj",
    "torch_geometric.loader.neighbor_sampler.EdgeIndex", "dataloaderjob.collate.RaggedBytes",
    "speechbrain.dataio.batch.PaddedData",
    "scipy.stats._resampling.MonteCarloMethod",
} | LHOTSE  # fmt: skip
"""Those with methods of their own."""
BUILT_IN = {
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple",
}  # fmt: skip
FACTORIES = {f"builtins.{name}" for name in BUILT_IN} | {
    f"collections.{name}" for name in ("Counter", "OrderedDict", "defaultdict", "deque")
}
ALLOWED: dict[str, set[str]] = {
    "MAPPING": MAPPINGS,
    "mapping": MAPPINGS,
    "DEFAULTDICT": FACTORIES,
    "defaultdict": FACTORIES,
    "dict": {name for name in MAPPINGS if name.endswith("AttributeDict")},
    "own dict": {name for name in MAPPINGS if name.endswith("AttributeDict")},
    "ndarray": {"numpy.matrix", "numpy.rec.recarray", "numpy.char.chararray"},
    "tensor": {"monai.data.meta_tensor.MetaTensor", "torch.nn.parameter.Buffer"},
    "instance": LHOTSE | {
        "monai.data.meta_obj.MetaObj", "mmengine.structures.base_data_element.BaseDataElement",
        "mmengine.structures.instance_data.InstanceData", "mmengine.structures.label_data.LabelData",
        "mmengine.structures.pixel_data.PixelData", "lhotse.custom.CustomFieldMixin", "lhotse.cut.base.Cut",
        "speechbrain.dataio.batch.PaddedBatch",
    },
    "torch_geometric": {"torch_geometric.data.data.Data", "torch_geometric.data.hetero_data.HeteroData"},
    "tokenizers.Encoding": {"tokenizers.Encoding", "builtins.Encoding"},
}  # fmt: skip


def walked(modules: tuple[str, ...]) -> dict[str, Any]:
    program = Path(__file__).parents[1] / "support" / "class_walk.py"
    done = subprocess.run(
        [sys.executable, program, *modules], capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(found: dict[str, Any]) -> None:
    assert found["events"] == [], "a batch opens, imports and starts nothing"
    assert {"builtins.ValueError builtins", "builtins.OSError builtins"} <= set(found["errors"])
    others = {base for error in found["errors"] for base in error.split()[1:]}
    assert others <= {"builtins", "abc", "typing", "collections.abc", "_collections_abc"}, "of errors"
    created = found["created"]
    assert {"collections.OrderedDict"} <= set(created["MAPPING"]), "the walk's batches are whole"
    for way, names in created.items():
        if way in ("NAMEDTUPLE", "DATACLASS"):
            assert set(names) - set(found["records"]) <= RECORDS, way
        elif way == "SEQUENCE":
            modules = {name.rpartition(".")[0] for name in names}
            assert modules - sys.stdlib_module_names <= {"torch", "torch.return_types"}
        elif way == "PIL.Image":
            assert all(name.startswith("PIL.") and "Stub" not in name for name in names)
            assert "PIL.Image.Image" in names
        elif way != "enum":  # its members are there before
            assert set(names) <= ALLOWED[way], way


@pytest.mark.thorough
def test_only_listed_classes_come_out_of_crafted_batches() -> None:
    found = walked(FEW)
    assert found["tried"] > 7000
    check(found)
    assert {"PIL.Image", "torch_geometric", "ndarray", "tokenizers.Encoding"} <= set(found["created"])


@pytest.mark.thorough
def test_batches_import_nothing_where_only_torch_is_imported() -> None:
    found = walked(())
    assert found["events"] == []
    assert "numpy.matrix" in found["created"]["ndarray"]


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_only_listed_classes_come_out_whatever_is_installed() -> None:
    installed = sorted(name for name in importlib.metadata.packages_distributions() if name.isidentifier())
    found = walked(
        (*FEW, *MORE, *(name for name in installed if not name.startswith(("_", "dataloaderjob"))))
    )
    assert found["tried"] > 20000
    check(found)
    assert {"tensor", "instance"} <= set(found["created"])
