"""The contract of a codec, as a function that tries any codec, a user's own included.

``check(MyCodec())`` encodes tensors of many forms and raises :class:`Broken` with a line for each promise of
``lowtide.codecs.Codec`` that does not hold, which names the codec, the tensor and the promise.
"""

from __future__ import annotations

import itertools
import json
import math
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lowtide.codecs import FLOATS, Codec, Packed, Raw, ShapeOnly, TensorMeta, flatten, from_config
from lowtide.kernels import reference

KEY, OTHER_KEY = 5, -(2**62) + 11
EDGE_KEYS = (0, -1, 2**63 - 1, -(2**63))

Fill = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""Makes values of a shape that the codec is made for."""


def _last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


# name -> (shape to fill, view of it)
CASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "vector": ((257,), lambda x: x),
    "matrix": ((31, 17), lambda x: x),
    "transposed matrix": ((13, 7), lambda x: x.t()),
    "maps": ((2, 3, 9, 10), lambda x: x),
    "maps channels_last": ((2, 3, 9, 10), _last),
    "maps channels_last of one row": ((2, 3, 1, 10), _last),
    "maps channels_last of one column": ((2, 3, 10, 1), _last),
    "maps channels_last of one channel": ((2, 1, 5, 6), _last),
    "maps of one pixel": ((3, 4, 1, 1), lambda x: x),
    "maps transposed": ((2, 3, 9, 10), lambda x: x.transpose(2, 3)),
    "maps permuted": ((4, 5, 6, 7), lambda x: x.permute(3, 1, 0, 2)),
    "volumes": ((2, 3, 4, 5, 6), lambda x: x),
    "volumes channels_last_3d": ((2, 3, 4, 5, 6), lambda x: x.contiguous(memory_format=torch.channels_last_3d)),
    "empty": ((0,), lambda x: x),
    "empty batch": ((0, 3, 4, 4), lambda x: x),
    "empty inside": ((2, 3, 0, 4), lambda x: x),
    "0-dim": ((), lambda x: x),
    "one": ((1,), lambda x: x),
    "one in four dimensions": ((1, 1, 1, 1), lambda x: x),
    "prime": ((1009,), lambda x: x),
    "prime maps": ((3, 5, 7, 11), lambda x: x),
    "dense with an offset": ((40, 6), lambda x: x[3:30]),
    "slice": ((6, 20), lambda x: x[::2, 1:18:3]),
    "maps slice": ((4, 6, 8, 8), lambda x: x[1:3, ::2, 1:7, ::3]),
    "maps channels_last slice": ((2, 6, 8, 8), lambda x: _last(x)[:, ::2]),
    "expanded": ((1, 5, 7), lambda x: x.expand(4, 5, 7)),
}


class Broken(AssertionError):
    """A codec does not keep its contract."""


def normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values of a standard normal distribution."""
    return torch.randn(shape, generator=generator)


def tensor_of(case: str, dtype: torch.dtype, fill: Fill = normal) -> Tensor:
    """The tensor of a case; what is around a slice holds zeros."""
    shape, view = CASES[case]
    generator, base = torch.Generator().manual_seed(len(case)), torch.zeros(shape, dtype=dtype)
    tensor = view(base)
    if 0 in tensor.stride() and tensor.numel():
        base.copy_(fill(shape, generator))
    else:
        tensor.copy_(fill(tuple(tensor.shape), generator))
    return tensor


def check(
    codec: Codec,
    *,
    dtypes: tuple[torch.dtype, ...] = FLOATS,
    fits: Callable[[Tensor], bool] = lambda tensor: True,
    fill: Fill = normal,
    accurate: Callable[[Tensor, Tensor], bool] | None = None,
    random: bool | None = None,
) -> None:
    """Raise :class:`Broken` if the codec does not keep its contract for tensors of ``dtypes`` that it ``fits``.

    ``accurate`` is asked whether the second tensor may stand for the first; None asks for equality of an ``exact``
    codec that keeps values, and for nothing else. ``random`` says whether the bytes of more than 100
    values depend on the key; None asks for neither.
    """
    broken = list(_of_the_value(codec))
    found = [(c, d) for c, d in itertools.product(CASES, dtypes) if fits(CASES[c][1](torch.empty(CASES[c][0])))]
    large = sorted([(c, d) for c, d in found if math.prod(CASES[c][0]) > 100], key=lambda at: at[0] != "maps")
    parts = [(at, _of_one_encoding(codec, tensor_of(*at, fill), accurate, random)) for at in found]
    parts += [(at, _of_more_encodings(codec, tensor_of(*at, fill))) for at in large[:1]]
    raised: Exception | None = None
    for (case, dtype), lines in parts:
        try:
            broken.extend(f"{case}, {dtype}: {line}" for line in lines)  # keeps the lines before an error
        except Exception as error:  # whatever a codec raises, the report shall name the tensor
            broken.append(f"{case}, {dtype}: it raises {error!r}")
            raised = raised or error
    if not found:
        broken.append("it fits none of the tensors, so nothing was checked")
    if broken:
        raise Broken("\n".join([f"{codec!r} breaks the contract of a codec:", *broken])) from raised


def _of_the_value(codec: Codec) -> Iterator[str]:
    """What holds for a codec as a value."""
    try:
        again = from_config(json.loads(json.dumps(codec.to_config())))
    except (TypeError, ValueError) as error:
        yield f"its config does not survive JSON: {error}"
    else:
        if type(again) is not type(codec) or again != codec:
            yield f"its config makes another codec, {again!r}"
    try:
        hash(codec)
    except TypeError as error:
        yield f"it is not hashable: {error}"


def _of_one_encoding(
    codec: Codec, x: Tensor, accurate: Callable[[Tensor, Tensor], bool] | None, random: bool | None
) -> Iterator[str]:
    """What holds for one packed tensor. The tensor is cleared at the end, to see that nothing depends on it."""
    before, version, state = x.clone(), x._version, torch.get_rng_state()
    packed = codec.encode(x, key=KEY)
    kept = bytes_of(packed)
    if packed.codec is not codec and packed.codec != codec:
        yield f"the packed tensor names another codec, {packed.codec!r}"

    predicted, real = codec.packed_nbytes(TensorMeta.of(x)), sum(map(len, kept))
    if not predicted == packed.nbytes == real:
        yield f"{predicted} bytes are predicted, {packed.nbytes} are reported, the buffers have {real}"
    if (held := sum(b.untyped_storage().nbytes() for b in packed.buffers)) != packed.nbytes:
        yield f"the storages of the buffers hold {held} bytes, {packed.nbytes} are reported"
    storages = {_storage(b) for b in packed.buffers} - {None}
    if _storage(x) in storages:
        yield "a buffer shares memory with the tensor"

    out = packed.decode()
    yield from _of_the_form(codec, x, packed, out)
    if _storage(out) == _storage(x) is not None:
        yield "the decoded tensor shares memory with the tensor"
    shared = _storage(out) in storages
    if shared and type(codec) is not Raw:
        yield "the decoded tensor is not fresh: it shares memory with a buffer"
    if not same_bits(x, before) or x._version != version:
        yield "the tensor was changed"
    if not torch.equal(torch.get_rng_state(), state):
        yield "torch's random generator was used"

    if not isinstance(codec, ShapeOnly):  # whose values mean nothing
        judge = accurate or (same_bits if codec.exact and codec.keeps_values else lambda x, out: True)
        if out.dtype == x.dtype and out.shape == x.shape and not judge(x, out):
            yield "the decoded values are wrong"
        first = out.clone()
        if not shared:
            out.fill_(1)  # a reader may write to it
        if not same_bits(packed.decode(), first):
            yield "a second decode gives other values"
        if bytes_of(packed) != kept:
            yield "the buffers were changed by decode, or by who wrote to what it gave"
        if bytes_of(codec.encode(x, key=KEY)) != kept:
            yield "the same tensor and key give other bytes"
        depends = bytes_of(codec.encode(x, key=OTHER_KEY)) != kept
        # A vector's samples are single values, which are constant groups.
        if random is False and depends:
            yield "the bytes depend on the key"
        if random and not depends and x.numel() > 100 and x.dim() > 1:
            yield "the bytes do not depend on the key"
        x.zero_()
        if not same_bits(packed.decode(), first):
            yield "the decoded values change with the tensor"


def _of_the_form(codec: Codec, x: Tensor, packed: Packed, out: Tensor) -> Iterator[str]:
    if out.dtype != x.dtype:
        yield f"the decoded tensor has {out.dtype}"
    if out.shape != x.shape:
        yield f"the decoded tensor has the shape {tuple(out.shape)}, not {tuple(x.shape)}"
        return
    if TensorMeta.of(out) != packed.meta:
        yield f"the decoded tensor is {TensorMeta.of(out)}, but was packed as {packed.meta}"
    if out.storage_offset() != 0:
        yield f"the decoded tensor begins {out.storage_offset()} values behind the start of its storage"
    # Where a dimension has one value, or the tensor none, strides say nothing. ShapeOnly keeps those of any tensor.
    wanted = x if is_dense(x) or isinstance(codec, ShapeOnly) else x.contiguous()
    got = [(a, b) for a, b, n in zip(out.stride(), wanted.stride(), out.shape, strict=True) if n != 1]
    if x.numel() and any(a != b for a, b in got):
        yield f"the decoded tensor has the strides {out.stride()}, not {wanted.stride()}"


def _of_more_encodings(codec: Codec, x: Tensor) -> Iterator[str]:
    """What is seen as well on one tensor as on all."""
    for key in EDGE_KEYS:
        try:
            shape = codec.encode(x, key=key).decode().shape
        except Exception as error:  # whatever it is, a key of 64 bits must not raise
            yield f"with key {key} it raises {error!r}"
        else:
            if shape != x.shape:
                yield f"with key {key} the shape is {tuple(shape)}"
    if codec.keeps_values:
        rectified = x.relu()
        packed, support = codec.encode_rectified(rectified, key=KEY)
        wanted = reference.pack_band(flatten(rectified)[0], 0.0, math.inf, False, True)
        if not torch.equal(support, wanted):
            yield "the support of a rectified tensor is not that of its positive values"
        if bytes_of(packed) != bytes_of(codec.encode(rectified, key=KEY, support=wanted)):
            yield "a rectified tensor has other bytes than with its support given"
    own = x.clone()
    storage = weakref.ref(own.untyped_storage())
    packed = codec.encode(own, key=KEY)
    del own
    if storage() is not None:
        yield "the tensor is kept alive"


def bytes_of(packed: Packed) -> list[bytes]:
    """The bytes of each buffer."""
    return [b.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for b in packed.buffers]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit but for the payload of NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    nan = a.isnan()
    signs = torch.equal(torch.signbit(a)[~nan], torch.signbit(b)[~nan])
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan], b[~nan]) and signs


def is_dense(tensor: Tensor) -> bool:
    """Do the values fill a stretch of memory without gaps, each once? By looking at every place."""
    at = torch.zeros(tensor.shape, dtype=torch.int64)
    for d, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        at += (torch.arange(size) * stride).view([-1 if k == d else 1 for k in range(tensor.dim())])
    return torch.equal(at.flatten().sort().values, torch.arange(tensor.numel()))


def _storage(tensor: Tensor) -> int | None:
    """Where the memory of a tensor is; None if it has none."""
    return tensor.untyped_storage().data_ptr() or None
