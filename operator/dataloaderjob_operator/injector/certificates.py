"""The injector's certificates: its own authority, and the certificate that it serves. Pure, except that keys are
random.

A new authority is first added to the API server's bundle, next to the previous one. Only then is a certificate from the
new authority served. At any time, the API server therefore trusts the certificates of all replicas.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum, auto

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_DAYS = 730
CERTIFICATE_DAYS = 90
RENEW_DAYS = 30
"""Number of days before expiry at which a certificate is renewed. The authority is renewed so early that its
certificates always have their full validity."""
SKEW = timedelta(hours=1)
"""A certificate is valid from this long before its creation, to allow for slow clocks."""
FIELDS = ("ca.crt", "ca.key", "tls.crt", "tls.key")
PREVIOUS = "previous.crt"
COMMON_NAME = "dataloaderjob injector"


class Renewal(Enum):
    """The parts to renew."""

    NONE = auto()
    CERTIFICATE = auto()
    AUTHORITY = auto()
    """Both a new authority and a certificate issued by it."""


class BadCertificates(Exception):
    """The stored certificates cannot be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """All certificates and keys, as PEM."""

    authority: bytes
    authority_key: bytes
    certificate: bytes
    key: bytes
    previous: bytes = b""
    """The authority before this one; empty if there was none."""

    @property
    def bundle(self) -> bytes:
        """The authorities that the API server must trust."""
        return self.authority + self.previous

    def stored(self) -> dict[str, bytes]:
        """Returns the certificates and keys as the data of a Secret."""
        values = (self.authority, self.authority_key, self.certificate, self.key)
        return {**dict(zip(FIELDS, values, strict=True)), PREVIOUS: self.previous}


def from_stored(data: Mapping[str, bytes]) -> Certificates:
    """Reads certificates and keys from the data of a Secret. Raises BadCertificates."""
    if missing := [name for name in FIELDS if not data.get(name)]:
        raise BadCertificates(f"it lacks {', '.join(missing)}")
    found = Certificates(
        authority=data["ca.crt"], authority_key=data["ca.key"], certificate=data["tls.crt"], key=data["tls.key"],
        previous=data.get(PREVIOUS, b""),
    )  # fmt: skip
    try:
        for pem in (found.authority, found.certificate):
            x509.load_pem_x509_certificate(pem)
        for pem in (found.authority_key, found.key):
            _key(pem)
    except (ValueError, TypeError) as exc:
        raise BadCertificates(str(exc)) from exc
    return found


def renewal(found: Certificates | None, names: Sequence[str], now: datetime) -> Renewal:
    """Returns the parts to renew now. `names`: the names under which the injector is reached."""
    if found is None:
        return Renewal.AUTHORITY
    if end(found.authority) - now < timedelta(days=CERTIFICATE_DAYS + RENEW_DAYS):
        return Renewal.AUTHORITY
    certificate = x509.load_pem_x509_certificate(found.certificate)
    try:
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(found.authority))
    except Exception:  # each kind of mismatch has its own exception
        return Renewal.CERTIFICATE
    alike = set(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value) == set(
        _alternatives(names)
    )
    late = end(found.certificate) - now < timedelta(days=RENEW_DAYS)
    return Renewal.CERTIFICATE if late or not alike else Renewal.NONE


def renewed(
    found: Certificates | None, what: Renewal, names: Sequence[str], now: datetime, *, in_use: bytes = b""
) -> Certificates:
    """Creates new certificates. `in_use`: the authority of the certificate that replicas serve. It becomes the previous
    authority if `found` is None."""
    if what is Renewal.CERTIFICATE and found is not None:
        certificate, key = _issue(names, now, found.authority, found.authority_key)
        return Certificates(
            authority=found.authority, authority_key=found.authority_key, certificate=certificate, key=key,
            previous=_valid(found.previous, now),
        )  # fmt: skip
    authority, authority_key = _authority(now)
    certificate, key = _issue(names, now, authority, authority_key)
    return Certificates(
        authority=authority, authority_key=authority_key, certificate=certificate, key=key,
        previous=_valid(found.authority if found else in_use, now),
    )  # fmt: skip


def end(pem: bytes) -> datetime:
    """Returns the time at which a certificate expires."""
    return x509.load_pem_x509_certificate(pem).not_valid_after_utc


def _valid(pem: bytes, now: datetime) -> bytes:
    return pem if pem and end(pem) > now else b""


def _authority(now: datetime) -> tuple[bytes, bytes]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{COMMON_NAME} {now:%Y-%m-%dT%H:%M:%S}")])
    made = (
        _builder(name, name, key.public_key(), now, AUTHORITY_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _pem(made), _key_pem(key)


def _issue(
    names: Sequence[str], now: datetime, authority: bytes, authority_key: bytes
) -> tuple[bytes, bytes]:
    issuer, key = x509.load_pem_x509_certificate(authority), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, COMMON_NAME)])
    made = (
        _builder(name, issuer.subject, key.public_key(), now, CERTIFICATE_DAYS)
        .add_extension(x509.SubjectAlternativeName(_alternatives(names)), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(_key(authority_key).public_key()),
            critical=False,
        )
        .sign(_key(authority_key), hashes.SHA256())
    )
    return _pem(made), _key_pem(key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, days: int
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - SKEW)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs, crl_sign=signs, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _alternatives(names: Sequence[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for name in names:
        try:
            found.append(x509.IPAddress(ipaddress.ip_address(name)))
        except ValueError:
            found.append(x509.DNSName(name))
    return found


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ValueError("the key is not an elliptic-curve key")
    return key


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
