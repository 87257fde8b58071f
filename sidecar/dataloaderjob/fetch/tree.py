"""Batch trees and bytes: the names that feeder, trainer and proofs of equality import."""

from __future__ import annotations

from dataloaderjob.fetch.decoding import Decoder
from dataloaderjob.fetch.digest import digest_update
from dataloaderjob.fetch.encoding import EncodedBatch, encode

__all__ = ["Decoder", "EncodedBatch", "digest_update", "encode"]
