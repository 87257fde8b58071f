"""Batch trees and bytes: the names that feeder, trainer and proofs of equality import."""

from __future__ import annotations

from dataloaderjob.codec.decoding import Decoder
from dataloaderjob.codec.digest import digest_update
from dataloaderjob.codec.encoding import EncodedBatch, encode

__all__ = ["Decoder", "EncodedBatch", "digest_update", "encode"]
