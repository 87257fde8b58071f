"""The certificates of a job with `spec.loader.tls: true` (`core.tls`). They are derived from a seed and the job's
start. Pure: the same seed produces the same bytes, so nothing needs to be stored, and a lost file can be rebuilt.

Each generation has its own authority. A process also trusts the authorities of the previous and the next generation. So
all pods trust each other, even while new files have reached only some of them.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from datetime import timedelta

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from dataloaderjob.core.generations import Schedule
from dataloaderjob.core.keys import Part

SKEW = timedelta(hours=1)
"""Certificates are valid from this long before the start of their generation, to allow for slow clocks."""
_SERIAL_NBYTES = 19


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one part of a job in one generation, in PEM format."""

    authorities: bytes
    certificate: bytes
    key: bytes


def files(seed: bytes, part: Part, generation: int, schedule: Schedule) -> Files:
    """Returns the files of a part of the job in a generation. `seed` is a secret of the job."""
    key = _key(seed, part.value, generation)
    authority = _key(seed, "authority", generation)
    made = (
        _builder(seed, part.value, generation, schedule, key)
        .issuer_name(_name("authority", generation))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(part.host)]), critical=False)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
        )
        .sign(authority, None)
    )  # fmt: skip
    return Files(authorities(seed, generation, schedule), _pem(made), _key_pem(key))


def authorities(seed: bytes, generation: int, schedule: Schedule) -> bytes:
    """Returns the authorities that a process with certificates of `generation` trusts. They belong to this generation,
    the previous one and the next one."""
    numbers = (n for n in (generation, generation - 1, generation + 1) if n >= 0)
    return b"".join(_pem(_authority(seed, number, schedule)) for number in numbers)


def _authority(seed: bytes, generation: int, schedule: Schedule) -> x509.Certificate:
    key = _key(seed, "authority", generation)
    return (
        _builder(seed, "authority", generation, schedule, key)
        .issuer_name(_name("authority", generation))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .sign(key, None)
    )


def _builder(
    seed: bytes, what: str, generation: int, schedule: Schedule, key: Ed25519PrivateKey
) -> x509.CertificateBuilder:
    serial = int.from_bytes(_derive(seed, f"serial/{what}", generation)[:_SERIAL_NBYTES]) | 1
    return (
        x509.CertificateBuilder()
        .subject_name(_name(what, generation))
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(schedule.start(generation) - SKEW)
        .not_valid_after(schedule.end(generation))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(what: str, generation: int) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"dataloaderjob {what} {generation}")])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True, key_cert_sign=signs, crl_sign=signs, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _key(seed: bytes, what: str, generation: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(_derive(seed, f"key/{what}", generation))


def _derive(seed: bytes, what: str, generation: int) -> bytes:
    return hmac.digest(
        hashlib.sha256(seed).digest(), f"dataloaderjob/tls/{what}/{generation}".encode(), "sha256"
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
