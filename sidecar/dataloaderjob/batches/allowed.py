"""The classes whose objects a batch may carry without a pickle. The feeder and the trainer apply the same rules.

The trainer does not trust feeders. With some classes, content from a feeder could run code in the trainer. So only the
following classes are allowed:

- classes of the user's own modules, if each base is the user's own, is listed in this module, or is abstract and empty;
- library classes that are listed in this module;
- dataclasses and named tuples of libraries, if they consist only of fields;
- library classes that opt in with `__dataloaderjob_data__ = True` in their body.

A class with a `__del__` is never allowed, because Python would run it on content from a feeder.

The lookup of a class runs no code. It reads the `__dict__` of modules that are already imported, and of their classes.
It calls no module's `__getattr__`, no metaclass and no descriptor.
"""

from __future__ import annotations

import abc
import collections
import collections.abc
import functools
import sys
import types
import typing
import weakref
from collections.abc import Callable, Mapping
from dataclasses import Field
from typing import Any

from dataloaderjob.core.errors import UnsupportedBatch
from dataloaderjob.shipping import user_code
from dataloaderjob.shipping.modules import MAINS, is_installed, is_ours

CONSENT = "__dataloaderjob_data__"
"""Attribute that a class sets to True in its body to let batches carry its objects."""
_MODULE_DICT: Any = vars(types.ModuleType)["__dict__"]
_CLASS_DICT: Any = vars(type)["__dict__"]
_CLASS_MRO: Any = vars(type)["__mro__"]
_CLASS_MODULE: Any = vars(type)["__module__"]
_CLASS_QUALNAME: Any = vars(type)["__qualname__"]
_MISSING = object()


def _of(module: str, *names: str) -> list[str]:
    return [f"{module}.{name}" for name in names]


_NAMED = frozenset(
    [
        *_of("numpy", "matrix"), *_of("numpy.rec", "recarray"),
        *_of("numpy.char", "chararray"), *_of("numpy._core.defchararray", "chararray"),
        *_of("torch.nn.utils.rnn", "PackedSequence", "PackedSequence_"), *_of("torch.nn.parameter", "Buffer"),
        *_of("torchvision.tv_tensors._tv_tensor", "TVTensor"), *_of("torchvision.tv_tensors._image", "Image"),
        *_of("torchvision.tv_tensors._video", "Video"), *_of("torchvision.tv_tensors._mask", "Mask"),
        *_of("torchvision.tv_tensors._bounding_boxes", "BoundingBoxes"),
        *_of("torchvision.tv_tensors._keypoints", "KeyPoints"),
        *_of("transformers.tokenization_utils_base", "BatchEncoding"),
        *_of("transformers.feature_extraction_utils", "BatchFeature"),
        *_of("transformers.image_processing_base", "BatchFeature"),
        *_of("monai.data.meta_tensor", "MetaTensor"), *_of("monai.data.meta_obj", "MetaObj"),
        *_of("torch_geometric.data.data", "Data", "BaseData"), *_of("torch_geometric.data.hetero_data", "HeteroData"),
        *_of("torch_geometric.data.feature_store", "FeatureStore"),
        *_of("torch_geometric.data.graph_store", "GraphStore"),
        *_of("torch_geometric.loader.neighbor_sampler", "Adj", "EdgeIndex"),
        *_of("lightning.fabric.utilities.data", "AttributeDict"),
        *_of("lightning_fabric.utilities.data", "AttributeDict"),
        *_of("lightning.pytorch.utilities.parsing", "AttributeDict"),
        *_of("pytorch_lightning.utilities.parsing", "AttributeDict"),
        *_of("addict.addict", "Dict"), *_of("mmengine.config.config", "ConfigDict"),
        *_of("mmengine.structures.base_data_element", "BaseDataElement"),
        *_of("mmengine.structures.instance_data", "InstanceData"),
        *_of("mmengine.structures.pixel_data", "PixelData"), *_of("mmengine.structures.label_data", "LabelData"),
        *_of("speechbrain.dataio.batch", "PaddedBatch", "PaddedData"),
        *_of("lhotse.cut.base", "Cut"), *_of("lhotse.cut.data", "DataCut"), *_of("lhotse.cut.mono", "MonoCut"),
        *_of("lhotse.cut.multi", "MultiCut"), *_of("lhotse.cut.padding", "PaddingCut"),
        *_of("lhotse.cut.mixed", "MixedCut", "MixTrack"), *_of("lhotse.custom", "CustomFieldMixin"),
        *_of("lhotse.supervision", "SupervisionSegment", "AlignmentItem"),
        *_of("lhotse.audio.recording", "Recording"), *_of("lhotse.audio.source", "AudioSource"),
        *_of("lhotse.features.base", "Features"), *_of("lhotse.array", "Array", "TemporalArray"),
        *_of("typing_extensions", "Protocol"), *_of("dataloaderjob.collate", "RaggedBytes"),
    ]
)  # fmt: skip
"""Library classes whose objects can be created from a feeder's content without running code, and the bases of these
classes. Methods that the training script calls on such an object use that content: see the threat model."""
_ABSTRACT: frozenset[Any] = frozenset(
    {
        object, typing.Generic, typing.Protocol, abc.ABC,
        *(vars(collections.abc)[name] for name in collections.abc.__all__),
    }
)  # fmt: skip
"""Base classes that add no content to an object."""
_PLAIN_FACTORIES: frozenset[Any] = frozenset(
    {
        int, float, complex, bool, str, bytes, bytearray, list, tuple, dict, set, frozenset,
        collections.OrderedDict, collections.Counter, collections.deque, collections.defaultdict,
    }
)  # fmt: skip
_GENERATED = frozenset(
    {
        "__module__", "__qualname__", "__doc__", "__annotations__", "__annotate__", "__annotate_func__",
        "__annotations_cache__", "__dict__", "__weakref__", "__slots__", "__orig_bases__", "__parameters__",
        "__class_getitem__", "__firstlineno__", "__static_attributes__", "__abstractmethods__", "_abc_impl",
        "__init__", "__repr__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__match_args__",
        "__dataclass_fields__", "__dataclass_params__", "__setattr__", "__delattr__", "__getstate__", "__setstate__",
        "__replace__", "__new__", "__getnewargs__", "__post_init__", "__str__", "__slotnames__", "__final__",
        "__type_params__",
        "_fields", "_field_defaults", "_make", "_replace", "_asdict",
        "_field_types", "_source",
    }
)  # fmt: skip
"""Names that `@dataclass`, `namedtuple`, `copyreg` and the interpreter put into a class."""
_allowed: dict[int, tuple[weakref.ref[type], set[int]]] = {}
"""Cache of `is_allowed`. The key is the id of an allowed class. The value is the class and the ids of the foundations
for which it is allowed."""


def remembered(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Wraps a rule in a cache of the classes that it allows. The cache's keys are ids, because hashing a class may run
    code of its metaclass."""
    known: dict[int, weakref.ref[type]] = {}

    @functools.wraps(rule)
    def allows(cls: type) -> bool:
        before = known.get(id(cls))
        if before is not None and before() is cls:
            return True
        found = rule(cls)
        if found:
            known[id(cls)] = weakref.ref(cls)
        return found

    return allows


# Classes by name


def find(module: str, qualname: str) -> type:
    """Returns the class `qualname` of an imported module. Raises UnsupportedBatch if there is no such class."""
    own = sys.modules.get(module)
    found = _MISSING
    if isinstance(own, types.ModuleType):
        first, *others = qualname.split(".")
        found = _MODULE_DICT.__get__(own).get(first, _MISSING)
        for name in others:
            found = _CLASS_DICT.__get__(found).get(name, _MISSING) if isinstance(found, type) else _MISSING
    if found is _MISSING:
        found = user_code.sent_class((module, qualname)) or _MISSING
    if found is _MISSING:
        why = (
            f"module {module!r} has no such name"
            if module in sys.modules
            else f"{module!r} is not imported here"
        )
        raise UnsupportedBatch(
            f"the batch holds a {module}.{qualname}, and this process cannot find that class ({why}): "
            "define it at the top level of a module that the training script imports"
        )
    if not isinstance(found, type):
        raise UnsupportedBatch(
            f"the batch holds a {module}.{qualname}, which is not a class in this process but a "
            f"{type(found).__name__}: give the class a unique name"
        )
    return found


def mro(cls: type) -> tuple[type, ...]:
    """Returns the class and all its bases, without running code of its metaclass."""
    found: tuple[type, ...] = _CLASS_MRO.__get__(cls)
    return found


def static(cls: type, name: str) -> Any:
    """Looks up an attribute in a class and its bases without calling descriptors. Returns None if it is not found."""
    for base in mro(cls):
        own = _CLASS_DICT.__get__(base)
        if name in own:
            return own[name]
    return None


def own_names(cls: type) -> Mapping[str, Any]:
    """Returns a class's own `__dict__`, without running code of its metaclass."""
    found: Mapping[str, Any] = _CLASS_DICT.__get__(cls)
    return found


# Rules


def is_allowed(cls: type, foundation: type = object) -> bool:
    """Returns True if a batch may carry objects of `cls`. They consist of an object of the class `foundation`, such as
    dict, and of attributes."""
    known = _allowed.get(id(cls))
    if known is not None and id(foundation) in known[1] and known[0]() is cls:
        return True
    if not _is_ordinary(cls) or not _is_trusted(cls) or static(cls, "__del__") is not None:
        return False
    lower = mro(foundation)
    if not all(_is_base(base, lower) for base in mro(cls)[1:]):
        return False
    if known is None or known[0]() is not cls:
        known = _allowed[id(cls)] = weakref.ref(cls), set()
    known[1].add(id(foundation))
    return True


def why_not(cls: type, foundation: type = object) -> str:
    """Returns the reason why `cls` is not allowed, as text that follows the class's name in a message. Returns an empty
    string if the class is allowed."""
    if is_allowed(cls, foundation):
        return ""
    if not (_is_ordinary(cls) and _is_trusted(cls)):
        return (
            f", a library class that batches do not carry as data (its author may set {CONSENT} = True in "
            "its body)"
        )
    if static(cls, "__del__") is not None:
        return ", whose __del__ would run with content that a feeder chose"
    bases = [base for base in mro(cls)[1:] if not _is_base(base, mro(foundation))]
    return f", which derives from {full_name(bases[0])}, whose objects batches do not carry as data"


def is_allowed_record(cls: type) -> bool:
    """Returns True if a batch may carry objects of `cls`, which is a dataclass or a named tuple."""
    return is_allowed(cls, tuple if tuple in mro(cls) else object) or is_record(cls)


def is_record(cls: type) -> bool:
    """Returns True for a dataclass or a named tuple that has only fields. Neither it nor its bases have methods or
    properties."""
    if not all(map(_is_ordinary, mro(cls))):
        return False
    bases = [base for base in mro(cls) if base not in _ABSTRACT and base is not tuple]
    fields = static(cls, "_fields" if tuple in mro(cls) else "__dataclass_fields__")
    if type(fields) not in (tuple, dict) or not bases:
        return False
    return all(_is_field(name, value, fields) for base in bases for name, value in own_names(base).items())


def is_factory(cls: type) -> bool:
    """Returns True if a defaultdict in a batch may call this class to create missing values."""
    return _is_ordinary(cls) and (cls in _PLAIN_FACTORIES or is_users(cls))


def is_abstract_or_users(cls: type) -> bool:
    """Returns True for a base that adds no library code. It is one of the user's own classes, or an abstract class
    without content."""
    return _is_ordinary(cls) and (cls in _ABSTRACT or is_users(cls))


def is_named(cls: type) -> bool:
    """Returns True for a library class that this module lists as pure data."""
    name = full_name(cls)
    if name not in _NAMED:
        return False
    module, _, qualname = name.rpartition(".")
    own = sys.modules.get(module)
    return isinstance(own, types.ModuleType) and _MODULE_DICT.__get__(own).get(qualname) is cls


def full_name(cls: type) -> str:
    """Returns the module and name that a class reports for itself."""
    return f"{_CLASS_MODULE.__get__(cls)}.{_CLASS_QUALNAME.__get__(cls)}"


def is_users(cls: type) -> bool:
    """Returns True if a class belongs to a user's module rather than to an installed one. Does not load lazy
    modules."""
    name = _CLASS_MODULE.__get__(cls)
    if name in MAINS or (_is_ordinary(cls) and user_code.is_by_value(cls)):
        return True
    own = sys.modules.get(name) if isinstance(name, str) else None
    file = _MODULE_DICT.__get__(own).get("__file__") if isinstance(own, types.ModuleType) else None
    return isinstance(file, str) and not is_installed(file) and not is_ours(name)


def _is_ordinary(cls: type) -> bool:
    """Returns True if comparing or hashing a class runs no code of its metaclass."""
    kind = type(cls)
    return kind is type or all(static(kind, name) is static(type, name) for name in ("__hash__", "__eq__"))


def _is_base(cls: type, lower: tuple[type, ...]) -> bool:
    return _is_ordinary(cls) and (cls in lower or cls in _ABSTRACT or _is_trusted(cls) or is_record(cls))


def _is_trusted(cls: type) -> bool:
    return is_users(cls) or is_named(cls) or own_names(cls).get(CONSENT) is True


def _is_field(name: str, value: Any, fields: Any) -> bool:
    """Returns True if a name in a class's body is a field, a plain constant, or generated."""
    if name in fields or name in _GENERATED:
        return not isinstance(value, (property, classmethod)) or name in ("_make", "__class_getitem__")
    return type(value) in (int, float, str, bool, type(None), Field) and not name.startswith("__")
