"""Decoders of a device_stage. torchcodec and DALI are run for real, on the CPU. torchvision is not: its wheels do not
import beside a torch for CPUs, so what is tested is the call, against the interface of 0.28."""

from __future__ import annotations

import enum
import io
import sys
import types
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image

from dataloaderjob.collate import RaggedBytes, keep_bytes
from dataloaderjob.core.errors import InputError
from dataloaderjob.decoders import DaliPipeline, dali_batch, decode_frames, decode_jpegs


def picture(number: int, height: int = 40) -> np.ndarray:
    """A smooth one, which a JPEG keeps nearly as it is."""
    rows, columns = np.mgrid[0:height, 0:60]
    return np.stack([rows * 3, columns * 4, np.full_like(rows, 20 * number)], axis=2).astype(np.uint8)


def jpegs(pictures: list[np.ndarray]) -> RaggedBytes:
    files = []
    for one in pictures:
        Image.fromarray(one).save(file := io.BytesIO(), "JPEG", quality=95)
        files.append(file.getvalue())
    return keep_bytes(files)


def is_near(found: torch.Tensor, picture: np.ndarray) -> bool:
    return (
        found.shape == picture.shape and (found.float() - torch.from_numpy(picture).float()).abs().mean() < 3
    )


class ImageReadMode(enum.Enum):
    UNCHANGED = 0
    RGB = 3


def decode_jpeg(
    input: Any,  # noqa: A002  torchvision's name
    mode: ImageReadMode = ImageReadMode.UNCHANGED,
    device: Any = "cpu",
    apply_exif_orientation: bool = False,
) -> Any:
    """What torchvision.io's takes and gives (torchvision 0.28, io/image.py), done by PIL."""
    if isinstance(input, list):
        if not input:
            raise ValueError("Input list must contain at least one element")
        assert all(one.device.type == "cpu" and one.dtype == torch.uint8 and one.ndim == 1 for one in input)
        return [decode_jpeg(one, mode, device, apply_exif_orientation) for one in input]
    decoded = Image.open(io.BytesIO(input.numpy())).convert(mode.name)
    return torch.from_numpy(np.asarray(decoded).copy()).permute(2, 0, 1).to(device)


@pytest.fixture
def torchvision_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("torchvision.io")
    made.decode_jpeg, made.ImageReadMode = decode_jpeg, ImageReadMode
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.io", made)


@pytest.mark.usefixtures("torchvision_stand_in")
def test_not_run_here_torchvision_gets_jpegs_as_a_list_of_views() -> None:
    pictures = [picture(1), picture(2, 50)]
    found = decode_jpegs(jpegs(pictures), "cpu")
    assert [one.shape for one in found] == [(3, 40, 60), (3, 50, 60)]
    assert all(is_near(one.permute(1, 2, 0), other) for one, other in zip(found, pictures, strict=True))
    assert decode_jpegs(RaggedBytes(torch.empty(0, dtype=torch.uint8), torch.tensor([0]))) == []


def video(shades: list[int]) -> bytes:
    with av.open(file := io.BytesIO(), "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for shade in shades:
            frame = av.VideoFrame.from_ndarray(np.full((48, 64, 3), shade, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.mark.system  # the libraries of FFmpeg
def test_torchcodec_decodes_the_requested_video_frames() -> None:
    videos = keep_bytes([video([0, 50, 100, 150]), video([200, 40])])
    found = decode_frames(videos, [[0, 3], [1]])
    assert [frames.shape for frames in found] == [(2, 3, 48, 64), (1, 3, 48, 64)]
    means = torch.cat([frames.float().mean((1, 2, 3)) for frames in found])
    assert torch.allclose(means, torch.tensor([0.0, 150.0, 40.0]), atol=3)


def test_dali_dynamic_mode_decodes_the_output_of_keep_bytes() -> None:
    import nvidia.dali.experimental.dynamic as ndd

    pictures = [picture(1), picture(2), picture(3, 50)]
    found = ndd.decoders.image(dali_batch(jpegs(pictures)), device="cpu")
    assert all(
        is_near(torch.from_dlpack(one.cpu()), other) for one, other in zip(found, pictures, strict=True)
    )


def pipeline(depth: int = 1) -> Any:
    """Decodes pictures, and masks too, and cuts the same part out of both."""
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=4, num_threads=2, device_id=None, prefetch_queue_depth=depth)
    def parts() -> Any:
        files = fn.external_source(name="jpeg", no_copy=True)
        masks = fn.external_source(name="mask", no_copy=True)
        corners = fn.external_source(name="corners", no_copy=True)
        whole = fn.decoders.image(files, device="cpu")
        return *(fn.slice(one, corners, [20, 30], axes=[0, 1]) for one in (whole, masks)), whole

    return parts()


def test_dali_pipeline_crops_picture_and_mask_identically() -> None:
    run = DaliPipeline(pipeline())
    for count in (4, 3):  # the last batch of an epoch has fewer
        pictures = [picture(number) for number in range(count - 1)] + [picture(9, 50)]
        masks = torch.stack([torch.from_numpy(picture(number)) for number in range(count)])
        corners = torch.randint(0, 20, (count, 2), generator=torch.Generator().manual_seed(count)).int()
        cut, cut_masks, whole = run(jpeg=jpegs(pictures), mask=masks, corners=corners)
        assert isinstance(cut, torch.Tensor)
        assert isinstance(cut_masks, torch.Tensor)
        assert isinstance(whole, list), "pictures of different shapes"
        assert [len(one) for one in whole] == [40] * (count - 1) + [50]
        for number in range(count):
            top, left = corners[number].tolist()
            part = np.s_[top : top + 20, left : left + 30]
            assert is_near(cut[number], pictures[number][part])
            assert torch.equal(cut_masks[number], masks[number][part])


def test_pipeline_output_survives_the_next_run() -> None:
    run = DaliPipeline(pipeline())

    def cut(number: int) -> torch.Tensor:
        one, corners = picture(number), torch.zeros(1, 2, dtype=torch.int32)
        found = run(jpeg=jpegs([one]), mask=torch.from_numpy(one)[None], corners=corners)[0]
        assert isinstance(found, torch.Tensor)
        return found

    first = cut(1)
    before = first.clone()
    cut(8)
    assert torch.equal(first, before)


def test_pipeline_with_prefetching_is_refused() -> None:
    with pytest.raises(InputError, match="must have prefetch_queue_depth=1, but has 2"):
        DaliPipeline(pipeline(2))
