"""States that somebody damaged or forged: each loads, or raises InputError with the path of the field, and no other."""

from __future__ import annotations

import base64
import copy
import itertools
import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from batches import Augmented, Numbers
from resuming import BATCH, LOADERS, N, distributed, elastic, seed
from torch.utils import data

from dataloaderjob import DataLoader, InputError
from dataloaderjob.making.generator_states import checked_torch
from dataloaderjob.trainer.resume import draws, generators, schema
from dataloaderjob.trainer.session.slot_places import Saved

HERE = {"num_workers": 0}
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 7, 2**31, 2**53, 2**63, 2**64, 2**70, -(2**70), 1.5, float("nan"), float("inf"), "",
    "x", "00", "ff" * 64, "{}", "[]", "[3, [1], null]", [], {}, [[]], [None], [1, 2], {"a": 1}, {"default": "00"},
    b"x", (), object, "é" * 9, [["default", "00"]], {1: 2}, "__import__('os')", [-1], ["x"] * 4, [0, 0, 0, -1],
]  # fmt: skip
"""What a field may hold instead."""


class Drawing(data.Sampler):  # type: ignore[type-arg]
    """Draws from generators of each kind."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.old, self.new = np.random.RandomState(1), np.random.default_rng(2)
        self.philox, self.twister = (
            np.random.Generator(np.random.Philox(3)),
            np.random.Generator(np.random.MT19937(4)),
        )
        self.own = random.Random(5)

    def __iter__(self) -> Iterator[int]:
        many = [
            self.old.randint(9),
            *self.new.integers(9, size=3),
            self.philox.integers(9),
            self.twister.integers(9),
        ]
        order = list(range(self.n))
        self.own.shuffle(order)
        yield from (order[(i + int(sum(many))) % self.n] for i in range(self.n))

    def __len__(self) -> int:
        return self.n


MAKERS: dict[str, Callable[[], DataLoader]] = {
    **{
        name: lambda make=make: make(**HERE)
        for name, make in LOADERS.items()
        if name != "a sampler with state"
    },
    "many generators": lambda: DataLoader(Augmented(N), BATCH, sampler=Drawing(N), **HERE),
    "with an id": lambda: DataLoader(Numbers(N), BATCH, shuffle=True, dataset_id="numbers", **HERE),
}


def places(found: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(found, dict | list):
        for key in found if isinstance(found, dict) else range(len(found)):
            yield from places(found[key], (*path, key))


def mutated(state: Any, dice: random.Random) -> Any:
    state = copy.deepcopy(state)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        path = dice.choice([path for path in places(state) if path] or [()])
        if not path:
            return dice.choice(ODD)
        parent = state
        for key in path[:-1]:
            parent = parent[key]
        way = dice.randrange(8)
        old = parent[path[-1]]
        if way == 0 and isinstance(parent, dict):
            del parent[path[-1]]
        elif way == 1 and isinstance(old, str) and old:
            at = dice.randrange(len(old))
            parent[path[-1]] = old[:at] + dice.choice("0f9,]}z ") + old[at + 1 :]
        elif way == 2 and isinstance(old, str):
            parent[path[-1]] = old[: dice.randrange(len(old) + 1)]
        elif way == 3 and isinstance(parent, dict):
            parent[dice.choice(["default", "random", "numpy", "sampler", "x", 3, None])] = old
        elif way == 4 and type(old) is int:
            parent[path[-1]] = old + dice.choice((-1, 1, 1000, 2**40, -(2**40)))
        else:
            parent[path[-1]] = copy.copy(dice.choice(ODD))
    return state


def states() -> dict[str, list[Any]]:
    """For each loader a state of its first batches, and one between epochs."""
    found: dict[str, list[Any]] = {}
    for name, make in MAKERS.items():
        seed(5)
        loader = make()
        list(itertools.islice(loader, 2))
        own = [json.loads(json.dumps(loader.state_dict()))]
        list(loader)
        found[name] = [*own, json.loads(json.dumps(loader.state_dict()))]
    return found


def attempt(make: Callable[[], DataLoader], state: Any) -> str:
    """Loads a state and takes batches of two epochs. Returns the text of an InputError."""
    loader = make()
    try:
        loader.load_state_dict(state)
        for _ in range(2):
            list(itertools.islice(loader, 3))
    except InputError as exc:
        return str(exc)
    return ""


def tried(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "LIMIT", 1 << 14)
    monkeypatch.setattr(draws.drawn_between, "__defaults__", (1 << 14,))  # the search would take hours
    known, refused = states(), 0
    for number in range(count):
        dice = random.Random(number)
        name = dice.choice(list(MAKERS))
        state = mutated(dice.choice(known[name]), dice)
        try:
            refused += bool(attempt(MAKERS[name], state))
        except Exception as exc:
            raise AssertionError(f"number {number}, {name}: {type(exc).__name__} of {state}") from exc
    assert count / 4 < refused < count, "some load and some are refused"


@pytest.mark.filterwarnings("ignore")
def test_a_mutated_state_loads_or_raises_inputerror(monkeypatch: pytest.MonkeyPatch) -> None:
    tried(400, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
def test_ten_thousand_mutated_states_raise_only_inputerror(monkeypatch: pytest.MonkeyPatch) -> None:
    tried(10_000, monkeypatch)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("epoch",), "one", "state's epoch must be a whole number"),
        (("finished",), 1, "state's finished must be true or false"),
        (
            ("generators", "default"),
            "00",
            r"state's generators\['default'\] must be the state of a generator",
        ),
        (("digest", 2), -1, r"state's digest\[2\] must be a whole number from 0"),
        (("loader", "seeds"), {}, "state's loader.seeds must be a list"),
        (("loader", "probes", 1), 3, r"state's loader.probes\[1\] must be text"),
        (("samples",), 2**60, "state's samples must be a whole number"),
        (("seen", 0), "a", r"state's seen\[0\]"),
        (("now", "default"), None, r"state's now\['default'\] must be text"),
        (("drawn",), [["default"]], r"state's drawn\[0\] must be a list of 2"),
    ],
    ids=lambda one: ".".join(map(str, one)) if isinstance(one, tuple) else None,
)
def test_the_path_of_the_field_is_named(path: tuple[Any, ...], value: Any, said: str) -> None:
    (state, _) = states()["shuffled"]
    inner: Any = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(InputError, match=said):
        MAKERS["shuffled"]().load_state_dict(state)


@pytest.mark.parametrize("position", [625, -1, 2**31 - 1])
def test_numpy_reads_no_memory_beyond_its_words(position: int) -> None:
    """numpy takes any position, and would read what lies there."""
    loader = MAKERS["many generators"]
    own = generators.generators_of(loader().epoch_spec())
    (state, _) = states()["many generators"]
    changed = 0
    for name in own:
        text = state["generators"][name]
        found = json.loads(text) if text[:1] in "{[" else None
        if isinstance(found, dict) and ("pos" in found["state"] or "buffer_pos" in found):
            (found["state"] if "pos" in found["state"] else found).update(
                {"pos" if "pos" in found["state"] else "buffer_pos": position}
            )
            changed += 1
            with pytest.raises(InputError, match="a position from 0 to"):
                loader().load_state_dict(
                    {**state, "generators": {**state["generators"], name: json.dumps(found)}}
                )
    assert changed == 3
    words = generators.now(others=True)["numpy"]
    damaged = words[: 624 * 8] + position.to_bytes(4, "little", signed=True).hex() + words[624 * 8 + 8 :]
    with pytest.raises(InputError, match=r"generators\['numpy'\]"):
        loader().load_state_dict({**state, "generators": {"numpy": damaged}})


TORCHS = struct.Struct("<QiiQ")
"""Seed, draws left + 1, whether it was seeded, position of the next word."""


@pytest.mark.parametrize(
    ("left", "following"), [(624, 624), (2, 624), (1, 625), (625, 0), (0, 0), (-5, 0), (1, 2**64 - 1)]
)
def test_torch_reads_no_memory_beyond_its_words(left: int, following: int) -> None:
    """torch checks each of the two numbers, but not both together."""
    loader, (state, _) = MAKERS["many generators"], states()["many generators"]
    honest = bytes.fromhex(generators.now(others=False)["default"])
    seeded, _, is_seeded, _ = TORCHS.unpack_from(honest)
    forged = (TORCHS.pack(seeded, left, is_seeded, following) + honest[TORCHS.size :]).hex()
    for field in ("generators", "now", "drawn"):
        found: Any = [["default", forged]] if field == "drawn" else {"default": forged}
        with pytest.raises(InputError, match=rf"{field}\['default'\] must be the state of a generator"):
            loader().load_state_dict({**state, field: found})
    own = DataLoader(Numbers(N), BATCH, shuffle=True, generator=torch.Generator(), **HERE)
    next(iter(own))
    mine = json.loads(json.dumps(own.state_dict()))
    (name,) = (name for name in mine["generators"] if name.startswith("loader"))
    mine["generators"][name] = forged
    with pytest.raises(InputError, match="must be the state of a generator"):
        own.load_state_dict(mine)


@pytest.mark.parametrize("drawn", [0, 1, 2, 623, 624, 625, 1247, 1248])
def test_state_of_torch_after_any_number_of_draws_is_taken(drawn: int) -> None:
    generator = torch.Generator().manual_seed(3)
    if drawn:
        torch.randint(0, 2**31 - 1, (drawn,), generator=generator)
    checked_torch(generator.get_state())


@pytest.mark.parametrize("found", [-1, 625, 2**31 - 1])
def test_counting_draws_reads_no_memory_beyond_the_words(found: int) -> None:
    """Accelerate's loader steps back from states that it has not loaded itself."""
    honest = generators.now(others=True)
    data = bytearray.fromhex(honest["default"])
    TORCHS.pack_into(data, 0, 1, 625 - found, 1, 0)
    with pytest.raises(ValueError, match="a position from 0 to 624"):
        generators.before_a_seed(data.hex(), honest["default"])


@pytest.mark.parametrize(
    ("words", "dtype"),
    [
        (["a"], "U20000000"),
        ([0], "V999999999"),
        ([1.5], "uint32"),
        ([[0] * 9] * 9, "uint32"),
        ([0] * 5000, "uint64"),
    ],
    ids=lambda one: one if type(one) is str else None,
)
def test_array_in_a_generators_state_takes_bounded_memory(words: Any, dtype: str) -> None:
    loader, (state, _) = MAKERS["many generators"], states()["many generators"]
    own = generators.generators_of(loader().epoch_spec())
    name = next(one for one in own if state["generators"][one].startswith("{"))
    found = {**json.loads(state["generators"][name]), "more": {"array": words, "dtype": dtype}}
    with pytest.raises(InputError, match="words"):
        loader().load_state_dict({**state, "generators": {**state["generators"], name: json.dumps(found)}})


def test_loading_tries_generators_without_changing_them() -> None:
    (state, _) = states()["many generators"]
    loader = MAKERS["many generators"]()
    seed(9)
    before = (
        generators.now(others=True),
        generators.all_now(generators.generators_of(loader.epoch_spec()), shared=False, others=False),
    )
    loader.load_state_dict(state)
    after = (
        generators.now(others=True),
        generators.all_now(generators.generators_of(loader.epoch_spec()), shared=False, others=False),
    )
    assert before == after


def test_a_samplers_refusal_names_the_sampler() -> None:
    seed(5)
    loader = LOADERS["a sampler with state"](**HERE)
    next(iter(loader))
    state = loader.state_dict()
    for wrong in ({}, 3, "x", {"round": 1}):
        again = LOADERS["a sampler with state"](**HERE)
        again.load_state_dict({**state, "sampler": wrong})
        with pytest.raises(InputError, match="Counting does not accept the sampler's state"):
            iter(again)


def slots_state() -> dict[str, Any]:
    return {
        "version": 1, "batches": 3,
        "sampler": {
            "rank": 0, "slots": [[2, base64.b64encode(b"Dxx").decode()], None],
            "digests": [[2, "00ff00ff00ff00ff"], None], "ends": [[1, 4]], "taken": [2, 1],
        },
    }  # fmt: skip


@pytest.mark.parametrize("count", [2000])
def test_a_mutated_entry_for_slots_is_read_or_raises_inputerror(count: int) -> None:
    refused = 0
    for number in range(count):
        dice = random.Random(number)
        state = slots_state()
        state["sampler"] = mutated(state["sampler"], dice)
        try:
            schema.validate(state, takes=lambda name, text: None, is_stream=True)
            Saved.of(state["sampler"], 0, slots=2)
        except InputError:
            refused += 1
    assert count / 4 < refused < count


def test_a_pickle_in_a_slot_is_refused_unless_allowed() -> None:
    state = slots_state()["sampler"]
    state["slots"][0][1] = base64.b64encode(b"\x80\x05N.").decode()
    with pytest.raises(InputError, match="runs code when it is loaded: pass allow_pickle=True"):
        Saved.of(state, 0, slots=2)
    assert Saved.of(state, 0, slots=2, allow_pickle=True).snapshots == {0: (2, b"\x80\x05N.")}


def test_torchs_generator_takes_no_state_of_another_length() -> None:
    with pytest.raises(InputError, match="generators"):
        DataLoader(Numbers(N), BATCH, **HERE).load_state_dict(
            {
                "batches": 0,
                "generators": {"default": torch.Generator().get_state().numpy().tobytes().hex()[:-2]},
            }
        )


def test_the_loaders_of_this_file_include_several_ranks() -> None:
    assert distributed in LOADERS.values()
    assert elastic in LOADERS.values()
