"""Checksums of a release's files, signed with a key of one's own. `openssl` does the cryptography (Ed25519).

`python -m release.signing sign dist --key release.pem` writes SHA256SUMS and SHA256SUMS.sig. `verify dist --key
release.pub` checks both. SECURITY.md has the same check without this program.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
from pathlib import Path

SUMS = "SHA256SUMS"
SIGNATURE = f"{SUMS}.sig"


class SignatureFault(Exception):
    """Files that are not what was signed, or that cannot be signed; the message states which and what to do."""


def _openssl(*arguments: str | Path) -> str:
    try:
        done = subprocess.run(
            ["openssl", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as exc:
        raise SignatureFault("openssl is needed to sign and to verify: install it") from exc
    if done.returncode:
        raise SignatureFault(f"openssl {arguments[0]} failed: {(done.stderr or done.stdout).strip()[:500]}")
    return done.stdout


def new_key(folder: Path) -> tuple[Path, Path]:
    """Makes a key. Returns the paths of the private and the public part."""
    private, public = folder / "release.pem", folder / "release.pub"
    _openssl("genpkey", "-algorithm", "ed25519", "-out", private)
    private.chmod(0o600)
    public_part(private, public)
    return private, public


def public_part(private: Path, public: Path) -> None:
    _openssl("pkey", "-in", private, "-pubout", "-out", public)


def _digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file below `folder`, except of the sums and their signature. Refuses links."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or "\n" in name or "\\" in name:
            raise SignatureFault(
                f"{path} is a link, or has a name that {SUMS} cannot hold: a release has plain files"
            )
        if path.is_file() and name not in (SUMS, SIGNATURE):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def sign(folder: Path, private: Path) -> None:
    """Writes the sums of all files in `folder`, and their signature. Raises SignatureFault."""
    digests = _digests(folder)
    if not digests:
        raise SignatureFault(f"{folder} has no files to sign: make dist")
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    _openssl(
        "pkeyutl", "-sign", "-rawin", "-inkey", private, "-in", folder / SUMS, "-out", folder / SIGNATURE
    )


def verify(folder: Path, public: Path) -> int:
    """Returns the number of files that are as signed. Raises SignatureFault if any differs, lacks or is left over."""
    sums = folder / SUMS
    for needed in (sums, folder / SIGNATURE):
        if not needed.is_file():
            raise SignatureFault(f"{needed} is needed to verify {folder}, and is missing")
    _openssl(
        "pkeyutl",
        "-verify",
        "-pubin",
        "-rawin",
        "-inkey",
        public,
        "-in",
        sums,
        "-sigfile",
        folder / SIGNATURE,
    )
    signed = {}
    for line in sums.read_text().splitlines():
        digest, _, name = line.partition("  ")
        signed[name] = digest
    found = _digests(folder)
    wrong = sorted(name for name in {*signed, *found} if signed.get(name) != found.get(name))
    if wrong:
        raise SignatureFault(
            f"these files of {folder} are not as signed: {', '.join(wrong[:10])}. Do not use them"
        )
    return len(signed)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=("sign", "verify"))
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--key", type=Path, required=True, help="PEM file: to sign the private key, to verify the public"
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.action == "sign":
            sign(chosen.folder, chosen.key)
        else:
            sys.stdout.write(f"{verify(chosen.folder, chosen.key)} files are as signed\n")
    except SignatureFault as fault:
        sys.stderr.write(f"{fault}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
