"""Pods of a job: the user's template with the operator's fields, containers, volumes and restrictions put in. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.data import DataSpec
from dataloaderjob.api.pods import Container, PodMetadata, PodTemplate, ScratchSpec
from dataloaderjob.api.trainer import SidecarSpec
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest, digest
from dataloaderjob_operator.objects import settings

SHM_NBYTES = 256 * 1024**2
"""Ray's object store, of which the data path uses nothing, and torch's own."""
INHERITED = ("imagePullSecrets", "securityContext")
"""Fields that head and feeders take over from the templates whose image they run, unless they have their own."""
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
LAST_WORDS = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""Puts what a container printed last into its status, and from there into the job's conditions."""
FROM_TEMPLATES = ("labels", "annotations", "finalizers")
"""Metadata that controllers take from a template."""
LOST_NODE_S = 30
"""Seconds after which a pod leaves a node that has been given up, where Kubernetes' own default is 300: the trainers of
all other nodes stand still until then. The node has been silent for 40 s or more by that time."""
LOST_NODE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints of nodes that have been given up."""
ISTIO = "sidecar.istio.io/inject"
AMBIENT = "istio.io/dataplane-mode"
_OWNED = ("containers", "initContainers", "volumes", "restartPolicy")
TMP: Manifest = {"name": "dataloaderjob-tmp", "mountPath": "/tmp"}  # noqa: S108  a volume of the pod's own
SHM: Manifest = {"name": "dataloaderjob-shm", "mountPath": "/dev/shm"}  # noqa: S108
"""Mounts that the user's at the same path replace."""
SETTINGS_VOLUME = "dataloaderjob-settings"
MOUNTS: tuple[Manifest, ...] = (
    {"name": "dataloaderjob-key", "mountPath": settings.KEY_FOLDER, "readOnly": True},
    {"name": SETTINGS_VOLUME, "mountPath": settings.SETTINGS_FOLDER, "readOnly": True},
)


def plain(model: PodTemplate | Container | ScratchSpec | DataSpec | SidecarSpec) -> dict[str, Any]:
    """Dumps a model as the user wrote it, less what he set to null: that counts as left out, at any depth."""
    return dict(_without_nulls(model.model_dump(mode="json", by_alias=True, exclude_unset=True)))


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def image(job: DataLoaderJob) -> str:
    """The image of head and feeders."""
    return job.spec.feeders.image or job.spec.trainers.job.container.image or ""


def template(
    job: DataLoaderJob, role: names.Role, user: PodTemplate, spec: Manifest, *, asked: Any, version: str
) -> Manifest:
    """Makes a pod template. `asked`: all that the user decides about it, whose change replaces the pods."""
    mesh = outside_mesh(user.metadata)
    annotations = {
        **mesh["annotations"],
        **user.metadata.annotations,
        names.ANNOTATION_TEMPLATE: digest(asked),
        names.ANNOTATION_MADE_BY: version,
    }
    labels = {**mesh["labels"], **names.child_labels(job, role, user.metadata.labels)}
    others = {name: value for name, value in (user.metadata.model_extra or {}).items() if value is not None}
    return {"metadata": {**others, "labels": labels, "annotations": annotations}, "spec": spec}


def outside_mesh(user: PodMetadata) -> dict[str, dict[str, str]]:
    """Labels and annotations that keep service meshes off a pod: its connections are authenticated by the job's key, at
    ports that no proxy knows. Where the user wants Istio's sidecar, they keep the job's own off it."""
    labels, annotations = user.labels, user.annotations
    found = {"labels": {AMBIENT: "none"}, "annotations": {"linkerd.io/inject": "disabled"}}
    wanted = labels.get(ISTIO, annotations.get(ISTIO))
    if wanted is None:
        found["labels"][ISTIO] = found["annotations"][ISTIO] = "false"
    elif wanted == "true":
        ports = f"{settings.GCS_PORT},{settings.SUPERVISOR_PORT}"
        found["annotations"] |= {
            "traffic.sidecar.istio.io/includeInboundPorts": "",
            "traffic.sidecar.istio.io/excludeOutboundPorts": ports,
        }
    return found


def shared_fields(
    setup: settings.OperatorConfig, user: PodTemplate, taken: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """The pod's own fields: the user's, what is taken from other templates, no token of the cluster."""
    found = {name: value for name, value in plain(user).get("spec", {}).items() if name not in _OWNED}
    found = {**taken, **found}
    group = {} if setup.fs_group is None else {"fsGroup": setup.fs_group}
    found["securityContext"] = {**group, **found.get("securityContext", {})}
    found.setdefault("automountServiceAccountToken", False)
    if found.get("hostNetwork"):  # the node's own DNS knows none of the job's Services
        found.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    found["enableServiceLinks"] = False
    found["tolerations"] = _tolerations(found.get("tolerations", []))
    return found


def _tolerations(theirs: Any) -> Any:
    """The user's, after those for lost nodes that he has none of his own for: the first that fits a taint counts."""
    if not isinstance(theirs, list) or not all(isinstance(toleration, Mapping) for toleration in theirs):
        return theirs  # the API server says what is wrong with it
    own = [toleration.get("key") for toleration in theirs]
    ours = [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_NODE_S}
        for key in LOST_NODE
        if key not in own
    ]
    return [*ours, *theirs]


def ray_pod(
    setup: settings.OperatorConfig, job: DataLoaderJob, container: Manifest, user: PodTemplate,
    taken: Mapping[str, Any], data: Mapping[str, Any] = MappingProxyType({}),
) -> Manifest:  # fmt: skip
    """A pod of a Ray node of the job: the operator's container, with what the user's of its name adds, and the user's
    others. `data`: spec.data, where user code runs in it."""
    spec = plain(user).get("spec", {})
    theirs = {found["name"]: found for found in spec.get("containers", [])}
    ours = add(container, with_data(theirs.pop(container["name"], {}), data))
    shm = {"medium": "Memory", "sizeLimit": shm_size(job, container["name"])}
    scratch = [
        found
        for mount, found in (
            (TMP, scratch_volume(TMP["name"], job.spec.feeders.scratch)),
            (SHM, {"name": SHM["name"], "emptyDir": shm}),
        )
        if mount in ours["volumeMounts"]
    ]
    pod = {
        **shared_fields(setup, user, taken),
        "containers": [ours, *theirs.values()],
        "volumes": [
            *volumes(job, setup, names.Role(container["name"])),
            *scratch,
            *data.get("volumes", []),
            *spec.get("volumes", []),
        ],
    }
    return pod | {name: spec[name] for name in ("initContainers",) if name in spec}


def inherited(*templates: PodTemplate) -> dict[str, Any]:
    """Fields of `INHERITED`, each of the first template that has it."""
    specs = [plain(user).get("spec", {}) for user in templates]
    return {
        name: next(s[name] for s in specs if name in s) for name in INHERITED if any(name in s for s in specs)
    }


def volumes(job: DataLoaderJob, setup: settings.OperatorConfig, role: names.Role) -> list[Manifest]:
    """Key and settings, for every pod of a role."""
    return [
        {
            "name": "dataloaderjob-key",
            "secret": {
                "secretName": names.key_secret(job.name, job.metadata.uid or ""),
                "defaultMode": 0o440,
            },
        },
        {"name": SETTINGS_VOLUME, "configMap": {"name": settings.map_name(job, setup, role)}},
    ]


def map_of(template: Mapping[str, Any]) -> str | None:
    """The ConfigMap with the settings of a template's pods; None if they have none."""
    for volume in (template.get("spec") or {}).get("volumes") or ():
        if volume.get("name") == SETTINGS_VOLUME:
            return str((volume.get("configMap") or {}).get("name"))
    return None


def shm_size(job: DataLoaderJob, container: str) -> str:
    """Shared memory of a Ray node: Ray's object store, and what user code shares."""
    tasks = job.spec.ray.managed.room()
    has_tasks = tasks.cpus and container == names.Role.FEEDER.value
    nbytes = SHM_NBYTES + (tasks.object_store_nbytes if has_tasks else 0)
    return f"{-(-nbytes // 1024**2)}Mi"


def scratch_volume(name: str, scratch: ScratchSpec) -> Manifest:
    """The volume of a scratch."""
    if scratch.volume is not None:
        return {**scratch.volume, "name": name}
    return {"name": name, "emptyDir": {"sizeLimit": str(scratch.size or settings.SCRATCH_SIZE)}}


def mounts(ours: Iterable[Manifest], theirs: Iterable[Mapping[str, Any]]) -> list[Manifest]:
    """Mounts of a container: of ours, /tmp and /dev/shm give way to the user's at the same path. Others do not: two at
    one path are the API server's to refuse."""
    taken = {str(mount.get("mountPath")).rstrip("/") for mount in theirs}
    kept = [mount for mount in ours if mount not in (TMP, SHM) or mount["mountPath"] not in taken]
    return [*kept, *map(dict, theirs)]


def ray_container(
    job: DataLoaderJob, role: names.Role, module: str, file: str, resources: Mapping[str, Any]
) -> Manifest:
    """The container of a Ray node of the job: head or feeders."""
    return {
        "name": role.value,
        "image": image(job),
        "command": ["python", "-m", module, "--settings", f"{settings.SETTINGS_FOLDER}/{file}"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *environment({"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}),  # noqa: S108  as above
        ],
        "resources": dict(resources),
        "securityContext": dict(RESTRICTED),
        "volumeMounts": [*MOUNTS, TMP, SHM],
        **LAST_WORDS,
    }


def add(container: Manifest, theirs: Mapping[str, Any]) -> Manifest:
    """A container of the operator's with what the user's of the same name adds to it, or has otherwise: what he may not
    have otherwise, the manifest's rules refuse."""
    made = {**container, **theirs}
    for field in ("env", "ports"):
        if field in container:
            made[field] = joined(container[field], theirs.get(field, []))
    made["volumeMounts"] = mounts(container["volumeMounts"], theirs.get("volumeMounts", []))
    made["securityContext"] = {**container["securityContext"], **theirs.get("securityContext", {})}
    return made


def with_data(theirs: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The user's container with spec.data, to whose variables its own may refer."""
    made = dict(theirs)
    if "env" in data:
        made["env"] = joined(data["env"], theirs.get("env", []))
    for field in ("envFrom", "volumeMounts"):
        if field in data:
            made[field] = [*data[field], *theirs.get(field, [])]
    return made


def resources(model: Any) -> dict[str, Any]:
    """Requests and limits of a spec, without those that are empty."""
    dumped = model.model_dump(mode="json", by_alias=True)
    return {kind: values for kind, values in dumped.items() if values}


def joined(ours: Iterable[Manifest], theirs: Iterable[Manifest]) -> list[Manifest]:
    """Joins things with names, such as variables: ours first, less those that are theirs, which may refer to ours."""
    found = list(theirs)
    taken = [item.get("name") for item in found]
    return [*(item for item in ours if item["name"] not in taken), *found]


def environment(variables: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def pod_of(workload: Manifest) -> Manifest:
    """A pod as the workload's controller would create it, owned by the job."""
    template, metadata = workload["spec"]["template"], workload["metadata"]
    taken = {name: value for name, value in template["metadata"].items() if name in FROM_TEMPLATES}
    own = {"namespace": metadata["namespace"], "generateName": f"{metadata['name']}-"}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {**taken, **own, "ownerReferences": metadata["ownerReferences"]}, "spec": template["spec"],
    }  # fmt: skip
