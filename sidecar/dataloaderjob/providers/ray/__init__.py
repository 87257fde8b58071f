"""Feeders as actors of a Ray cluster. No other provider imports ray, and in this package, `node` does not import it."""
