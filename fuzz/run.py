"""Runs atheris on targets: `python -m fuzz.run --seconds 300`, or with the names of some. Run by `make fuzz`.

Each target has a process of its own, and a corpus in build/fuzz/NAME that later runs go on with. An input that is a
finding is kept there, too. `python -m fuzz.run NAME --input FILE` parses such an input again.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CORPORA = ROOT / "build/fuzz"
HANG_S = 10
"""Maximum seconds for one input."""
MAX_RSS_MB = 2048
"""Maximum memory of a target's process. With torch, it begins at about 300."""
_CHILD = "FUZZ_CHILD"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a target; without any, all")
    parser.add_argument("--seconds", type=int, default=300, help="time for each target (300)")
    parser.add_argument("--input", type=Path, help="parse this file once instead")
    chosen = parser.parse_args(arguments)
    if os.environ.get(_CHILD):
        return _fuzz(chosen.names[0], chosen.seconds)
    from fuzz.targets import TARGETS

    unknown = [name for name in chosen.names if name not in TARGETS]
    if unknown:
        parser.error(f"no target is named {', '.join(unknown)}; there are: {', '.join(TARGETS)}")
    if chosen.input is not None:
        if len(chosen.names) != 1:
            parser.error("--input needs the name of one target")
        accepted = TARGETS[chosen.names[0]].run(chosen.input.read_bytes())
        sys.stdout.write("accepted\n" if accepted else "refused with a declared error\n")
        return 0
    return _all(chosen.names or list(TARGETS), chosen.seconds)


def _all(names: list[str], seconds: int) -> int:
    """Runs the targets one after the other. Returns 1 if any has a finding."""
    found = []
    for name in names:
        began = time.monotonic()
        command = [sys.executable, "-m", "fuzz.run", name, "--seconds", str(seconds)]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, _CHILD: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        log = CORPORA / name / "log.txt"
        log.write_bytes(done.stdout)
        last = [line for line in done.stdout.decode(errors="replace").splitlines() if line.startswith("Done")]
        how = last[-1] if last and not done.returncode else f"FINDING, see {log.relative_to(ROOT)}"
        sys.stdout.write(f"{name:20} {time.monotonic() - began:5.0f} s  {how}\n")
        sys.stdout.flush()
        if done.returncode or not last:
            found.append(name)
    sys.stdout.write(f"{len(names)} targets, findings in: {', '.join(found) or 'none'}\n")
    return bool(found)


def _fuzz(name: str, seconds: int) -> int:
    """Fuzzes one target in this process, which atheris ends."""
    import atheris

    with atheris.instrument_imports(include=["dataloaderjob", "dataloaderjob_operator"]):
        from fuzz.targets import TARGETS
    target = TARGETS[name]
    corpus = CORPORA / name / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds()):
        (corpus / f"seed-{number}").write_bytes(seed)

    def mutate(data: bytes, max_nbytes: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if target.mutate is not None and chance.random() < 0.5:
            return target.mutate(data, chance)[:max_nbytes]
        changed: bytes = atheris.Mutate(data, max_nbytes)
        return changed

    options = {
        "max_total_time": seconds, "max_len": target.max_nbytes, "timeout": HANG_S, "rss_limit_mb": MAX_RSS_MB,
        "artifact_prefix": f"{CORPORA / name}/", "print_final_stats": 1,
    }  # fmt: skip
    command = [sys.argv[0], *(f"-{option}={value}" for option, value in options.items()), str(corpus)]
    atheris.Setup(command, lambda data: target.run(data) and None, custom_mutator=mutate)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
