"""Providers, which start feeders. `ray` runs feeders as actors of a Ray cluster, and `local` as processes on this
machine. `remote` forwards requests to a provider in another process."""
