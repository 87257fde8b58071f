"""Known vulnerabilities of what images install, by pip-audit: `make audit` writes build/audit.md for the release notes.

pip-audit calls a package that it could not look up "skipped", and succeeds. Here, an audit that skipped a package has
not taken place.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from release import inventory, locks

TOOL = locks.ROOT / ".venv-release/bin/pip-audit"
REPORT = locks.ROOT / "build/audit.md"
FOUND, NOT_RUN = 1, 2
"""Exit codes: known vulnerabilities; packages that were not looked up."""
SERVICES = ("pypi", "osv")
_TIMEOUT_S = 30


@dataclass(frozen=True, slots=True)
class Audit:
    """The result for all packages of all images."""

    service: str
    looked_up: int
    skipped: tuple[str, ...]
    """Packages that the service did not answer for."""
    findings: tuple[tuple[str, str, str, str], ...]
    """(package, version, name of the vulnerability, versions that mend it)."""
    failure: str = ""
    """The reason why there is no result at all."""

    @property
    def code(self) -> int:
        if self.failure or self.skipped or not self.looked_up:
            return NOT_RUN
        return FOUND if self.findings else 0

    def report(self) -> str:
        """Returns the result as Markdown."""
        if self.failure:
            return f"**Not audited**: pip-audit failed with the service {self.service}: {self.failure}\n"
        lines = [
            f"pip-audit looked up {self.looked_up} packages at {self.service}: {len(self.findings)} findings."
        ]
        if not self.looked_up and not self.skipped:
            lines.append("\n**Not audited**: it was given no package.")
        if self.skipped:
            names = ", ".join(self.skipped[:5])
            lines.append(f"\n**Not audited**: {len(self.skipped)} packages had no answer, such as {names}.")
        if self.findings:
            lines += ["", "| package | version | vulnerability | mended in |", "|---|---|---|---|"]
            lines += [
                f"| `{name}` | {version} | {what} | {fixed} |" for name, version, what, fixed in self.findings
            ]
        return "\n".join(lines) + "\n"


def parsed(output: str, service: str) -> Audit:
    """Reads pip-audit's JSON."""
    try:
        dependencies: Sequence[Mapping[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError) as exc:
        return Audit(service, 0, (), (), f"its output cannot be read: {exc}")
    skipped = tuple(str(one["name"]) for one in dependencies if "skip_reason" in one)
    findings = tuple(
        (
            str(one["name"]),
            str(one["version"]),
            str(vuln["id"]),
            ", ".join(vuln.get("fix_versions") or ["none"]),
        )
        for one in dependencies
        for vuln in one.get("vulns", ())
    )
    return Audit(service, len(dependencies) - len(skipped), skipped, findings)


def run(service: str, tool: Path = TOOL) -> Audit:
    """Audits the locks of all images, and torch with what it needs as this environment has it."""
    if not tool.exists():
        return Audit(service, 0, (), (), f"{tool} is missing: make audit installs it")
    command = [str(tool), "--disable-pip", "--no-deps", "--format", "json", "--progress-spinner", "off"]
    command += ["--timeout", str(_TIMEOUT_S), "--vulnerability-service", service]
    pinned = {
        (pin.name, pin.version) for lock in locks.LOCKS for pin in locks.pins(lock.path, of_images=True)
    }
    names = {name for name, _ in pinned}
    pinned |= {item for item in inventory.needed_by(locks.UNLOCKED).items() if item[0] not in names}
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        # A version of a local build, such as 2.13.0+cpu, is that release for a service.
        file.write("".join(f"{name}=={version.partition('+')[0]}\n" for name, version in sorted(pinned)))
        file.flush()
        done = subprocess.run([*command, "-r", file.name], capture_output=True, text=True, check=False)
    if not done.stdout.strip():
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return Audit(service, 0, (), (), last[0])
    return parsed(done.stdout, service)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--service", choices=SERVICES, default=SERVICES[0], help="whom to ask (pypi)")
    audit = run(parser.parse_args(arguments).service)
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text(audit.report())
    sys.stdout.write(audit.report())
    if audit.code == NOT_RUN:
        sys.stderr.write(
            "The audit has not taken place. It needs pypi.org's JSON API, or --service osv api.osv.dev.\n"
        )
    return audit.code


if __name__ == "__main__":
    sys.exit(main())
