"""The autoscaling of one job. This module converts the job's spec and state to the policy's input, and the policy's
answer to a condition. Pure.

The policy is `dataloaderjob.core.autoscaling`; `autoscaler` runs it.
"""

from __future__ import annotations

from dataclasses import dataclass

from dataloaderjob.api.feeders import AutoscalingMode, FeedersSpec
from dataloaderjob.core.autoscaling import Bounds, Proposal, Reason, Situation
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.health import ConditionState
from dataloaderjob_operator.decide.observed import Observed, ScalingReport, SupervisorStatus
from dataloaderjob_operator.decide.stages import WANTED, ChildPart, Stage, StageResult

LASTING = frozenset({Reason.SATURATED, Reason.PENDING, Reason.AT_LIMIT})
"""Lasting reasons of the policy. The condition AutoscalingActive shows these, and `Scaling` instead of all others."""
SCALED = "replicas "
"""Prefix of the message that reports a change in the number of replicas."""
ROLLOUT = "feeders are being replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingTarget:
    """A job whose feeders the operator scales. `least`, `most` and `replicas` count feeder pods."""

    least: int
    most: int
    replicas: int
    per_pod: int
    frozen: str = ""
    """The reason not to change the number of feeders now; empty if there is none."""

    @property
    def bounds(self) -> Bounds:
        return Bounds(least=self.least * self.per_pod, most=self.most * self.per_pod)

    def situation(self, supervisor: SupervisorStatus | None) -> Situation:
        answers = supervisor is not None and not supervisor.silent
        return Situation(
            desired=self.replicas * self.per_pod,
            ready=supervisor.ready if supervisor is not None else 0,
            measures=supervisor.measures if supervisor is not None and answers else None,
            frozen=self.frozen,
            step=self.per_pod,
        )


def target_of(observed: Observed, result: StageResult) -> ScalingTarget | None:
    """Returns the job as the policy sees it; None if the operator must not scale it."""
    spec = observed.job.spec.feeders
    if spec.autoscaling.mode is not AutoscalingMode.AUTO or ChildPart.FEEDING not in WANTED[result.stage]:
        return None
    frozen = "" if result.stage is Stage.RUNNING else f"the job is {result.stage.value.lower()}"
    least, most = spec.autoscaling_bounds()
    return ScalingTarget(
        least=least, most=most, replicas=spec.replicas, per_pod=spec.processes_per_pod,
        frozen=frozen or (ROLLOUT if _rolls_out(observed) else ""),
    )  # fmt: skip


def _rolls_out(observed: Observed) -> bool:
    """Returns True if pods of an earlier template still exist."""
    deployment = observed.children.get(("Deployment", names.feeders(observed.job.name)), {})
    status = deployment.get("status") or {}
    return int(status.get("updatedReplicas") or 0) < int(status.get("replicas") or 0)


def report_of(before: ScalingReport | None, target: ScalingTarget, proposal: Proposal) -> ScalingReport:
    """Returns the report about the policy's proposal. If the proposal does not change the number of feeders, the report
    repeats the last change."""
    reason = proposal.reason.value if proposal.reason in LASTING else "Scaling"
    replicas = proposal.feeders // target.per_pod
    if replicas != target.replicas:
        return ScalingReport(True, reason, f"{SCALED}{target.replicas} -> {replicas}: {proposal.text}")
    text = before.message if before is not None and before.message.startswith(SCALED) else ""
    return ScalingReport(True, reason, text or f"between {target.least} and {target.most} replicas")


def blocked_by(name: str) -> ScalingReport:
    """Returns the report for a job that the HorizontalPodAutoscaler `name` scales."""
    text = f"HorizontalPodAutoscaler {name} scales this job: delete it, or use autoscaling.mode Recommend"
    return ScalingReport(False, "HorizontalPodAutoscaler", text)


def scaling(spec: FeedersSpec, report: ScalingReport | None) -> ConditionState:
    """Returns the state of the condition AutoscalingActive."""
    mode = spec.autoscaling.mode
    if mode is not AutoscalingMode.AUTO:
        text = "the operator recommends a number of replicas" if mode is AutoscalingMode.RECOMMEND else ""
        return ConditionState(False, mode.value, text)
    if report is None:
        return ConditionState(None, "NotMeasured", "nothing has been measured yet")
    return ConditionState(report.is_active, report.reason, report.message)
