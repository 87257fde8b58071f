"""Providers start feeders: `ray` by actors of a Ray cluster, `local` as processes of this machine."""
