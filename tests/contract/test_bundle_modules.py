"""Modules of this package that bundles and records name: another release must have them, or another PROTOCOL."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from dataloaderjob.core.frames import PROTOCOL
from dataloaderjob.core.records import MAGIC

NAMED = {(9, b"DLJREC03"): {"dataloaderjob.shipping.reducers", "dataloaderjob.shipping.user_code"}}
SCRIPT = """
import sys
import numpy, torch
from pathlib import Path
from dataloaderjob.core.blobs import BlobStore
from dataloaderjob.shipping.bundles import make_bundle

class Held(torch.utils.data.Dataset):
    def __init__(self):
        self.generator, self.function = numpy.random.RandomState(1), lambda x: x + 1
        self.tensor, self.large = torch.ones(3), numpy.zeros(2_000_000)
    def __getitem__(self, key):
        return self.function(key)

def collate(batch):
    return batch

make_bundle(Held(), collate, lambda worker: None, store=BlobStore(Path(sys.argv[1])), allow_pickle=True)
"""


def test_modules_named_in_bundles_move_only_with_a_new_protocol(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path], check=True, timeout=120)
    found = {
        name.decode()
        for path in tmp_path.iterdir()
        for name in re.findall(rb"dataloaderjob(?:\.[a-z_]+)+", path.read_bytes())
    }
    assert found == NAMED[PROTOCOL, MAGIC], "increase PROTOCOL and MAGIC, and change the row here"
