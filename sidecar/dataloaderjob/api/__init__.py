"""The DataLoaderJob API: models of the manifest, its checks, its schema. No I/O but reading manifests."""

from dataloaderjob.api.base import ByteSize, Quantity, Resources
from dataloaderjob.api.feeders import FeedersSpec, HealthCheck, RaySpec, RayTuning
from dataloaderjob.api.job import (
    API_VERSION,
    GROUP,
    KIND,
    PLURAL,
    SHORT_NAME,
    VERSION,
    DataLoaderJob,
    DataLoaderJobSpec,
    Deadlines,
    Metadata,
)
from dataloaderjob.api.load import load_manifest, parse_manifest, parse_object, refused_changes
from dataloaderjob.api.pods import Container, EnvVar, PodSpec, PodTemplate, Volume
from dataloaderjob.api.problems import ManifestError, Problem
from dataloaderjob.api.trainer import SidecarSpec, TrainerPodTemplate, TrainerSpec

__all__ = [
    "API_VERSION",
    "GROUP",
    "KIND",
    "PLURAL",
    "SHORT_NAME",
    "VERSION",
    "ByteSize",
    "Container",
    "DataLoaderJob",
    "DataLoaderJobSpec",
    "Deadlines",
    "EnvVar",
    "FeedersSpec",
    "HealthCheck",
    "ManifestError",
    "Metadata",
    "PodSpec",
    "PodTemplate",
    "Problem",
    "Quantity",
    "RaySpec",
    "RayTuning",
    "Resources",
    "SidecarSpec",
    "TrainerPodTemplate",
    "TrainerSpec",
    "Volume",
    "load_manifest",
    "parse_manifest",
    "parse_object",
    "refused_changes",
]
