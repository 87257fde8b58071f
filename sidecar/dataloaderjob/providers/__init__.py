"""Providers start feeders: `ray` as actors of a Ray cluster, `local` as processes on this machine."""
