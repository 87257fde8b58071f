"""Fuzzing of everything that parses bytes of other processes: `make fuzz` runs atheris on each target.

A target is a parser, its seeds, which the real encoders make, and the errors that it declares. Any other exception, a
hang, or a process that grows beyond MAX_RSS_MB is a finding. `tests/unit/test_fuzz_targets.py` runs each target on its
seeds and some mutations of them.
"""
