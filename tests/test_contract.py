"""The checker of the contract catches every kind of breach, and passes what is sound.

Each toy codec below breaks one promise; the checker must name it.
"""

from __future__ import annotations

import doctest
import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from codec_contract import Broken, check
from lowtide.codecs import Codec, GroupQuant, Packed, Raw, TensorMeta, flatten


@dataclass(frozen=True)
class Sound(Codec):
    """Keeps a copy."""

    id: ClassVar[str] = "toy_sound"
    exact: ClassVar[bool] = True
    setting: int = 1

    def encode(self, tensor: Tensor, *, key: int, support: Tensor | None = None) -> Packed:
        values, meta, _ = flatten(tensor)
        return Packed(self, meta, (values.clone(),))

    def decode(self, packed: Packed, *, support: Tensor | None = None) -> Tensor:
        return packed.buffers[0].clone().as_strided(packed.meta.shape, packed.meta.stride)

    def packed_nbytes(self, meta: TensorMeta) -> int:
        return meta.nbytes


class Keyed(Sound):
    """Keeps the key too, in the place of its noise."""

    id = "toy_keyed"

    def encode(self, tensor, *, key, support=None):
        packed = super().encode(tensor, key=key)
        return Packed(self, packed.meta, (*packed.buffers, torch.tensor([key])))

    def packed_nbytes(self, meta):
        return meta.nbytes + 8


class Aliasing(Sound):
    id = "toy_aliasing"

    def encode(self, tensor, *, key, support=None):
        values, meta, _ = flatten(tensor)
        return Packed(self, meta, (values,))


class PassingOn(Sound):
    """Packs a copy, and decodes to the tensor itself."""

    id = "toy_passing_on"
    last: ClassVar[list[Tensor]] = []

    def encode(self, tensor, *, key, support=None):
        self.last[:] = [tensor]
        return super().encode(tensor, key=key)

    def decode(self, packed, *, support=None):
        return self.last[0]


class Hoarding(Sound):
    id = "toy_hoarding"
    hoard: ClassVar[list[Tensor]] = []

    def encode(self, tensor, *, key, support=None):
        self.hoard.append(tensor)
        return super().encode(tensor, key=key)


class Lending(Sound):
    id = "toy_lending"

    def decode(self, packed, *, support=None):
        return packed.buffers[0].as_strided(packed.meta.shape, packed.meta.stride)


class ChangingValues(Sound):
    id = "toy_changing_values"

    def encode(self, tensor, *, key, support=None):
        packed = super().encode(tensor, key=key)
        if 0 not in tensor.stride():
            tensor.neg_()
        return packed


class Touching(Sound):
    """Writes to the tensor what it holds already, which autograd counts as a change."""

    id = "toy_touching"

    def encode(self, tensor, *, key, support=None):
        if 0 not in tensor.stride():
            tensor.mul_(1)
        return super().encode(tensor, key=key)


class Miscounting(Sound):
    id = "toy_miscounting"

    def packed_nbytes(self, meta):
        return meta.nbytes + 1


class Oversized(Sound):
    """Keeps a part of a larger storage."""

    id = "toy_oversized"

    def encode(self, tensor, *, key, support=None):
        values, meta, _ = flatten(tensor)
        return Packed(self, meta, (torch.cat([values, values])[: meta.numel],))


class OtherType(Sound):
    id = "toy_other_type"

    def decode(self, packed, *, support=None):
        return super().decode(packed).double()


class OtherShape(Sound):
    id = "toy_other_shape"

    def decode(self, packed, *, support=None):
        return packed.buffers[0].clone()


class OtherStrides(Sound):
    id = "toy_other_strides"

    def decode(self, packed, *, support=None):
        return super().decode(packed).contiguous()


class SparseStrides(Sound):
    """Gives a slice back as a slice."""

    id = "toy_sparse_strides"

    def encode(self, tensor, *, key, support=None):
        return Packed(self, TensorMeta.of(tensor), (tensor.contiguous().view(-1).clone(),))

    def decode(self, packed, *, support=None):
        meta = packed.meta
        out = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)
        return out.copy_(packed.buffers[0].view(meta.shape)) if 0 not in meta.stride else out


class OffsetInStorage(Sound):
    id = "toy_offset_in_storage"

    def decode(self, packed, *, support=None):
        meta, values = packed.meta, packed.buffers[0]
        return torch.cat([values.new_zeros(3), values]).as_strided(meta.shape, meta.stride, 3)


class OtherMeta(Sound):
    """Decodes right, from a description that is wrong."""

    id = "toy_other_meta"

    def encode(self, tensor, *, key, support=None):
        packed = super().encode(tensor, key=key)
        shape, stride, dtype = packed.meta
        return Packed(self, TensorMeta((1, *shape), (1, *stride), dtype), packed.buffers)

    def decode(self, packed, *, support=None):
        return super().decode(packed)[0]


class OtherName(Sound):
    id = "toy_other_name"

    def encode(self, tensor, *, key, support=None):
        packed = super().encode(tensor, key=key)
        return Packed(Sound(), packed.meta, packed.buffers)


class Inexact(Sound):
    """Says that it is exact and rounds."""

    id = "toy_inexact"

    def decode(self, packed, *, support=None):
        return super().decode(packed).to(torch.float8_e5m2).to(packed.meta.dtype)


class Counting(Sound):
    """Its bytes differ from call to call."""

    id = "toy_counting"
    count: ClassVar[itertools.count[int]] = itertools.count()

    def encode(self, tensor, *, key, support=None):
        packed = super().encode(tensor, key=key)
        return Packed(self, packed.meta, (*packed.buffers, torch.tensor([next(self.count)])))

    def packed_nbytes(self, meta):
        return meta.nbytes + 8


class Drawing(Sound):
    """Takes random numbers from torch's generator."""

    id = "toy_drawing"

    def encode(self, tensor, *, key, support=None):
        torch.rand(1)
        return super().encode(tensor, key=key)


class Wearing(Sound):
    """Each decode wears its buffer."""

    id = "toy_wearing"

    def decode(self, packed, *, support=None):
        out = super().decode(packed)
        packed.buffers[0].add_(1)
        return out


class Forgetful(Sound):
    """Its config loses a setting."""

    id = "toy_forgetful"

    def to_config(self):
        return {"id": self.id}


class Unwritable(Sound):
    """Its config is no plain data."""

    id = "toy_unwritable"

    def to_config(self):
        return {"id": self.id, "setting": {1, 2}}


class Nameless(Sound):
    """Has the id of its parent."""


@dataclass(frozen=True)
class Unhashable(Sound):
    id: ClassVar[str] = "toy_unhashable"
    numbers: list[int] = field(default_factory=list, compare=False)
    __hash__ = None  # type: ignore[assignment]


class NarrowKey(Keyed):
    """Leaves no room for the highest bit of the key."""

    id = "toy_narrow_key"

    def encode(self, tensor, *, key, support=None):
        return super().encode(tensor, key=key * 2)


class EmptyAtZero(Sound):
    """Takes key 0 for none."""

    id = "toy_empty_at_zero"

    def encode(self, tensor, *, key, support=None):
        return super().encode(tensor if key else tensor[:0], key=key)


class WrongSupport(Sound):
    id = "toy_wrong_support"

    def encode_rectified(self, tensor, *, key):
        packed, support = super().encode_rectified(tensor, key=key)
        return packed, support.bitwise_not()


class OtherRectified(Keyed):
    id = "toy_other_rectified"

    def encode_rectified(self, tensor, *, key):
        return super().encode_rectified(tensor, key=key + 1)


class Raising(Sound):
    """Stands for a codec that was never tried on a tensor without values."""

    id = "toy_raising"

    def encode(self, tensor, *, key, support=None):
        tensor.max()
        return super().encode(tensor, key=key)


BREACHES = [
    (Raising(), {}, "empty batch, torch.float16: it raises"),
    (Aliasing(), {}, "a buffer shares memory with the tensor"),
    (Aliasing(), {}, "the decoded values change with the tensor"),
    (PassingOn(), {}, "the decoded tensor shares memory with the tensor"),
    (Hoarding(), {}, "the tensor is kept alive"),
    (Lending(), {}, "the decoded tensor is not fresh: it shares memory with a buffer"),
    (ChangingValues(), {}, "the tensor was changed"),
    (Touching(), {}, "the tensor was changed"),
    (Miscounting(), {}, "bytes are predicted"),
    (Oversized(), {}, "the storages of the buffers hold"),
    (OtherType(), {}, "the decoded tensor has torch.float64"),
    (OtherShape(), {}, "the decoded tensor has the shape"),
    (OtherStrides(), {}, "the decoded tensor has the strides"),
    (SparseStrides(), {}, "the decoded tensor has the strides"),
    (OffsetInStorage(), {}, "the decoded tensor begins 3 values behind the start of its storage"),
    (OtherMeta(), {}, "but was packed as"),
    (OtherName(), {}, "the packed tensor names another codec"),
    (Inexact(), {}, "the decoded values are wrong"),
    (Sound(), {"accurate": lambda x, out: x.numel() < 500}, "prime, torch.float32: the decoded values are wrong"),
    (Counting(), {}, "the same tensor and key give other bytes"),
    (Keyed(), {"random": False}, "the bytes depend on the key"),
    (Sound(), {"random": True}, "the bytes do not depend on the key"),
    (Drawing(), {}, "torch's random generator was used"),
    (Wearing(), {}, "a second decode gives other values"),
    (Wearing(), {}, "the buffers were changed by decode"),
    (Forgetful(2), {}, "its config makes another codec"),
    (Unwritable(), {}, "its config does not survive JSON"),
    (Nameless(), {}, "has no id of its own"),
    (Unhashable(), {}, "it is not hashable"),
    (NarrowKey(), {}, "with key 9223372036854775807 it raises"),
    (EmptyAtZero(), {}, "with key 0 the shape is (0, "),
    (WrongSupport(), {}, "the support of a rectified tensor is not that of its positive values"),
    (OtherRectified(), {}, "a rectified tensor has other bytes than with its support given"),
    (Sound(), {"fits": lambda tensor: False}, "it fits none of the tensors"),
]


@pytest.mark.parametrize(
    ("codec", "options", "message"),
    BREACHES,
    ids=lambda part: ", ".join(part) if isinstance(part, dict) else str(part)[:60],
)
def test_the_checker_names_what_is_broken(codec, options, message):
    with pytest.raises(Broken) as error:
        check(codec, **options)
    text = str(error.value)
    assert repr(codec) in text
    assert message in text


@pytest.mark.parametrize(
    ("codec", "options"),
    [(Sound(3), {"random": False}), (Keyed(), {"random": True}), (Raw(), {}), (GroupQuant(3), {"random": True})],
    ids=str,
)
def test_the_checker_passes_what_is_sound(codec, options):
    check(codec, **options)


def test_the_example_in_the_docs_keeps_the_contract():
    """What a user reads first is sound for every type and stride: half precision is no alias there."""
    *definition, _ = doctest.DocTestParser().get_examples(Codec.__doc__ or "")
    names: dict[str, object] = {"__name__": "example"}
    for part in definition:
        exec(compile(part.source, "<example>", "exec", dont_inherit=True), names)
    codec = names["Half"]()  # type: ignore[operator]
    half_unit = torch.finfo(torch.float16).eps / 2

    def accurate(x: Tensor, out: Tensor) -> bool:
        """Within half a unit of fp16, or of its smallest step; and no less exact for bfloat16, which is coarser."""
        wide = x.double()
        return bool(((out.double() - wide).abs() <= wide.abs() * half_unit + 2.0**-25).all())

    check(codec, accurate=accurate, random=False)


def test_an_error_does_not_hide_what_was_found_before():
    class Worse(Oversized):
        id = "toy_worse"

        def decode(self, packed, *, support=None):
            raise RuntimeError("no way back")

    with pytest.raises(Broken) as error:
        check(Worse())
    assert "matrix, torch.float32: the storages of the buffers hold" in str(error.value)
    assert "matrix, torch.float32: it raises RuntimeError('no way back')" in str(error.value)


def test_raw_lends_its_copy():
    """The one exception of the contract: a view of the buffer, never of the tensor."""
    x = torch.randn(3, 4)
    packed = Raw().encode(x, key=0)
    assert packed.decode().data_ptr() == packed.buffers[0].data_ptr() != x.data_ptr()
