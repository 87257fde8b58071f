"""`dataloaderjob map` of scripts of many kinds, in a process of its own and without feeders."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dataloaderjob.local.mapping import command
from processes import in_child


def mapped(folder: Path, text: str, dataset: str = "d", function: str = "f", **options: Any) -> str:
    """What a run in `folder` ends with: its line, or its error."""
    (folder / "work.py").write_text(textwrap.dedent(text))
    given = {"batch_size": 4, "rows_per_file": 8, "feeders": 0, "collate_fn": None, **options}

    def run() -> str:
        os.chdir(folder)
        return command.run(
            command.Arguments(
                script=Path("work.py"), dataset=dataset, function=function, output=Path("out"), **given
            )
        )

    return in_child(run)


def column(folder: Path, name: str = "result") -> list[Any]:
    return pq.read_table(folder / "out")[name].to_pylist()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("f = print", "InputError: work.py has no 'd', only f"),
        ("d = f = 3", "InputError: d in work.py must be a dataset with __getitem__ and __len__, or a function"),
        ("def d(): return 3", "InputError: d in work.py must be a dataset with __getitem__ and __len__, or a"),
        ("def d(n): return n", "UserCodeError: d in work.py raised an exception\nTypeError: d() missing 1"),
        ("d = f = [1]", "InputError: f in work.py must be a function, a torch.nn.Module, or a class"),
        ("d = [1]\nclass f: pass", "but is a class without __call__"),
        (
            "from torch.utils.data import IterableDataset\nclass d(IterableDataset):\n def __iter__(self): return self",
            "InputError: d in work.py is an IterableDataset",
        ),
        ("import nothing_of_that_name", "UserCodeError: work.py raised an exception\nTraceback"),
        ("d = (", "SyntaxError: '(' was never closed"),
        ("open('missing')", "FileNotFoundError: [Errno 2] No such file or directory: 'missing'"),
        ("import sys\nsys.exit(3)", "SystemExit: 3"),
    ],
)  # fmt: skip
def test_unmappable_input_is_refused_and_no_folder_is_made(tmp_path: Path, text: str, told: str) -> None:
    assert told in mapped(tmp_path, text)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batch_size": 0}, "--batch-size must be at least 1, but is 0"),
        ({"rows_per_file": -1}, "--rows-per-file must be at least 1, but is -1"),
        ({"feeders": -1}, "--feeders must be at least 0, but is -1"),
        ({"collate_fn": "c"}, "work.py has no 'c', only d, f"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(tmp_path: Path, options: Any, told: str) -> None:
    assert told in mapped(tmp_path, "d = [1]\ndef f(batch): return batch", **options)


def test_more_than_one_rank_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "map runs in one process, but WORLD_SIZE is 2" in mapped(tmp_path, "d = [1]\nf = print")


def test_missing_script_is_named(tmp_path: Path) -> None:
    arguments = command.Arguments(
        script=tmp_path / "missing.py", dataset="d", function="f", output=tmp_path / "out", collate_fn=None,
        batch_size=1, rows_per_file=1, feeders=0,
    )  # fmt: skip
    assert f"there is no file {tmp_path}/missing.py" in in_child(lambda: command.run(arguments))


@pytest.mark.parametrize(("rows", "files"), [(0, 0), (1, 1), (3, 1), (8, 1), (9, 2)])
def test_a_dataset_may_be_of_any_length(tmp_path: Path, rows: int, files: int) -> None:
    text = f"d = [float(i) for i in range({rows})]\ndef f(batch): return batch"
    for _ in range(2):
        assert mapped(tmp_path, text) == f"out: {rows} rows in {files} files"
    assert len(list((tmp_path / "out").glob("part-*"))) == files
    assert (tmp_path / "out" / "_SUCCESS").exists()
    if rows:
        assert column(tmp_path) == [float(i) for i in range(rows)]


def test_guarded_main_block_of_a_script_does_not_run(tmp_path: Path) -> None:
    text = "d = [1]\ndef f(b): return b\nif __name__ == '__main__': raise SystemExit('ran')"
    assert mapped(tmp_path, text) == "out: 1 rows in 1 files"


def test_script_may_import_from_its_folder_and_change_directory(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("STEP = 5")
    text = "import os, beside\nos.chdir('/')\nd = range(3)\ndef f(b): return b + beside.STEP"
    assert mapped(tmp_path, text) == "out: 3 rows in 1 files"
    assert column(tmp_path) == [5, 6, 7]


def test_a_script_is_compiled_as_python_compiles_it(tmp_path: Path) -> None:
    text = "d = range(2)\ndef f(b: int): return b\nassert f.__annotations__ == {'b': int}, f.__annotations__"
    assert mapped(tmp_path, text) == "out: 2 rows in 1 files"


def test_dataset_with_getitems_is_asked_for_a_batch(tmp_path: Path) -> None:
    text = """
    import random
    class D:
        def __len__(self): return 10
        def __getitems__(self, indices): return [(i, len(indices), random.random()) for i in indices]
        def __getitem__(self, i): raise AssertionError("one by one")
    d = D()
    def f(batch): return {"i": batch[0], "n": batch[1], "r": batch[2]}
    """
    assert mapped(tmp_path, text) == "out: 10 rows in 2 files"
    assert column(tmp_path, "i") == list(range(10))
    assert column(tmp_path, "n") == [4] * 8 + [2] * 2
    drawn = column(tmp_path, "r")
    (tmp_path / "out" / "part-00001-of-00002.parquet").unlink()
    assert mapped(tmp_path, text) == "out: 10 rows in 2 files"
    assert column(tmp_path, "r") == drawn


@pytest.mark.parametrize(
    "text",
    [
        "def f(batch): raise StopIteration\nd = range(9)",
        "def f(batch): return batch\nclass d:\n def __len__(self): return 9\n def __getitem__(self, i): next(iter(()))",
        "def f(batch): return batch\nclass d(list):\n def __getitems__(self, i): next(iter(()))\nd = d(range(9))",
    ],
    ids=["function", "sample", "samples"],
)  # fmt: skip
def test_stop_iteration_of_user_code_does_not_end_the_run_early(tmp_path: Path, text: str) -> None:
    told = mapped(tmp_path, text)
    assert "UserCodeError: no result for rows 0 to 3: RuntimeError: the " in told
    assert "raised StopIteration" in told
    assert list((tmp_path / "out").glob("part-*")) == []


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("1.0 if batch[0] < 4 else batch", "column 'result' of the result for rows 0 to 3 cannot be written"),
        ("batch if batch[0] < 4 else batch.float()", "column 'result' is float in rows 4 to 7 and int64 in rows 0"),
        ("batch[batch > 4]", "column 'result' of the result for rows 0 to 3 must have 4 rows, but has 0"),
        ("batch.cuda(99)", "no result for rows 0 to 3: "),
    ],
)  # fmt: skip
def test_a_result_that_cannot_be_written_is_named_with_its_rows(
    tmp_path: Path, result: str, told: str
) -> None:
    assert told in mapped(tmp_path, f"d = range(10)\ndef f(batch): return {result}")


def test_samples_that_make_no_batch_are_reported_with_the_option(tmp_path: Path) -> None:
    text = "import torch\nd = [torch.ones(1), torch.ones(2)]\ndef f(batch): return [sum(b) for b in batch]\nc = list"
    told = mapped(tmp_path, text)
    assert "InputError: torch's default_collate cannot collate the samples of rows 0 to 1: stack" in told
    assert "Use --collate-fn to name a function in the script that collates them" in told
    assert mapped(tmp_path, text, collate_fn="c") == "out: 2 rows in 1 files"
    assert column(tmp_path) == [1.0, 2.0]


def test_run_with_a_changed_script_continues_with_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "d = range(10)\ndef f(batch):\n if batch[0] == 8: raise KeyError('x')\n return batch"
    assert "no result for rows 8 to 9: KeyError: 'x'" in mapped(tmp_path, text)
    assert "1 of 2 files are complete; repeat the command to resume" in capfd.readouterr().err
    assert mapped(tmp_path, text.replace("== 8", "> 99")) == "out: 10 rows in 2 files"
    said = capfd.readouterr().err
    assert "1 of 2 files exist already" in said
    assert "work.py has changed since the first run; existing files are kept unchanged" in said
    assert column(tmp_path) == list(range(10))
