"""How long tests wait for what has to come."""

PATIENCE_S = 60.0
"""The least, whatever is waited for: a machine that does other things, too, is slow, and benchmarks measure speed."""
