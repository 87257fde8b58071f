"""Batches as bytes and back: layout, leaves, objects taken apart, digests."""
