"""Feeders that the kernel, or Ray's memory monitor, ends for want of memory: what the script and `status` say. Real
limits, in a control group of the kernel's."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from memory_cgroup import limited
from patience import PATIENCE_S

pytestmark = pytest.mark.system
LIMIT = 1_500_000_000
HUNGRY = """
    import json, os, subprocess, sys, time
    import torch
    import dataloaderjob

    def take(nbytes):
        taken = bytearray(nbytes)
        for i in range(0, nbytes, 4096):
            taken[i] = 1

    class Hungry(torch.utils.data.Dataset):
        def __len__(self):
            return 32

        def __getitem__(self, i):
            if i == 13:
                take(4_000_000_000)
            return torch.full((4,), i)

    def status():
        command = [sys.executable, "-m", "dataloaderjob", "status"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def collate(batch):
        if os.environ.get("WHERE") == "collate" and int(batch[-1][0]) >= 12:
            take(4_000_000_000)
        return torch.stack(batch)
"""


def script(body: str) -> str:
    return textwrap.dedent(HUNGRY) + textwrap.dedent(body)


def run(folder: Path, text: str, *, nbytes: int = LIMIT, **env: str) -> tuple[str, str]:
    """Runs a script in a group of so much memory; returns its output and its errors."""
    path = folder / "script.py"
    path.write_text(text)
    with limited(nbytes) as group:
        enter = f"echo $$ > {group}/cgroup.procs; exec {sys.executable} {path}"
        made = subprocess.run(
            ["sh", "-c", enter], capture_output=True, text=True, timeout=4 * PATIENCE_S,
            env={**os.environ, "TMPDIR": str(folder), **env},
        )  # fmt: skip
    assert made.returncode == 0, made.stderr
    return made.stdout, made.stderr


LOOP = """
    loader = dataloaderjob.DataLoader(Hungry(), batch_size=4, num_workers=1, collate_fn=collate)
    taken = []
    try:
        for batch in loader:
            taken.append(batch[0][0].item())
    except dataloaderjob.FeederLost as error:
        print(taken)
        print(json.dumps([type(error).__name__, str(error), status()]))
"""


@pytest.mark.parametrize(
    ("where", "sample"), [pytest.param("sample", "index 13 of batch 3", id="sample"),
                          pytest.param("collate", "index 15 of batch 3", id="collate_fn")]
)  # fmt: skip
def test_sample_exhausting_memory_is_reported_in_loop_and_status(where: str, sample: str, tmp_path: Path):
    text = LOOP if where == "sample" else LOOP.replace("Hungry()", "Hungry.__base__ and Calm()")
    calm = "\nclass Calm(Hungry):\n    def __getitem__(self, i):\n        return torch.full((4,), i)\n"
    out, err = run(tmp_path, textwrap.dedent(HUNGRY) + calm + textwrap.dedent(text), WHERE=where)
    taken, told = out.splitlines()
    assert json.loads(taken) == [0, 4, 8], "the batches before it came"
    error, message, status = json.loads(told)
    assert error == "OutOfMemory"
    remedy = "its control group may use 1.4 GiB: use fewer feeders or smaller batches, or free some memory"
    assert f"3 feeder processes ended while making {sample}" in message
    assert remedy in message
    assert re.search(rf"feeder-0 ready for .*: the process that is making {sample} ran out of memory", status)
    assert remedy in status
    assert f"feeder-0: the process that is making {sample} ran out of memory" in err


def test_dataset_too_large_to_load_is_reported_as_out_of_memory(tmp_path: Path):
    grows = """
    class Grows(Hungry):
        def __init__(self):
            self.has_state = True

        def __setstate__(self, state):
            take(4_000_000_000)
    loader = dataloaderjob.DataLoader(Grows(), batch_size=4, num_workers=1)
    try:
        next(iter(loader))
    except dataloaderjob.OutOfMemory as error:
        print(error)
    """
    out, _ = run(tmp_path, script(grows))
    assert "feeder-0: the process that loads the dataset ran out of memory" in out
    assert "its control group may use 1.4 GiB" in out


def test_feeder_killed_by_the_kernel_is_reported_as_out_of_memory(tmp_path: Path):
    kills = """
    class Chooses(Hungry):
        def __init__(self):
            self.marker = os.path.join(os.environ["TMPDIR"], "marker")

        def __setstate__(self, state):
            self.__dict__ = state
            if os.path.exists(self.marker):
                return
            open(self.marker, "w").close()
            for feeder in feeders():  # the kernel takes it before what grows
                with open(f"/proc/{feeder}/oom_score_adj", "w") as out:
                    out.write("1000")
            take(4_000_000_000)

        def __getitem__(self, i):
            return torch.full((4,), i)

    def feeders():
        here = open("/proc/self/cgroup").read()
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                named = open(f"/proc/{name}/comm").read().strip() == "dlj-feeder-0"
                if named and open(f"/proc/{name}/cgroup").read() == here:
                    yield name
            except OSError:
                pass

    loader = dataloaderjob.DataLoader(Chooses(), batch_size=4, num_workers=1)
    print([batch[0][0].item() for batch in loader])
    print(json.dumps(status()))
    """
    out, _ = run(tmp_path, script(kills))
    taken, status = out.splitlines()
    assert json.loads(taken) == list(range(0, 32, 4)), "another feeder made what was lost"
    said = json.loads(status)
    assert re.search(
        r"feeder-0 ready for .*: its process ran out of memory, and the kernel killed it; its control", said
    )
