"""The Secrets with a job's certificates, if its spec has `loader.tls`. Pure.

The operator creates a generation's Secret when the generation begins. It does not have permission to change Secrets.
Pods therefore refer to the Secrets of all generations from the start. The certificates are derived from the root key
and the job. No Secret contains the authorities' keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.injection import attached_certificates
from dataloaderjob.api.sidecar import AUTHORITIES, certificate_fields
from dataloaderjob.core import certificates
from dataloaderjob.core.generations import GENERATIONS, Schedule
from dataloaderjob.core.keys import PARTS_OF_PODS, Part
from dataloaderjob_operator import names
from dataloaderjob_operator.by_job import cached_by_job
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects import settings


def secret_names(job: DataLoaderJob, setup: settings.OperatorConfig) -> list[str]:
    """Returns the names of the Secrets of all generations, in order; empty if the job does not use TLS."""
    count = GENERATIONS if job.spec.loader.tls else 0
    uid = job.metadata.uid or ""
    return [names.certificate_secret(job.name, uid, setup.root_key, number) for number in range(count)]


@cached_by_job
def secrets(
    job: DataLoaderJob, setup: settings.OperatorConfig, schedule: Schedule, generations: tuple[int, ...]
) -> Sequence[Manifest]:
    """Builds the Secrets of these generations."""
    made = list[Manifest]()
    seed = names.certificate_seed(setup.root_key, job.metadata.uid or "")
    for number in generations:
        values = _values(seed, PARTS_OF_PODS, number, schedule)
        name = secret_names(job, setup)[number]
        made.append({**settings.secret_of_values(job, name, values), "immutable": True})
        if job.spec.trainers.attached:  # not immutable, like the Secret with their key
            values = _values(seed, (Part.SIDECAR,), number, schedule)
            made.append(settings.secret_of_values(job, attached_certificates(job)[number], values))
    return tuple(made)


def _values(seed: bytes, parts: Sequence[Part], generation: int, schedule: Schedule) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for part in parts:
        made = certificates.files(seed, part, generation, schedule)
        certificate, key = certificate_fields(part)
        found |= {AUTHORITIES: made.authorities, certificate: made.certificate, key: made.key}
    return found
