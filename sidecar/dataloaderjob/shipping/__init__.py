"""User code and its state as blobs: what travels, under which name, and what cannot."""
