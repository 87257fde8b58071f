"""Who starts feeders: `ray` on clusters, `local` on one machine. The supervisor decides, a provider acts."""
