"""The peers, one module for each benchmark. Each builds the same batches as ours, in its own best way."""
