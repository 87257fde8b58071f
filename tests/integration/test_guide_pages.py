"""The code and the tables of the guide's pages on the loader, on sizing and on other loaders hold."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data
import webdataset
from documents import ROOT
from rig import Rig

from dataloaderjob import DataLoader

GUIDE = ROOT / "docs/guide"
_PYTHON = re.compile(r"^( *)```python\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_DIFF = re.compile(r"^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 2000

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.rand(8) + i


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        yield from range(8)


def text_of(page: str) -> str:
    return (GUIDE / page).read_text()


def python_of(page: str) -> list[str]:
    """The blocks of Python, without the indentation of a list."""
    return [
        re.sub(f"^{indent}", "", code, flags=re.MULTILINE) for indent, code in _PYTHON.findall(text_of(page))
    ]


def own_arguments() -> dict[str, str]:
    """Argument and example of each row of the table."""
    part = text_of("loader.md").partition("## Our arguments")[2].partition("\n\nThese attributes")[0]
    return dict(re.findall(r"^\| `(\w+)` \|.*\| `(DataLoader\(.*\))` \|$", part, re.MULTILINE))


def test_the_table_has_all_arguments_that_torch_lacks() -> None:
    ours, torchs = (
        inspect.signature(loader).parameters for loader in (DataLoader, torch.utils.data.DataLoader)
    )
    assert set(own_arguments()) == set(ours) - set(torchs)


@pytest.mark.parametrize(("name", "example"), own_arguments().items())
def test_an_example_of_the_table_makes_a_loader(name: str, example: str) -> None:
    names = {
        "DataLoader": DataLoader,
        "dataset": Numbers(),
        "stream": Stream(),
        "decode": abs,
        "augment": max,
    }
    assert getattr(eval(example, names), name) is not None
    assert f"{name}=" in example


def test_feeders_and_this_process_give_one_digest(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [code for code in python_of("loader.md") if "loader.digest" in code]
    with Rig(feeders=2):
        exec(code, {"__name__": "__main__", "dataset": Numbers()})
    (here, digest), (feeders, same) = (line.split() for line in capsys.readouterr().out.splitlines())
    assert (here, feeders) == ("0", "2")
    assert digest == same != "0" * 16


def messages() -> Iterator[str]:
    """The texts in the loader's code, `...` in place of values."""
    for path in sorted((ROOT / "sidecar/dataloaderjob").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def test_messages_that_the_page_explains_exist() -> None:
    table = text_of("loader.md").partition("| symptom |")[2].partition("\n\n")[0]
    shown = [*re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE), "served as copies"]
    assert len(shown) == 4
    assert "served as copies" in table
    said = "\n".join(messages())
    patterns = [".*".join(map(re.escape, text.split("..."))) for text in shown]
    assert [pattern for pattern in patterns if not re.search(pattern, said)] == []


def test_a_batch_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {}
    threads = torch.get_num_threads()
    try:
        exec(python_of("sizing.md")[0], names)
        names["measure"](Numbers(), 1000)
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr().out
    assert re.fullmatch(r"0\.\d{3} s, 0\.\d{3} CPU s and 0\.0 MB for each batch\n", printed), printed


def test_sizing_example_prints_the_documented_output(capsys: pytest.CaptureFixture[str]) -> None:
    example = text_of("sizing.md").partition("## An example")[2]
    exec(python_of("sizing.md")[1], {})
    assert re.findall(r"^```text\n(.*?)^```", example, re.MULTILINE | re.DOTALL)[0] == capsys.readouterr().out


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards in tar files."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(4):
        with webdataset.TarWriter(str(folder / f"shards-{shard}.tar")) as out:
            for number in range(shard, 40, 4):
                out.write({"__key__": f"{number:04}", "npy": torch.full((4,), number).numpy(), "cls": number})
    return folder


def sides(heading: str) -> tuple[str, str]:
    """The code before and after the change that a section of coming-from.md shows."""
    lines = _DIFF.findall(text_of("coming-from.md").partition(f"\n## {heading}\n")[2])[0].splitlines()
    before, after = ([line[1:] for line in lines if not line.startswith(other)] for other in "+-")
    return "\n".join(before), "\n".join(after)


def order(code: str) -> list[Any]:
    """The first numbers of the batches of the loader that the code makes."""
    names: dict[str, Any] = {"dataset": range(200), "__name__": "__main__"}
    torch.manual_seed(0)
    exec(code, names)
    batches = [batch[1] if isinstance(batch, list) else batch for batch in names["loader"]]
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize("heading", ["torch's DataLoader", "torchdata's StatefulDataLoader", "WebDataset"])
def test_code_before_and_after_gives_the_same_samples(
    heading: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before, after = sides(heading)
    assert "dataloaderjob" in after
    assert "dataloaderjob" not in before
    with Rig(feeders=2):
        found = order(after)
    assert (found == order(before)) is ("torchdata" not in heading), "whose sampler draws in another order"
    assert sorted(number for batch in found for number in batch) == list(
        range(40 if "Web" in heading else 200)
    )


def test_code_for_ray_data_makes_a_loader() -> None:
    _, after = sides("Ray Data")
    exec(after.partition("for batch")[0], {"make": dict})


def test_the_body_of_a_map_becomes_a_dataset(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    names: dict[str, Any] = {"decoded": len, "files": [tmp_path / "a"] * 3}
    exec(python_of("coming-from.md")[0], names)
    with Rig():
        assert [batch.tolist() for batch in names["loader"]] == [[3, 3, 3]]
