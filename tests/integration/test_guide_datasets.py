"""The examples of docs/guide/datasets.md, run as they are printed, on files that are made here."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import warm
from documents import ROOT
from moto.server import ThreadedMotoServer
from rig import Rig

GUIDE = (ROOT / "docs/guide/datasets.md").read_text()
EXAMPLES = dict(
    re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
)
AFTER = "print('seen', sum(len(batch) for batch in ({})))\n"
COUNTED = {
    "WebDataset": "values for values, _ in loader",
    "WebDataset, decoded by any feeder": "values for values, _ in loader",
    "HF datasets": "batch['x'] for batch in loader",
    "HF datasets, mapped by any feeder": "batch['x'] for batch in loader",
    "LitData": "batch['id'] for batch in loader",
    "MosaicML Streaming": "batch['id'] for batch in loader",
    "TFRecord": "batch['id'] for batch in loader",
    "An image and its mask": "images for images, _ in loader",
}
FILES = """
import av, fsspec, litdata, lmdb, numpy as np, pyarrow as pa, pyarrow.parquet, streaming, tfrecord, webdataset
from array_record.python.array_record_module import ArrayRecordWriter
from PIL import Image
from tfrecord.tools.tfrecord2idx import create_index

def sample(number):
    return {"x": np.full(4, number, "f4"), "id": number}

def main():
    numbers = range(40)
    for shard in range(4):
        with webdataset.TarWriter(f"shards-{shard}.tar") as out:
            for number in numbers[shard::4]:
                out.write({"__key__": f"{number:04}", "npy": sample(number)["x"], "cls": number})
    pa.parquet.write_table(pa.table({"x": [float(i) for i in numbers]}), "rows.parquet", row_group_size=8)
    litdata.optimize(sample, list(numbers), "chunks", num_workers=1, chunk_bytes=1 << 9, start_method="fork")
    with streaming.MDSWriter(out="mds", columns={"x": "ndarray:float32:4", "id": "int"}) as out:
        for number in numbers:
            out.write(sample(number))
    with lmdb.open("lmdb") as env, env.begin(write=True) as out:
        for number in numbers:
            out.put(b"%04d" % number, str(number).encode())
    records, writer = ArrayRecordWriter("rows.array_record", "group_size:1"), tfrecord.TFRecordWriter("rows.tfrecord")
    for number in numbers:
        records.write(sample(number)["x"].tobytes())
        writer.write({"x": (sample(number)["x"], "float"), "id": (number, "int")})
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(f"image-{number}.png")
        Image.fromarray(np.full((8, 8), number % 2, np.uint8)).save(f"mask-{number}.png")
    records.close()
    writer.close()
    create_index("rows.tfrecord", "rows.index")
    for clip in range(2):
        with av.open(f"clip-{clip}.mp4", "w") as video:
            stream = video.add_stream("mpeg4", rate=10)
            stream.width = stream.height = 32
            video.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((32, 32, 3), clip * 99, np.uint8))))
            video.mux(stream.encode())
    store = fsspec.filesystem("s3")
    store.mkdir("bucket")
    for number in numbers:
        with store.open(f"bucket/{number}.npy", "wb") as out:
            np.save(out, sample(number)["x"])

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The files, feeders, and an S3 server; torchvision, which Streaming's image datasets need, is left empty."""
    folder = tmp_path_factory.mktemp("guide")
    vision = folder / "modules" / "torchvision"
    (vision / "transforms").mkdir(parents=True)
    for name in ("__init__.py", "transforms/__init__.py"):
        (vision / name).touch()
    (vision / "datasets.py").write_text("class VisionDataset: ...\n")
    (vision / "transforms" / "functional.py").write_text("to_tensor = None\n")
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder / "modules"))
        patch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
        for name, value in {
            "ENDPOINT_URL": f"http://{host}:{port}",
            "ACCESS_KEY_ID": "key",
            "SECRET_ACCESS_KEY": "secret",
            "DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(f"AWS_{name}", value)
        with Rig(feeders=2):
            run(folder, FILES)
            yield folder
    server.stop()


def test_each_library_has_an_example_of_ten_lines() -> None:
    assert len(EXAMPLES) == 15
    assert set(COUNTED) < set(EXAMPLES)
    assert all(len([line for line in text.splitlines() if line]) <= 10 for text in EXAMPLES.values())


@pytest.mark.thorough
def test_the_examples_run_as_printed(folder: Path) -> None:
    """One process runs them one after the other, each as its main module: most of the time would go into imports."""
    for name, text in EXAMPLES.items():
        (folder / f"{name}.py").write_text(text + AFTER.format(COUNTED.get(name, "loader")))
    seen = run(
        folder,
        f"import runpy\nfor name in {list(EXAMPLES)}: runpy.run_path(name + '.py', {{}}, '__main__')\n",
    )
    assert seen.splitlines() == ["seen 40"] * len(EXAMPLES)


def run(folder: Path, text: str) -> str:
    """What a script prints."""
    (folder / "example.py").write_text(text)
    done = warm.run(["example.py"], cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
