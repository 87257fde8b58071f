"""Shipping of user code and its state as blobs: objects, their names, and objects that cannot be sent."""
