"""What feeders and trainers share: a batch from a ticket, batches as bytes, user code as blobs, failures."""
