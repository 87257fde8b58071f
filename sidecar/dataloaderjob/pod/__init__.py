"""Entry points of the pods that the operator makes for Ray: `head` and `feeder`.

Each is the main process of its container: it starts Ray, watches it, shows what its children print, and
ends with it, so that the kubelet starts the container anew.
"""
