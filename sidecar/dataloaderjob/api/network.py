"""spec.networkPolicy: who may connect to the job's pods, and to whom they may. Pure."""

from __future__ import annotations

from typing import Literal

from dataloaderjob.api.base import Model

Mode = Literal["Ingress", "Strict", "None"]


class NetworkPolicySpec(Model):
    """NetworkPolicies of the job's pods. Ignored on one machine, and where the cluster's network has none.

    They say what is let in. What a job needs besides, such as its storage in mode Strict or a port of the trainer's
    own, is opened by a NetworkPolicy of yours that selects its pods by their labels: policies add up.
    docs/network.md has the connections and examples.
    """

    mode: Mode = "Ingress"
    """`Ingress`: what connects to the job's pods is the job itself, the operator, and anyone to the sidecars' metrics.

    `Strict`: besides, the pods connect to the job itself and to DNS only. `None`: no NetworkPolicy is made.
    """
