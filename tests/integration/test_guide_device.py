"""The code of docs/guide/device.md, as printed but for `cuda`, which becomes `cpu`; and the example that it names."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from documents import ROOT
from PIL import Image
from rig import Rig

GUIDE = (ROOT / "docs/guide/device.md").read_text()
CODE = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
EXAMPLE = ROOT / "examples/images"


def png(number: int) -> bytes:
    """Its upper rows are darker; the part that was cut out says so where it began."""
    rows = np.tile((np.arange(40, dtype=np.uint8) + number)[:, None, None], (1, 48, 3))
    Image.fromarray(rows).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


class Pairs(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"picture": png(i), "mask": png(i), "jpeg": png(i), "x": torch.ones(3), "y": i}


def run(code: str, **names: Any) -> list[Any]:
    """The batches of an epoch."""
    made: dict[str, Any] = {"torch": torch, "dataset": Pairs(), "model": torch.nn.Linear(3, 1), **names}
    exec(code.replace('device="cuda"', 'device="cpu"'), made)
    return list(made["loader"])


def test_page_has_three_code_blocks() -> None:
    assert len(CODE) == 3


def test_a_loader_with_a_device_gives_its_batches_there() -> None:
    code = "from dataloaderjob import DataLoader\nfrom dataloaderjob.collate import keep_bytes\n" + CODE[0]
    with Rig():
        (batch,) = run(code.replace("256,", "256, collate_fn=keep_bytes,"))
    assert batch["x"].device.type == "cpu"


def test_a_stage_has_the_bytes_that_feeders_read() -> None:
    def decoded(views: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.asarray(Image.open(io.BytesIO(view.numpy()))).copy()) for view in views]

    with Rig():
        (batch,) = run(CODE[1], decoded=decoded, augmented=lambda pictures, _: torch.stack(pictures))
    assert batch["x"][:, 0, 0, 0].tolist() == batch["y"].tolist() == list(range(12))


def test_picture_and_mask_are_cut_in_the_same_place() -> None:
    with Rig(feeders=2):
        torch.manual_seed(5)
        batches = run(CODE[2])
        torch.manual_seed(5)
        again = run(CODE[2])
    assert [batch["y"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert all(torch.equal(batch["picture"], batch["mask"]) for batch in batches)
    assert batches[0]["picture"].shape == (4, 24, 32, 3)
    tops = torch.cat([batch["picture"][:, 0, 0, 0] - batch["y"] for batch in batches])
    assert len(set(tops.tolist())) > 3, "cut at random"
    assert all(torch.equal(one["picture"], two["picture"]) for one, two in zip(batches, again, strict=True))


def shape(text: str) -> str:
    """What stays of an output whatever was measured or learned."""
    return re.sub(r"[\d,.]*\d", "#", text)


@pytest.mark.system  # the photographs of the package mate-backgrounds
def test_the_example_runs_as_printed_on_photographs(tmp_path: Path) -> None:
    commands, output = re.findall(
        r"^```(?:sh|text)\n(.*?)^```", (EXAMPLE / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert re.findall(r"^python (\S+)", commands, re.MULTILINE) == [
        "examples/images/pictures.py", "examples/images/train.py",
    ]  # fmt: skip

    def said(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shown = said(str(EXAMPLE / "pictures.py"), "--each", "5") + said(str(EXAMPLE / "train.py"))
    assert "60 pictures of 12 photographs in data/images" in shown
    assert shape(shown) == shape(output)
