"""spec.trainers.job.failurePolicy: what becomes of the trainers when one of them fails. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dataloaderjob.api.base import Flag, Model, Whole

Action = Literal["FailJob", "Ignore", "Count"]


class FailureRule(Model):
    """What some exit codes of a trainer mean."""

    on_exit_codes: Annotated[
        tuple[Annotated[Whole, Field(ge=1, le=255)], ...], Field(min_length=1, max_length=255)
    ]
    """Exit codes of a container of a trainer pod, of those that failed first."""
    action: Action
    """`FailJob`: the job fails at once. `Ignore`: a restart that does not count. `Count`: one that does."""


class FailurePolicy(Model):
    """How often, and when, all trainers are started anew after one failed."""

    max_restarts: Whole = Field(default=3, ge=0, le=1_000)
    """Restarts after failures. Ten minutes in which batches were taken set the count to 0."""
    backoff_seconds: Whole = Field(default=10, ge=0, le=300)
    """Pause before the first restart. Each further one doubles it, up to 300."""
    ignore_disruptions: Flag = True
    """Evictions, preemptions and lost nodes do not count. 50 in a row without progress fail the job."""
    rules: Annotated[tuple[FailureRule, ...], Field(max_length=20)] = ()
    """The first that has the exit code decides; without one it counts."""

    def action(self, codes: frozenset[int]) -> tuple[Action, str]:
        """What to do after these exit codes, and the rule that says so, for people; empty if none does."""
        for number, rule in enumerate(self.rules):
            if found := codes.intersection(rule.on_exit_codes):
                return rule.action, f"failurePolicy.rules[{number}]: exit code {min(found)}"
        return "Count", ""
