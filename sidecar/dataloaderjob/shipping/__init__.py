"""Shipping of user code and its state as blobs. It covers objects, the names of objects, and objects that cannot be
sent."""
