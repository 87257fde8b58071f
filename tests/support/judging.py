"""What becomes of a mutated manifest: the API server refuses it, or the operator makes its children, or its status says
what is wrong. Anything else is a fault of this project's."""

from __future__ import annotations

import asyncio
import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from every_field import EVERY_FIELD
from mutants import Mutant
from operated import SETUP, Supervisors

from dataloaderjob.api import KIND
from dataloaderjob.api.base import spell
from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.decide.decision import decide
from dataloaderjob_operator.kinds import CHILDREN, KINDS, Manifest
from dataloaderjob_operator.observe.cache import Cache, JobKey
from dataloaderjob_operator.reconcile import Reconciler

AT_ONCE = 4
"""Mutants that are tried side by side."""
PASSES = 4
"""Reconciles: an error that may pass is told after its third repetition."""
TOLD = frozenset({"InvalidSpec", "ChildRefused"})
SAME_PART = 2
"""First parts of its path, such as `spec.feeders`, that a message has to share with that of the mutation."""
NEAR = 2
"""Last parts of its path that it need not share: rules are about several fields, and name one."""
_FIELD = re.compile(r"\b(?:spec|metadata|status)(?:\.[\w-]+|\[[^\]]*\])*")
_RULE = re.compile(r'([\w.]+): Invalid value: "object": ([\w.[\]]+): ')
"""A rule's message: where the rule is, and what it names from there on."""
_ON_HOST = re.compile(r"\bwith hostNetwork in ([\w.]+)")
GIVEN_NAME = EVERY_FIELD["metadata"]["name"]


class End(StrEnum):
    """How a mutant may end."""

    REFUSED = "refused by the API server"
    MADE = "children made"
    TOLD = "told by a condition"
    ELSEWHERE = "left to another controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The end of one mutant, and what is wrong about it."""

    mutant: Mutant
    end: End
    fault: str = ""
    said: str = ""
    """The API server's or the condition's message."""

    @property
    def exact(self) -> bool:
        """Whether the message names the very field, or one within it."""
        return _apart(self.mutant, self.said) == 0

    def __str__(self) -> str:
        return f"{self.mutant} ({self.end.value}): {self.fault}; {self.said[:500]}"


@dataclass(slots=True)
class Tried:
    """A mutant, and its operator after some passes; None where the API server has refused it."""

    mutant: Mutant
    refused: str = ""
    key: JobKey = ("", "")
    operator: Reconciler | None = None
    errors: list[str] = field(default_factory=list)
    """What the passes raised."""


class Judge:
    """Has all mutants in one namespace of an API server, each with an operator of its own."""

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client, self._namespace, self._turns = client, namespace, asyncio.Semaphore(AT_ONCE)

    async def judge(self, found: Sequence[Mutant]) -> list[Judged]:
        await self._post("/api/v1/namespaces", {"metadata": {"name": self._namespace}})
        tried = await asyncio.gather(*(self._try(number, mutant) for number, mutant in enumerate(found)))
        there = {
            name: await self._list(name) for name in (KIND, *(k.name for k in CHILDREN if k.name != "Pod"))
        }
        return [_judged(each, there) for each in tried]

    async def _post(self, path: str, thing: Manifest) -> Manifest:
        return await self._client._write(("", ""), "POST", path, thing, fieldValidation="Strict")

    async def _list(self, kind: str) -> dict[str, Manifest]:
        path = KINDS[kind].path(self._namespace)
        return {thing["metadata"]["name"]: thing async for thing in self._client.list(path)}

    async def _try(self, number: int, mutant: Mutant) -> Tried:
        async with self._turns:
            manifest = copy.deepcopy(mutant.manifest)
            if isinstance(about := manifest.get("metadata"), dict) and about.get("name") == GIVEN_NAME:
                about["name"] = f"m{number}"
            try:
                made = await self._post(KINDS[KIND].path(self._namespace), manifest)
            except ApiError as exc:
                return Tried(mutant, refused=exc.message)
            cache = Cache()
            cache.put({**made, "kind": KIND})
            operator = Reconciler(self._client, cache, SETUP, Supervisors())
            tried = Tried(mutant, key=(self._namespace, made["metadata"]["name"]), operator=operator)
            await _pass(tried, operator)
            return tried


async def _pass(tried: Tried, operator: Reconciler) -> None:
    """Reconciles until it succeeds, or the status says why it does not."""
    for _ in range(PASSES):
        try:
            await operator.reconcile(tried.key)
            return
        except ApiError as exc:
            tried.errors.append(str(exc))
        conditions = operator.cache.live_status(tried.key).get("conditions") or ()
        if any(condition["reason"] in TOLD for condition in conditions):
            return


def _judged(tried: Tried, there: Mapping[str, Mapping[str, Manifest]]) -> Judged:
    mutant, operator, name = tried.mutant, tried.operator, tried.key[1]
    if operator is None:
        return Judged(
            mutant=mutant, end=End.REFUSED, fault=unnamed(mutant, tried.refused), said=tried.refused
        )
    conditions = (there[KIND][name].get("status") or {}).get("conditions") or ()
    ready = next((c for c in conditions if c["type"] == "Ready"), {"reason": "", "message": ""})
    said = f"{ready['reason']}: {ready['message']}"
    made = {(kind, child) for kind, things in there.items() for child in things}
    if ready["reason"] in TOLD:
        fault = unnamed(mutant, ready["message"])
        if ready["reason"] == "InvalidSpec" and not any(f"; {verb} " in said for verb in ("use", "leave")):
            fault = "no remedy"
        if begun := made & {
            ("Deployment", f"{name}-head"),
            ("Deployment", f"{name}-feeders"),
            ("Job", f"{name}-trainers-0"),
        }:
            fault = f"made though not all can be: {sorted(begun)}"
        return Judged(mutant=mutant, end=End.TOLD, fault=fault, said=said)
    observed = operator.cache.observed(tried.key)
    decision = decide(observed, SETUP, operator.now()) if observed is not None else None
    if decision is None:
        return Judged(mutant=mutant, end=End.ELSEWHERE, fault="a status" if conditions else "")
    lacking = {(child["kind"], child["metadata"]["name"]) for child in decision.apply} - made
    fault = f"not made: {sorted(lacking)}" if lacking else "no condition" if not conditions else ""
    if ready["reason"] == "NotUnderstood" or tried.errors:
        fault = f"an error of the operator's own: {tried.errors[-1:]}"
    return Judged(mutant=mutant, end=End.MADE, fault=fault, said=said)


def unnamed(mutant: Mutant, message: str) -> str:
    """Checks whether a message names the field that was changed, or one near it."""
    far = max(0, min(NEAR, len(_words(spell(mutant.path))) - SAME_PART))
    return "" if _apart(mutant, message) <= far else "the field is not named"


def _apart(mutant: Mutant, message: str) -> int:
    """Counts the last parts of the mutation's path that no path in the message shares."""
    mine, message = _words(spell(mutant.path)), message.replace("ObjectMeta.", "metadata.")
    named = [
        *_FIELD.findall(message), *map(".".join, _RULE.findall(message)),
        *(f"spec.{template}" for template in _ON_HOST.findall(message)),
    ]  # fmt: skip
    return len(mine) - max((_shared(mine, _words(path)) for path in named), default=0)


def _shared(mine: list[str], theirs: list[str]) -> int:
    """The number of first parts that are the same."""
    pairs = zip(mine, theirs, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _words(path: str) -> list[str]:
    return re.sub(r"\[[^\]]*\]", "", path).split(".")
