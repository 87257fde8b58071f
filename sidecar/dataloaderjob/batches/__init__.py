"""Conversion of batches to bytes and back: layout, leaves, decomposed objects, digests."""
