"""The translation of the API server's message about a refused child into a message about the job's own fields. Pure.

The module follows a field's path through the child and the user's template in parallel. It matches list entries by
their identifying field, because the operator's own entries come before the user's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dataloaderjob.api import DataLoaderJob
from dataloaderjob.api.base import Quantity
from dataloaderjob.api.plain import plain
from dataloaderjob.api.ray import OF_HEAD, SUPERVISOR_CONTAINER
from dataloaderjob.api.sidecar import RUN, SIDECAR
from dataloaderjob_operator import names
from dataloaderjob_operator.decide.resource_fields import with_field
from dataloaderjob_operator.kinds import Manifest
from dataloaderjob_operator.objects.pods import INHERITED, TMP
from dataloaderjob_operator.objects.supervisor import TMP as SUPERVISOR_TMP

NO_DRY_RUN = "does not support dry run"
"""Part of the API server's message if an admission webhook does not support dry runs, because it has side effects."""
_SAYS_NOTHING = (
    NO_DRY_RUN,
    'cannot create resource "pods"',  # a chart of an earlier release does not grant this permission
    "exceeded quota",  # quota may be freed later; until then, events report the refusal
    "status unknown for quota",  # the quota is new
    "error looking up service account",  # the account may be created after the job
    "cannot be handled as a Pod",  # a value that server-side apply of the workload has converted
    "admission webhook",  # the answer may depend on the pod's creator or owner
    "failed calling webhook",
    "ValidatingAdmissionPolicy",
)
"""Parts of messages (Kubernetes 1.34) about a pod refused in a dry run, although the job's own pods may be accepted."""
_NAMED_BY_PODS = {"no PriorityClass": "priorityClassName", "RuntimeClass": "runtimeClassName"}
"""Parts of messages (Kubernetes 1.34) about a missing object that a pod names, each with the field that names it."""
TRAINERS, FEEDERS, HEAD = (
    "spec.trainers.job.template",
    "spec.feeders.template",
    "spec.ray.managed.head.template",
)
_PATH = re.compile(r"\.?\bspec\.template((?:\.[A-Za-z][\w-]*|\[[^\]]*\])+)")
_METADATA = re.compile(r"(?<![\w.\]])\.?metadata(?=\.(?:labels|annotations)\b)")
_TOKEN = re.compile(r"\.([A-Za-z][\w-]*)|\[(?:([A-Za-z]\w*)=(?:\"([^\"]*)\"|([^\",\]]*))|(\d+))[^\]]*\]")
_NOT_CONVERTED = "unable to convert"
"""Part of the API server's message for a value of the wrong type. The message does not name the field."""
_AMOUNTS = ("requests", "limits", "sizeLimit")
"""Fields that contain quantities."""
_KEYS = ("name", "mountPath", "key", "containerPort", "ip")
"""Fields that identify the entries of a list."""
_IN_CONTAINERS = tuple(("containers", field) for field in ("env", "envFrom", "volumeMounts"))
"""Lists in a pod to which spec.data adds entries."""
_OWN = {
    (names.Role.HEAD, "head", "resources"): "spec.ray.managed.head.resources",
    (names.Role.HEAD, SUPERVISOR_CONTAINER, "resources"): "spec.ray.managed.head.resources",
    (names.Role.FEEDER, "feeder", "resources"): "spec.feeders.resources",
    (names.Role.TRAINER, SIDECAR, "resources"): "spec.sidecar.resources",
    (names.Role.TRAINER, SIDECAR, "image"): "spec.sidecar.image",
    (names.Role.TRAINER, SIDECAR, "env"): "spec.sidecar.env",
    (names.Role.TRAINER, SIDECAR, "securityContext"): "spec.sidecar.securityContext",
}
"""The job's field that sets a field of the operator's containers, by role, container and field."""
_SCRATCHES = {
    (names.Role.HEAD, SUPERVISOR_TMP["name"]): "spec.feeders.scratch",
    (names.Role.FEEDER, TMP["name"]): "spec.feeders.scratch",
    (names.Role.TRAINER, RUN["name"]): "spec.sidecar.scratch",
}
"""The job's field that sets the size of one of the operator's volumes, by role and volume."""
_Token = str | int | tuple[str, str]


def is_of_the_trial(message: str) -> bool:
    """Returns True if the reason for refusing a pod in a dry run may not apply to the job's own pods."""
    return any(words in message for words in _SAYS_NOTHING)


def of_a_pod(message: str, workload: Manifest) -> str:
    """Rewrites the refusal of a pod as a refusal of its workload. Adds the field to change, if it is known."""
    name = workload["metadata"]["name"]
    told = re.sub(rf"\b{re.escape(name)}-[a-z0-9]{{5}}\b", name, message)
    field = next((field for words, field in _NAMED_BY_PODS.items() if words in message), None)
    if field is not None:
        told = f"spec.template.spec.{field}: {told}"
    return with_field(told, names.Role(workload["metadata"]["labels"][names.LABEL_ROLE]))


def explain(message: str, child: Manifest, job: DataLoaderJob) -> str:
    """Returns the message with the child's fields replaced by the job's. A field stays unchanged if the user did not
    set it. If a value has the wrong type, the message begins with the likely fields."""
    role = child["metadata"].get("labels", {}).get(names.LABEL_ROLE)
    template = child.get("spec", {}).get("template")
    if role is None or template is None:
        return message
    found = _Template(job, names.Role(role), template)
    told = _METADATA.sub(f"{found.root.rpartition('.')[0]}.metadata", message)
    told = _PATH.sub(lambda match: found.path(_tokens(match[1])) or match[0].lstrip("."), told)
    if _NOT_CONVERTED not in told:
        return told
    odd = [
        f"{found.path(list(path)) or found.root}: found {value!r}; use {use}"
        for path, value, use in _odd_values(template, ())
    ]
    return "; ".join((*(odd or [found.root]), told))


def _tokens(path: str) -> list[_Token]:
    return [
        field or ((key, quoted or bare) if key else int(index))
        for field, key, quoted, bare, index in _TOKEN.findall(path)
    ]


def _odd_values(value: Any, path: tuple[_Token, ...]) -> Iterator[tuple[tuple[_Token, ...], Any, str]]:
    """Yields values that should be quantities but are not, and floating-point numbers in other fields. Each item holds
    the value's path, the value, and a description of a valid value."""
    entries: Iterable[tuple[_Token, Any]] = value.items() if isinstance(value, Mapping) else ()
    for key, inner in enumerate(value) if isinstance(value, list) else entries:
        here = (*path, key)
        if isinstance(inner, Mapping | list):
            yield from _odd_values(inner, here)
        elif {*path[-1:], key}.isdisjoint(_AMOUNTS):
            if isinstance(inner, float):
                yield here, inner, "a whole number"
        elif not _is_quantity(inner):
            yield here, inner, Quantity.EXAMPLE


def _is_quantity(value: Any) -> bool:
    try:
        Quantity(value)
    except ValueError:
        return False
    return True


class _Template:
    """A child's pod template, paired with the user's."""

    def __init__(self, job: DataLoaderJob, role: names.Role, made: Mapping[str, Any]) -> None:
        self._job, self._role, self._made = job, role, made
        templates = {HEAD: job.spec.ray.head.template, FEEDERS: job.spec.feeders.template}
        first = {names.Role.HEAD: HEAD, names.Role.FEEDER: FEEDERS, names.Role.TRAINER: TRAINERS}[role]
        sources = {
            root: plain(user) for root, user in (templates | {TRAINERS: job.spec.trainers.template}).items()
        }
        following = list(sources)[list(sources).index(first) :]
        self.root, self._user = first, sources[first]
        self._inherited_from = {
            name: root
            for name in INHERITED
            for root in reversed(following)
            if name in sources[root].get("spec", {})
        }
        """The root of the template from which each field of `INHERITED` comes."""

    def path(self, tokens: list[_Token]) -> str | None:
        """Returns the job's field for a path in the child's template; None if the user set no part of it."""
        if tokens[0] in ("labels", "annotations"):  # validation omits `metadata`
            tokens = ["metadata", *tokens]
        root = self._inherited_from.get(str(tokens[1]), self.root) if len(tokens) > 1 else self.root
        if root != self.root:
            return root + _spelt(tokens)
        found = self._own_field(tokens) or self._user_field(tokens) or self._data_field(tokens)
        both = (
            len(tokens) == 4 and (tokens[1], tokens[3]) in _IN_CONTAINERS and self._has_data(str(tokens[3]))
        )
        return f"{found} or spec.data.{tokens[3]}" if found and both else found

    def _has_data(self, field: str) -> bool:
        return self._role is not names.Role.HEAD and bool(plain(self._job.spec.data).get(field))

    def _own_field(self, tokens: list[_Token]) -> str | None:
        if len(tokens) < 3:
            return None
        owner = _at(self._made, tokens[:3])
        name = owner.get("name") if isinstance(owner, Mapping) else None
        if tokens[1] == "volumes":
            return self._scratch(str(name), tokens[3:])
        if len(tokens) < 4:
            return None
        field = tokens[3]
        ours = OF_HEAD if self._role is names.Role.HEAD else (self._role.value,)
        if field == "image" and name in ours and self._role is not names.Role.TRAINER:
            given = self._job.spec.feeders.image
            return "spec.feeders.image" if given else f"{TRAINERS}.spec.containers[0].image"
        root = _OWN.get((self._role, str(name), str(field)))
        if root is not None and self._job.spec.ray.external is not None:
            root = root.replace("spec.ray.managed.head", "spec.ray.external")
        return None if root is None else root + _spelt(tokens[4:])

    def _scratch(self, volume: str, below: list[_Token]) -> str | None:
        root = _SCRATCHES.get((self._role, volume))
        if root is None:
            return None
        spec = self._job.spec.sidecar if self._role is names.Role.TRAINER else self._job.spec.feeders
        return f"{root}.size" if spec.scratch.volume is None else f"{root}.volume{_spelt(below)}"

    def _data_field(self, tokens: list[_Token]) -> str | None:
        """Returns the field of spec.data from which a list entry comes."""
        if self._role is names.Role.HEAD or tokens[0] != "spec":
            return None
        place = 1 if tokens[1:2] == ["volumes"] else 3
        if len(tokens) < place + 2 or (place == 3 and (tokens[1], tokens[3]) not in _IN_CONTAINERS):
            return None
        field, *below = tokens[place:]
        index = _same_entry(plain(self._job.spec.data).get(str(field)), _at(self._made, tokens[: place + 2]))
        return None if index is None else f"spec.data.{field}" + _spelt([index, *below[1:]])

    def _user_field(self, tokens: list[_Token]) -> str | None:
        made: Any = self._made
        user: Any = self._user
        path = list[_Token]()
        for token in tokens:
            if isinstance(token, str):
                made, user = _at(made, [token]), _at(user, [token])
                path.append(token)
                continue
            entry = _at(made, [token])
            index = token if isinstance(token, int) and made == user else _same_entry(user, entry)
            if index is None and entry is None and isinstance(user, list):
                break  # the entry has no identifying field: name the list
            if index is None or index >= len(user):
                return None
            made, user = entry, user[index]
            path.append(index)
        return self.root + _spelt(path)


def _at(value: Any, tokens: Sequence[_Token]) -> Any:
    for token in tokens:
        if isinstance(token, str):
            value = value.get(token) if isinstance(value, Mapping) else None
        elif not isinstance(value, list):
            return None
        elif isinstance(token, int):
            value = value[token] if token < len(value) else None
        else:
            key, wanted = token
            value = next((v for v in value if isinstance(v, Mapping) and str(v.get(key)) == wanted), None)
    return value


def _same_entry(listed: Any, entry: Any) -> int | None:
    """Returns the index of an entry in the user's list; None if the list does not contain it."""
    if not isinstance(listed, list) or entry is None:
        return None
    keys = [key for key in _KEYS if isinstance(entry, Mapping) and key in entry]
    for index, mine in enumerate(listed):
        if mine == entry:
            return index
        if keys and isinstance(mine, Mapping) and mine.get(keys[0]) == entry[keys[0]]:
            return index
    return None


def _spelt(tokens: Sequence[_Token]) -> str:
    text = ""
    for token in tokens:
        if isinstance(token, str):
            text += f".{token}"
        elif isinstance(token, int):
            text += f"[{token}]"
        else:
            text += f'[{token[0]}="{token[1]}"]'
    return text
