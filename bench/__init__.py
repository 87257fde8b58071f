"""Benchmarks of the loader against its peers: `python -m bench.run`. bench/README.md has the method."""
