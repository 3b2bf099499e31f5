"""The contract of a codec, and the layout of a tensor in memory.

A codec is a frozen value. The same tensor, codec and key give the same bytes, on every backend and for every number
of threads (a projection, whose products are torch's, says its own limits). The size of what is packed is known exactly
without data. A tensor is called *dense* if its values fill a stretch of memory without gaps, in some order of its
dimensions.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..kernels import ops

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class NotRepresentable(ValueError):
    """The codec cannot store this tensor exactly. Who asked for it keeps the tensor as it is."""


class TensorMeta(NamedTuple):
    """What a size prediction may look at: everything but the values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Describe ``tensor``."""
        return tuple.__new__(cls, (tensor.shape, tensor.stride(), tensor.dtype))

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes that the values take without gaps."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """How a tensor lies in memory, or would lie once it is contiguous if it is not dense.

    ``order`` lists the dimensions from outermost to innermost, and ``sizes`` their sizes in that order.
    """

    dense: bool
    order: tuple[int, ...]
    stride: tuple[int, ...]
    sizes: tuple[int, ...]


@lru_cache(maxsize=4096)
def layout_of(shape: tuple[int, ...], stride: tuple[int, ...]) -> Layout:
    """The layout of a tensor of this shape with these strides.

    >>> layout_of((2, 3, 4, 5), (60, 1, 15, 3)).sizes   # channels last
    (2, 4, 5, 3)
    """
    order = _order(shape, stride)
    if 0 in shape:
        return Layout(True, order, stride, tuple(shape[d] for d in order))
    expected = 1
    for dim in reversed(order):
        if shape[dim] != 1 and stride[dim] != expected:
            contiguous = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
            return Layout(False, tuple(range(len(shape))), contiguous, shape)
        expected *= shape[dim]
    return Layout(True, order, stride, tuple(shape[d] for d in order))


def _order(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions by falling stride. One of size 1, whose stride says nothing, stands before its right neighbour."""
    order = sorted((d for d in range(len(shape)) if shape[d] != 1), key=lambda d: (-stride[d], d))
    for dim in reversed(range(len(shape))):
        if shape[dim] != 1:
            continue
        if dim == 0:
            order.insert(0, dim)
        elif dim + 1 in order:
            order.insert(order.index(dim + 1), dim)
        else:
            left = next((d for d in reversed(range(dim)) if d in order), None)
            order.insert(0 if left is None else order.index(left) + 1, dim)
    return tuple(order)


def form_of(tensor: Tensor) -> tuple[TensorMeta, Layout]:
    """The form in which a codec gives ``tensor`` back, and how that form lies in memory."""
    meta = TensorMeta.of(tensor)
    layout = layout_of(meta.shape, meta.stride)
    return meta if layout.dense else TensorMeta(meta.shape, layout.stride, meta.dtype), layout


def flatten(tensor: Tensor) -> tuple[Tensor, TensorMeta, Layout]:
    """The values as one line in the order of memory, the form in which they come back, and its layout.

    The line is a view of ``tensor`` if that is dense, and otherwise a copy.
    """
    meta, layout = form_of(tensor)
    if not layout.dense:
        tensor = tensor.contiguous()
    return tensor.as_strided((meta.numel,), (1,)), meta, layout


def with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """The same values laid out by ``stride``. They are copied only if they lie otherwise."""
    if tensor.stride() == stride:
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


@dataclass(frozen=True, slots=True)
class Packed:
    """What is kept in place of a tensor. Decoding needs nothing else, but ``support`` if encode was given it."""

    codec: Codec
    meta: TensorMeta
    buffers: tuple[Tensor, ...]
    key: int = 0
    """The key of the encoding, where decoding needs its random numbers again."""

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers together."""
        return sum(b.numel() * b.element_size() for b in self.buffers)

    def decode(self, support: Tensor | None = None) -> Tensor:
        """The tensor again."""
        return self.codec.decode(self, support=support)


_definition_count = itertools.count(1)


class Codec(ABC):
    """Turns a tensor into packed buffers and back. Subclass as a frozen dataclass with an ``id`` of its own.

    ``key`` is a signed 64-bit number that names (seed, step, site): all randomness must come from it.
    ``support`` is a bit mask (see ``ops.pack_band``) of the values above zero of a rectified tensor: a codec may
    spend its codes on those alone and return exact zeros elsewhere, or ignore it.

    The contract, which ``check`` in ``tests/codec_contract.py`` tries on any codec:

    - ``encode`` gets a tensor that needs no gradient. It leaves the tensor and torch's random generators as they
      are. The buffers share no memory with the tensor. The same tensor, codec and key give the same bytes.
    - ``packed_nbytes`` is exactly what the buffers take, and the storages behind them hold no more.
    - ``decode`` gives shape and dtype of the tensor, and its strides if the tensor is dense; any other tensor comes
      back contiguous. The values begin at the start of their storage. A second call gives the same values.
    - What ``decode`` gives is fresh: it shares no memory with the buffers, because a reader may write to it. ``Raw``
      alone may decode to a view of its buffer; who wants to write to that makes a copy.
    - ``from_config(codec.to_config())`` is an equal codec, also after JSON.

    >>> import torch
    >>> from dataclasses import dataclass
    >>> from typing import ClassVar
    >>> from lowtide.codecs import Codec, Packed, flatten
    >>> @dataclass(frozen=True)
    ... class Half(Codec):
    ...     '''Keep half precision.'''
    ...     id: ClassVar[str] = "half"
    ...     def encode(self, tensor, *, key, support=None):
    ...         values, meta, _ = flatten(tensor)  # one line, in the order of memory
    ...         return Packed(self, meta, (values.to(torch.float16, copy=True),))
    ...     def decode(self, packed, *, support=None):
    ...         values = packed.buffers[0].to(packed.meta.dtype, copy=True)
    ...         return values.as_strided(packed.meta.shape, packed.meta.stride)
    ...     def packed_nbytes(self, meta):
    ...         return meta.numel * 2
    >>> Half().encode(torch.ones(3), key=0).decode()
    tensor([1., 1., 1.])
    """

    id: ClassVar[str]
    exact: ClassVar[bool] = False
    """Does ``decode`` give back exactly what backward reads of the tensors that this codec is for?"""
    keeps_values: ClassVar[bool] = True
    """Does ``decode`` give back the values of any float tensor, or an approximation of them?

    It is False for a codec that keeps only a part of what the values say (their shape, one bit each), or that stores
    only tensors of a special kind. Such a codec serves the slots that the library chooses it for; it cannot stand for
    saved values in general.
    """
    _definition: ClassVar[int] = 0

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Number the definitions, so that the newest of one name is known."""
        super().__init_subclass__(**kwargs)
        cls._definition = next(_definition_count)

    @abstractmethod
    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        """Pack ``tensor``, which is neither changed nor kept alive."""

    def encode_rectified(self, tensor: Tensor, *, key: int) -> tuple[Packed, Tensor]:
        """Pack a rectified tensor, and give its support too, which a codec may find on the way."""
        support = ops.pack_band(flatten(tensor)[0], 0.0, math.inf, False, True)
        return self.encode(tensor, key=key, support=support), support

    @abstractmethod
    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        """A fresh tensor of the packed values. This may be called any number of times."""

    @abstractmethod
    def packed_nbytes(self, meta: TensorMeta) -> int:
        """The exact bytes that ``encode`` will need, without ``support``, which is stored apart."""

    def to_config(self) -> dict[str, Any]:
        """Plain data that :func:`from_config` turns back into an equal codec."""
        cls = type(self)
        if "id" not in vars(cls):
            raise TypeError(
                f"{cls.__module__}.{cls.__qualname__} has no id of its own, so a config could not name it; "
                "give the class an id that no other codec has"
            )
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return {"id": self.id, **{f.name: getattr(self, f.name) for f in fields}}

    def __str__(self) -> str:
        """The id, and the settings that differ from their defaults."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        given = [f"{f.name}={v}" for f in fields if (v := getattr(self, f.name)) != f.default]
        return f"{self.id}({', '.join(given)})" if given else self.id


def registered() -> dict[str, type[Codec]]:
    """Every codec class with an ``id`` of its own by that id, a user's own included.

    A class that was defined again under the same module and name (a notebook cell that ran twice,
    ``dataclass(slots=True)``, which makes a second class) counts once: the newest definition is the codec.
    """
    found = _definitions()
    if any(len(classes) > 1 for classes in found.values()):
        # A class that nobody uses any more lives until the next collection. It is no rival.
        del found
        gc.collect()
        found = _definitions()
    for name, classes in found.items():
        if len(classes) > 1:
            raise ValueError(f"two codecs share the id {name!r}: {' and '.join(classes)}; give one of them another id")
    return {name: cls for name, classes in found.items() for cls in classes.values()}


def _definitions() -> dict[str, dict[str, type[Codec]]]:
    """For each id the newest class of each full name that has it."""
    classes: list[type[Codec]] = Codec.__subclasses__()
    for cls in classes:
        classes.extend(cls.__subclasses__())  # the loop goes on through these
    found: dict[str, dict[str, type[Codec]]] = {}
    for cls in sorted(classes, key=lambda c: c._definition):
        if "id" in vars(cls):
            found.setdefault(cls.id, {})[f"{cls.__module__}.{cls.__qualname__}"] = cls
    return found


def from_config(config: Mapping[str, Any]) -> Codec:
    """The codec that a config describes.

    >>> from_config({"id": "raw"})
    Raw()
    """
    if not isinstance(config, Mapping):
        raise TypeError(f"the config of a codec must be a mapping, as Codec.to_config() gives it; got {config!r}")
    settings = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k != "id"}
    name, classes = config.get("id"), registered()
    if not isinstance(name, str) or name not in classes:
        raise ValueError(f"unknown codec {name!r} in {dict(config)}; known: {', '.join(sorted(classes))}")
    signature = inspect.signature(classes[name])
    try:
        signature.bind(**settings)
    except TypeError as error:
        allowed = ", ".join(signature.parameters) or "none"
        raise ValueError(
            f"the config {dict(config)} does not fit codec {name!r}, whose settings are: {allowed} ({error})"
        ) from None
    return classes[name](**settings)


def require(value: object, allowed: tuple[object, ...], what: str) -> None:
    """Raise unless ``value`` is one of ``allowed`` and of their type."""
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ValueError(f"{what} must be one of {', '.join(map(str, allowed))}; got {value!r}")


def require_positive(value: int, what: str) -> None:
    """Raise unless ``value`` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{what} must be a whole number of at least 1; got {value!r}")


def require_whole(value: object, what: str) -> None:
    """Raise unless ``value`` is a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{what} must be a whole number; got {value!r}")


def require_float(tensor: Tensor, codec: Codec) -> None:
    """Raise unless ``tensor`` is of a type that lossy codecs store."""
    if tensor.dtype not in FLOATS:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise TypeError(f"{codec.id} stores {allowed}; got {tensor.dtype}. Keep such a tensor with Raw()")
