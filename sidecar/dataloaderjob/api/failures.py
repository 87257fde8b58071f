"""spec.trainers.job.failurePolicy: the treatment of trainers when one of them fails. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dataloaderjob.api.base import Flag, Model, Whole

Action = Literal["FailJob", "Ignore", "Count"]


class FailureRule(Model):
    """The meaning of some exit codes of a trainer."""

    on_exit_codes: Annotated[
        tuple[Annotated[Whole, Field(ge=1, le=255)], ...], Field(min_length=1, max_length=255)
    ]
    """Exit codes of the containers in trainer pods. Only those that failed first count."""
    action: Action
    """`FailJob`: fail the job at once. `Ignore`: restart without counting. `Count`: restart and count it."""


class FailurePolicy(Model):
    """Number and timing of restarts of all trainers after one of them failed."""

    max_restarts: Whole = Field(default=3, ge=0, le=1_000)
    """Maximum number of restarts after failures. Ten minutes in which batches were taken reset the count to 0."""
    backoff_seconds: Whole = Field(default=10, ge=0, le=300)
    """Pause before the first restart. Each further restart doubles it, up to 300."""
    ignore_disruptions: Flag = True
    """Do not count evictions, preemptions and lost nodes. 50 in a row without progress fail the job."""
    rules: Annotated[tuple[FailureRule, ...], Field(max_length=20)] = ()
    """The first rule with the exit code decides. Without one, the failure counts."""

    def action(self, codes: frozenset[int]) -> tuple[Action, str]:
        """Returns the action after these exit codes, and the rule that decides it, for people; empty if none does."""
        for number, rule in enumerate(self.rules):
            if found := codes.intersection(rule.on_exit_codes):
                return rule.action, f"failurePolicy.rules[{number}]: exit code {min(found)}"
        return "Count", ""
