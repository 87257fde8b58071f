"""Benchmarks of the loader beside its peers: `python -m bench.run`; method in bench/README.md."""
