"""The program of the pod in `external_metrics`. It has the standard library alone.

Variables: METRIC, a gauge of the operator; OPERATORS, the addresses of the operator's pods as a JSON list.
"""

from __future__ import annotations

import json
import os
import re
import ssl
import sys
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

METRIC, OPERATORS = os.environ["METRIC"], json.loads(os.environ["OPERATORS"])
GROUP = "external.metrics.k8s.io/v1beta1"
RESOURCE = {
    "name": METRIC, "singularName": "", "namespaced": True, "verbs": ["get"], "kind": "ExternalMetricValueList",
}  # fmt: skip


def answer(url: str) -> dict[str, Any]:
    found = urlsplit(url)
    if found.path == f"/apis/{GROUP}":
        return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": [RESOURCE]}
    namespace = found.path.removeprefix(f"/apis/{GROUP}/namespaces/").partition("/")[0]
    selector = parse_qs(found.query).get("labelSelector", [""])[0]
    numbers = list(values(namespace, selector))
    sys.stdout.write(f"{namespace} {selector} {numbers}\n")
    row = {
        "metricName": METRIC,
        "metricLabels": {},
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    items = [{**row, "value": str(number)} for number in numbers]
    return {"kind": "ExternalMetricValueList", "apiVersion": GROUP, "metadata": {}, "items": items}


def values(namespace: str, selector: str) -> Iterator[int]:
    wanted = dict(pair.split("=") for pair in selector.split(",") if pair) | {
        "dataloaderjob_namespace": namespace
    }
    for address in OPERATORS:
        text = urllib.request.urlopen(f"http://{address}:9440/metrics", timeout=3).read().decode()
        for labels, value in re.findall(rf"^{METRIC}{{(.*)}} (\S+)$", text, re.MULTILINE):
            if wanted.items() <= dict(re.findall(r'(\w+)="([^"]*)"', labels)).items():
                yield int(float(value))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps(answer(self.path)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("", 6443), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain("/tls/tls.crt", "/tls/tls.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
