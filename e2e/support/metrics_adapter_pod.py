"""An adapter that serves one external metric to the API server over TLS, as prometheus-adapter and KEDA do.

As a program, it runs in the pod of `external_metrics`, and needs the standard library alone. Variables: METRIC, a gauge
of the operator; OPERATORS, the addresses of the operator's pods as a JSON list.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

GROUP = "external.metrics.k8s.io"
VERSION = "v1beta1"
Values = Callable[[str, str], Iterable[int]]
"""Returns the metric's values for a namespace and a label selector."""


def answer(url: str, metric: str, values: Values) -> dict[str, Any] | None:
    """Returns the answer to a request; None if there is no such resource."""
    found, root = urlsplit(url), f"/apis/{GROUP}/{VERSION}"
    if found.path == root:
        resource = {
            "name": metric, "singularName": "", "namespaced": True, "verbs": ["get"], "kind": "ExternalMetricValueList",
        }  # fmt: skip
        return {
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{GROUP}/{VERSION}",
            "resources": [resource],
        }  # fmt: skip
    namespace, _, name = found.path.removeprefix(f"{root}/namespaces/").partition("/")
    if name != metric:
        return None
    selector = parse_qs(found.query).get("labelSelector", [""])[0]
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    row = {"metricName": metric, "metricLabels": {}, "timestamp": now}
    return {
        "kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {},
        "items": [{**row, "value": str(value)} for value in values(namespace, selector)],
    }  # fmt: skip


def serving(
    address: tuple[str, int], certificate: str, key: str, metric: str, values: Values
) -> ThreadingHTTPServer:
    """Returns a server that answers over TLS once it runs. `certificate` and `key`: paths of PEM files."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self.path, metric, values)
            body = json.dumps(found or {}).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(address, Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    return server


def of_operators(metric: str, addresses: list[str]) -> Values:
    """Returns a function that reads the metric from the operator's pods, and prints each request."""

    def read(wanted: dict[str, str]) -> Iterator[int]:
        for address in addresses:
            text = urllib.request.urlopen(f"http://{address}:9440/metrics", timeout=3).read().decode()
            for labels, value in re.findall(rf"^{metric}{{(.*)}} (\S+)$", text, re.MULTILINE):
                if wanted.items() <= dict(re.findall(r'(\w+)="([^"]*)"', labels)).items():
                    yield int(float(value))

    def values(namespace: str, selector: str) -> list[int]:
        wanted = dict(pair.split("=") for pair in selector.split(",") if pair)
        found = list(read({**wanted, "dataloaderjob_namespace": namespace}))
        sys.stdout.write(f"{namespace} {selector} {found}\n")
        return found

    return values


if __name__ == "__main__":
    name = os.environ["METRIC"]
    readings = of_operators(name, json.loads(os.environ["OPERATORS"]))
    serving(("", 6443), "/tls/tls.crt", "/tls/tls.key", name, readings).serve_forever()
