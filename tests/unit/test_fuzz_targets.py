"""The fuzz targets: each accepts what the real encoders make, and refuses mutations with declared errors only."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from fuzz import run
from fuzz.target import mutate_bytes
from fuzz.targets import TARGETS

MUTATIONS = 300
HANGS_S = 5.0


@pytest.mark.parametrize("name", TARGETS)
def test_a_fuzz_target_accepts_its_seeds(name: str):
    target = TARGETS[name]
    seeds = target.seeds()
    assert seeds
    assert any(target.run(seed) for seed in seeds)
    assert all(len(seed) <= target.max_nbytes for seed in seeds)


@pytest.mark.parametrize("name", TARGETS)
def test_a_parser_refuses_mutations_with_its_declared_errors(name: str):
    target, chance = TARGETS[name], random.Random(name)
    seeds = list(target.seeds())
    for number in range(MUTATIONS):
        data = chance.choice(seeds)
        for _ in range(chance.choice((1, 1, 2, 3))):
            change = target.mutate if target.mutate is not None and chance.random() < 0.8 else mutate_bytes
            data = change(data, chance)
        data, began = data[: target.max_nbytes], time.monotonic()
        try:
            target.run(data)
        except Exception as exc:
            pytest.fail(f"{name}, mutation {number}, {data[:2000]!r}: {type(exc).__name__}: {str(exc)[:300]}")
        assert time.monotonic() - began < HANGS_S, f"{name}, mutation {number}, {data[:2000]!r}"


def test_an_unknown_target_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        run.main(["values", "no-such"])
    assert "no target is named no-such; there are: frame-headers, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"), [(b"\xc0", "accepted\n"), (b"", "refused with a declared error\n")]
)
def test_a_kept_input_is_parsed_again(
    content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "crash"
    path.write_bytes(content)
    assert run.main(["values", "--input", str(path)]) == 0
    assert capsys.readouterr().out == said
