"""The field of the manifest in messages of quotas and LimitRanges about pods."""

from __future__ import annotations

import pytest

from dataloaderjob_operator.decide.resource_fields import with_field
from dataloaderjob_operator.names import Role

FORBIDDEN = 'pods "hungry-head-1" is forbidden: '


@pytest.mark.parametrize(
    "words",
    [
        "exceeded quota: small, requested: requests.cpu=2, used: requests.cpu=1, limited: requests.cpu=2",
        "failed quota: small: must specify limits.cpu for: feeder",
        "minimum memory usage per Container is 1Gi, but request is 512Mi",
        "[maximum cpu usage per Container is 1, but limit is 2, maximum memory usage per Pod is 1Gi, but limit is 2Gi]",
        "cpu max limit to request ratio per Container is 2, but provided ratio is 4.000000",
        'spec.containers[0].resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1',
    ],
)
@pytest.mark.parametrize(
    ("role", "field"),
    [
        (Role.HEAD, "spec.ray.managed.head.resources"),
        (Role.FEEDER, "spec.feeders.resources"),
        (Role.TRAINER, "spec.trainers.job.template or spec.sidecar.resources"),
    ],
)
def test_pod_refused_by_quota_or_limit_range_names_the_field(words: str, role: Role, field: str):
    told = with_field(FORBIDDEN + words, role)
    assert told.startswith(FORBIDDEN + words)
    assert told.endswith(field)


def test_other_refusals_do_not_mention_resources():
    text = FORBIDDEN + 'violates PodSecurity "restricted:latest": privileged'
    assert with_field(text, Role.FEEDER) == text
