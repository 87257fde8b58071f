"""CUDA's driver knows a region's memory while it is mapped. Simulated: calls of the driver are written down."""

from __future__ import annotations

import copy
import fcntl
import gc
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import Numbers

from dataloaderjob import DataLoader
from dataloaderjob.core.errors import InputError
from dataloaderjob.trainer.device import devices
from dataloaderjob.trainer.device.transfer import Way
from dataloaderjob.trainer.session import service
from dataloaderjob.trainer.session.pool import Mapping, Region, map_region

NBYTES = 1 << 16
OUT_OF_MEMORY = 2


class Driver:
    """`cudart`, as far as it is called here."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.calls: list[tuple[str, int, bool]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, is_mapped(address)))
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, is_mapped(address)))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(devices, "_cuda", lambda: made)
    return made


def test_loader_uses_one_device_stream_for_all_its_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []

    class Counted:
        def __init__(self, device: torch.device) -> None:
            made.append(device)

    monkeypatch.setattr(devices, "Accelerator", Counted)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    loaders = [DataLoader(Numbers(4), device="meta") for _ in range(2)]
    found = [loader.way(pins=False, pin_device=None).device for loader in loaders for _ in range(3)]
    assert found[0] is found[1] is found[2]
    assert found[3] is found[4] is found[5] is not found[0]
    assert len(made) == 2
    here = copy.copy(loaders[0])
    assert here.way(pins=False, pin_device=None).device is not found[0], "a copy is another loader"
    copied = pickle.loads(pickle.dumps(loaders[0]))
    assert copied.way(pins=False, pin_device=None).device is not found[0]


def test_device_attribute_of_a_subclass_is_ignored() -> None:
    class Own(DataLoader[Any]):
        def __init__(self, *what: Any) -> None:
            super().__init__(*what)
            self.device = "cuda"

    own = Own(Numbers(4), 1, False, None, None, 1)
    assert own.way(pins=False, pin_device=None) == Way(pins=False)
    assert own.multiprocessing_context.of == {}


def accelerator() -> Any:
    made = object.__new__(devices.Accelerator)
    made._device = torch.device("cuda:0")
    return made


def is_mapped(address: int) -> bool:
    areas = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in areas)


def region() -> Region:
    fd = os.memfd_create("region", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return map_region(1, NBYTES, False, fd)


def test_a_region_is_unregistered_while_it_is_still_mapped(driver: Driver) -> None:
    made = region()
    address = made.address
    assert accelerator().register(address, NBYTES, made.map)
    assert driver.calls == [("register", address, True)]
    made.close()
    del made
    gc.collect()
    assert driver.calls[1:] == [("unregister", address, True)]
    assert not is_mapped(address)


def test_a_forked_child_leaves_the_driver_alone(driver: Driver) -> None:
    made = region()
    accelerator().register(made.address, NBYTES, made.map)
    pid = os.fork()
    if not pid:
        del made
        gc.collect()
        os._exit(len(driver.calls) - 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_failed_memory_registration_is_reported_once(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    cleared: list[torch.device] = []
    monkeypatch.setattr(service, "say_once", said.append)
    monkeypatch.setattr(devices, "_clear_error", cleared.append)
    driver.error, made = OUT_OF_MEMORY, region()
    assert not accelerator().register(made.address, NBYTES, made.map)
    assert len(driver.calls) == len(said) == len(cleared) == 1
    assert "cudaHostRegister: error 2" in said[0]
    assert "torch's pinned memory" in said[0]
    made.close()


def test_releasing_unregistered_memory_calls_no_driver(driver: Driver) -> None:
    made = Mapping(-1, NBYTES)
    del made
    assert driver.calls == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.eye(3).to_sparse(),
        torch.eye(4).to_sparse_csr(),
        torch.quantize_per_tensor(torch.rand(3), 0.1, 2, torch.qint8),
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
    ],
    ids=["sparse", "csr", "quantized", "nested, strided"],
)
def test_tensors_torch_cannot_keep_for_a_stream_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(
        InputError, match=r"device= supports only dense tensors, and nested tensors with layout=torch\.jagged"
    ):
        accelerator().copy(tensor)


def test_missing_device_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    with pytest.raises(InputError, match="device='cuda:1' does not exist: torch sees 1, numbered from 0"):
        devices.device_of("cuda:1", {})
