"""Code in a feeder, with Ray's token, runs anything on the head's Ray node, and finds no key of the job's there."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import Any

import pytest
from cluster import Cluster, until
from jobs import FEEDERS, HEAD, TRAINER, job

from dataloaderjob.core import keys
from dataloaderjob.core.keys import Holder

pytestmark = pytest.mark.timeout(400)
ATTACK = r"""
import glob, hashlib, json, os, socket, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

def look():
    hashes, lines, folders = set(), [], ("/etc/dataloaderjob", "/run", "/tmp", "/dev/shm", "/var/run/secrets")
    roots = ["", *glob.glob("/proc/[0-9]*/root")]
    for top in [root + folder for root in roots for folder in folders]:
        for folder, _, names in os.walk(top):
            for name in names:
                try:
                    with open(os.path.join(folder, name), "rb") as file:
                        data = file.read(4096)
                except OSError:
                    continue
                hashes |= {hashlib.sha256(part).hexdigest() for part in (data, data.strip())}
    for process in glob.glob("/proc/[0-9]*"):
        for name in ("environ", "cmdline"):
            try:
                with open(f"{process}/{name}", "rb") as file:
                    words = file.read().split(b"\0")
            except OSError:
                continue
            hashes |= {hashlib.sha256(word.partition(b"=")[2]).hexdigest() for word in words}
            if name == "cmdline":
                lines.append(" ".join(word.decode(errors="replace") for word in words[:6])[:120])
    return {"hashes": sorted(hashes), "lines": lines, "host": socket.gethostname()}

host, _, port = json.load(open("/etc/dataloaderjob/settings/feeder.json"))["head"].rpartition(":")
address = socket.gethostbyname(host)
ray.init(f"{address}:{port}", log_to_driver=False)
(node,) = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeManagerAddress"] == address]
there = NodeAffinitySchedulingStrategy(node, soft=False)
found = ray.get(ray.remote(num_cpus=0, scheduling_strategy=there)(look).remote(), timeout=120)
print("FOUND", json.dumps(found))
"""
PROGRAM = f"""
import os, subprocess, sys, time, torch
from dataloaderjob import DataLoader
ATTACK = {ATTACK!r}
class Set(torch.utils.data.Dataset):
    def __len__(self): return 2
    def __getitem__(self, i):
        if i == 0:
            token = dict(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH="/etc/dataloaderjob/key/ray")
            done = subprocess.run(
                [sys.executable, "-c", ATTACK], env={{**os.environ, **token}}, capture_output=True, text=True
            )
            for line in (done.stdout + done.stderr).splitlines():
                for start in range(0, len(line), 30000): print("ATTACK", line[start:start + 30000], flush=True)
        return torch.tensor(i)
for batch in DataLoader(Set(), batch_size=2): print("batch", batch.tolist(), flush=True)
time.sleep(20)  # the feeders' logs go with the trainers
"""


def test_code_on_the_heads_ray_node_finds_no_key_of_the_job(operator: Cluster, namespace: str, start):
    attacked = start(job("attacked", program=PROGRAM))
    printed: dict[str, str] = {}
    ran: dict[str, Any] = {}

    def look() -> bool:
        for pod in attacked.pods(FEEDERS):
            printed[pod["metadata"]["name"]] = operator.logs(pod["metadata"]["name"], namespace)
        for pod in attacked.pods(HEAD):
            ran["head"] = pod
        return "batch [0, 1]" in attacked.logs(TRAINER, "trainer")

    until(look, timeout_s=300, every_s=1.0, what="the attack's end", also=attacked.why)
    look()
    text = "".join(re.findall(r"ATTACK (.*)", "\n".join(printed.values())))
    assert "FOUND " in text, text[-3000:]
    found = json.JSONDecoder().raw_decode(text.partition("FOUND ")[2])[0]
    lines = "\n".join(found["lines"])
    assert found["host"] == ran["head"]["metadata"]["name"], "it ran in the head's pod"
    names = [v["secret"]["secretName"] for v in ran["head"]["spec"]["volumes"] if "secret" in v]
    data = json.loads(operator.kubectl("get", "secret", names[0], "-n", namespace, "-o", "json"))["data"]
    job_key, token = (base64.b64decode(data[name]) for name in ("links", "ray"))
    hashes = set(found["hashes"])
    assert hashlib.sha256(token).hexdigest() in hashes, "it reads the files of its own container"
    for key in (job_key, *(keys.derive(job_key, holder) for holder in Holder)):
        assert hashlib.sha256(key).hexdigest() not in hashes
    assert "dataloaderjob.providers.ray.agent" in lines, "in Ray's container"
    assert "dataloaderjob.supervisor.main" not in lines, "and sees no process of the other one"
    attacked.await_phase("Complete")
