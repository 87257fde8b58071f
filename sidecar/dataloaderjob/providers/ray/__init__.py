"""Feeders as actors of a Ray cluster. No other provider imports ray. In this package, `node` does not import it."""
