"""The operator's reconcile against a real API server, without watches: it lists all that is there."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import itertools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from kubernetes.aio import client as kubernetes

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob.core.generations import Schedule
from dataloaderjob_operator import names, objects
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide.observed import SupervisorStatus
from dataloaderjob_operator.kinds import CHILDREN, KINDS
from dataloaderjob_operator.names import LABEL_JOB
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.reconcile import Reconciler

SETUP = objects.OperatorConfig(version="1.0", sidecar_image="example/sidecar:1", root_key=b"r" * 32)
T = TypeVar("T")
MERGE = "application/merge-patch+json"
_NUMBERS = itertools.count()


class Killed(BaseException):
    """The operator died here: nothing in it catches that."""


class Api:
    """`ApiClient`, which may fail before a write: `fault` is asked with the number of the write."""

    def __init__(self, client: ApiClient, fault: Callable[[int], BaseException | None]) -> None:
        self._client, self._fault, self.writes, self.reported = client, fault, 0, 0

    def _count(self) -> None:
        self.writes += 1
        if (error := self._fault(self.writes)) is not None:
            raise error

    async def read(self, namespace: str, key: tuple[str, str]) -> dict[str, Any] | None:
        return await self._client.read(namespace, key)

    async def create(self, manifest: dict[str, Any]) -> bool:
        """A write only where nothing of that name is there."""
        if (error := self._fault(self.writes + 1)) is not None:
            self.writes += 1
            raise error
        made = await self._client.create(manifest)
        self.writes += made
        return made

    async def apply(self, manifest: dict[str, Any]) -> dict[str, Any]:
        self._count()
        return await self._client.apply(manifest)

    async def try_apply(self, manifest: dict[str, Any]) -> None:
        """Not counted as a write: nothing is written."""
        await self._client.try_apply(manifest)

    async def try_create(self, manifest: dict[str, Any]) -> None:
        """Not counted, as `try_apply`."""
        await self._client.try_create(manifest)

    async def apply_status(
        self, namespace: str, name: str, version: str, status: Mapping[str, Any]
    ) -> dict[str, Any]:
        self._count()
        return await self._client.apply_status(namespace, name, version, status)

    async def delete(self, namespace: str, key: tuple[str, str], uid: str) -> dict[str, Any] | None:
        self._count()
        return await self._client.delete(namespace, key, uid)

    async def create_event(self, event: dict[str, Any]) -> None:
        """Not counted as a write: what follows a status may be lost."""
        self.reported += 1
        await self._client.create_event(event)


@functools.cache
def client_of(server: ApiServer) -> tuple[asyncio.Runner, ApiClient]:
    """One event loop and one client for all tests: connections are kept."""
    runner = asyncio.Runner()

    async def connect() -> ApiClient:
        configuration = kubernetes.Configuration(host=server.url)
        configuration.verify_ssl = False
        configuration.api_key = {"BearerToken": f"Bearer {server.token}"}
        return ApiClient(kubernetes.ApiClient(configuration))

    return runner, runner.run(connect())


class Supervisors:
    """The status of supervisors, as a test has it, and the number of feeders that they are sent."""

    def __init__(self) -> None:
        self.reported: SupervisorStatus | None = None
        self.wanted: int | None = None

    def status(self, key: JobKey) -> SupervisorStatus | None:
        return self.reported

    def want(
        self, key: JobKey, feeders: int | None, certificates: Schedule | None = None, *, ends: bool = False
    ) -> None:
        self.wanted = feeders


class Operated:
    """One job on the server, in a namespace of its own, and an operator that reconciles it when a test calls it.

    Nothing runs its pods, so its trainers wait for no feeder, unless the manifest says for how many.
    """

    def __init__(self, server: ApiServer, manifest: dict[str, Any]) -> None:
        manifest = copy.deepcopy(manifest)
        manifest["spec"].setdefault("feeders", {}).setdefault("minAvailable", 0)
        self.server = server
        self.namespace = f"ns-{next(_NUMBERS)}"
        self.name = manifest["metadata"]["name"]
        self.key = (self.namespace, self.name)
        self._key_secrets: dict[str, str] = {}
        """Names of Secrets with keys, by the job's uid."""
        self.supervisor = Supervisors()
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": self.namespace}})
        server.request("POST", self.path(KIND), manifest)

    def path(self, kind: str, name: str = "") -> str:
        folder = KINDS[kind].path(self.namespace)
        return f"{folder}/{name}" if name else folder

    def reconcile(
        self,
        fault: Callable[[int], BaseException | None] = lambda number: None,
        setup: objects.OperatorConfig = SETUP,
    ) -> int:
        """One reconcile. Returns how many writes it made. Raises what `fault` does."""
        runner, client = client_of(self.server)
        api = Api(client, fault)
        runner.run(Reconciler(api, self.observe(), setup, self.supervisor).reconcile(self.key))
        return api.writes

    def operator(self) -> Reconciler:
        """An operator that lives through several reconciles."""
        return Reconciler(client_of(self.server)[1], self.observe(), SETUP, self.supervisor)

    def reconcile_with(self, operator: Reconciler) -> float | None:
        operator.cache = operator.children.cache = self.observe()
        return self.run(operator.reconcile(self.key))

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """In the loop of the operator's client."""
        return client_of(self.server)[0].run(what)

    def settle(self, rounds: int = 12, setup: objects.OperatorConfig = SETUP) -> None:
        """Reconciles, and collects garbage, until nothing is written any more."""
        for _ in range(rounds):
            collected = self.collect_garbage() | self.roll_out()
            if self.reconcile(setup=setup) == 0 and not collected:
                return
        raise AssertionError(f"not settled after {rounds} reconciles")

    def observe(self) -> Cache:
        cache = Cache()
        cache.put({**self.get(KIND, self.name), "kind": KIND})
        for thing in [*self.children().values(), *self.pods()]:
            if thing["kind"] != "Secret":  # no operator reads one
                cache.put(thing)
        return cache

    @property
    def key_secret(self) -> str:
        uid = self.get(KIND, self.name)["metadata"]["uid"]
        prefix = f"{self.name}-keys-{uid[:8]}-"
        found = [name for kind, name in self.children() if kind == "Secret" and name.startswith(prefix)]
        known = self._key_secrets
        known[uid] = found[0] if found else known.get(uid, names.key_secret(self.name, uid, SETUP.root_key))
        return known[uid]

    def named(self) -> set[tuple[str, str]]:
        """The children by kind and name, the Secret's without what only this job has of it, and settings by their role
        and not their content."""
        return {self.called(child) for child in self.children().values()}

    def called(self, child: dict[str, Any]) -> tuple[str, str]:
        kind, name = child["kind"], child["metadata"]["name"]
        if kind == "ConfigMap" and names.LABEL_ROLE in child["metadata"]["labels"]:
            return kind, f"{self.name}-settings-{child['metadata']['labels'][names.LABEL_ROLE]}"
        is_key = kind == "Secret" and name.startswith(f"{self.name}-keys-")
        return (kind, f"{self.name}-key") if is_key else (kind, name)

    def real(self, key: tuple[str, str]) -> tuple[str, str]:
        """What `named` calls so; settings must be there."""
        if key == ("Secret", f"{self.name}-key"):
            return "Secret", self.key_secret
        return next((real for real, child in self.children().items() if self.called(child) == key), key)

    def pods(self) -> list[dict[str, Any]]:
        """That have the job's label."""
        path = f"{self.path('Pod')}?labelSelector={LABEL_JOB}={self.name}"
        return [{**item, "kind": "Pod"} for item in self.server.request("GET", path)["items"]]

    def get(self, kind: str, name: str) -> dict[str, Any]:
        return self.server.request("GET", self.path(kind, name))

    def children(self) -> dict[tuple[str, str], dict[str, Any]]:
        """All that has the job's label, with their kinds."""
        found = {}
        for kind in CHILDREN:
            path = f"{self.path(kind.name)}?labelSelector={LABEL_JOB}={self.name}"
            for item in self.server.request("GET", path)["items"]:
                found[kind.name, item["metadata"]["name"]] = {**item, "kind": kind.name}
        return found

    def patch(
        self, kind: str, name: str, change: dict[str, Any], part: str = "", manager: str = "someone"
    ) -> None:
        path = self.path(kind, name) + (f"/{part}" if part else "")
        self.server.request("PATCH", f"{path}?fieldManager={manager}", change, content_type=MERGE)

    def serves(self, replicas: int = 1) -> None:
        """What kubelets and controllers would report of head and feeders that are up."""
        for name in (f"{self.name}-head", f"{self.name}-feeders"):
            counts = {"replicas": replicas, "readyReplicas": replicas, "updatedReplicas": replicas}
            self.patch("Deployment", name, {"status": counts}, "status")

    def ready_head(self, address: str) -> None:
        """A pod of the head, ready at this address."""
        now = "2026-01-01T00:00:00Z"
        ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
        status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": [ready]}
        self.pod(names.Role.HEAD, status)

    def last_words(self, words: str) -> None:
        """Reports the trainer's pod as a kubelet would when it fails: these are what the container left behind. What is
        not UTF-8 in them has become U+FFFD by the time the API server has it."""
        ended = {"exitCode": 1, "reason": "Error", "message": words}
        container = {"name": "trainer", "image": "i", "imageID": "", "ready": False, "restartCount": 0}
        container["state"] = {"terminated": ended}
        self.pod(names.Role.TRAINER, {"phase": "Failed", "containerStatuses": [container]})

    def pod(self, role: names.Role, status: dict[str, Any]) -> None:
        """The pod of that role has this status; it is made if it is not there."""
        folder, name = self.path("Pod"), f"{self.name}-{role.value}-0"
        if not any(pod["metadata"]["name"] == name for pod in self.pods()):
            metadata = {
                "name": name,
                "labels": names.labels(self.name, role),
                "ownerReferences": [self.owner(role)],
            }
            spec = {"containers": [{"name": role.value, "image": "i"}], "restartPolicy": "Never"}
            self.server.request("POST", folder, {"metadata": metadata, "spec": spec})
        self.server.request("PATCH", f"{folder}/{name}/status", {"status": status}, content_type=MERGE)

    def owner(self, role: names.Role) -> dict[str, Any]:
        """The reference to what makes pods of a role."""
        if role is names.Role.TRAINER:
            name = names.trainers(self.name, 0)
            jobs = {name: found for (_, name), found in self.children().items()}
            uid = jobs[name]["metadata"]["uid"] if name in jobs else "gone"
            return {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": uid, "controller": True}
        name = names.head(self.name) if role is names.Role.HEAD else names.feeders(self.name)
        return {
            "apiVersion": "apps/v1",
            "kind": "ReplicaSet",
            "name": f"{name}-7c",
            "uid": "r",
            "controller": True,
        }

    def edit(self, **spec: Any) -> None:
        """A user's change of the job."""
        self.patch(KIND, self.name, {"spec": spec})

    def delete(self, kind: str, name: str) -> None:
        self.server.request("DELETE", self.path(kind, name) + "?propagationPolicy=Background")

    def ends(self, name: str, kind: str) -> None:
        """Reports an Indexed Job as Complete or Failed, as the Job controller would, which is not there."""
        over = {"type": kind, "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        before = "SuccessCriteriaMet" if kind == "Complete" else "FailureTarget"
        status: dict[str, Any] = {
            "startTime": "2026-01-01T00:00:00Z",
            "conditions": [{**over, "type": before}, over],
        }
        if kind == "Complete":
            status |= {"completionTime": "2026-01-01T00:01:00Z", "succeeded": 1}
        self.patch("Job", name, {"status": status}, "status")

    def collect_garbage(self) -> bool:
        """What the garbage collector does, which is not there: lets go of what is being deleted in the foreground."""
        collected = False
        for (kind, name), child in self.children().items():
            if child["metadata"].get("deletionTimestamp"):
                with contextlib.suppress(Exception):
                    self.patch(kind, name, {"metadata": {"finalizers": None}})
                collected = True
        return collected

    def roll_out(self) -> bool:
        """Reports that all pods are of the present templates, as the Deployment controller would: it is not there."""
        rolled = False
        for (kind, name), child in self.children().items():
            generation = child["metadata"].get("generation")
            if kind == "Deployment" and child["status"].get("observedGeneration") != generation:
                counts = {
                    "observedGeneration": generation,
                    "updatedReplicas": child["status"].get("replicas", 0),
                }
                self.patch(kind, name, {"status": counts}, "status")
                rolled = True
        return rolled

    def conditions(self) -> dict[str, dict[str, Any]]:
        return {c["type"]: c for c in self.get(KIND, self.name)["status"]["conditions"]}


def dies_at(write: int) -> Callable[[int], BaseException | None]:
    """The operator is killed before its write of that number."""
    return lambda number: Killed() if number == write else None


def refuses(codes: Mapping[int, int]) -> Callable[[int], BaseException | None]:
    """The API server answers these writes so."""
    return lambda number: ApiError(codes[number], "not now") if number in codes else None
