"""spec.trainers.job.failurePolicy: the response to trainer failures. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dataloaderjob.api.base import Flag, Model, Whole

Action = Literal["FailJob", "Ignore", "Count"]


class FailureRule(Model):
    """The action for certain exit codes of trainers."""

    on_exit_codes: Annotated[
        tuple[Annotated[Whole, Field(ge=1, le=255)], ...], Field(min_length=1, max_length=255)
    ]
    """Exit codes of containers in trainer pods. Only those of the containers that failed first count."""
    action: Action
    """`FailJob`: fail the job at once. `Ignore`: restart without counting the failure. `Count`: restart and count
    it."""


class FailurePolicy(Model):
    """Limits and delays for restarting all trainers after one of them has failed."""

    max_restarts: Whole = Field(default=3, ge=0, le=1_000)
    """Maximum number of restarts after failures. The count returns to 0 after ten minutes during which trainers take
    batches."""
    backoff_seconds: Whole = Field(default=10, ge=0, le=300)
    """Pause before the first restart. Each further restart doubles the pause, up to 300 seconds."""
    ignore_disruptions: Flag = True
    """Do not count evictions, preemptions and lost nodes as failures. The job still fails after 50 of them in a row
    without progress."""
    rules: Annotated[tuple[FailureRule, ...], Field(max_length=20)] = ()
    """Rules for exit codes. The first rule that lists the exit code decides. If none does, the failure counts."""

    def action(self, codes: frozenset[int]) -> tuple[Action, str]:
        """Returns the action for these exit codes and a description of the deciding rule, which is empty if no rule
        matches."""
        for number, rule in enumerate(self.rules):
            if found := codes.intersection(rule.on_exit_codes):
                return rule.action, f"failurePolicy.rules[{number}]: exit code {min(found)}"
        return "Count", ""
