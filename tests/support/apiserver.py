"""A real API server with its etcd, and nothing else of a cluster: no node, no controller.

The programs are those of envtest: `etcd` and `kube-apiserver` in KUBEBUILDER_ASSETS (`make apiserver` gets them).
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import os
import secrets
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ports import reserve_port

DEFAULT_ASSETS = "/usr/local/kubebuilder/bin"
UP_S = 60.0
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "userGroups": ["system:serviceaccounts"]}, {"level": "None"}],
}
END_S = 2.0
"""It has nothing to save, and waits for open connections otherwise."""


class Refused(Exception):
    """The API server's answer to a request that it does not do."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


@dataclass(frozen=True)
class ApiServer:
    """A running one, and its administrator's token."""

    url: str
    token: str
    audit_log: Path
    """What service accounts asked for, a line of JSON for each request."""

    @functools.cached_property
    def connection(self) -> http.client.HTTPSConnection:
        """Kept open: a new one for each request takes longer than the request."""
        return http.client.HTTPSConnection(self.url.removeprefix("https://"), context=_trusting(), timeout=30)

    def request(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json"
    ) -> dict[str, Any]:
        """The object in the answer. Raises Refused."""
        headers = {"Content-Type": content_type, "Authorization": f"Bearer {self.token}"}
        data = None if body is None else json.dumps(body).encode()
        try:
            answer, text = self._exchange(method, path, data, headers)
        except (http.client.RemoteDisconnected, ssl.SSLEOFError, ConnectionError):
            # It closes connections that were idle for minutes, as between two files of tests.
            answer, text = self._exchange(method, path, data, headers)
        if answer.status < 400:
            return dict(json.loads(text))
        with contextlib.suppress(ValueError, KeyError, TypeError):
            text = json.loads(text)["message"]
        raise Refused(answer.status, text)

    def _exchange(
        self, method: str, path: str, data: bytes | None, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, str]:
        try:
            self.connection.request(method, path, body=data, headers=headers)
            answer = self.connection.getresponse()
            return answer, answer.read().decode(errors="replace")
        except BaseException:
            self.connection.close()
            raise

    def ready(self) -> bool:
        """Whether it answers as one that is up."""
        request = urllib.request.Request(
            f"{self.url}/readyz", headers={"Authorization": f"Bearer {self.token}"}
        )
        try:
            with urllib.request.urlopen(request, context=_trusting(), timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def define(self, crd: dict[str, Any]) -> None:
        """Creates a CustomResourceDefinition and waits until its objects can be created and listed."""
        path = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        self.request("POST", path, crd)
        spec = crd["spec"]
        objects = f"/apis/{spec['group']}/{spec['versions'][0]['name']}/{spec['names']['plural']}"
        deadline = time.monotonic() + UP_S
        while time.monotonic() < deadline:
            found = self.request("GET", f"{path}/{crd['metadata']['name']}")
            conditions = found.get("status", {}).get("conditions") or ()
            if any(c["type"] == "Established" and c["status"] == "True" for c in conditions):
                with contextlib.suppress(Refused):  # 404 or 429: its storage is not ready
                    self.request("GET", objects)
                    return
            time.sleep(0.05)
        raise TimeoutError(f"{crd['metadata']['name']} was not established in {UP_S:.0f} s")


def assets() -> Path:
    """The folder of the programs. Raises FileNotFoundError with what to do."""
    folder = Path(os.environ.get("KUBEBUILDER_ASSETS", DEFAULT_ASSETS))
    lacking = [name for name in ("etcd", "kube-apiserver") if not os.access(folder / name, os.X_OK)]
    if lacking:
        raise FileNotFoundError(
            f"{' and '.join(lacking)} are needed in {folder} for tests against an API server: run `make apiserver`, "
            "or set KUBEBUILDER_ASSETS to the folder that has them"
        )
    return folder


@contextlib.contextmanager
def api_server(folder: Path, *options: str) -> Iterator[ApiServer]:
    """Starts both in `folder`, which is theirs, and ends both. `options`: further ones of the API server. Raises
    RuntimeError if they do not come up."""
    programs = assets()
    etcd_port, peer_port, port = (reserve_port() for _ in range(3))
    token = secrets.token_hex(16)
    (folder / "tokens").write_text(f"{token},admin,admin,system:masters\n")
    (folder / "audit.json").write_text(json.dumps(AUDIT_POLICY))
    key = folder / "service-accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    etcd = _start(
        folder, "etcd", programs / "etcd", f"--data-dir={folder / 'data'}", "--unsafe-no-fsync",
        f"--listen-client-urls=http://127.0.0.1:{etcd_port}", f"--advertise-client-urls=http://127.0.0.1:{etcd_port}",
        f"--listen-peer-urls=http://127.0.0.1:{peer_port}",
    )  # fmt: skip
    server = _start(
        folder, "kube-apiserver", programs / "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{etcd_port}",
        "--bind-address=127.0.0.1", f"--secure-port={port}", f"--cert-dir={folder / 'certs'}",
        f"--token-auth-file={folder / 'tokens'}", "--authorization-mode=RBAC",
        "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-key-file={key}",
        f"--service-account-signing-key-file={key}", "--service-cluster-ip-range=10.0.0.0/24",
        "--disable-admission-plugins=ServiceAccount", f"--audit-policy-file={folder / 'audit.json'}",
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement", f"--audit-log-path={folder / 'audit.log'}",
        *options,
    )  # fmt: skip
    try:
        running = ApiServer(f"https://127.0.0.1:{port}", token, folder / "audit.log")
        _wait_up(running, folder, etcd, server)
        yield running
    finally:
        for process in (server, etcd):
            process.terminate()
        for process in (server, etcd):
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _start(folder: Path, name: str, *command: str | Path) -> subprocess.Popen[bytes]:
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)


def _wait_up(running: ApiServer, folder: Path, *processes: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + UP_S
    while not running.ready():
        over = [p for p in processes if p.poll() is not None]
        if over or time.monotonic() > deadline:
            said = "\n".join(
                line for log in sorted(folder.glob("*.log")) for line in log.read_text().splitlines()[-10:]
            )
            raise RuntimeError(f"the API server did not come up in {UP_S:.0f} s; it said:\n{said}")
        time.sleep(0.1)


def _trusting() -> ssl.SSLContext:
    """Its certificate is one that it made for itself a moment ago, on this machine."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
