"""Converts batches to bytes and back: layout, leaves, objects taken apart, digests."""
