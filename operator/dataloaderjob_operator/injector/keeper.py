"""The renewal of the injector's certificates: first in a Secret that all replicas share, then in the API server's
bundle, and last in this replica's TLS context.

A replica that finds a new authority in the Secret adds it to the bundle. It serves a certificate from the new authority
only after the API server has had time to read the bundle. Until then, all replicas serve certificates from authorities
that are already in the bundle.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dataloaderjob.core.tls import load
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.injector.certificates import (
    BadCertificates,
    Certificates,
    Renewal,
    end,
    from_stored,
    renewal,
    renewed,
)
from dataloaderjob_operator.names import MANAGER

log = logging.getLogger(__name__)

CHECK_S = 60.0
ROLLING_S = 2.0
"""Seconds between checks while a new certificate waits to be served."""
SETTLE_S = 10.0
"""Seconds to wait until the API servers have read a new bundle. Their watches deliver it within a second."""
RETRY_S = 5.0
CONFIGURATIONS = "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations"
MERGE_PATCH = "application/json-patch+json"


class CannotKeep(Exception):
    """The certificates cannot be read or written at the moment."""


def empty_context() -> ssl.SSLContext:
    """Returns a TLS context, into which a certificate is loaded later."""
    return ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)


@dataclass(slots=True)
class Files:
    """Certificates that another tool, such as cert-manager, maintains in a folder with tls.crt and tls.key."""

    folder: Path
    check_s: float = CHECK_S
    context: ssl.SSLContext = field(default_factory=empty_context)
    ends: datetime | None = None
    """Expiry of the certificate that is served; None before the first certificate."""
    _served: bytes = b""

    async def step(self) -> float:
        """Serves the files' certificate. Returns the seconds until the next step. Raises CannotKeep."""
        try:
            certificate, key = ((self.folder / name).read_bytes() for name in ("tls.crt", "tls.key"))
            if certificate + key != self._served:
                load(self.context, certificate, key)
                self._served, self.ends = certificate + key, end(certificate)
                log.info("serving the certificate in %s, which expires at %s", self.folder, self.ends)
        except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
            raise CannotKeep(f"cannot read tls.crt and tls.key in {self.folder}: {exc}") from exc
        return self.check_s


@dataclass(slots=True)
class CertificateKeeper:
    """Certificates that the injector creates itself."""

    api: ApiClient
    namespace: str
    secret: str
    configuration: str
    """Name of the MutatingWebhookConfiguration that contains the bundle."""
    names: Sequence[str]
    """Names under which the API server reaches the injector."""
    context: ssl.SSLContext = field(default_factory=empty_context)
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)
    settle_s: float = SETTLE_S
    check_s: float = CHECK_S
    served: Certificates | None = None
    """The certificates in the TLS context; None before the first certificates."""
    _bundled_at: datetime | None = None
    """Time since which every check has found the newest authority in the bundle."""

    @property
    def ends(self) -> datetime | None:
        """The expiry of the certificate that is served."""
        return None if self.served is None else end(self.served.certificate)

    async def step(self) -> float:
        """Renews the certificates that are due, and serves one that the API server trusts. Returns the seconds until
        the next step. Raises CannotKeep."""
        try:
            found = await self._stored()
            changed = await self._bundle(found)
        except ApiError as exc:
            raise CannotKeep(f"cannot maintain the certificates: {exc}") from exc
        now = self.clock()
        if changed or self._bundled_at is None:
            self._bundled_at = now
        if found == self.served:
            return self.check_s
        known = self.served is None or self.served.authority == found.authority
        if not known and (now - self._bundled_at).total_seconds() < self.settle_s:
            return min(ROLLING_S, self.check_s)
        load(self.context, found.certificate, found.key)
        self.served = found
        log.info("serving a certificate that expires at %s", self.ends)
        return min(ROLLING_S, self.check_s)

    async def _stored(self) -> Certificates:
        """Returns the certificates in the Secret, renewed if that is due. Raises ApiError."""
        path = f"/api/v1/namespaces/{self.namespace}/secrets"
        live = await self._read(f"{path}/{self.secret}")
        found, now = _certificates(live), self.clock()
        what = renewal(found, self.names, now)
        if what is Renewal.NONE and found is not None:
            return found
        in_use = b"" if self.served is None else self.served.authority
        made = renewed(found, what, self.names, now, in_use=in_use)
        metadata = {
            "name": self.secret,
            "namespace": self.namespace,
            "labels": {"app.kubernetes.io/managed-by": MANAGER},
        }
        data = {name: base64.b64encode(value).decode() for name, value in made.stored().items()}
        body: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data}
        if live is None:
            await self.api.request("POST", path, body)
        else:  # fails if another replica has just renewed them
            metadata["resourceVersion"] = live["metadata"]["resourceVersion"]
            await self.api.request("PUT", f"{path}/{self.secret}", body)
        log.info("renewed the %s in Secret %s/%s", what.name.lower(), self.namespace, self.secret)
        return made

    async def _bundle(self, wanted: Certificates) -> bool:
        """Writes the authorities into the webhook's configuration. Returns True if that changed the configuration.
        Raises ApiError."""
        path = f"{CONFIGURATIONS}/{self.configuration}"
        live = await self.api.request("GET", path)
        in_use = (
            b"" if self.served is None or self.served.authority in wanted.bundle else self.served.authority
        )
        bundle = base64.b64encode(wanted.bundle + in_use).decode()
        changes = [
            {"op": "add", "path": f"/webhooks/{index}/clientConfig/caBundle", "value": bundle}
            for index, webhook in enumerate(live.get("webhooks") or ())
            if (webhook.get("clientConfig") or {}).get("caBundle") != bundle
        ]
        if changes:
            version = {
                "op": "test",
                "path": "/metadata/resourceVersion",
                "value": live["metadata"]["resourceVersion"],
            }
            await self.api.request("PATCH", path, [version, *changes], MERGE_PATCH)
            log.info(
                "wrote the certificate authorities into MutatingWebhookConfiguration %s", self.configuration
            )
        return bool(changes)

    async def _read(self, path: str) -> dict[str, Any] | None:
        try:
            return await self.api.request("GET", path)
        except ApiError as exc:
            if exc.code == 404:
                return None
            raise


def _certificates(secret: dict[str, Any] | None) -> Certificates | None:
    """Returns the certificates in a Secret; None if there is no Secret, or its data cannot be used."""
    if secret is None:
        return None
    try:
        data = {name: base64.b64decode(value) for name, value in (secret.get("data") or {}).items()}
        return from_stored(data)
    except (BadCertificates, binascii.Error) as exc:
        log.warning("the Secret %s is unusable and will be replaced: %s", secret["metadata"]["name"], exc)
        return None


async def keep(keeper: CertificateKeeper | Files, ready: Callable[[], None]) -> None:
    """Keeps the certificates current until it is cancelled. Calls `ready` once the first certificate is served."""
    while True:
        try:
            wait_s = await keeper.step()
            if keeper.ends is not None:
                ready()
        except CannotKeep as exc:
            log.warning("%s; retry in %.0f s", exc, RETRY_S)
            wait_s = RETRY_S
        await asyncio.sleep(wait_s)
