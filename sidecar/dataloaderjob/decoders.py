"""Decoders for a `device_stage` that receives samples from `keep_bytes`. They use torchvision, NVIDIA DALI and
torchcodec. None of these libraries is installed with dataloaderjob. The decoders read encoded samples in place, in host
memory.

DALI and torchcodec were tested on the CPU. No decoder was tested on a GPU, and torchvision's interface was only
simulated.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack

from dataloaderjob.collate import RaggedBytes
from dataloaderjob.core.errors import InputError


def decode_jpegs(encoded: RaggedBytes, device: torch.device | str = "cpu") -> list[torch.Tensor]:
    """Decodes images with torchvision. Returns one uint8 tensor of shape (3, height, width) per image. A GPU's hardware
    decoder decodes all images in one call."""
    from torchvision.io import ImageReadMode, decode_jpeg

    views = encoded.views()
    return list(decode_jpeg(views, mode=ImageReadMode.RGB, device=device)) if views else []


def decode_frames(
    encoded: RaggedBytes, indices: Sequence[Sequence[int]], device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """Decodes video frames with torchcodec. Returns one uint8 tensor of shape (frames, 3, height, width) per video.
    `indices` lists the frames to decode in each video."""
    from torchcodec.decoders import VideoDecoder

    videos = zip(encoded.views(), indices, strict=True)
    return [VideoDecoder(video, device=device).get_frames_at(indices=list(of)).data for video, of in videos]


def dali_batch(encoded: RaggedBytes) -> Any:
    """Returns input for operators of DALI's dynamic mode: `ndd.decoders.image(dali_batch(batch["jpeg"]),
    device="gpu")`."""
    import nvidia.dali.experimental.dynamic as ndd

    return ndd.batch([view.numpy() for view in encoded.views()])


class DaliPipeline:
    """A DALI pipeline as part of a device_stage: `images, masks = pipeline(jpeg=batch["jpeg"], dice=dice)`.

    Declare each input in the pipeline, for example as `fn.external_source(name="jpeg", no_copy=True)`. The pipeline's
    `prefetch_queue_depth` must be 1: the loader itself prefetches, and holds a stage's inputs only until the stage is
    done. The random numbers of DALI's own operators depend on the number of earlier batches, so they differ after a
    resume. To avoid this, draw from the stage's generator, and pass the numbers to the pipeline as an input.
    """

    def __init__(self, pipeline: Any) -> None:
        """Raises InputError for a pipeline that prefetches."""
        if (depth := pipeline.prefetch_queue_depth) != 1:
            raise InputError(
                f"a DALI pipeline in a device_stage must have prefetch_queue_depth=1, but has {depth}: the "
                "loader already prefetches (prefetch_device), and DALI would read batches that the loader "
                "has released"
            )
        pipeline.build()
        self._pipeline, self._turn = pipeline, threading.Lock()

    def __call__(self, **inputs: RaggedBytes | torch.Tensor) -> tuple[torch.Tensor | list[torch.Tensor], ...]:
        """Runs the pipeline on the current stream and returns its outputs. An output is a tensor if all its samples
        have the same shape, and a list of tensors otherwise."""
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream() if is_used else None
        arrays = {name: _samples(value) for name, value in inputs.items()}
        with self._turn:  # stages of two loaders may share the pipeline
            return tuple(map(_tensors, self._pipeline.run(stream, **arrays)))


def _samples(value: RaggedBytes | torch.Tensor) -> Any:
    """Returns data in host memory as numpy arrays. If DALI 2.4 received a host tensor, it would ask torch for a CUDA
    stream, which not every build of torch supports."""
    if isinstance(value, RaggedBytes):
        return [view.numpy() for view in value.views()]
    return value.numpy() if value.device.type == "cpu" else value


def _tensors(output: Any) -> torch.Tensor | list[torch.Tensor]:
    """Copies the output, because the pipeline writes its next outputs into the same memory."""
    if output.is_dense_tensor():
        return from_dlpack(output.as_tensor()).clone()
    return [from_dlpack(output[i]).clone() for i in range(len(output))]
