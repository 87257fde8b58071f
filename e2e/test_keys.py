"""Keys of a job on a cluster: what a feeder's permits, and a rotation of the root key while the job trains."""

from __future__ import annotations

import base64
import json

import pytest
from cluster import RELEASE, SYSTEM, Cluster, Manifest, until
from jobs import FEEDERS, HEAD, TRAINER, Job, job
from readme import block

from dataloaderjob_operator import names
from dataloaderjob_operator.objects.settings import JOB_KEY, SUPERVISOR_PORT

pytestmark = pytest.mark.timeout(600)
ALL = (HEAD, FEEDERS, TRAINER)
COMMANDS: tuple[Manifest, ...] = (
    {"type": "status"},
    {"type": "scale", "feeders": 0},
    {"type": "stop"},
    {"type": "replace", "name": "NAME", "instance": "INSTANCE", "reason": "none"},
    {"type": "metrics"},
    {"type": "have", "digest": "0" * 64},
    {"type": "blob", "digest": "0" * 64, "nbytes": 1},
)
"""Each message that only the operator or a sidecar may send to the supervisor."""
TRY_EACH = r"""
import json, sys
from dataloaderjob.core import handshake, sockets
settings = json.load(open("/etc/dataloaderjob/settings/feeder.json"))
key = open("/etc/dataloaderjob/key/links", "rb").read()
host = settings["head"].rpartition(":")[0], int(sys.argv[2])

def tell(role, message):
    with sockets.dial(host, 20) as sock:
        handshake.greet(sock, key, role=role, name="intruder", job=settings["job"], versions=handshake.BY_ROLE)
        sockets.send_message(sock, message)
        return sockets.recv_message(sock)["type"]

for role in ("control", "sidecar", "upload", "feeder", "blob"):
    for message in json.loads(sys.argv[1]):
        try:
            answer = tell(role, message)
        except ConnectionError:
            answer = "closed"
        except Exception as exc:
            answer = f"{type(exc).__name__}: {exc}"
        print(json.dumps([role, message["type"], answer]))
"""
EPOCH = """
import hashlib, time, torch
from dataloaderjob import DataLoader
loader, digest = DataLoader(torch.arange(6000), batch_size=10, shuffle=True), hashlib.sha256()
torch.manual_seed(7)
for number, batch in enumerate(loader):
    digest.update(batch.numpy().tobytes())
    print("batch", number, flush=True)
    time.sleep(0.1)
print("digest", digest.hexdigest()[:16], flush=True)
"""


def test_feeders_key_gets_no_command_through(operator: Cluster, namespace: str, start) -> None:
    attacked: Job = start(job("attacked"))
    attacked.await_phase("Running")
    before, (pod,) = attacked.uids(*ALL), attacked.pods(FEEDERS)
    told = operator.kubectl(
        "exec", pod["metadata"]["name"], "-n", namespace, "--", "python", "-c", TRY_EACH, json.dumps(COMMANDS),
        str(SUPERVISOR_PORT),
    )  # fmt: skip
    answers = [json.loads(line) for line in told.splitlines()]
    assert len(answers) == 5 * len(COMMANDS)
    for role, message, answer in answers:
        if role in ("control", "sidecar", "upload", "feeder"):
            assert f"does not hold this job's key for role '{role}'" in answer, (role, message, answer)
        else:
            assert answer == "closed", (role, message, answer)
    assert attacked.uids(*ALL) == before
    assert attacked.status()["feeders"]["summary"] == "1/1"
    assert attacked.phase() == "Running"


def root_key(cluster: Cluster) -> bytes:
    found = cluster.get("secret", f"{RELEASE}-root-key", SYSTEM)
    assert found is not None
    return base64.b64decode(found["data"]["root"])


def root_of(found: Job, *roots: bytes) -> bytes:
    """The root key that the job's own key is derived from."""
    uid = found.live()["metadata"]["uid"]
    (pod,) = found.pods(HEAD)
    (name,) = {v["secret"]["secretName"] for v in pod["spec"]["volumes"] if "secret" in v}
    secret = found.cluster.get("secret", name, found.namespace)
    assert secret is not None
    key = base64.b64decode(secret["data"][JOB_KEY])
    (root,) = (root for root in roots if names.job_key(root, uid) == key)
    return root


@pytest.mark.nightly
@pytest.mark.alone
def test_root_key_is_rotated_by_the_documented_commands_in_an_epoch(operator: Cluster, start) -> None:
    old = root_key(operator)
    earlier: Job = start(job("earlier", program=EPOCH))
    until(
        lambda: "batch 3\n" in earlier.logs(TRAINER, "trainer"),
        timeout_s=120,
        what="batches",
        also=earlier.why,
    )
    operator.script(block("docs/kubernetes/install.md", "The root key"))
    operator.kubectl("rollout", "status", f"deployment/{RELEASE}-operator", "-n", SYSTEM, timeout_s=90)
    new, before = root_key(operator), earlier.uids(*ALL)
    assert new != old
    later: Job = start(job("later", program=EPOCH))
    later.await_phase("Running")
    assert root_of(later, old, new) == new
    assert root_of(earlier, old, new) == old
    operator.kubectl("scale", "dlj", "earlier", "-n", earlier.namespace, "--replicas=2")
    until(
        lambda: earlier.status()["feeders"].get("summary") == "2/2", timeout_s=90, what="2/2", also=earlier.why
    )  # fmt: skip
    assert set(before.items()) <= set(earlier.uids(*ALL).items()), "the rotation replaced or restarted pods"
    for each in (earlier, later):
        each.await_phase("Complete", timeout_s=180)
    assert earlier.digest() == later.digest()
