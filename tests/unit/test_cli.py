"""The command where something that it needs is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dataloaderjob.local import cli


def test_run_without_pydantic_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith("dataloaderjob.api")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert cli.main(["run", "--provider", "local", str(tmp_path / "job.yaml")]) == 2
    assert "'dataloaderjob[trainer,cli]' for --provider local" in capsys.readouterr().err
