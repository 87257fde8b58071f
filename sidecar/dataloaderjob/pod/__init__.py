"""The main processes of the containers in the pods that the operator creates. `head`, `driver` and `feeder` start Ray,
watch it, show their children's output, and end with Ray, so that the kubelet restarts the container. `supervisor` keeps
the supervisor running.

`status` and `times` are commands that `dataloaderjob report` runs in these pods.
"""
