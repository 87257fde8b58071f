"""Code that every process shares: errors, frames, layout, shared memory, settings, handshake. Standard library only."""
