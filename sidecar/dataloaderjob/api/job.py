"""DataLoaderJob v1alpha1: a training job, the feeders that make its batches, and its network policy. Pure."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from dataloaderjob.api.base import (
    MIB,
    Flag,
    Free,
    Immutable,
    Model,
    Rule,
    Use,
    Whole,
    in_quotes,
    nested,
)
from dataloaderjob.api.data import DataSpec
from dataloaderjob.api.feeders import FeedersSpec
from dataloaderjob.api.loader import LoaderSpec
from dataloaderjob.api.ray import RaySpec, RayTuning
from dataloaderjob.api.trainer import (
    FIRST_POOL_OVERHEAD_NBYTES,
    FURTHER_POOL_OVERHEAD_NBYTES,
    SidecarSpec,
    TrainersSpec,
)
from dataloaderjob.core.places import ALLOW_PICKLE_VARIABLE, FEEDERS_VARIABLE, PREFETCH_VARIABLE
from dataloaderjob.core.settings import LoaderSettings

Mode = Literal["Ingress", "Strict", "None"]


class NetworkPolicySpec(Model):
    """NetworkPolicies of the job's pods. Ignored on one machine, and on clusters whose network does not support them.

    They list the allowed connections. A job may need others, for example to its storage in `Strict` mode, or to a port
    that the trainer itself opens. Allow these in a NetworkPolicy of your own that selects the job's pods by their
    labels. docs/kubernetes/networking.md gives examples.
    """

    mode: Mode = "Ingress"
    """`Ingress`: only the job itself and the operator may connect to the job's pods. The sources in the operator's
    `--metrics-from` may also connect to the sidecars' metrics.

    `Strict`: in addition, the pods may connect only to the job itself and to DNS. `None`: no NetworkPolicy is created.
    """


GROUP = "dataloading.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DataLoaderJob"
PLURAL = "dataloaderjobs"
SHORT_NAME = "dlj"
MANAGED_BY = f"{GROUP}/operator"
"""The operator's own name in `managedBy`."""
MAX_NAME_LENGTH = 44
"""Maximum length of a job's name. A trainer's host name, NAME-trainers-ATTEMPT-REPLICA, has at most 63 characters. Its
two numbers have up to four digits each."""
_NAME = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"


_OWN, _ATTACHED = "has(self.trainers.job)", "has(self.trainers.attach)"
_HOST_NETWORK = "has(self.{0}.template.spec.hostNetwork) && self.{0}.template.spec.hostNetwork"
_FEEDERS_OUTSIDE = f"({_HOST_NETWORK.format('feeders')})"
_TRAINERS_OUTSIDE = f"({_OWN} && {_HOST_NETWORK.format('trainers.job')})"
_PROCESSES = (
    f"({_OWN} ? self.trainers.job.processesPerPod : {_ATTACHED} ? self.trainers.attach.processesPerPod : 1)"
)
_MEMORY_LIMIT = "self.sidecar.resources.limits['memory']"
_PER_PROCESS = "quantity(string(self.loader.memoryPerProcess))"
_REGISTER_TIMEOUT = (
    "(has(self.ray.managed) ? self.ray.managed.tuning.workerRegisterTimeoutSeconds"
    f" : {RayTuning().worker_register_timeout_seconds})"
)
_MEMORY_NEEDED = (
    f"{_PER_PROCESS}.asInteger() * {_PROCESSES} + {FIRST_POOL_OVERHEAD_NBYTES} +"
    f" {FURTHER_POOL_OVERHEAD_NBYTES} * ({_PROCESSES} - 1)"
)


class DataLoaderJobSpec(Model):
    """Desired state of the job."""

    ray: RaySpec = nested(RaySpec)
    """The Ray cluster that places and restarts feeders."""
    feeders: FeedersSpec = nested(FeedersSpec)
    """The processes that make batches."""
    sidecar: SidecarSpec = nested(SidecarSpec)
    """The process next to each trainer that receives batches into shared memory."""
    trainers: TrainersSpec
    """The trainers, which run the training command."""
    loader: LoaderSpec = nested(LoaderSpec)
    """Delivery of batches to the training loop."""
    data: DataSpec = nested(DataSpec)
    """Volumes and environment variables that give both trainers and feeders access to the data."""
    startup_deadline_seconds: Whole = Field(default=900, ge=1, le=604_800)
    """Maximum startup time, from the moment when all needed pods have a node until the head, the sidecars and
    `minAvailable` feeder pods serve."""
    active_deadline_seconds: Whole | None = Field(default=None, ge=1, le=31_536_000)
    """Maximum time for the whole job, including queueing. If omitted: no limit."""
    network_policy: NetworkPolicySpec = nested(NetworkPolicySpec)
    """Connections allowed to and from the job's pods. Ignored on one machine."""
    ttl_seconds_after_finished: Whole | None = Field(default=None, ge=0, le=31_536_000)
    """Time after which the finished job is deleted. If omitted: never. Ignored on one machine."""
    suspend: Flag = False
    """Suspend the job: it has no pods until this field is false again."""
    managed_by: Annotated[
        str | None,
        Field(max_length=63, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$"),
        Use("a controller's name such as kueue.x-k8s.io/multikueue"),
    ] = None
    """The controller that runs this job. If omitted or `dataloading.dev/operator`: the operator. Any other name: the
    operator leaves the job alone and reports this in an event. Ignored on one machine."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="trainers.job",
            use=(
                "either job (the operator creates the pods) or attach (other controllers create them), not both"
            ),
            cel=f"{_OWN} != {_ATTACHED}",
            found=f"({_OWN} ? 'job and attach' : 'neither job nor attach')",
        ),
        Rule(
            field="feeders.image",
            use=(
                "an image with your Dataset's code and dataloaderjob[feeder], because the job does not know the "
                "image of attached trainers"
            ),
            cel=f"!{_ATTACHED} || has(self.feeders.image)",
            found="'no image'",
            only_on_a_cluster=True,
        ),
        Rule(
            field="ray.managed.tuning.workerRegisterTimeoutSeconds",
            use="at most spec.startupDeadlineSeconds, or raise that deadline",
            cel=f"has(self.ray.external) || {_REGISTER_TIMEOUT} <= self.startupDeadlineSeconds",
            found=f"string({_REGISTER_TIMEOUT}) + ', above startupDeadlineSeconds ' +"
            " string(self.startupDeadlineSeconds)",
        ),
        Rule(
            field="sidecar.resources.limits.memory",
            use=(
                "at least loader.memoryPerProcess for each process of a pod, plus 64Mi, plus 16Mi for each further "
                "process, or omit memory"
            ),
            cel="!has(self.sidecar.resources) || !has(self.sidecar.resources.limits) ||"
            " !('memory' in self.sidecar.resources.limits) ||"
            f" !quantity(string({_MEMORY_LIMIT})).isInteger() || !{_PER_PROCESS}.isInteger() ||"
            f" quantity(string({_MEMORY_LIMIT})).asInteger() >= {_MEMORY_NEEDED}",
            found=f"string({_MEMORY_LIMIT}) + ', below the ' + string(({_MEMORY_NEEDED} + {MIB - 1}) / {MIB}) +"
            " 'Mi that memoryPerProcess ' + string(self.loader.memoryPerProcess) + ' and the sidecar itself need'",
        ),
        Rule(
            field="networkPolicy.mode",
            use=(
                "None if pods use their node's network, because a NetworkPolicy neither protects nor admits such pods"
            ),
            cel=f"self.networkPolicy.mode == 'None' || !({_TRAINERS_OUTSIDE} || {_FEEDERS_OUTSIDE})",
            found="self.networkPolicy.mode + ' with hostNetwork in ' +"
            f" ({_TRAINERS_OUTSIDE} ? 'trainers.job' : 'feeders') + '.template'",
        ),
        Rule(
            field="loader.tls",
            use="false with spec.ray.external, because feeders on its nodes have no certificates of the job",
            cel="!self.loader.tls || !has(self.ray) || !has(self.ray.external)",
            found="'true'",
        ),
    )
    IMMUTABLE: ClassVar[tuple[Immutable, ...]] = (
        Immutable(field="managedBy", use="a new job, because two controllers must not share one"),
    )

    @property
    def shared_nbytes(self) -> int:
        """Shared memory that all pools of one trainer pod may use together."""
        return self.loader.memory_per_process.nbytes * self.trainers.processes_per_pod

    def loader_settings(self, *, replicas: int = 1) -> LoaderSettings:
        """Returns the settings of one sidecar that serves `replicas` replicas of the trainer."""
        loader = self.loader
        return LoaderSettings(
            processes=self.trainers.processes_per_pod * replicas,
            shared_memory_nbytes=self.shared_nbytes * replicas,
            pool_nbytes=None if loader.pool_size is None else loader.pool_size.nbytes,
            batch_deadline_s=float(loader.batch_timeout_seconds),
            progress_after_s=float(loader.warn_after_seconds),
            checksum=loader.checksum,
            awaits_feeders=self.trainers.attached,
        )

    def loader_environment(self) -> dict[str, str]:
        """Returns the environment variables that pass the manifest's settings to the loader in a trainer process."""
        found = {FEEDERS_VARIABLE: str(max(1, self.feeders.count))}
        if self.loader.prefetch is not None:
            found[PREFETCH_VARIABLE] = str(self.loader.prefetch)
        return found | ({ALLOW_PICKLE_VARIABLE: "1"} if self.loader.allow_pickle else {})


class Metadata(Model):
    """Kubernetes' object metadata."""

    name: Annotated[
        str,
        Use("a name of lower-case letters, digits and hyphens that begins and ends with a letter or a digit"),
    ]
    """Name of the job: at most 44 lower-case letters, digits and hyphens, beginning and ending with a letter or a
    digit."""
    namespace: Annotated[str | None, Field(max_length=63)] = None
    """Namespace of the job. Ignored on one machine."""
    labels: dict[str, str] = Field(default_factory=dict)
    """Labels of the object."""
    annotations: dict[str, str] = Field(default_factory=dict)
    """Annotations of the object."""
    uid: str | None = None
    """Set by the cluster."""
    generation: int | None = None
    """Set by the cluster."""
    resource_version: str | None = None
    """Set by the cluster."""
    creation_timestamp: str | None = None
    """Set by the cluster."""
    deletion_timestamp: str | None = None
    """Set by the cluster."""
    deletion_grace_period_seconds: int | None = None
    """Set by the cluster."""
    generate_name: str | None = None
    """Set by the cluster's clients."""
    self_link: str | None = None
    """Set by the cluster."""
    finalizers: tuple[str, ...] = ()
    """Set by the cluster's controllers."""
    owner_references: tuple[Free, ...] = ()
    """Set by the cluster's controllers."""
    managed_fields: tuple[Free, ...] = ()
    """Set by the cluster."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            field="name",
            use="at most 44 characters, because the names of pods and Services are derived from it",
            cel=f"size(self.name) <= {MAX_NAME_LENGTH}",
            found=in_quotes("self.name") + " + ' (' + string(size(self.name)) + ' characters)'",
        ),
        Rule(
            field="name",
            use="lower-case letters, digits and hyphens, beginning and ending with a letter or a digit",
            cel=f"self.name.matches('{_NAME}')",
            found=in_quotes("self.name"),
        ),
    )


class DataLoaderJob(Model):
    """A DataLoaderJob manifest."""

    api_version: Literal["dataloading.dev/v1alpha1"] = "dataloading.dev/v1alpha1"
    """`dataloading.dev/v1alpha1`."""
    kind: Literal["DataLoaderJob"] = "DataLoaderJob"
    """`DataLoaderJob`."""
    metadata: Metadata
    """Name, namespace, labels and annotations."""
    spec: DataLoaderJobSpec
    """Desired state of the job."""
    status: Free | None = None
    """State reported by the operator; ignored in a manifest."""

    @property
    def name(self) -> str:
        return self.metadata.name
