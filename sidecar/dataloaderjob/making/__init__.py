"""Making samples and batches from a ticket: seeds, generators, slots, stages, failures."""
