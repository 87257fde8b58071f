"""The shipping of user code, and of the state that the code needs, as blobs."""
