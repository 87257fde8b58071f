"""Pod specs: what the user's template says, with the operator's containers, volumes and restrictions put in. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.pods import Container, PodTemplate
from dataloaderjob_operator import names
from dataloaderjob_operator.objects import meta, settings

SHM_SIZE = "256Mi"
"""Ray's object store, of which the data path uses nothing, and torch's own."""
TMP_SIZE = "10Gi"
"""Ray's sockets and logs, and the arrays of the dataset."""
FS_GROUP = 65532
"""Where the template gives none: by it key and token can be read, and trainer and sidecar share the socket, whoever
they run as."""
INHERITED = ("imagePullSecrets", "securityContext")
"""Of the trainers' pods, for head and feeders: by default they run the trainers' image."""
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
LAST_WORDS = {"terminationMessagePolicy": "FallbackToLogsOnError"}
"""What a container printed last goes into its status, and from there into the job's conditions."""
_OWNED = ("containers", "initContainers", "volumes", "restartPolicy")


def plain(model: PodTemplate | Container) -> dict[str, Any]:
    """As the user wrote it."""
    return model.model_dump(mode="json", by_alias=True, exclude_unset=True)


def image(job: DataLoaderJob) -> str:
    """Of head and feeders."""
    return job.spec.feeders.image or job.spec.trainer.container.image or ""


def template(
    job: DataLoaderJob, role: names.Role, user: PodTemplate, spec: meta.Manifest, *, asked: Any, version: str
) -> meta.Manifest:
    """A pod template. `asked`: all that the user decides about it, whose change replaces the pods."""
    annotations = {
        **user.metadata.annotations,
        names.ANNOTATION_TEMPLATE: meta.digest(asked),
        names.ANNOTATION_MADE_BY: version,
    }
    labels = {**user.metadata.labels, **meta.labels(job, role)}
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": spec}


def shared_fields(job: DataLoaderJob, user: PodTemplate) -> dict[str, Any]:
    """The pod's own fields: the user's, what head and feeders take from the trainers, no token of the cluster."""
    found = {name: value for name, value in plain(user).get("spec", {}).items() if name not in _OWNED}
    found = {**_inherited(job), **found}
    found["securityContext"] = {"fsGroup": FS_GROUP, **found.get("securityContext", {})}
    found.setdefault("automountServiceAccountToken", False)
    found["enableServiceLinks"] = False
    return found


def asked(job: DataLoaderJob, user: PodTemplate) -> list[Any]:
    """What the user says of the pods of head or feeders, in his words: a later operator finds the same."""
    return [image(job), plain(user), _inherited(job)]


def _inherited(job: DataLoaderJob) -> dict[str, Any]:
    trainer = plain(job.spec.trainer.template)["spec"]
    return {name: trainer[name] for name in INHERITED if name in trainer}


def volumes(job: DataLoaderJob) -> list[meta.Manifest]:
    """Key and settings, for every pod of the job."""
    return [
        {
            "name": "dataloaderjob-key",
            "secret": {"secretName": names.key_secret(job.name), "defaultMode": 0o440},
        },
        {"name": "dataloaderjob-settings", "configMap": {"name": names.settings_map(job.name)}},
    ]


MOUNTS = (
    {"name": "dataloaderjob-key", "mountPath": settings.KEY_FOLDER, "readOnly": True},
    {"name": "dataloaderjob-settings", "mountPath": settings.SETTINGS_FOLDER, "readOnly": True},
)


def scratch() -> tuple[list[meta.Manifest], list[meta.Manifest]]:
    """Volumes and mounts of what Ray writes: /tmp and /dev/shm, of a size."""
    made = [
        {"name": "dataloaderjob-tmp", "emptyDir": {"sizeLimit": TMP_SIZE}},
        {"name": "dataloaderjob-shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHM_SIZE}},
    ]
    mounts = [
        {"name": "dataloaderjob-tmp", "mountPath": "/tmp"},  # noqa: S108  a volume of the pod's own
        {"name": "dataloaderjob-shm", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    return made, mounts


def ray_container(
    job: DataLoaderJob, role: names.Role, module: str, file: str, resources: Mapping[str, Any]
) -> meta.Manifest:
    """The container of a Ray node of the job: head or feeders."""
    _, mounts = scratch()
    return {
        "name": role.value,
        "image": image(job),
        "command": ["python", "-m", module, "--settings", f"{settings.SETTINGS_FOLDER}/{file}"],
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            *meta.environment({"HOME": "/tmp", "PYTHONUNBUFFERED": "1"}),  # noqa: S108  as above
        ],
        "resources": dict(resources),
        "securityContext": dict(RESTRICTED),
        "volumeMounts": [*MOUNTS, *mounts],
        **LAST_WORDS,
    }


def add(container: meta.Manifest, theirs: Mapping[str, Any]) -> meta.Manifest:
    """A container of the operator's with what the user's of the same name adds to it."""
    made = {**container, **{k: v for k, v in theirs.items() if k not in container}}
    for field in ("env", "volumeMounts"):
        key = "name" if field == "env" else "mountPath"
        ours = container.get(field, [])
        taken = {item[key] for item in ours}
        made[field] = [*ours, *(item for item in theirs.get(field, []) if item[key] not in taken)]
    if "securityContext" in theirs:
        made["securityContext"] = {**container.get("securityContext", {}), **theirs["securityContext"]}
    return made


def resources(model: Any) -> dict[str, Any]:
    """Requests and limits of a spec, without those that are empty."""
    dumped = model.model_dump(mode="json", by_alias=True)
    return {kind: values for kind, values in dumped.items() if values}


def named(containers: Iterable[Container], name: str) -> Container | None:
    return next((c for c in containers if c.name == name), None)
