"""The pods of a job. Each is the user's template plus the operator's fields, containers, volumes and restrictions.
Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.plain import plain, resources
from dataloaderjob.api.pods import PodMetadata, PodTemplate
from dataloaderjob.api.sidecar import (
    KEY_VOLUME,
    LAST_WORDS,
    MOUNTS,
    RESTRICTED,
    SETTINGS_VOLUME,
    key_volume,
    scratch_volume,
)
from dataloaderjob.core.keys import Part
from dataloaderjob_operator import names
from dataloaderjob_operator.kinds import Manifest, digest
from dataloaderjob_operator.objects import certificates, settings, supervisor

SHM_NBYTES = 256 * 1024**2
"""Size of shared memory for torch and for Ray's object store. The data path does not use it."""
INHERITED = ("imagePullSecrets", "securityContext")
"""Fields that the head and the feeders inherit from the template whose image they run, unless their own template sets
them."""
FROM_TEMPLATES = ("labels", "annotations", "finalizers")
"""Metadata that controllers copy from a template."""
LOST_NODE_S = 30
"""Seconds after which a pod is removed from a lost node; Kubernetes' default is 300. Until then, the trainers on all
other nodes are blocked. Kubernetes starts to count after the node has been silent for at least 40 s."""
LOST_NODE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
"""Taints of lost nodes."""
ISTIO = "sidecar.istio.io/inject"
AMBIENT = "istio.io/dataplane-mode"
_PARTS = {
    names.Role.HEAD: Part.SUPERVISOR,
    names.Role.FEEDER: Part.FEEDER,
    names.Role.TRAINER: Part.SIDECAR,
}
_OWNED = ("containers", "initContainers", "volumes", "restartPolicy")
TMP: Manifest = {"name": "dataloaderjob-tmp", "mountPath": "/tmp"}  # noqa: S108  a volume of the pod's own
SHM: Manifest = {"name": "dataloaderjob-shm", "mountPath": "/dev/shm"}  # noqa: S108
"""A mount that, like TMP, gives way to the user's mount at the same path."""


def image(job: DataLoaderJob) -> str:
    """Returns the image of the head and the feeders."""
    own = job.spec.trainers.job
    return job.spec.feeders.image or (own.container.image if own else None) or ""


def template(
    job: DataLoaderJob, role: names.Role, user: PodTemplate, spec: Manifest, *, asked: Any, version: str
) -> Manifest:
    """Builds a pod template. `asked`: the user's part of the template. Any change to this part replaces the pods."""
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
    """Returns labels and annotations that keep a pod out of service meshes. The job's key authenticates the pod's
    connections, and no proxy knows their ports. If the user wants Istio's sidecar, the connections bypass it."""
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
    """Builds the pod's fields from the user's, those taken from other templates, and the operator's defaults. By
    default, the pod gets no token for the API server."""
    found = {name: value for name, value in plain(user).get("spec", {}).items() if name not in _OWNED}
    found = {**taken, **found}
    group = {} if setup.fs_group is None else {"fsGroup": setup.fs_group}
    found["securityContext"] = {**group, **found.get("securityContext", {})}
    found.setdefault("automountServiceAccountToken", False)
    if found.get("hostNetwork"):  # the node's DNS does not know the job's Services
        found.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    found["enableServiceLinks"] = False
    found["tolerations"] = _tolerations(found.get("tolerations", []))
    return found


def _tolerations(theirs: Any) -> Any:
    """Puts the tolerations for lost nodes before the user's, because the first one that matches a taint counts. If the
    user's tolerations name a taint, the operator adds none for it."""
    if not isinstance(theirs, list) or not all(isinstance(toleration, Mapping) for toleration in theirs):
        return theirs  # the API server reports the error
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
    """Builds the pod of a Ray node. It has the operator's container, merged with the user's container of the same name,
    and the user's other containers. The head's pod also has the supervisor's container. `data`: spec.data, if user code
    runs in the pod."""
    spec = plain(user).get("spec", {})
    theirs = {found["name"]: found for found in spec.get("containers", [])}
    ours = add(container, with_data(theirs.pop(container["name"], {}), data))
    is_divided = container["name"] == names.Role.HEAD.value
    ray_tmp = supervisor.ray_scratch(TMP["name"])
    shm = {"medium": "Memory", "sizeLimit": shm_size(job, container["name"])}
    scratch = [
        found
        for mount, found in (
            (TMP, ray_tmp if is_divided else scratch_volume(TMP["name"], job.spec.feeders.scratch)),
            (SHM, {"name": SHM["name"], "emptyDir": shm}),
        )
        if mount in ours["volumeMounts"]
    ]
    fields = shared_fields(setup, user, taken)
    ours["securityContext"] = non_root(fields["securityContext"], ours["securityContext"])
    others = [supervisor.container(ours, resources(job.spec.ray.head.resources))] if is_divided else []
    pod = {
        **fields,
        **(supervisor.OWN_PROCESSES if is_divided else {}),
        "containers": [ours, *others, *theirs.values()],
        "volumes": [
            *volumes(job, setup, names.Role(container["name"])),
            *(supervisor.volumes(job, setup) if is_divided else []),
            *scratch,
            *data.get("volumes", []),
            *spec.get("volumes", []),
        ],
    }
    return pod | {name: spec[name] for name in ("initContainers",) if name in spec}


def non_root(pod: Mapping[str, Any], container: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the securityContext of a container that must not run as root. Returns it unchanged if the pod or the
    container sets runAsNonRoot, or a runAsUser of 0."""
    both = {**pod, **container}
    if "runAsNonRoot" in both or both.get("runAsUser") == 0:
        return dict(container)
    return {**container, "runAsNonRoot": True}


def inherited(*templates: PodTemplate) -> dict[str, Any]:
    """Returns the fields of `INHERITED`, each from the first template that sets it."""
    specs = [plain(user).get("spec", {}) for user in templates]
    return {
        name: next(s[name] for s in specs if name in s) for name in INHERITED if any(name in s for s in specs)
    }


def volumes(job: DataLoaderJob, setup: settings.OperatorConfig, role: names.Role) -> list[Manifest]:
    """Builds the volumes with the key and the settings, for every pod of a role."""
    return [
        key_volume(
            names.key_secret(job.name, job.metadata.uid or "", setup.root_key),
            0o440,
            _PARTS[role],
            items=settings.key_items(role),
            certificates=certificates.secret_names(job, setup),
        ),
        {"name": SETTINGS_VOLUME, "configMap": {"name": settings.map_name(job, setup, role)}},
    ]


def map_of(template: Mapping[str, Any]) -> str | None:
    """Returns the name of the ConfigMap with the settings of a template's pods; None if the template mounts none."""
    for volume in (template.get("spec") or {}).get("volumes") or ():
        if volume.get("name") == SETTINGS_VOLUME:
            return str((volume.get("configMap") or {}).get("name"))
    return None


def secret_of(template: Mapping[str, Any]) -> str | None:
    """Returns the name of the Secret with the keys of a template's pods; None if the template mounts none."""
    for volume in (template.get("spec") or {}).get("volumes") or ():
        if volume.get("name") == KEY_VOLUME:
            projected = (volume.get("projected") or {}).get("sources") or [{}]
            return str(
                (volume.get("secret") or {}).get("secretName")
                or (projected[0].get("secret") or {}).get("name")
            )
    return None


def shm_size(job: DataLoaderJob, container: str) -> str:
    """Returns the size of a Ray node's shared memory, for Ray's object store and for user code."""
    tasks = job.spec.ray.own.room()
    has_tasks = tasks.cpus and container == names.Role.FEEDER.value
    nbytes = SHM_NBYTES + (tasks.object_store_nbytes if has_tasks else 0)
    return f"{-(-nbytes // 1024**2)}Mi"


def mounts(ours: Iterable[Manifest], theirs: Iterable[Mapping[str, Any]]) -> list[Manifest]:
    """Joins the mounts of a container. The user's mounts replace the operator's at /tmp and /dev/shm. The API server
    refuses a user's mount at any other path that the operator uses."""
    taken = {str(mount.get("mountPath")).rstrip("/") for mount in theirs}
    kept = [mount for mount in ours if mount not in (TMP, SHM) or mount["mountPath"] not in taken]
    return [*kept, *map(dict, theirs)]


def ray_container(
    job: DataLoaderJob, role: names.Role, module: str, file: str, amounts: Mapping[str, Any]
) -> Manifest:
    """Builds the container of a Ray node, head or feeder. The head's container does not get the job's key."""
    is_divided = role is names.Role.HEAD
    return {
        "name": role.value,
        "image": image(job),
        "command": ["python", "-m", module, "--settings", f"{settings.SETTINGS_FOLDER}/{file}"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *environment({"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}),  # noqa: S108  as above
        ],
        "resources": dict(amounts),
        "securityContext": dict(RESTRICTED),
        "volumeMounts": [*(supervisor.ray_mounts() if is_divided else MOUNTS), TMP, SHM],
        **LAST_WORDS,
    }


def add(container: Manifest, theirs: Mapping[str, Any]) -> Manifest:
    """Merges the user's container into the operator's container of the same name. The user's fields take precedence.
    Validation of the manifest refuses fields that must not change."""
    made = {**container, **theirs}
    for field in ("env", "ports"):
        if field in container:
            made[field] = joined(container[field], theirs.get(field, []))
    made["volumeMounts"] = mounts(container["volumeMounts"], theirs.get("volumeMounts", []))
    made["securityContext"] = {**container["securityContext"], **theirs.get("securityContext", {})}
    return made


def with_data(theirs: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Adds spec.data to the user's container. The container's own variables may refer to variables of spec.data."""
    made = dict(theirs)
    if "env" in data:
        made["env"] = joined(data["env"], theirs.get("env", []))
    for field in ("envFrom", "volumeMounts"):
        if field in data:
            made[field] = [*data[field], *theirs.get(field, [])]
    return made


def joined(ours: Iterable[Manifest], theirs: Iterable[Manifest]) -> list[Manifest]:
    """Joins named items, such as variables. The operator's items come first, because the user's may refer to them. A
    user's item replaces the operator's item of the same name."""
    found = list(theirs)
    taken = [item.get("name") for item in found]
    return [*(item for item in ours if item["name"] not in taken), *found]


def environment(variables: Mapping[str, str]) -> list[Manifest]:
    return [{"name": name, "value": value} for name, value in variables.items()]


def pod_of(workload: Manifest) -> Manifest:
    """Builds a pod as the workload's controller would, except that the job owns the pod."""
    template, metadata = workload["spec"]["template"], workload["metadata"]
    taken = {name: value for name, value in template["metadata"].items() if name in FROM_TEMPLATES}
    own = {"namespace": metadata["namespace"], "generateName": f"{metadata['name']}-"}
    return {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {**taken, **own, "ownerReferences": metadata["ownerReferences"]}, "spec": template["spec"],
    }  # fmt: skip
