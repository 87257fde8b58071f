"""Making samples and batches from tickets: seeds, random number generators, slots, stages and failures."""
