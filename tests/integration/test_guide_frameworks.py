"""The examples of docs/guide/frameworks.md, run as they are printed."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest
import warm
from documents import ROOT

PAGE = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs" / "guide" / "frameworks.md").read_text()
EXAMPLES = dict(
    re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
)
BEFORE = """
import sys, torch
from batches import Numbers
dataset, path, last_checkpoint, seen = Numbers(130), sys.argv[1], None, []
checkpoint, epochs = {}, 1
model = torch.nn.Linear(7, 1)
train = lambda batch: seen.append(len(batch[0]))
try:
    import lightning
except ImportError:
    module = None
else:
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = model
        def training_step(self, batch, _):
            train(batch)
            return self.net(batch[1]).mean()
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)
    module = Module()
if ROWS:
    dataset = [{"input": x} for _, x in dataset]
if __name__ == "__main__":
"""
AFTER = """
    if "trainer" not in globals():
        seen.clear()
        for batch in globals().get("batches", loader):
            seen.append(len(batch[0]))
    elif hasattr(trainer, "get_train_dataloader"):
        for batch in trainer.get_train_dataloader():
            seen.append(len(next(iter(batch.values())) if isinstance(batch, dict) else batch[0]))
    print("seen", seen[:3])
"""


README = """
import sys, torch
from accelerate import Accelerator
from batches import Numbers
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer
from dataloaderjob import DataLoader
dataset, accelerator, seen = Numbers(130), Accelerator(cpu=True), []
if __name__ == "__main__":
    checkpoint = {"batches": 1}
"""


def test_the_example_of_the_readme_runs_as_printed(tmp_path: Path) -> None:
    (body,) = re.findall(
        r"^```python\n(from dataloaderjob import DataLoader, context\n.*?)^```", PAGE, re.M | re.S
    )
    assert run(tmp_path, README + indented(body) + AFTER).endswith("seen [1, 1, 1]")


def test_each_framework_has_an_example() -> None:
    assert len(EXAMPLES) == 6
    assert all(len(text.strip().splitlines()) <= 9 for text in EXAMPLES.values())


@pytest.mark.thorough
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_as_printed(name: str, tmp_path: Path) -> None:
    expected = "seen [8, 8, 8]" if "Hugging" in name else "seen [64, 64, 2]"
    assert (
        run(tmp_path, BEFORE.replace("ROWS", str("Hugging" in name)) + indented(EXAMPLES[name]) + AFTER)
        == expected
    )


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


def run(folder: Path, text: str) -> str:
    """The last line that a script prints."""
    (folder / "example.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    done = warm.run(["example.py", folder / "out"], modules=warm.FRAMEWORKS, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]
