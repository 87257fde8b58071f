"""A mutating webhook of somebody else: a server on this machine that patches each labeled pod of one namespace."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from injector import ADMISSION

from apiserver import ApiServer
from dataloaderjob_operator.injector.certificates import Renewal, renewed

Patch = list[dict[str, Any]]
CONFIGURATIONS = f"{ADMISSION}/mutatingwebhookconfigurations"


@contextmanager
def second_webhook(
    server: ApiServer,
    name: str,
    namespace: str,
    folder: Path,
    patch: Callable[[dict[str, Any]], Patch],
    again: str,
) -> Iterator[list[str]]:
    """Serves until the end of the block. `name`: webhooks are called in the order of the names of their configurations;
    `again`: the reinvocationPolicy. Yields a list that gets the path of each field that it patches."""
    patched: list[str] = []

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["request"]
            made = patch(request["object"])
            patched.extend(operation["path"] for operation in made)
            response: dict[str, Any] = {"uid": request["uid"], "allowed": True, "patchType": "JSONPatch"}
            response["patch"] = base64.b64encode(json.dumps(made).encode()).decode()
            review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(review).encode())

        def log_message(self, *_: Any) -> None:
            """Keeps the output of the tests short."""

    found = renewed(None, Renewal.AUTHORITY, ("127.0.0.1",), datetime.now(UTC))
    certificate, key = folder / "second.crt", folder / "second.key"
    certificate.write_bytes(found.certificate)
    key.write_bytes(found.key)
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    listening.socket = context.wrap_socket(listening.socket, server_side=True)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    url = f"https://127.0.0.1:{listening.server_address[1]}/"
    hook = {
        "name": "old-types.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
        "clientConfig": {"url": url, "caBundle": base64.b64encode(found.authority).decode()},
        "reinvocationPolicy": again,
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [{"operations": ["CREATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["pods"]}],
    }  # fmt: skip
    server.request("POST", CONFIGURATIONS, {"metadata": {"name": name}, "webhooks": [hook]})
    try:
        yield patched
    finally:
        server.request("DELETE", f"{CONFIGURATIONS}/{name}")
        listening.shutdown()
        listening.server_close()


def without(*fields: str) -> Callable[[dict[str, Any]], Patch]:
    """The patch of a webhook that does not know these fields of init containers, and so leaves them out."""

    def patch(pod: dict[str, Any]) -> Patch:
        containers = pod["spec"].get("initContainers") or ()
        return [
            {"op": "remove", "path": f"/spec/initContainers/{place}/{field}"}
            for place, container in enumerate(containers)
            for field in fields
            if field in container
        ]

    return patch
