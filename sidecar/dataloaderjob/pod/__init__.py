"""The main processes of the containers in the operator's pods. `head`, `driver` and `feeder` start Ray and show their
children's output. They end with Ray, so that the kubelet restarts the container. `supervisor` keeps the supervisor
running.

`status` and `times` are commands that `dataloaderjob report` runs in these pods.
"""
