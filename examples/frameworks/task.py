"""Common parts of the loops in this folder: data, a model, and a digest of the training batches.

    python plain.py out          # or fabric.py, lightning_trainer.py, accelerated.py, hugging_face.py, torchdatas.py
    STOP_AFTER=19 python plain.py out; python plain.py out

Each writes a checkpoint into its folder every few steps, and resumes from the last one. With STOP_AFTER=n it kills
itself in its n-th step.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "fashion-mnist"))

from fashion import FashionMNIST

BATCH, EPOCHS, SAVE_EVERY = 64, 2, 5
_steps = itertools.count(1)
WORKERS = int(os.environ.get("WORKERS", "2"))


def folder() -> Path:
    """Returns the folder of checkpoints."""
    path = Path(sys.argv[1])
    path.mkdir(parents=True, exist_ok=True)
    return path


def dataset() -> FashionMNIST:
    return FashionMNIST("train", augment=True, limit=BATCH * 12)


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


def loss_of(net: nn.Module, batch: Any) -> torch.Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(net(images), labels)


class Seen:
    """A digest of all batches in their order. The checkpoint contains its state."""

    def __init__(self) -> None:
        self.digest = ""

    def add(self, batch: Any) -> None:
        images, labels = batch
        content = images.numpy().tobytes() + labels.numpy().tobytes()
        self.digest = hashlib.sha256(self.digest.encode() + content).hexdigest()

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self.digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.digest = state["digest"]


def count_step() -> None:
    """Kills this process in step number STOP_AFTER."""
    if next(_steps) == int(os.environ.get("STOP_AFTER", "-1")):
        os.kill(os.getpid(), signal.SIGKILL)


def report(net: nn.Module, seen: Seen) -> None:
    """Prints the digests that two runs of one loop must have in common."""
    weights = hashlib.sha256()
    for parameter in net.parameters():
        weights.update(parameter.detach().numpy().tobytes())
    print(f"batches {seen.digest[:16]} weights {weights.hexdigest()[:16]}", flush=True)
