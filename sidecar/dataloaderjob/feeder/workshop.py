"""Loads the user's code and makes batches with it. Only the build thread comes in here.

What fails on the way comes back as a packed failure, with the phase, and the sample where one is known.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.data import _utils

from dataloaderjob.core import tickets
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.settings import FeederSettings
from dataloaderjob.fetch.aliasing import aliased
from dataloaderjob.fetch.bundles import UserCode, load_bundle
from dataloaderjob.fetch.failures import pack_failure
from dataloaderjob.fetch.fetcher import Fetcher
from dataloaderjob.fetch.tree import EncodedBatch, encode


class Failed(NamedTuple):
    """In place of a batch: what `fetch.failures` packed."""

    payload: bytes


class _Loaded:
    """One dataset with its collate_fn, ready to make batches."""

    def __init__(self, bundle: Bundle, code: UserCode) -> None:
        self.allow_pickle = bundle.allow_pickle
        self.dataset = code.dataset
        self.fetcher = Fetcher(code.dataset, code.collate_fn)


class Workshop:
    """The datasets that are loaded in this process, the one used last at the end."""

    def __init__(self, settings: FeederSettings, store: BlobStore) -> None:
        self._settings = settings
        self._store = store
        self._loaded: OrderedDict[bytes, _Loaded | Failed] = OrderedDict()

    def prepare_thread(self) -> None:
        """Call once in the build thread: the number of torch's threads is kept for each thread."""
        torch.set_num_threads(self._settings.torch_threads)

    def has(self, bundle_id: bytes) -> bool:
        return bundle_id in self._loaded

    def load(self, bundle_id: bytes, bundle: Bundle, base_seed: int) -> None:
        """Loads a bundle and calls its worker_init_fn. A failure is kept, and answers each of its tickets."""
        while len(self._loaded) >= self._settings.max_loaded_bundles:
            self._loaded.popitem(last=False)
        phase = "loading"
        try:
            code = load_bundle(bundle, self._store)
            made = _Loaded(bundle, code)
            self._introduce(made, base_seed)
            if code.worker_init_fn is not None:
                phase = "worker_init_fn"
                code.worker_init_fn(self._settings.index)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # user code may raise anything, SystemExit too
            self._loaded[bundle_id] = self._fail(exc, phase)
            return
        self._loaded[bundle_id] = made

    def make(
        self, bundle_id: bytes, number: int, payload: bytes, on_sample: Callable[[int], None] | None
    ) -> EncodedBatch | Failed:
        """Makes batch `number` from its packed ticket, with a bundle that is loaded."""
        loaded = self._loaded[bundle_id]
        self._loaded.move_to_end(bundle_id)
        if isinstance(loaded, Failed):
            return loaded
        phase = "loading the sampler's keys"
        try:
            ticket = _unpack(payload)
            self._introduce(loaded, ticket.base_seed)
            phase = ""  # of the user's code: the fetcher says which
            batch = loaded.fetcher.fetch(number, ticket, on_sample)
            held = aliased(batch)
            phase = "encoding the batch"
            encoded = encode(batch, allow_pickle=loaded.allow_pickle)
            return encoded.owned() if held else encoded
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            return self._fail(exc, phase)

    def _introduce(self, loaded: _Loaded, base_seed: int) -> None:
        """Makes torch's get_worker_info() answer, with the seed of the iterator that is served now."""
        worker = _utils.worker
        info = worker._worker_info  # noqa: SLF001  torch offers no other way to be a worker
        if info is None or info.dataset is not loaded.dataset or info.seed != base_seed + info.id:
            index = self._settings.index
            worker._worker_info = worker.WorkerInfo(  # noqa: SLF001
                id=index,
                num_workers=max(self._settings.num_feeders, index + 1),
                seed=base_seed + index,
                dataset=loaded.dataset,
            )

    def _fail(self, exc: BaseException, phase: str) -> Failed:
        return Failed(pack_failure(exc, phase=phase, feeder=self._settings.name))


def _unpack(payload: bytes) -> tickets.Ticket:
    """Raises InputError for keys whose types this feeder does not have."""
    try:
        return tickets.unpack(payload)
    except (ImportError, AttributeError) as exc:
        raise InputError(
            f"the sampler's keys cannot be loaded in a feeder: {exc}. Use ints, strings or tuples for keys, or types "
            "of a module that is installed in the feeders' image"
        ) from exc
