"""The DataLoaderJob API: models of the manifest, its checks, its schema. No I/O except reading manifests."""

from dataloaderjob.api.job import API_VERSION, GROUP, KIND, PLURAL, VERSION, DataLoaderJob
from dataloaderjob.api.load import load_manifest, parse_live, parse_manifest, parse_object
from dataloaderjob.api.problems import ManifestError

__all__ = [
    "API_VERSION", "GROUP", "KIND", "PLURAL", "VERSION", "DataLoaderJob", "ManifestError", "load_manifest",
    "parse_live", "parse_manifest", "parse_object",
]  # fmt: skip
