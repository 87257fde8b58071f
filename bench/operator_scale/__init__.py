"""B13, the operator at scale: a real API server and controllers, fake nodes, pods and supervisors. See
bench/README.md."""
