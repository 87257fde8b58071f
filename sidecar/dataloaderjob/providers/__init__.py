"""Providers, which start feeders: `ray` as actors of a Ray cluster, `local` as processes on this machine, and `remote`
through a provider in another process."""
