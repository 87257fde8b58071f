"""Runs a script as a trainer and its datasets as feeders do, without a service: forked from one process that
has torch loaded. `same(dataset, ...)` in the script makes a bundle; what a fork of the script finds, which is
what torch's worker finds, is compared with what a process finds that loaded the bundle.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import runpy
import subprocess
import sys
import tempfile
import textwrap
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def write(folder: Path, files: dict[str, str]) -> Path:
    """Returns the script of a project, whose files are made."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder / "train.py"


class Scripts:
    """A process that runs scripts in forks of itself."""

    def __init__(self) -> None:
        paths = [str(Path(__file__).parents[2] / name) for name in ("sidecar", "operator")]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            cwd="/",
        )

    def run(self, file: Path, *argv: str, module: str = "", cwd: Path | None = None) -> list[dict[str, Any]]:
        """Returns for each `same()` what was expected and found."""
        request = {"file": str(file), "argv": argv, "module": module, "cwd": str(cwd or file.parent)}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert not answer["error"], answer["error"]
        results: list[dict[str, Any]] = answer["results"]
        return results

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


@contextlib.contextmanager
def scripts() -> Iterator[Scripts]:
    made = Scripts()
    try:
        yield made
    finally:
        made.close()


def _in_child(function: Callable[[], Any]) -> Any:
    """Returns what `function` returns in a fork of this process; a traceback's text if it raises."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        try:
            result = True, function()
        except BaseException:
            result = False, traceback.format_exc()
        with os.fdopen(writing, "wb") as out:
            out.write(pickle.dumps(result))
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        data = stream.read()
    os.waitpid(pid, 0)
    worked, result = pickle.loads(data) if data else (False, "it died")
    if not worked:
        raise RuntimeError(result)
    return result


def _evaluate(dataset: Any, collate_fn: Any, worker_init_fn: Any, keys: list[Any]) -> list[str]:
    def sample(key: Any) -> str:
        try:
            return repr(dataset[key] if collate_fn is None else collate_fn([dataset[key]]))
        except Exception as exc:
            return f"{type(exc).__name__}: {exc}"

    if worker_init_fn is not None:
        worker_init_fn(0)
    return [sample(key) for key in keys]


def _trainer(request: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    from dataloaderjob.core.blobs import BlobStore
    from dataloaderjob.core.errors import InputError
    from dataloaderjob.shipping.bundles import make_bundle

    made: list[dict[str, Any]] = []

    def same(dataset: Any, keys: Any = (0, 1), collate_fn: Any = None, worker_init_fn: Any = None) -> None:
        keys = list(keys)
        result: dict[str, Any] = {"keys": keys, "manifest": b"", "refused": ""}
        try:
            bundle = make_bundle(
                dataset, collate_fn, worker_init_fn, store=BlobStore(folder / "blobs"), allow_pickle=True
            )
            result["manifest"], result["id"] = bundle.manifest(), bundle.id.hex()
        except InputError as exc:
            result["refused"] = str(exc)
        result["expected"] = _in_child(lambda: _evaluate(dataset, collate_fn, worker_init_fn, keys))
        made.append(result)

    parity: Any = types.ModuleType("parity")  # no file: not the user's
    parity.same = same
    sys.modules["parity"] = parity
    os.chdir(request["cwd"])
    if request["module"]:
        sys.argv = ["-m", *request["argv"]]
        sys.path.insert(0, request["cwd"])
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    else:
        sys.argv = [request["file"], *request["argv"]]
        sys.path.insert(0, str(Path(request["file"]).parent))
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            runpy.run_path(request["file"], run_name="__main__")
    return made


def _feeder(result: dict[str, Any], folder: Path) -> list[str]:
    from dataloaderjob.core.blobs import BlobStore, Bundle
    from dataloaderjob.core.errors import InputError
    from dataloaderjob.shipping.bundles import load_bundle

    try:
        code = load_bundle(Bundle.parse(result["manifest"]), BlobStore(folder / "blobs"))
    except InputError as exc:
        return [f"InputError: {exc}"]
    return _evaluate(code.dataset, code.collate_fn, code.worker_init_fn, result["keys"])


def main() -> None:
    import dataloaderjob.shipping.bundles  # noqa: F401  torch, once for all

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        answer: dict[str, Any] = {"error": "", "results": []}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            try:
                results = _in_child(lambda line=line, folder=folder: _trainer(json.loads(line), folder))  # type: ignore[misc]
                for result in results:
                    if result["manifest"]:
                        result["found"] = _in_child(
                            lambda result=result, folder=folder: _feeder(result, folder)
                        )  # type: ignore[misc]
                    del result["manifest"]
                    answer["results"].append(result)
            except RuntimeError as exc:
                answer["error"] = str(exc)
        out.write(json.dumps(answer) + "\n")
        out.flush()


if __name__ == "__main__":
    main()
