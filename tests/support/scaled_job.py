"""A job on a real API server whose trainers and feeders are simulated, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from manifests import manifest
from operated import Operated, client_of
from sim_job import SimJob

from apiserver import ApiServer
from dataloaderjob.api import KIND
from dataloaderjob.api.status import RayStatus
from dataloaderjob_operator.autoscaler import Autoscalers
from dataloaderjob_operator.decide.observed import Rates, SupervisorStatus

RAY = RayStatus(version="2.60.0", worker_register_timeout_seconds=120)
RATES = Rates(batches_per_s=2.0, nbytes_per_s=2e6, stall=0.8, occupancy=0.0)
NOW = "2026-01-01T00:00:00Z"


class ScaledJob:
    """A job on the server whose trainers and feeders are simulated, and an operator that scales it."""

    def __init__(self, server: ApiServer, autoscaling: dict[str, Any], **sim: Any) -> None:
        self.job = Operated(server, manifest({"spec.feeders.autoscaling": autoscaling}))
        self.sim = SimJob(**sim)
        self.job.supervisor.reported = SupervisorStatus(ray=RAY)
        self.scalers = Autoscalers(
            client_of(server)[1], self.job.supervisor.status, self.version, lambda key: None,
            clock=lambda: self.sim.now,
        )  # fmt: skip
        self.reconcile()
        self.job.patch(
            KIND,
            self.job.name,
            {"status": {"phase": "Running", "servingTime": NOW, "startTime": NOW}},
            "status",
        )

    def version(self, key: tuple[str, str]) -> str:
        return str(self.job.get(KIND, self.job.name)["metadata"]["resourceVersion"])

    def reconcile(self) -> None:
        operator = self.job.operator()
        operator.autoscalers = self.scalers
        self.job.reconcile_with(operator)

    def until(self, end: float) -> None:
        """Lets time pass. Feeders follow the job's spec."""
        while self.sim.now < end:
            self.sim.run(10)
            self.job.supervisor.reported = replace(
                self.job.supervisor.reported or SupervisorStatus(ray=RAY),
                desired=self.sim.desired, ready=self.sim.ready, measures=self.sim.window.measures(), rates=RATES,
            )  # fmt: skip
            self.reconcile()
            self.job.run(self.scalers.tick())
            self.sim.scale(self.replicas)

    @property
    def replicas(self) -> int:
        return int(self.job.get(KIND, self.job.name)["spec"]["feeders"]["replicas"])

    @property
    def condition(self) -> dict[str, Any]:
        self.reconcile()
        return self.job.conditions()["AutoscalingActive"]

    def hpa(self, target: str) -> None:
        spec = {
            "scaleTargetRef": {"apiVersion": "dataloading.dev/v1alpha1", "kind": KIND, "name": target},
            "minReplicas": 1, "maxReplicas": 9,
        }  # fmt: skip
        path = f"/apis/autoscaling/v2/namespaces/{self.job.namespace}/horizontalpodautoscalers"
        self.job.server.request("POST", path, {"metadata": {"name": f"for-{target}"}, "spec": spec})
