"""The DataLoaderJob API: the manifest's models, checks and schema. Its only I/O is reading manifests."""

from dataloaderjob.api.job import API_VERSION, GROUP, KIND, PLURAL, VERSION, DataLoaderJob
from dataloaderjob.api.load import load_manifest, parse_live, parse_manifest, parse_object
from dataloaderjob.api.problems import ManifestError

__all__ = [
    "API_VERSION", "GROUP", "KIND", "PLURAL", "VERSION", "DataLoaderJob", "ManifestError", "load_manifest",
    "parse_live", "parse_manifest", "parse_object",
]  # fmt: skip
