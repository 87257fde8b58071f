"""Entry points of the pods that the operator creates for Ray: `head` and `feeder`. Each is the main process of its
container. It starts Ray, watches it, shows its children's output, and ends with Ray, so that the kubelet restarts the
container.

`status` and `times` are commands that `dataloaderjob report` runs in these pods.
"""
