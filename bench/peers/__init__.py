"""The peers, one module for each benchmark. Each builds the same batches as ours, by its own best means."""
