"""Code that all processes share: errors, frames, layout, shared memory, settings, handshake. Only `certificates`,
`digests` and `values` import packages outside the standard library."""
