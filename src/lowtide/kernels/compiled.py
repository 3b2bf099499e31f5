"""Every kernel again, written for Numba: the bytes of ``reference``, at the speed of memory.

``layout`` declares what a kernel is given, ``native`` asks for the machine code of what is here, and ``cpu`` launches
it. Only a process that finds no machine code in a cache imports this module, and with it Numba.

How it is built
    A kernel is a C function ``(parameters, scratch, first, last)``: the address of its record of parameters,
    private memory, and the range of items to work on. One signature for all kernels means one way to launch
    them, whatever the dtype, and no cost per argument.
    16-bit floats are widened into scratch that stays in L1, so the arithmetic is compiled once, for float32.
    No fast-math flag anywhere: minima and maxima run on integers ordered like the floats they stand for, so
    loops vectorize, NaN shows up as an extreme, and nothing depends on what a compiler assumes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from . import layout
from .layout import (
    BATCH,
    BFLOAT16,
    BOOL,
    E4M3,
    E5M2,
    FLOAT16,
    FLOAT32,
    GROUPS,
    NORM_CHANNELS,
    SLABS,
    TILE,
    TILE_CHANNELS,
    TWISTER,
    Coding,
    Slabs,
)

# Some versions of Numba are typed and some are not; and no types describe code that Numba compiles.
numba: Any = import_module("numba")
types: Any = numba.types
cgutils: Any = import_module("numba.core.cgutils")
ir: Any = import_module("llvmlite.ir")
compiler: Any = import_module("numba.core.compiler")
dispatcher: Any = import_module("numba.core.dispatcher")
registry: Any = import_module("numba.core.registry")
locks: Any = import_module("numba.core.compiler_lock")

for _function in layout.SHARED:
    numba.extending.register_jitable(_function)

F = TypeVar("F", bound=Callable[..., Any])

USUAL = 256  # values of a group for which loops of known length are compiled

U8, U16, U32, I32, U64, F32 = np.uint8, np.uint16, np.uint32, np.int32, np.uint64, np.float32
_GOLDEN, _DITHER = np.uint32(0x9E3779B9), np.uint32(0x5BD1E995)
_MIX1, _MIX2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_S16, _S15 = np.uint32(16), np.uint32(15)
_ZERO, _ONE, _ULP = np.float32(0.0), np.float32(1.0), np.float32(2.0**-24)
_NAN, _MINUS_INF = np.float32(np.nan), np.float32(-np.inf)
_SMALLEST_STEP = np.float32(2.0**-126)
_EACH_BYTE = 0x0101010101010101  # times a byte: eight of them
_SPREAD_BITS = np.uint64(0x0102040810204080)  # times eight bytes of 0 or 1: their bits, in the top byte


def _inline(function: F) -> F:
    return cast(F, numba.njit(error_model="numpy", forceinline=True)(function))


def _plain(function: F) -> F:
    return cast(F, numba.njit(error_model="numpy")(function))


def _intrinsic(function: Callable[..., Any]) -> Any:
    return numba.extending.intrinsic(prefer_literal=True)(function)


@_intrinsic
def _pointer(typing: Any, address: Any, dtype: Any) -> Any:
    """An address as a typed pointer: indexing it is one load or store, without Python's negative indices."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), generate


@_intrinsic
def _read(typing: Any, address: Any, record: Any) -> Any:
    """The record of ``layout`` at an address."""
    fields = record.instance_class._fields

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        words = builder.inttoptr(arguments[0], word.as_pointer())
        values = [builder.load(builder.gep(words, [ir.Constant(word, i)])) for i in range(len(fields))]
        return context.make_tuple(builder, signature.return_type, values)

    return types.NamedUniTuple(types.int64, len(fields), record.instance_class)(types.int64, record), generate


@_intrinsic
def _write(typing: Any, address: Any, record: Any) -> Any:
    """Puts a record at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, record = arguments
        word = ir.IntType(64)
        words = builder.inttoptr(address, word.as_pointer())
        for i in range(signature.args[1].count):
            builder.store(builder.extract_value(record, i), builder.gep(words, [ir.Constant(word, i)]))
        return context.get_dummy_value()

    return types.void(types.int64, record), generate


@_intrinsic
def _bits(typing: Any, value: Any, dtype: Any) -> Any:
    """The same 32 bits as another type."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return dtype.dtype(value, dtype), generate


@_intrinsic
def _load64(typing: Any, address: Any) -> Any:
    """Eight bytes from any address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=1)

    return types.uint64(types.int64), generate


@_intrinsic
def _store64(typing: Any, address: Any, word: Any) -> Any:
    """Eight bytes to any address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[1], builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.uint64), generate


@_intrinsic
def _prefetch(typing: Any, address: Any) -> Any:
    """Asks for the cache line at an address, which need not be a valid one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        options = [ir.Constant(word, option) for option in (0, 2, 1)]
        builder.call(function, [builder.inttoptr(arguments[0], byte), *options])
        return context.get_dummy_value()

    return types.void(types.int64), generate


# ---------------------------------------------------------------- bits


@_inline
def _mix(x: Any) -> Any:
    x = U32((x ^ (x >> _S16)) * _MIX1)
    x = U32((x ^ (x >> _S15)) * _MIX2)
    return U32(x ^ (x >> _S16))


@_inline
def _order(x: Any) -> Any:
    """An integer that sorts as the float does; NaN lies beyond the infinities, -0.0 just below 0.0."""
    b = _bits(x, I32)
    return I32(b ^ I32(I32(b >> 31) & 0x7FFFFFFF))


@_inline
def _value(order: Any) -> Any:
    return _bits(I32(order ^ I32(I32(order >> 31) & 0x7FFFFFFF)), F32)


@_inline
def _float(b: Any) -> Any:
    return _bits(U32(b), F32)


@_inline
def _widen(b: Any, kind: int) -> Any:
    if kind == BFLOAT16:
        return _float(U32(b) << _S16)
    b = U32(b)
    sign = U32((b & 0x8000) << 16)
    rest = U32(b & 0x7FFF)
    scale = 0x70000000 if rest >= 0x7C00 else 0x38000000
    small = _bits(F32(I32(rest)) * _ULP, U32)
    return _float((small if rest < 0x400 else U32((rest << 13) + scale)) | sign)


@_inline
def _narrow(x: Any, kind: int) -> Any:
    """The 16 bits of the nearest value, ties to even, with the NaNs torch writes on x86.

    A finite value beyond float16 becomes its largest: the step, rounded up, may decode 65504 to more.
    """
    b = _bits(x, U32)
    if kind == BFLOAT16:
        nearest = U32((b + 0x7FFF + ((b >> 16) & 1)) >> 16)
        return U16(0xFFFF if (b & 0x7FFFFFFF) > 0x7F800000 else nearest)
    rest = U32(b & 0x7FFFFFFF)
    normal = U32((rest - 0x38000000 + 0xFFF + ((rest >> 13) & 1)) >> 13)
    small = U32(_bits(_float(rest) + F32(0.5), U32) - 0x3F000000)  # the sum rounds at 2**-24
    huge = U32(0x7E00 | ((rest >> 13) & 0x3FF)) if rest > 0x7F800000 else U32(0x7C00)
    near = small if rest < 0x38800000 else min(normal, U32(0x7BFF))
    near = U32(0x7BFF) if rest >= 0x47800000 else near
    return U16((huge if rest >= 0x7F800000 else near) | U32((b >> 16) & 0x8000))


@_plain
def _widen_run(source: int, target: int, n: int, kind: int) -> None:
    s, t = _pointer(source, types.uint16), _pointer(target, types.float32)
    if kind == BFLOAT16:
        for i in range(n):
            t[i] = _widen(s[i], BFLOAT16)
    else:
        for i in range(n):
            t[i] = _widen(s[i], FLOAT16)


@_plain
def _round_run(values: int, n: int, kind: int) -> None:
    """Values become the nearest of a 16-bit type."""
    v = _pointer(values, types.float32)
    if kind == BFLOAT16:
        for i in range(n):
            v[i] = _widen(_narrow(v[i], BFLOAT16), BFLOAT16)
    else:
        for i in range(n):
            v[i] = _widen(_narrow(v[i], FLOAT16), FLOAT16)


@_plain
def _narrow_run(source: int, target: int, n: int, kind: int) -> None:
    s, t = _pointer(source, types.float32), _pointer(target, types.uint16)
    if kind == BFLOAT16:
        for i in range(n):
            t[i] = _narrow(s[i], BFLOAT16)
    elif kind == FLOAT16:
        for i in range(n):
            t[i] = _narrow(s[i], FLOAT16)
    else:
        f = _pointer(target, types.float32)
        for i in range(n):
            f[i] = s[i]


# ---------------------------------------------------------------- one group


@_inline
def _extremes(values: int, n: int) -> tuple[Any, Any]:
    """The largest bits as integers without and with a sign."""
    v = _pointer(values, types.int32)
    low, high = U32(0), I32(-0x80000000)
    for i in range(n):
        low, high = max(low, U32(v[i])), max(high, v[i])
    return low, high


@_plain
def _range(values: int, n: int) -> tuple[Any, Any]:
    """The smallest and the largest value of a group, as ordered integers.

    Where both signs occur they have the largest bits, compared without and with a sign; only a group of one sign
    needs its bits put in order.
    """
    low, high = _extremes(values, USUAL) if n == USUAL else _extremes(values, n)
    if high >= 0 and low >= 0x80000000:
        return _order(_float(low)), high
    v = _pointer(values, types.float32)
    first, last = I32(0x7FFFFFFF), I32(-0x80000000)
    for i in range(n):
        o = _order(v[i])
        first, last = min(first, o), max(last, o)
    return first, last


@_plain
def _positive_range(values: int, source: int, n: int) -> tuple[Any, Any]:
    """The same of the values whose ``source`` is above zero, or NaN."""
    b, v, s = _pointer(values, types.int32), _pointer(values, types.float32), _pointer(source, types.float32)
    low, high = U32(0), I32(-0x80000000)
    for i in range(n):
        out = s[i] <= _ZERO
        low, high = max(low, U32(0) if out else U32(b[i])), max(high, I32(-0x80000000) if out else b[i])
    if high >= 0 and low >= 0x80000000:
        return _order(_float(low)), high
    first, last = I32(0x7FFFFFFF), I32(-0x80000000)
    for i in range(n):
        o = _order(v[i])
        out = s[i] <= _ZERO
        first = min(first, I32(0x7FFFFFFF) if out else o)
        last = max(last, I32(-0x80000000) if out else o)
    return first, last


@_intrinsic
def _above_zero(typing: Any, address: Any, lanes: Any) -> Any:
    """A bit for each of ``lanes`` values, the first lowest: is it above zero, or NaN?"""
    count = lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), count)
        values = builder.load(builder.inttoptr(arguments[0], vector.as_pointer()), align=4)
        bits = builder.fcmp_unordered(">", values, ir.Constant(vector, [0.0] * count))
        return builder.bitcast(bits, ir.IntType(count))

    return {8: types.uint8, 16: types.uint16}[count](types.int64, lanes), generate


@_inline
def _mark(source: int, n: int, mask: int) -> None:
    """The bits of ``n`` values, a multiple of eight."""
    m, w = _pointer(mask, types.uint8), _pointer(mask, types.uint16)
    for i in range(n >> 4):
        w[i] = _above_zero(source + 64 * i, 16)
    if n & 8:
        m[n >> 3 & ~1] = _above_zero(source + 4 * (n & ~15), 8)


@_inline
def _size(n: int, bits: int) -> int:
    """Bytes of the codes of a group: a plane for each power of two in ``bits``."""
    return (
        (n if bits & 8 else 0) + ((n * (bits & 4) + 7) >> 3) + ((n * (bits & 2) + 7) >> 3) + ((n * (bits & 1) + 7) >> 3)
    )


@_inline
def _group_hash(g: int, key: tuple[int, int]) -> Any:
    return _mix(U32(_mix(U32(g + key[0])) ^ U32(key[1])))


@_inline
def _base(h: Any, bits: int) -> Any:
    """What the thresholds of a group have in common: their exponent, and the bits below the byte of each."""
    return U32(((127 + bits) << 23) | (U32(_mix(U32(h ^ _DITHER)) >> _S16) >> U32(bits + 1)))


@_inline
def _threshold(word: Any, base: Any, bits: int) -> Any:
    """``2**bits + u``, with the lowest byte of a hash."""
    return _float((U32(word << U32(15 - bits)) & U32(0xFF << (15 - bits))) | base)


# ---------------------------------------------------------------- sixteen values in each of four lanes, by hand

# A compiler finds these vectors only where lanes have a known length, and takes long. A hash serves a value of each
# lane. Planes are *even* if each lane has its own bytes or bits of them: then codes need not be spread to bytes first.
# *Mixed* ones are even but for that of single bits, and with *loose* ones all codes are spread.

LOOSE, MIXED, EVEN = 0, 1, 2

_SIXTEEN = 16  # values of a vector; a compiler may divide it
_WORD, _LONG, _FLOAT = ir.IntType(32), ir.IntType(64), ir.FloatType()
_WORDS, _FLOATS = ir.VectorType(_WORD, _SIXTEEN), ir.VectorType(_FLOAT, _SIXTEEN)
_SHORTS = ir.VectorType(ir.IntType(16), _SIXTEEN)
_BYTES = ir.VectorType(ir.IntType(8), _SIXTEEN)


def _all(value: int) -> Any:
    return ir.Constant(_WORDS, [value & 0xFFFFFFFF] * _SIXTEEN)


def _same(builder: Any, value: Any) -> Any:
    """Code for a vector with one value throughout."""
    nothing = ir.Constant(ir.VectorType(value.type, _SIXTEEN), ir.Undefined)
    first = builder.insert_element(nothing, value, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(first, nothing, _all(0))


def _times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(_LONG, factor))


def _load(builder: Any, kind: Any, *address: Any) -> Any:
    where = builder.inttoptr(reduce(builder.add, address), kind.as_pointer())
    return builder.load(where, align=4 if kind is _FLOATS else 1)


def _store(builder: Any, value: Any, *address: Any) -> None:
    where = builder.inttoptr(reduce(builder.add, address), value.type.as_pointer())
    builder.store(value, where, align=4 if value.type is _FLOATS else 1)


def _bits_from(builder: Any, words: Any, first: int, width: int, to: int) -> Any:
    """Code for ``width`` bits of each word from bit ``first`` on, put from bit ``to`` on."""
    if first:
        words = builder.lshr(words, _all(first))
    return builder.shl(builder.and_(words, _all((1 << width) - 1)), _all(to))


def _words(numbers: Iterable[int]) -> Any:
    return ir.Constant(_WORDS, [number & 0xFFFFFFFF for number in numbers])


def _mixed(builder: Any, h: Any, places: Iterable[int]) -> Any:
    """Code for the hashes of sixteen places."""
    x = builder.add(_same(builder, h), _words(place * int(_GOLDEN) for place in places))
    x = builder.mul(builder.xor(x, builder.lshr(x, _all(16))), _all(int(_MIX1)))
    x = builder.mul(builder.xor(x, builder.lshr(x, _all(15))), _all(int(_MIX2)))
    return builder.xor(x, builder.lshr(x, _all(16)))


def _thresholds_of(builder: Any, h: Any, base: Any, bits: int) -> list[Any]:
    """Code for the thresholds of each lane, from sixteen hashes: see ``_threshold``."""
    x, base = _mixed(builder, h, range(_SIXTEEN)), _same(builder, base)
    found = [builder.or_(_bits_from(builder, x, 8 * k, 8, 15 - bits), base) for k in range(4)]
    return [builder.bitcast(words, _FLOATS) for words in found]


def _codes_of(builder: Any, bits: int, values: Any, lane: Any, h: Any, base: Any, low: Any, inverse: Any) -> list[Any]:
    """Code for the codes of sixteen values in each lane."""
    low, inverse, found = _same(builder, low), _same(builder, inverse), []
    for k, threshold in enumerate(_thresholds_of(builder, h, base, bits)):
        x = _load(builder, _FLOATS, values, _times(builder, lane, 4 * k))
        total = builder.fadd(threshold, builder.fmul(builder.fsub(x, low), inverse))
        found.append(_bits_from(builder, builder.bitcast(total, _WORDS), 23 - bits, bits, 0))
    return found


_FILL = (*[types.int64] * 3, types.uint32, types.uint32, types.float32, types.float32)


@_intrinsic
def _fill_loose(
    typing: Any, values: Any, codes: Any, lane: Any, h: Any, base: Any, low: Any, inverse: Any, bits: Any
) -> Any:
    """The codes of sixteen values in each lane, a byte each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, codes, lane, *rest, _ = arguments
        for k, code in enumerate(_codes_of(builder, bits.literal_value, values, lane, *rest)):
            _store(builder, builder.trunc(code, _BYTES), codes, _times(builder, lane, k))
        return context.get_dummy_value()

    return types.void(*_FILL, bits), generate


@_intrinsic
def _fill_even(
    typing: Any, values: Any, codes: Any, lane: Any, h: Any, base: Any, low: Any, inverse: Any, bits: Any
) -> Any:
    """The same into even planes. Single bits share bytes with those half a lane on, so these are done too."""
    width = bits.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, codes, lane, h, *rest, _ = arguments
        places, found = [ir.Constant(_LONG, 0)], []
        if width & 1:
            places.append(builder.lshr(lane, ir.Constant(_LONG, 1)))
        for place in places:
            later = builder.add(h, builder.mul(builder.trunc(place, _WORD), ir.Constant(_WORD, int(_GOLDEN))))
            where = builder.add(values, _times(builder, place, 4))
            found.append(_codes_of(builder, width, where, lane, later, *rest))

        for place, four in zip(places, found, strict=True):
            _store_planes(builder, four, width, builder.add(codes, place), lane)
        if width & 1:
            parts = [_bits_from(builder, found[i][k], width & 6, 1, 2 * k + i) for k in range(4) for i in range(2)]
            _store_bytes(builder, parts, codes, _times(builder, lane, (width & 6) // 2))
        return context.get_dummy_value()

    return types.void(*_FILL, bits), generate


@_intrinsic
def _fill_mixed(
    typing: Any, values: Any, codes: Any, lane: Any, h: Any, base: Any, low: Any, inverse: Any, spare: Any, bits: Any
) -> Any:
    """The same into planes that are even but for that of single bits, whose bits go to ``spare``, a byte each."""
    width = bits.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, codes, lane, *rest, spare, _ = arguments
        four = _codes_of(builder, width, values, lane, *rest)
        _store_planes(builder, four, width, codes, lane)
        for k in range(4):
            _store_bytes(builder, [_bits_from(builder, four[k], width & 6, 1, 0)], spare, _times(builder, lane, k))
        return context.get_dummy_value()

    return types.void(*_FILL, types.int64, bits), generate


def _store_bytes(builder: Any, parts: list[Any], *address: Any) -> None:
    _store(builder, builder.trunc(reduce(builder.or_, parts), _BYTES), *address)


def _store_planes(builder: Any, four: list[Any], width: int, codes: Any, lane: Any) -> None:
    """Code that puts the codes of sixteen values in each lane into even planes, but for single bits."""
    if width == 8:
        for k in range(4):
            _store_bytes(builder, [four[k]], codes, _times(builder, lane, k))
    if width & 4:
        for k in range(2):
            parts = [_bits_from(builder, four[k + 2 * i], 0, 4, 4 * i) for i in range(2)]
            _store_bytes(builder, parts, codes, _times(builder, lane, k))
    if width & 2:
        parts = [_bits_from(builder, four[k], width & 4, 2, 2 * k) for k in range(4)]
        _store_bytes(builder, parts, codes, _times(builder, lane, (width & 4) // 2))


@_intrinsic
def _pack_sixteen(typing: Any, bits: Any, size: Any, out: Any) -> Any:
    """Sixteen bytes of a plane of single bits, which has ``size`` bytes, from bits of a byte each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bits, size, out = arguments
        found = [_load(builder, _BYTES, bits, _times(builder, size, k)) for k in range(8)]
        parts = [builder.shl(byte, ir.Constant(_BYTES, [k] * _SIXTEEN)) for k, byte in enumerate(found)]
        _store(builder, reduce(builder.or_, parts), out)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@_intrinsic
def _unpack_sixteen(typing: Any, packed: Any, size: Any, out: Any) -> Any:
    """The other way round."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        packed, size, out = arguments
        byte = _load(builder, _BYTES, packed)
        for k in range(8):
            bit = builder.lshr(byte, ir.Constant(_BYTES, [k] * _SIXTEEN))
            _store(builder, builder.and_(bit, ir.Constant(_BYTES, [1] * _SIXTEEN)), out, _times(builder, size, k))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


def _wide(builder: Any, *address: Any) -> Any:
    return builder.zext(_load(builder, _BYTES, *address), _WORDS)


def _even_codes(builder: Any, codes: Any, lane: Any, late: Any, bits: int) -> list[Any]:
    """Code that reads the codes of each lane from even planes; ``late`` is 1 in the second half of a lane, else 0."""
    if bits == 8:
        return [_wide(builder, codes, _times(builder, lane, k)) for k in range(4)]
    parts: list[list[Any]] = [[], [], [], []]
    if bits & 4:
        for k in range(2):
            plane = _wide(builder, codes, _times(builder, lane, k))
            for i in range(2):
                parts[k + 2 * i].append(_bits_from(builder, plane, 4 * i, 4, 0))
    if bits & 2:
        plane = _wide(builder, codes, _times(builder, lane, (bits & 4) // 2))
        for k in range(4):
            parts[k].append(_bits_from(builder, plane, 2 * k, 2, bits & 4))
    if bits & 1:
        back = builder.mul(late, builder.lshr(lane, ir.Constant(_LONG, 1)))
        plane = _wide(builder, builder.sub(codes, back), _times(builder, lane, (bits & 6) // 2))
        plane = builder.lshr(plane, _same(builder, builder.trunc(late, _WORD)))
        for k in range(4):
            parts[k].append(_bits_from(builder, plane, 2 * k, 1, bits & 6))
    return [reduce(builder.or_, part, _all(0)) for part in parts]


def _store_levels(builder: Any, steps: Any, low: Any, step: Any, *address: Any) -> None:
    """Code that decodes: see ``reference``."""
    levels = builder.fmul(steps, _same(builder, step))
    _store(builder, builder.fadd(levels, _same(builder, low)), *address)


@_intrinsic
def _decode_even(typing: Any, codes: Any, values: Any, lane: Any, late: Any, low: Any, step: Any, bits: Any) -> Any:
    """Sixteen values of each lane, from even planes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        codes, values, lane, late, low, step, _ = arguments
        for k, code in enumerate(_even_codes(builder, codes, lane, late, bits.literal_value)):
            _store_levels(builder, builder.sitofp(code, _FLOATS), low, step, values, _times(builder, lane, 4 * k))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, types.float32, types.float32, bits), generate


@_intrinsic
def _decode_loose(typing: Any, codes: Any, values: Any, low: Any, step: Any) -> Any:
    """Sixteen values, from codes of a byte each."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        codes, values, low, step = arguments
        _store_levels(builder, builder.sitofp(_wide(builder, codes), _FLOATS), low, step, values)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.float32, types.float32), generate


@_intrinsic
def _undither(
    typing: Any,
    codes: Any,
    values: Any,
    lane: Any,
    late: Any,
    h: Any,
    base: Any,
    low: Any,
    step: Any,
    planes: Any,
    bits: Any,
) -> Any:
    """Sixteen values of each lane less their thresholds, from even planes or from codes of a byte each.

    Of mixed planes ``late`` is the address of the single bits, a byte each.
    """
    width, kind = bits.literal_value, planes.literal_value
    even = {EVEN: width, MIXED: width & 6, LOOSE: 8}[kind]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        codes, values, lane, late, h, base, low, step, _, _ = arguments
        half = ir.Constant(_FLOATS, [2**width + 0.5] * _SIXTEEN)
        thresholds = _thresholds_of(builder, h, base, width)
        for k, code in enumerate(_even_codes(builder, codes, lane, late, even)):
            if kind == MIXED:
                bit = _wide(builder, late, _times(builder, lane, k))
                code = builder.or_(code, builder.shl(bit, _all(even)))
            steps = builder.fsub(builder.fadd(builder.sitofp(code, _FLOATS), half), thresholds[k])
            _store_levels(builder, steps, low, step, values, _times(builder, lane, 4 * k))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, *_FILL[3:], planes, bits), generate


# A group of sixteen values, such as the last of a map of 28 x 28, fills one vector with all its lanes of four values.


def _short_thresholds(builder: Any, h: Any, base: Any, bits: int) -> Any:
    """Code for the thresholds of a group of sixteen: each hash serves one value of each lane."""
    x = _mixed(builder, h, (e % 4 for e in range(_SIXTEEN)))
    x = builder.lshr(x, _words(8 * (e // 4) for e in range(_SIXTEEN)))
    return builder.bitcast(builder.or_(_bits_from(builder, x, 0, 8, 15 - bits), _same(builder, base)), _FLOATS)


def _short_planes(bits: int) -> Iterator[tuple[int, int, int, Any, Any]]:
    """Of each plane of a group of sixteen: width, lowest bit, first byte, the byte of each code, its place there."""
    low = first = 0
    for width in (8, 4, 2, 1):
        if bits & width:
            size = 2 * width
            yield width, low, first, [e % size for e in range(_SIXTEEN)], [e // size * width for e in range(_SIXTEEN)]
            low, first = low + width, first + size


@_intrinsic
def _fill_short(typing: Any, values: Any, codes: Any, h: Any, base: Any, low: Any, inverse: Any, bits: Any) -> Any:
    """The codes of a group of sixteen values, into their planes."""
    width = bits.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, codes, h, base, low, inverse, _ = arguments
        x, threshold = _load(builder, _FLOATS, values), _short_thresholds(builder, h, base, width)
        away = builder.fsub(x, _same(builder, low))
        total = builder.fadd(threshold, builder.fmul(away, _same(builder, inverse)))
        found = _bits_from(builder, builder.bitcast(total, _WORDS), 23 - width, width, 0)
        for own, lowest, first, places, shifts in _short_planes(width):
            part, count = builder.shl(_bits_from(builder, found, lowest, own, 0), _words(shifts)), _SIXTEEN
            while count > max(places) + 1:
                count //= 2
                halves = [ir.Constant(ir.VectorType(_WORD, count), list(range(k, k + count))) for k in (0, count)]
                part = builder.or_(*[builder.shuffle_vector(part, part, half) for half in halves])
            plane = builder.trunc(part, ir.VectorType(ir.IntType(8), count))
            _store(builder, plane, codes, ir.Constant(_LONG, first))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, *_FILL[3:], bits), generate


@_intrinsic
def _undither_short(typing: Any, codes: Any, values: Any, h: Any, base: Any, low: Any, step: Any, bits: Any) -> Any:
    """A group of sixteen values less their thresholds, from its planes."""
    width = bits.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        codes, values, h, base, low, step, _ = arguments
        found = _all(0)
        for own, lowest, first, places, shifts in _short_planes(width):
            plane = _load(builder, ir.VectorType(ir.IntType(8), 2 * own), codes, ir.Constant(_LONG, first))
            spread = builder.zext(builder.shuffle_vector(plane, plane, ir.Constant(_WORDS, places)), _WORDS)
            part = _bits_from(builder, builder.lshr(spread, _words(shifts)), 0, own, lowest)
            found = builder.or_(found, part)
        half = ir.Constant(_FLOATS, [2**width + 0.5] * _SIXTEEN)
        steps = builder.fadd(builder.sitofp(found, _FLOATS), half)
        steps = builder.fsub(steps, _short_thresholds(builder, h, base, width))
        _store_levels(builder, steps, low, step, values)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, *_FILL[3:], bits), generate


# ---------------------------------------------------------------- codes of one group


@_inline
def _part(s: Any, level: Any, inverse: Any) -> Any:
    """How much of the interval above ``level`` lies below ``s``, from 0 to 1."""
    part = (s - level) * inverse
    part = part if part > _ZERO else _ZERO
    return part if part < _ONE else _ONE


@_plain
def _fit(groups: int, bits: int, ends: int, side: int) -> None:
    """The side words of groups whose ends are known, smallest values first, then largest.

    In their place come the inverses of the steps, 0.0 for a group without codes, then what such a group keeps in its
    first code, or else the distance from ``low`` to the largest. One loop over all: alone, the divisions of a group
    would take as long as its values.
    """
    first, last = _pointer(ends, types.int32), _pointer(ends + 4 * groups, types.int32)
    inverses, rest = _pointer(ends, types.float32), _pointer(ends + 4 * groups, types.uint32)
    words, top = _pointer(side, types.uint32), F32((1 << bits) - 1)
    for g in range(groups):
        none = first[g] > last[g]
        smallest, largest = I32(0) if none else first[g], I32(0) if none else last[g]
        finite = (largest < 0x7F800000) & (smallest >= -0x7F800000)
        low, high = _value(smallest) + _ZERO, _value(largest) + _ZERO
        exact = _bits(low, U32)
        away = (exact >> U32(31)) & U32((exact & 0xFFFF) != 0)
        low_word = U32((exact >> _S16) + away)
        extent = high - _float(U32(low_word << _S16))
        step = extent / top
        step_bits = _bits(step if step > _SMALLEST_STEP else _SMALLEST_STEP, U32)
        step_word = U32((step_bits >> _S16) + U32((step_bits & 0xFFFF) != 0))
        constant = finite & (low == high)
        coded = finite & (low != high) & ((low_word & 0x7F80) != 0x7F80) & (step_word < 0x7F80)
        lower = U32(exact >> _S16) if constant else U32(0x7FC0)
        upper = U32(0x8000 | ((exact & 0xFFFF) >> U32(1))) if constant else U32(0)
        lower, upper = low_word if coded else lower, step_word if coded else upper
        words[g] = U32((upper << _S16) | lower)
        inverses[g] = _ONE / _float(U32(step_word << _S16)) if coded else _ZERO
        rest[g] = _bits(extent, U32) if coded else (U32(exact & 1) if constant else U32(0))


@_inline
def _pack_plane(codes: int, n: int, width: int, low: int, out: int) -> int:
    """``width`` bits of each code from bit ``low`` on; the address behind them.

    Eight bytes at once, the last eight perhaps once more. Codes behind the ``n`` must be 0 up to the next eight.
    """
    size, mask = (n * width + 7) >> 3, (1 << width) - 1
    c, p = _pointer(codes, types.uint8), _pointer(out, types.uint8)
    if size < 8:
        for j in range(size):
            byte = U32(0)
            for k in range(8 // width):
                byte |= ((U32(c[k * size + j]) >> U32(low)) & mask) << (k * width)
            p[j] = U8(byte)
        return out + size
    for first in range(0, size, 8):
        at, word = min(first, size - 8), U64(0)
        for k in range(8 // width):
            word |= ((_load64(codes + k * size + at) >> U64(low)) & U64(mask * _EACH_BYTE)) << U64(k * width)
        _store64(out + at, word)
    return out + size


@_plain
def _pack(codes: int, n: int, bits: int, out: int) -> None:
    """Codes of fewer than 8 bits, a byte each, into planes: the widest first, with the lowest bits."""
    if bits & 4:
        out = _pack_plane(codes, n, 4, 0, out)
    if bits & 2:
        out = _pack_plane(codes, n, 2, bits & 4, out)
    if bits & 1:
        _pack_plane(codes, n, 1, bits & 6, out)


@_inline
def _unpack_plane(packed: int, n: int, width: int, low: int, codes: int) -> int:
    """Adds ``width`` bits from bit ``low`` on to the codes, and to up to seven more; the address behind the plane."""
    size, mask = (n * width + 7) >> 3, (1 << width) - 1
    c, p = _pointer(codes, types.uint8), _pointer(packed, types.uint8)
    if size < 8:
        for j in range(size):
            for k in range(8 // width):
                part = ((U32(p[j]) >> (k * width)) & mask) << low
                c[k * size + j] = U8(part | (c[k * size + j] if low else 0))
        return packed + size
    for first in range(0, size, 8):
        at = min(first, size - 8)
        word = _load64(packed + at)
        for k in range(8 // width):
            to = codes + k * size + at
            part = ((word >> U64(k * width)) & U64(mask * _EACH_BYTE)) << U64(low)
            _store64(to, part | (_load64(to) if low else U64(0)))
    return packed + size


@_plain
def _unpack(packed: int, n: int, bits: int, codes: int) -> None:
    """Codes of fewer than 8 bits, a byte each."""
    if bits & 4:
        packed = _unpack_plane(packed, n, 4, 0, codes)
    if bits & 2:
        packed = _unpack_plane(packed, n, 2, bits & 4, codes)
    if bits & 1:
        _unpack_plane(packed, n, 1, bits & 6, codes)


@_plain
def _warp(values: int, n: int, top: int, table: int, low: Any, inverse: Any, out: int) -> None:
    """Where values lie among levels of their own, as a number of levels; the table has levels, then inverse widths."""
    v, f, t = _pointer(values, types.float32), _pointer(out, types.float32), _pointer(table, types.float32)
    if top == 3:
        a, b, c, d, e, g = t[0], t[1], t[2], t[4], t[5], t[6]
        for j in range(n):
            s = (v[j] - low) * inverse
            f[j] = _part(s, a, d) + _part(s, b, e) + _part(s, c, g)
        return
    for j in range(n):
        f[j] = _ZERO
    for i in range(top):
        level, width = t[i], t[top + 1 + i]
        for j in range(n):
            f[j] += _part((v[j] - low) * inverse, level, width)


@_inline
def _planes(n: int, bits: int) -> int:
    """How the planes of a group lie: only those are not ``LOOSE`` that are long enough for a vector."""
    if n == USUAL or (n & 3 == 0 and bits & 1 == 0 and n >= 4 * _SIXTEEN):
        return EVEN
    return MIXED if n & 3 == 0 and n >= 8 * _SIXTEEN else LOOSE


@_inline
def _whole(n: int) -> int:
    """The places that all four lanes have, if they fill a vector; 0 otherwise."""
    full = n - 3 * ((n + 3) >> 2)
    return full if full >= _SIXTEEN else 0


@_inline
def _fill_whole(values: int, lane: int, h: Any, base: Any, low: Any, inverse: Any, codes: int, bits: int) -> None:
    """Codes into even planes. The last vector may repeat what was done."""
    end = lane >> 1 if bits & 1 else lane
    for first in range(0, end, _SIXTEEN):
        j = min(first, end - _SIXTEEN)
        _fill_even(values + 4 * j, codes + j, lane, U32(h + U32(j) * _GOLDEN), base, low, inverse, bits)


@_inline
def _fill_lanes(
    values: int, n: int, h: Any, base: Any, low: Any, inverse: Any, codes: int, spare: int, bits: int
) -> None:
    """Codes into their planes, or those of all four lanes to ``spare``. The last vector may repeat what was done."""
    if n == USUAL:
        _fill_whole(values, USUAL >> 2, h, base, low, inverse, codes, bits)
        return
    if n == _SIXTEEN:
        _fill_short(values, codes, h, base, low, inverse, bits)
        return
    planes = _planes(n, bits)
    if planes == EVEN:
        _fill_whole(values, n >> 2, h, base, low, inverse, codes, bits)
        return
    if bits & 1 and planes == MIXED:
        lane, size = n >> 2, (n + 7) >> 3
        _store64(spare + n, U64(0))
        for first in range(0, lane, _SIXTEEN):
            j = min(first, lane - _SIXTEEN)
            later = U32(h + U32(j) * _GOLDEN)
            _fill_mixed(values + 4 * j, codes + j, lane, later, base, low, inverse, spare + j, bits)
        for first in range(0, size, _SIXTEEN):
            j = min(first, size - _SIXTEEN)
            _pack_sixteen(spare + j, size, codes + lane * (bits >> 1) + j)
        return
    lane, full = (n + 3) >> 2, _whole(n)
    for first in range(0, full, _SIXTEEN):
        j = min(first, full - _SIXTEEN)
        _fill_loose(values + 4 * j, spare + j, lane, U32(h + U32(j) * _GOLDEN), base, low, inverse, bits)


@_plain
def _fill(
    values: int, n: int, bits: int, levels: int, h: Any, inverse: Any, codes: int, side: int, spare: int, warped: int
) -> None:
    """The codes of a group whose side words are known."""
    low = _float(U32(_pointer(side, types.uint16)[0]) << 16)
    if levels:
        _warp(values, n, (1 << bits) - 1, levels, low, inverse, warped)
        values, low, inverse = warped, _ZERO, _ONE
    base, loose = _base(h, bits), codes if bits == 8 else spare
    if bits == 1:
        _fill_lanes(values, n, h, base, low, inverse, codes, loose, 1)
    elif bits == 2:
        _fill_lanes(values, n, h, base, low, inverse, codes, loose, 2)
    elif bits == 3:
        _fill_lanes(values, n, h, base, low, inverse, codes, loose, 3)
    elif bits == 4:
        _fill_lanes(values, n, h, base, low, inverse, codes, loose, 4)
    elif bits == 5:
        _fill_lanes(values, n, h, base, low, inverse, codes, loose, 5)
    elif bits == 6:
        _fill_lanes(values, n, h, base, low, inverse, codes, loose, 6)
    elif bits == 7:
        _fill_lanes(values, n, h, base, low, inverse, codes, loose, 7)
    else:
        _fill_lanes(values, n, h, base, low, inverse, codes, loose, 8)
    if _planes(n, bits) != LOOSE or n == _SIXTEEN:
        return
    v, t = _pointer(values, types.float32), _pointer(loose, types.uint8)
    lane, full, top = (n + 3) >> 2, _whole(n), (1 << bits) - 1
    for j in range(full, lane):
        w = _mix(U32(h + U32(j) * _GOLDEN))
        for e in range(j, n, lane):
            threshold = _threshold(w, base, bits)
            t[e] = U8(_bits(threshold + (v[e] - low) * inverse, U32) >> U32(23 - bits) & top)
            w = U32(w >> 8)
    if bits < 8:
        _store64(loose + n, U64(0))
        _pack(loose, n, bits, codes)


# ---------------------------------------------------------------- 8-bit floats


@_inline
def _narrow8(x: Any, kind: int) -> Any:
    """The 8 bits of the nearest value, ties to even; NaN for what is not within 2**-7 of the type's range."""
    b = _bits(x, U32)
    rest = U32(b & 0x7FFFFFFF)
    sign = U32((b >> 24) & 0x80)
    if kind == E4M3:
        normal = U32((rest - 0x3C000000 + 0x7FFFF + ((rest >> 20) & 1)) >> 20)
        small = U32(_bits(_float(rest) + F32(2.0**14), U32) - 0x46800000)  # the sum rounds at 2**-9
        near = small if rest < 0x3C800000 else normal
        return U8((U32(0x7F) if rest > 0x43E1C000 else near) | sign)
    normal = U32((rest - 0x38000000 + 0xFFFFF + ((rest >> 21) & 1)) >> 21)
    small = U32(_bits(_float(rest) + F32(2.0**7), U32) - 0x43000000)  # the sum rounds at 2**-16
    near = small if rest < 0x38800000 else normal
    return U8((U32(0x7F) if rest > 0x4761C000 else near) | sign)


@_inline
def _widen8(b: Any, kind: int) -> Any:
    sign, rest = U32((U32(b) & 0x80) << 24), U32(U32(b) & 0x7F)
    if kind == E4M3:
        small = _bits(F32(I32(rest)) * F32(2.0**-9), U32)
        normal = U32(0x7FC00000) if rest == 0x7F else U32((rest << 20) + 0x3C000000)
        return _float((small if rest < 8 else normal) | sign)
    small = _bits(F32(I32(rest)) * F32(2.0**-16), U32)
    normal = U32((rest << 21) + (0x70000000 if rest >= 0x7C else 0x38000000))
    return _float((small if rest < 4 else normal) | sign)


@_plain
def _group_scale(values: int, n: int, kind: int) -> Any:
    """The word of the bfloat16 that takes the largest value to the type's largest."""
    v, most = _pointer(values, types.float32), I32(0)
    for i in range(n):
        most = max(most, I32(_bits(v[i], I32) & 0x7FFFFFFF))
    if most >= 0x7F800000:
        return U32(0x7FC0)
    if most == 0:
        return U32(0x3F80)
    scale = _bits(most, F32) / (F32(448.0) if kind == E4M3 else F32(57344.0))
    b = _bits(scale if scale > _SMALLEST_STEP else _SMALLEST_STEP, U32)
    return U32((b >> 16) + (1 if b & 0xFFFF else 0))


@_plain
def _cast_run(values: int, n: int, scale: Any, out: int, kind: int) -> None:
    v, o = _pointer(values, types.float32), _pointer(out, types.uint8)
    if _bits(scale, U32) & 0x7FFFFFFF >= 0x7F800000:
        for i in range(n):
            o[i] = U8(0)
    elif kind == E4M3:
        for i in range(n):
            o[i] = _narrow8(v[i] / scale, E4M3)
    else:
        for i in range(n):
            o[i] = _narrow8(v[i] / scale, E5M2)


@_plain
def _uncast_run(codes: int, n: int, scale: Any, out: int, kind: int) -> None:
    c, o = _pointer(codes, types.uint8), _pointer(out, types.float32)
    if kind == E4M3:
        for i in range(n):
            o[i] = _widen8(c[i], E4M3) * scale
    else:
        for i in range(n):
            o[i] = _widen8(c[i], E5M2) * scale


@_inline
def _start(g: int, row: int, group: int) -> int:
    """The first value of group ``g``."""
    per_row = (row + group - 1) // group
    return g // per_row * row + g % per_row * group


@_inline
def _group_at(position: int, row: int, group: int) -> int:
    """The group that holds a value."""
    return position // row * ((row + group - 1) // group) + position % row // group


@_plain
def _encode(
    c: Coding, key: tuple[int, int], values: int, source: int, first: int, last: int, scratch: int, ahead: int
) -> None:
    """Groups whose values lie one after another; ``source``, if there is one, says by its signs which values count.

    All ranges first: they are independent, so the latency of one hides behind the next.
    """
    codes, side, row, group, bits, levels = c
    full, rest = row // group, row % group
    size, last_size = _size(group, bits), _size(rest, bits)
    per_row = full + (1 if rest else 0)
    codes += first // per_row * (full * size + last_size) + first % per_row * size
    groups = last - first
    room = layout.encode_scratch(groups, group)
    ends, spare, warped = scratch + room.ends, scratch + room.codes, scratch + room.warped
    low, high = _pointer(ends, types.int32), _pointer(ends + 4 * groups, types.int32)
    at, column = 0, first % per_row
    for g in range(groups):
        n = rest if column == full else group
        for i in range(0, 4 * n if ahead else 0, 128):
            _prefetch(ahead + 4 * at + i)
        if source:
            low[g], high[g] = _positive_range(values + 4 * at, source + 4 * at, n)
        else:
            low[g], high[g] = _range(values + 4 * at, n)
        at, column = at + n, 0 if column + 1 == per_row else column + 1
    _fit(groups, bits, ends, side + 4 * first)
    inverses, extents = _pointer(ends, types.float32), _pointer(ends + 4 * groups, types.float32)
    at, column, top = 0, first % per_row, F32((1 << bits) - 1)
    for g in range(groups):
        n, bytes_ = (rest, last_size) if column == full else (group, size)
        for i in range(64, 4 * n if ahead else 0, 128):
            _prefetch(ahead + 4 * at + i)
        inverse = inverses[g]
        if inverse > _ZERO:
            while extents[g] * inverse > top:
                inverse = _float(_bits(inverse, U32) - U32(1))
            h = _group_hash(first + g, key)
            _fill(values + 4 * at, n, bits, levels, h, inverse, codes, side + 4 * (first + g), spare, warped)
        else:
            b = _pointer(codes, types.uint8)
            for j in range(bytes_):
                b[j] = U8(0)
            b[0] = U8(_bits(extents[g], U32))
        at, codes, column = at + n, codes + bytes_, 0 if column + 1 == per_row else column + 1


@_plain
def _decode_levels(codes: int, n: int, bits: int, table: int, low: Any, step: Any, values: int, spare: int) -> None:
    v, t = _pointer(values, types.float32), _pointer(table, types.float32)
    if bits == 2:
        c, size = _pointer(codes, types.uint8), (n + 3) >> 2
        a, b, d, e = low + t[0] * step, low + t[1] * step, low + t[2] * step, low + t[3] * step
        for k in range(4):
            for j in range(min(size, n - k * size)):
                code = U32(c[j]) >> U32(2 * k)
                below, above = (b if code & 1 else a), (e if code & 1 else d)
                v[k * size + j] = above if code & 2 else below
        return
    _unpack(codes, n, bits, spare)
    q = _pointer(spare, types.uint8)
    for j in range(n):
        v[j] = low + t[q[j]] * step


@_inline
def _decode_whole(
    codes: int, values: int, lane: int, low: Any, step: Any, dither: int, h: Any, base: Any, bits: int
) -> None:
    """From even planes. The last vector may repeat what was done."""
    for first in range(0, lane, _SIXTEEN):
        j = min(first, lane - _SIXTEEN)
        late = 1 if 2 * j >= lane else 0
        if dither:
            later = U32(h + U32(j) * _GOLDEN)
            _undither(codes + j, values + 4 * j, lane, late, later, base, low, step, EVEN, bits)
        else:
            _decode_even(codes + j, values + 4 * j, lane, late, low, step, bits)


@_inline
def _decode_lanes(
    codes: int, values: int, n: int, low: Any, step: Any, dither: int, h: Any, base: Any, spare: int, bits: int
) -> None:
    """From their planes, or those of all four lanes from ``spare``. The last vector may repeat what was done."""
    if n == USUAL:
        _decode_whole(codes, values, USUAL >> 2, low, step, dither, h, base, bits)
        return
    if n == _SIXTEEN:
        _undither_short(codes, values, h, base, low, step, bits)
        return
    planes = _planes(n, bits)
    if bits & 1 and planes == MIXED:
        lane, size = n >> 2, (n + 7) >> 3
        for first in range(0, size, _SIXTEEN):
            j = min(first, size - _SIXTEEN)
            _unpack_sixteen(codes + lane * (bits >> 1) + j, size, spare + j)
        for first in range(0, lane, _SIXTEEN):
            j = min(first, lane - _SIXTEEN)
            later = U32(h + U32(j) * _GOLDEN)
            _undither(codes + j, values + 4 * j, lane, spare + j, later, base, low, step, MIXED, bits)
        return
    if planes != EVEN:
        lane, full = (n + 3) >> 2, _whole(n)
        for first in range(0, full, _SIXTEEN):
            j = min(first, full - _SIXTEEN)
            later = U32(h + U32(j) * _GOLDEN)
            _undither(spare + j, values + 4 * j, lane, 0, later, base, low, step, LOOSE, bits)
        return
    _decode_whole(codes, values, n >> 2, low, step, dither, h, base, bits)


@_plain
def _decode_group(
    codes: int, n: int, bits: int, low: Any, step: Any, dither: int, h: Any, values: int, spare: int
) -> None:
    """A group with even levels; with ``dither`` less the thresholds that ``h`` makes."""
    planes, loose, base = _planes(n, bits), codes if bits == 8 else spare, _base(h, bits) if dither else U32(0)
    short = n == _SIXTEEN and dither
    if bits < 8 and not short and (planes == LOOSE or (planes == MIXED and not dither)):
        _unpack(codes, n, bits, spare)
    c, v = _pointer(loose, types.uint8), _pointer(values, types.float32)
    if planes != EVEN and not dither:
        for first in range(0, n if n >= _SIXTEEN else 0, _SIXTEEN):
            j = min(first, n - _SIXTEEN)
            _decode_loose(loose + j, values + 4 * j, low, step)
        for j in range(0 if n >= _SIXTEEN else n):
            v[j] = F32(I32(c[j])) * step + low
        return
    if bits == 1:
        _decode_lanes(codes, values, n, low, step, dither, h, base, loose, 1)
    elif bits == 2:
        _decode_lanes(codes, values, n, low, step, dither, h, base, loose, 2)
    elif bits == 3:
        _decode_lanes(codes, values, n, low, step, dither, h, base, loose, 3)
    elif bits == 4:
        _decode_lanes(codes, values, n, low, step, dither, h, base, loose, 4)
    elif bits == 5:
        _decode_lanes(codes, values, n, low, step, dither, h, base, loose, 5)
    elif bits == 6:
        _decode_lanes(codes, values, n, low, step, dither, h, base, loose, 6)
    elif bits == 7:
        _decode_lanes(codes, values, n, low, step, dither, h, base, loose, 7)
    else:
        _decode_lanes(codes, values, n, low, step, dither, h, base, loose, 8)
    if planes != LOOSE or short:
        return
    lane, half = (n + 3) >> 2, F32((1 << bits) + 0.5)
    for j in range(_whole(n), lane):
        w = _mix(U32(h + U32(j) * _GOLDEN))
        for e in range(j, n, lane):
            v[e] = ((F32(I32(c[e])) + half) - _threshold(w, base, bits)) * step + low
            w = U32(w >> 8)


@_plain
def _decode(coding: Coding, dither: int, key: tuple[int, int], values: int, first: int, last: int, spare: int) -> None:
    """Groups one after another into float32 values; with ``dither`` less the thresholds that ``key`` makes.

    ``spare`` has room for the codes of a group, a byte each, and eight more.
    """
    codes, side, row, group, bits, levels = coding
    full, rest = row // group, row % group
    size, last_size = _size(group, bits), _size(rest, bits)
    per_row = full + (1 if rest else 0)
    codes += first // per_row * (full * size + last_size) + first % per_row * size
    column = first % per_row
    for g in range(first, last):
        n, bytes_ = (rest, last_size) if column == full else (group, size)
        words = _pointer(side + 4 * g, types.uint16)
        lower, upper = U32(words[0]) << 16, U32(words[1])
        if upper & 0x8000:
            lower |= ((upper & 0x7FFF) << 1) | (_pointer(codes, types.uint8)[0] & 1)
            upper = U32(0)
        low, step = _float(lower), _float(U32(upper << 16))
        if levels:
            _decode_levels(codes, n, bits, levels, low, step, values, spare)
        else:
            h = _group_hash(g, key) if dither else U32(0)
            _decode_group(codes, n, bits, low, step, dither, h, values, spare)
        values, codes, column = values + 4 * n, codes + bytes_, 0 if column + 1 == per_row else column + 1


@_intrinsic
def _keep_lanes(typing: Any, mask: Any, source: Any, target: Any, item: Any) -> Any:
    """Copies as many values of ``item`` bytes as ``mask`` has bits; those whose bit is 0 become 0.0."""
    count = mask.bitwidth

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        mask, source, target, _ = arguments
        size = item.literal_value
        lanes = ir.VectorType(ir.IntType(8 * size), count)
        values = builder.load(builder.inttoptr(source, lanes.as_pointer()), align=size)
        kept = builder.bitcast(mask, ir.VectorType(ir.IntType(1), count))
        values = builder.select(kept, values, ir.Constant(lanes, [0] * count))
        builder.store(values, builder.inttoptr(target, lanes.as_pointer()), align=size)
        return context.get_dummy_value()

    return types.void(mask, types.int64, types.int64, item), generate


@_intrinsic
def _copy_sixteen(typing: Any, source: Any, target: Any) -> Any:
    """Copies sixteen values."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _store(builder, _load(builder, _FLOATS, arguments[0]), arguments[1])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_plain
def _copy_run(source: int, target: int, n: int, support: int, start: int) -> None:
    """``n`` values; with ``support`` those whose bit, counted from bit ``start``, is 0 become 0.0."""
    s, t = _pointer(source, types.uint32), _pointer(target, types.uint32)
    if not support:
        whole = n if n >= _SIXTEEN else 0
        for first in range(0, whole, _SIXTEEN):
            j = min(first, n - _SIXTEEN)
            _copy_sixteen(source + 4 * j, target + 4 * j)
        for e in range(whole, n):
            t[e] = s[e]
        return
    m = _pointer(support, types.uint8)
    head = min(n, -start & 7)
    for e in range(head):
        t[e] = s[e] & U32(-((m[(start + e) >> 3] >> ((start + e) & 7)) & 1))
    byte = (start + head) >> 3
    for j in range((n - head) >> 3):
        _keep_lanes(m[byte + j], source + 4 * (head + 8 * j), target + 4 * (head + 8 * j), 4)
    for e in range(head + ((n - head) & ~7), n):
        t[e] = s[e] & U32(-((m[(start + e) >> 3] >> ((start + e) & 7)) & 1))


# ---------------------------------------------------------------- one slab: see ``layout.Slabs``


def _each_row(builder: Any, lines: Any, line: Any, rows: Any, row: Any) -> Iterator[Any]:
    """Code for two loops around what the caller builds: the offset in bytes of each row of each line."""
    with cgutils.for_range(builder, lines) as i, cgutils.for_range(builder, rows) as r:
        offset = builder.add(builder.mul(i.index, line), builder.mul(r.index, row))
        yield builder.mul(offset, ir.Constant(ir.IntType(64), 4))


def _columns(builder: Any, vector: Any, address: Any, *steps: Any) -> Any:
    """Code for the sums of columns over lines and rows, from first to last, beginning with 0.0."""
    sums = cgutils.alloca_once_value(builder, ir.Constant(vector, [0.0] * vector.count))
    for at in _each_row(builder, *steps):
        source = builder.inttoptr(builder.add(address, at), vector.as_pointer())
        builder.store(builder.fadd(builder.load(sums), builder.load(source, align=4)), sums)
    return builder.load(sums)


@_intrinsic
def _column_sum(typing: Any, address: Any, lines: Any, line: Any, rows: Any, row: Any, total: Any, lanes: Any) -> Any:
    """``total`` plus each of ``lanes`` columns, summed over lines and rows (sizes of a step in values).

    In vectors by hand: the order of the sums is fixed, which keeps a compiler from finding them.
    """
    count = lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *steps, total, _ = arguments
        columns = _columns(builder, ir.VectorType(ir.FloatType(), count), *steps)
        for k in range(count):
            total = builder.fadd(total, builder.extract_element(columns, ir.Constant(ir.IntType(32), k)))
        return total

    return types.float32(*[types.int64] * 5, types.float32, lanes), generate


@_intrinsic
def _column_add(
    typing: Any, address: Any, lines: Any, line: Any, rows: Any, row: Any, value: Any, target: Any, lanes: Any
) -> Any:
    """``lanes`` columns of ``address`` plus ``value``, into the same places of ``target``."""
    count = lanes.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, lines, line, rows, row, value, target, _ = arguments
        vector = ir.VectorType(ir.FloatType(), count)
        spread = ir.Constant(vector, ir.Undefined)
        for k in range(count):
            spread = builder.insert_element(spread, value, ir.Constant(ir.IntType(32), k))
        for at in _each_row(builder, lines, line, rows, row):
            source = builder.inttoptr(builder.add(address, at), vector.as_pointer())
            to = builder.inttoptr(builder.add(target, at), vector.as_pointer())
            builder.store(builder.fadd(builder.load(source, align=4), spread), to, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32, types.int64, lanes), generate


@_plain
def _sum_block(x: int, wide: int, lines: int, line: int, rows: int, row: int) -> Any:
    total = _ZERO
    while wide >= 8:
        total = _column_sum(x, lines, line, rows, row, total, 8)
        x, wide = x + 32, wide - 8
    if wide & 4:
        total = _column_sum(x, lines, line, rows, row, total, 4)
        x += 16
    if wide & 2:
        total = _column_sum(x, lines, line, rows, row, total, 2)
        x += 8
    return _column_sum(x, lines, line, rows, row, total, 1) if wide & 1 else total


@_intrinsic
def _folded_means(
    typing: Any,
    address: Any,
    lines: Any,
    line: Any,
    rows: Any,
    row: Any,
    count: Any,
    target: Any,
    lanes: Any,
    fold: Any,
) -> Any:
    """The means of ``lanes / fold`` narrow blocks side by side, each of ``count`` values in ``fold`` columns."""
    wide, block = lanes.literal_value, fold.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *steps, count, target, _, _ = arguments
        columns = _columns(builder, ir.VectorType(ir.FloatType(), wide), *steps)
        means = ir.VectorType(ir.FloatType(), wide // block)
        total = ir.Constant(means, [0.0] * (wide // block))
        for k in range(block):
            places = ir.Constant(ir.VectorType(ir.IntType(32), wide // block), list(range(k, wide, block)))
            total = builder.fadd(total, builder.shuffle_vector(columns, columns, places))
        counts = ir.Constant(means, ir.Undefined)
        for k in range(wide // block):
            counts = builder.insert_element(counts, count, ir.Constant(ir.IntType(32), k))
        builder.store(builder.fdiv(total, counts), builder.inttoptr(target, means.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, types.float32, types.int64, lanes, fold), generate


@_inline
def _fold(x: int, whole: int, lines: int, line: int, rows: int, row: int, means: int, lanes: int, fold: int) -> None:
    """The means of a row of narrow blocks, ``whole`` values wide; the last vector may repeat what was done."""
    count = F32(lines * rows * fold)
    for c in range(0, whole, lanes):
        at = min(c, whole - lanes)
        _folded_means(x + 4 * at, lines, line, rows, row, count, means + 4 * (at // fold), lanes, fold)


@_plain
def _fold_row(x: int, width: int, block: int, lines: int, line: int, rows: int, row: int, means: int) -> int:
    """The means of the first blocks of a row, as many as vectors can serve; returns their number."""
    whole = width - width % block
    if block == 2 and whole >= 16:
        _fold(x, whole, lines, line, rows, row, means, 16, 2)
    elif block == 2 and whole >= 8:
        _fold(x, whole, lines, line, rows, row, means, 8, 2)
    elif block == 4 and whole >= 16:
        _fold(x, whole, lines, line, rows, row, means, 16, 4)
    else:
        return 0
    return whole // block


@_plain
def _add_block(x: int, to: int, value: Any, wide: int, lines: int, line: int, rows: int, row: int) -> None:
    while wide >= 8:
        _column_add(x, lines, line, rows, row, value, to, 8)
        x, to, wide = x + 32, to + 32, wide - 8
    if wide & 4:
        _column_add(x, lines, line, rows, row, value, to, 4)
        x, to = x + 16, to + 16
    if wide & 2:
        _column_add(x, lines, line, rows, row, value, to, 2)
        x, to = x + 8, to + 8
    if wide & 1:
        _column_add(x, lines, line, rows, row, value, to, 1)


@_inline
def _unfold(x: int, width: int, block: int, means: int, target: int) -> None:
    """A row plus the means of its blocks: in vectors, where ``block`` is a constant."""
    v, m, t = _pointer(x, types.float32), _pointer(means, types.float32), _pointer(target, types.float32)
    full = width // block
    for b in range(full):
        for k in range(block):
            t[block * b + k] = v[block * b + k] + m[b]
    for k in range(full * block, width):
        t[k] = v[k] + m[full]


@_inline
def _next(line: int, lines: int, depth: int) -> int:
    return 0 if line + lines == depth else line + lines


_LANES = ir.VectorType(ir.FloatType(), 8)


def _lanes(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _LANES.as_pointer()), align=4)


def _down(builder: Any, rows: Any, count: Any, visit: Callable[[Any], None]) -> None:
    """Code that visits each of up to eight rows, written out: a loop this short costs more than its work."""
    if isinstance(count, types.IntegerLiteral):
        for r in range(count.literal_value):
            visit(ir.Constant(ir.IntType(64), r))
        return
    with contextlib.ExitStack() as nested:
        for r in range(8):
            row = ir.Constant(ir.IntType(64), r)
            if r:
                nested.enter_context(builder.if_then(builder.icmp_signed("<", row, rows)))
            visit(row)


@_intrinsic
def _lane_sums(typing: Any, address: Any, rows: Any, stride: Any, wide: Any, target: Any) -> Any:
    """Eight columns, each summed over ``rows`` rows that lie ``stride`` bytes apart; 0.0 from column ``wide`` on.

    In vectors by hand: the order of the sums is fixed, which keeps a compiler from finding them. Always loads eight.
    """
    whole = isinstance(wide, types.IntegerLiteral)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count, stride, wide, target = arguments
        sums = cgutils.alloca_once_value(builder, ir.Constant(_LANES, [0.0] * 8))

        def visit(r: Any) -> None:
            row = _lanes(builder, builder.add(address, builder.mul(r, stride)))
            builder.store(builder.fadd(builder.load(sums), row), sums)

        _down(builder, count, rows, visit)
        columns = builder.load(sums)
        if not whole:
            word = ir.VectorType(ir.IntType(64), 8)
            given = ir.Constant(word, ir.Undefined)
            for k in range(8):
                given = builder.insert_element(given, wide, ir.Constant(ir.IntType(32), k))
            mask = builder.icmp_unsigned("<", ir.Constant(word, list(range(8))), given)
            columns = builder.select(mask, columns, ir.Constant(_LANES, [0.0] * 8))
        builder.store(columns, builder.inttoptr(target, _LANES.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, rows, types.int64, wide, types.int64), generate


@_intrinsic
def _lane_add(typing: Any, address: Any, rows: Any, stride: Any, value: Any, target: Any) -> Any:
    """Rows of eight values plus ``value`` into the same places of ``target``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count, stride, value, target = arguments
        spread = ir.Constant(_LANES, ir.Undefined)
        for k in range(8):
            spread = builder.insert_element(spread, value, ir.Constant(ir.IntType(32), k))

        def visit(r: Any) -> None:
            offset = builder.mul(r, stride)
            row = _lanes(builder, builder.add(address, offset))
            to = builder.inttoptr(builder.add(target, offset), _LANES.as_pointer())
            builder.store(builder.fadd(row, spread), to, align=4)

        _down(builder, count, rows, visit)
        return context.get_dummy_value()

    return types.void(types.int64, rows, types.int64, types.float32, types.int64), generate


@_inline
def _minus_mean(word: Any) -> Any:
    """What makes a value the difference to a bfloat16 mean: -Inf if that is not finite."""
    return _MINUS_INF if U32(word) & 0x7F80 == 0x7F80 else -_widen(word, BFLOAT16)


@_plain
def _split(x: int, n: int, line: int, depth: int, width: int, low: int, residual: int, scratch: int, most: int) -> None:
    """Means of blocks of eight by eight, and the differences to them, of ``n`` values in whole slabs.

    All columns first, then all means (they fill vectors only together), then all differences. In ``scratch`` up to
    ``most`` blocks have eight column sums, a number of values and a mean. The last, narrow block of a slab is
    subtracted first: what it stores beyond its rows is overwritten by what follows. Up to seven values beyond the
    ``n`` are read, and as many beyond their differences overwritten.
    """
    full, wide, stride = width >> 3, width & 7, 4 * width
    room = layout.split_scratch(most)
    sums, counts, means = scratch + room.sums, scratch + room.counts, scratch + room.means
    s, c, m = _pointer(sums, types.float32), _pointer(counts, types.float32), _pointer(means, types.float32)
    at, first, end, blocks = x, line, x + 4 * n, 0
    while at < end:
        lines = min(8, depth - line)
        if lines == 8:
            for b in range(full):
                _lane_sums(at + 32 * b, 8, stride, 8, sums + 32 * (blocks + b))
        else:
            for b in range(full):
                _lane_sums(at + 32 * b, lines, stride, 8, sums + 32 * (blocks + b))
        for b in range(blocks, blocks + full):
            c[b] = F32(8 * lines)
        blocks += full
        if wide:
            _lane_sums(at + 32 * full, lines, stride, wide, sums + 32 * blocks)
            c[blocks] = F32(lines * wide)
            blocks += 1
        at, line = at + lines * stride, _next(line, lines, depth)
    words = _pointer(low, types.uint16)
    for b in range(blocks):
        total = _ZERO + s[8 * b]
        for k in range(1, 8):  # the zeros behind a narrow row change no sum
            total += s[8 * b + k]
        word = _narrow(total / c[b], BFLOAT16)
        words[b] = word
        m[b] = _minus_mean(word)
    at, line, blocks = x, first, 0
    while at < end:
        lines = min(8, depth - line)
        if wide:
            _lane_add(at + 32 * full, lines, stride, m[blocks + full], residual + 32 * full)
        if lines == 8:
            for b in range(full):
                _lane_add(at + 32 * b, 8, stride, m[blocks + b], residual + 32 * b)
        else:
            for b in range(full):
                _lane_add(at + 32 * b, lines, stride, m[blocks + b], residual + 32 * b)
        at, residual, line = at + lines * stride, residual + lines * stride, _next(line, lines, depth)
        blocks += full + (1 if wide else 0)


@_plain
def _merge(residual: int, n: int, line: int, depth: int, width: int, low: int, target: int) -> None:
    """The differences plus the means; reads and writes beyond them as ``_split`` does.

    Line by line, in the order memory likes; slabs of one block at once, which is less work.
    """
    blocks, stride = (width + 7) >> 3, 4 * width
    end = residual + 4 * n
    while residual < end:
        lines = min(8, depth - line)
        m = _pointer(low, types.uint16)
        if width < 8:
            _lane_add(residual, lines, stride, _widen(m[0], BFLOAT16), target)
        else:
            for r in range(0, lines * stride, stride):
                for b in range(blocks):
                    _lane_add(residual + r + 32 * b, 1, 0, _widen(m[b], BFLOAT16), target + r + 32 * b)
        residual, target = residual + lines * stride, target + lines * stride
        low, line = low + 2 * blocks, _next(line, lines, depth)


@_plain
def _deep_means(x: int, lines: int, slabs: Slabs, sums: int, means: int) -> None:
    """The means of a slab whose innermost values belong to different blocks."""
    _, rows, width, inner, block, _, _ = slabs
    v, s, m = _pointer(x, types.float32), _pointer(sums, types.float32), _pointer(means, types.float32)
    length, at = width * inner, 0
    for first in range(0, rows, block):
        tall = min(block, rows - first)
        for c in range(length):
            s[c] = _ZERO
        for i in range(lines):
            for r in range(first, first + tall):
                for c in range(length):
                    s[c] += v[(i * rows + r) * length + c]
        for b in range(0, width, block):
            wide = min(block, width - b)
            for c in range(inner):
                m[at + c] = _ZERO
            for k in range(b, b + wide):
                for c in range(inner):
                    m[at + c] += s[k * inner + c]
            count = F32(lines * tall * wide)
            for c in range(inner):
                m[at + c] /= count
            at += inner


@_plain
def _deep_add(x: int, lines: int, slabs: Slabs, means: int, target: int) -> None:
    _, rows, width, inner, block, blocks, _ = slabs
    v, t, m = _pointer(x, types.float32), _pointer(target, types.float32), _pointer(means, types.float32)
    for i in range(lines):
        for r in range(rows):
            for w in range(width):
                at, mean = ((i * rows + r) * width + w) * inner, (r // block * blocks + w // block) * inner
                for c in range(inner):
                    t[at + c] = v[at + c] + m[mean + c]


@_plain
def _slab_means(x: int, lines: int, slabs: Slabs, sums: int, means: int) -> None:
    _, rows, width, inner, block, blocks, _ = slabs
    if inner > 1:
        _deep_means(x, lines, slabs, sums, means)
        return
    m = _pointer(means, types.float32)
    # A line of one row steps as a row does.
    outer, line = (1, 0) if rows == 1 else (lines, rows * width)
    for first in range(0, rows, block):
        tall = lines if rows == 1 else min(block, rows - first)
        at = first // block * blocks
        done = _fold_row(x + 4 * first * width, width, block, outer, line, tall, width, means + 4 * at)
        for b in range(done, blocks):
            wide = min(block, width - b * block)
            total = _sum_block(x + 4 * (first * width + b * block), wide, outer, line, tall, width)
            m[at + b] = total / F32(outer * tall * wide)


@_plain
def _slab_add(x: int, lines: int, slabs: Slabs, means: int, target: int) -> None:
    """Each value of a slab plus its mean."""
    _, rows, width, inner, block, blocks, _ = slabs
    if inner > 1:
        _deep_add(x, lines, slabs, means, target)
        return
    if block == 2 or block == 4:
        for i in range(lines * rows):
            at, of_row = 4 * i * width, means + 4 * (i % rows // block * blocks)
            if block == 2:
                _unfold(x + at, width, 2, of_row, target + at)
            else:
                _unfold(x + at, width, 4, of_row, target + at)
        return
    m = _pointer(means, types.float32)
    for first in range(0, rows, block):
        tall = min(block, rows - first)
        for b in range(blocks):
            wide = min(block, width - b * block)
            corner = 4 * (first * width + b * block)
            value = m[first // block * blocks + b]
            if rows == 1:
                _add_block(x + corner, target + corner, value, wide, 1, 0, lines, width)
            else:
                _add_block(x + corner, target + corner, value, wide, lines, rows * width, tall, width)


# ---------------------------------------------------------------- kernels


KERNELS: dict[str, Callable[[int, int, int, int], None]] = {}


def _kernel(function: F) -> F:
    KERNELS[function.__name__.removeprefix("_kernel_")] = function
    return function


@_kernel
def _kernel_quantize_groups(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.QuantizeGroups)
    coding, key = Coding(p.codes, p.side, p.row, p.group, p.bits, p.levels), (p.key_low, p.key_high)
    step, room = layout.groups_at_once(p.group), layout.quantize_groups_scratch(p.group)
    for g in range(first, last, step):
        stop = min(g + step, last)
        start = _start(g, p.row, p.group)
        values, n = p.x + 4 * start, _start(stop, p.row, p.group) - start
        if p.kind != FLOAT32:
            values = scratch + room.wide
            _widen_run(p.x + 2 * start, values, n, p.kind)
        if p.support:
            _mark(values, n, p.support + (start >> 3))
        source, ahead = values if p.positive else 0, values + 4 * n if p.kind == FLOAT32 else 0
        _encode(coding, key, values, source, g, stop, scratch + room.encode, ahead)


@_kernel
def _kernel_dequantize_groups(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.DequantizeGroups)
    coding = Coding(p.codes, p.side, p.row, p.group, p.bits, p.levels)
    step, room = layout.groups_at_once(p.group), layout.dequantize_groups_scratch(p.group)
    wide, spare = scratch + room.wide, scratch + room.codes
    for g in range(first, last, step):
        stop = min(g + step, last)
        start = _start(g, p.row, p.group)
        n = _start(stop, p.row, p.group) - start
        values = p.out + 4 * start if p.kind == FLOAT32 else wide
        _decode(coding, p.dither, (p.key_low, p.key_high), values, g, stop, spare)
        if p.support:
            _copy_run(values, values, n, p.support, start)
        if p.kind != FLOAT32:
            _narrow_run(wide, p.out + 2 * start, n, p.kind)


@_kernel
def _kernel_cast_groups(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.CastGroups)
    scales, one = _pointer(p.scales, types.uint16), _pointer(p.scales, types.float32)
    wide = scratch + layout.one_group_scratch(p.group).wide
    for g in range(first, last):
        start = _start(g, p.row, p.group)
        n = _start(g + 1, p.row, p.group) - start
        values = p.x + 4 * start
        if p.kind != FLOAT32:
            values = wide
            _widen_run(p.x + 2 * start, wide, n, p.kind)
        if p.shared:
            scale = one[0]
        else:
            word = _group_scale(values, n, p.kind8)
            scales[g] = U16(word)
            scale = _float(U32(word << 16))
        _cast_run(values, n, scale, p.out + start, p.kind8)


@_kernel
def _kernel_uncast_groups(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.UncastGroups)
    scales, one = _pointer(p.scales, types.uint16), _pointer(p.scales, types.float32)
    wide = scratch + layout.one_group_scratch(p.group).wide
    for g in range(first, last):
        start = _start(g, p.row, p.group)
        n = _start(g + 1, p.row, p.group) - start
        scale = one[0] if p.shared else _float(U32(scales[g]) << 16)
        _uncast_run(p.codes + start, n, scale, p.out + 4 * start if p.kind == FLOAT32 else wide, p.kind8)
        if p.kind != FLOAT32:
            _narrow_run(wide, p.out + 2 * start, n, p.kind)


def _zipped(builder: Any, rows: list[Any]) -> list[Any]:
    """Code for the columns of a square of rows."""
    size = len(rows)
    half, kind = size // 2, ir.VectorType(_WORD, size)
    mixed = [[k // 2 + first + size * (k % 2) for k in range(size)] for first in (0, half)]
    for _ in range(size.bit_length() - 1):  # each time rows half the square apart are merged like a zip
        pairs = list(zip(rows[:half], rows[half:], strict=True))
        rows = [builder.shuffle_vector(a, b, ir.Constant(kind, m)) for a, b in pairs for m in mixed]
    return rows


@_intrinsic
def _turn(typing: Any, source: Any, between: Any, target: Any, apart: Any) -> Any:
    """Sixteen rows of sixteen values become columns; rows lie ``between`` and ``apart`` values from each other."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, between, target, apart = arguments
        rows = [_load(builder, _FLOATS, source, _times(builder, between, 4 * r)) for r in range(_SIXTEEN)]
        for r, row in enumerate(_zipped(builder, rows)):
            _store(builder, row, target, _times(builder, apart, 4 * r))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@_plain
def _turn_tile(source: int, between: int, target: int, apart: int, rows: int, columns: int) -> None:
    """``rows`` rows of ``columns`` values become columns."""
    if rows >= _SIXTEEN and columns >= _SIXTEEN:
        for r in range(0, rows, _SIXTEEN):
            for c in range(0, columns, _SIXTEEN):
                i, j = min(r, rows - _SIXTEEN), min(c, columns - _SIXTEEN)
                _turn(source + 4 * (i * between + j), between, target + 4 * (j * apart + i), apart)
        return
    s, t = _pointer(source, types.float32), _pointer(target, types.float32)
    for c in range(columns):
        for r in range(rows):
            t[c * apart + r] = s[r * between + c]


@_plain
def _copy_narrow_rows(source: int, between: int, target: int, apart: int, rows: int, n: int) -> None:
    """Rows of ``n`` values of 16 bits; their starts lie ``between`` and ``apart`` values from each other."""
    if n == TILE_CHANNELS:
        for r in range(rows):
            for i in range(0, 2 * TILE_CHANNELS, 8):
                _store64(target + 2 * r * apart + i, _load64(source + 2 * r * between + i))
        return
    s, t = _pointer(source, types.uint16), _pointer(target, types.uint16)
    for r in range(rows):
        for i in range(n):
            t[r * apart + i] = s[r * between + i]


class _Tile(NamedTuple):
    """Up to ``TILE_CHANNELS`` channels of a block."""

    first: int
    """Its first group."""
    groups: int
    rows: int
    """Outer indices of the block."""
    start: int
    """The first value of its first row."""
    codes: int
    """Bytes to add to the address of codes, as groups before were longer than these."""


@_inline
def _tile(item: int, outer: int, channels: int, inner: int, step: int, bits: int) -> _Tile:
    tiles = (channels + TILE_CHANNELS - 1) // TILE_CHANNELS
    block, channel = item // tiles, item % tiles * TILE_CHANNELS
    rows = min(step, outer - block * step)
    before = block * channels
    codes = before * (_size(step * inner, bits) - _size(rows * inner, bits))
    start = (step * before + channel) * inner
    return _Tile(before + channel, min(TILE_CHANNELS, channels - channel), rows, start, codes)


@_kernel
def _kernel_quantize_channels(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.QuantizeChannels)
    inner, kind, between, room = p.inner, p.kind, p.channels * p.inner, layout.channels_scratch(p.step * p.inner)
    gathered = scratch + room.gathered
    for item in range(first, last):
        t = _tile(item, p.outer, p.channels, inner, p.step, p.bits)
        n, run, source, apart = t.rows * inner, t.groups * inner, p.x + 4 * t.start, between
        if kind != FLOAT32:
            source, apart = scratch + room.staged, run
            _copy_narrow_rows(p.x + 2 * t.start, between, gathered, run, t.rows, run)
            _widen_run(gathered, source, t.rows * run, kind)
        if p.support:
            for r in range(t.rows):
                _mark(source + 4 * r * apart, run, p.support + ((t.start + r * between) >> 3))
        if inner == 1:
            _turn_tile(source, apart, gathered, n, t.rows, t.groups)
        else:
            for c in range(t.groups):
                for r in range(t.rows):
                    _copy_run(source + 4 * (r * apart + c * inner), gathered + 4 * (c * n + r * inner), inner, 0, 0)
        if inner == 1 and item + 1 < last:
            ahead = _tile(item + 1, p.outer, p.channels, inner, p.step, p.bits)
            for r in range(ahead.rows):
                _prefetch(p.x + (4 if kind == FLOAT32 else 2) * (ahead.start + r * between))
        coding = Coding(p.codes + t.codes, p.side, n, n, p.bits, p.levels)
        signs, end = gathered if p.positive else 0, t.first + t.groups
        _encode(coding, (p.key_low, p.key_high), gathered, signs, t.first, end, scratch + room.encode, 0)


@_kernel
def _kernel_dequantize_channels(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.DequantizeChannels)
    inner, kind, between, room = p.inner, p.kind, p.channels * p.inner, layout.channels_scratch(p.step * p.inner)
    gathered = scratch + room.gathered
    for item in range(first, last):
        t = _tile(item, p.outer, p.channels, inner, p.step, p.bits)
        place = t.start // (p.step * between) * p.step * p.apart + t.start % between
        n, run, target, apart = t.rows * inner, t.groups * inner, p.out + 4 * place, p.apart
        coding, end = Coding(p.codes + t.codes, p.side, n, n, p.bits, p.levels), t.first + t.groups
        _decode(coding, p.dither, (p.key_low, p.key_high), gathered, t.first, end, scratch + room.encode)
        if kind != FLOAT32:
            target, apart = scratch + room.staged, run
        if inner == 1:
            _turn_tile(gathered, n, target, apart, t.groups, t.rows)
        else:
            for r in range(t.rows):
                for c in range(t.groups):
                    _copy_run(gathered + 4 * (c * n + r * inner), target + 4 * (r * apart + c * inner), inner, 0, 0)
        if p.support:
            for r in range(t.rows):
                row, bit = target + 4 * r * apart, t.start + r * between
                if run == TILE_CHANNELS and bit & 7 == 0:
                    m = _pointer(p.support + (bit >> 3), types.uint8)
                    _keep_lanes(U16(U32(m[0]) | U32(m[1]) << 8), row, row, 4)
                else:
                    _copy_run(row, row, run, p.support, bit)
        if kind != FLOAT32:
            _narrow_run(target, gathered, t.rows * run, kind)
            _copy_narrow_rows(gathered, run, p.out + 2 * t.start, between, t.rows, run)


@_inline
def _row_size(row: int, group: int, bits: int) -> int:
    """Bytes of the codes of a row."""
    return row // group * _size(group, bits) + _size(row % group, bits)


@_inline
def _sample_coding(codes: int, side: int, row: int, group: int, bits: int, n: int) -> Coding:
    """For sample ``n``, whose codes begin at ``codes``: they are told where they would if all had its bits."""
    return Coding(codes - n * _row_size(row, group, bits), side, row, group, bits, 0)


@_kernel
def _kernel_quantize_samples(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.QuantizeSamples)
    row, group, key, widths = p.row, p.group, (p.key_low, p.key_high), _pointer(p.widths, types.uint8)
    per_row, step = (row + group - 1) // group, layout.groups_at_once(group)
    room = layout.quantize_groups_scratch(group)
    n, codes, g = 0, p.codes, first
    while g < last:
        while n < g // per_row:
            n, codes = n + 1, codes + _row_size(row, group, np.int64(widths[n]))
        coding = _sample_coding(codes, p.side, row, group, np.int64(widths[n]), n)
        stop = min(g + step, last, (n + 1) * per_row)
        start = _start(g, row, group)
        values, count = p.x + 4 * start, _start(stop, row, group) - start
        if p.kind != FLOAT32:
            values = scratch + room.wide
            _widen_run(p.x + 2 * start, values, count, p.kind)
        if p.support:
            _mark(values, count, p.support + (start >> 3))
        source, ahead = values if p.positive else 0, values + 4 * count if p.kind == FLOAT32 else 0
        _encode(coding, key, values, source, g, stop, scratch + room.encode, ahead)
        g = stop


@_kernel
def _kernel_dequantize_samples(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.DequantizeSamples)
    row, group, widths = p.row, p.group, _pointer(p.widths, types.uint8)
    room = layout.dequantize_groups_scratch(group)
    wide, spare = scratch + room.wide, scratch + room.codes
    per_row, step = (row + group - 1) // group, layout.groups_at_once(group)
    n, codes, g = 0, p.codes, first
    while g < last:
        while n < g // per_row:
            n, codes = n + 1, codes + _row_size(row, group, np.int64(widths[n]))
        coding = _sample_coding(codes, p.side, row, group, np.int64(widths[n]), n)
        stop = min(g + step, last, (n + 1) * per_row)
        start = _start(g, row, group)
        count = _start(stop, row, group) - start
        values = p.out + 4 * start if p.kind == FLOAT32 else wide
        _decode(coding, 0, (0, 0), values, g, stop, spare)
        if p.support:
            _copy_run(values, values, count, p.support, start)
        if p.kind != FLOAT32:
            _narrow_run(wide, p.out + 2 * start, count, p.kind)
        g = stop


@_kernel
def _kernel_range_energy(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.RangeEnergy)
    out, row, wide = _pointer(p.out, types.float32), p.row, scratch + layout.one_group_scratch(p.group).wide
    for r in range(first, last):
        total = _ZERO
        for start in range(r * row, (r + 1) * row, p.group):
            n = min(p.group, (r + 1) * row - start)
            values = p.x + 4 * start
            if p.kind != FLOAT32:
                values = wide
                _widen_run(p.x + 2 * start, wide, n, p.kind)
            least, most = _positive_range(values, values, n) if p.positive else _range(values, n)
            if least > most:
                continue
            finite = most < 0x7F800000 and least >= -0x7F800000
            extent = _value(most) - _value(least) if finite else _NAN
            total += extent * extent
        out[r] = total


@_inline
def _batch(start: int, line: int, end: int, depth: int, block: int, length: int) -> tuple[int, int, int]:
    """The slabs from ``start`` on that are worked on at once: their values, their number, the line after them."""
    n, slabs = 0, 0
    while n < BATCH and start + n < end:
        lines = min(block, depth - line)
        n, slabs, line = n + lines * length, slabs + 1, _next(line, lines, depth)
    return n, slabs, line


@_plain
def _split_any(x: int, n: int, line: int, slabs: Slabs, scratch: int, low: int, residual: int) -> None:
    """Means and the differences to them, for blocks of any size and shape."""
    depth, rows, width, inner, block, _, per_slab = slabs
    length, room = rows * width * inner, layout.means_scratch(slabs)
    sums, means = scratch + room.sums, scratch + room.means
    m = _pointer(means, types.float32)
    end = x + 4 * n
    while x < end:
        lines = min(block, depth - line)
        _slab_means(x, lines, slabs, sums, means)
        _narrow_run(means, low, per_slab, BFLOAT16)
        for c in range(per_slab):
            m[c] = _minus_mean(_narrow(m[c], BFLOAT16))
        _slab_add(x, lines, slabs, means, residual)
        x, residual = x + 4 * lines * length, residual + 4 * lines * length
        low, line = low + 2 * per_slab, _next(line, lines, depth)


@_plain
def _merge_any(residual: int, n: int, line: int, slabs: Slabs, means: int, low: int, target: int) -> None:
    depth, rows, width, inner, block, _, per_slab = slabs
    length = rows * width * inner
    end = residual + 4 * n
    while residual < end:
        lines = min(block, depth - line)
        _widen_run(low, means, per_slab, BFLOAT16)
        _slab_add(residual, lines, slabs, means, target)
        residual, target = residual + 4 * lines * length, target + 4 * lines * length
        low, line = low + 2 * per_slab, _next(line, lines, depth)


@_kernel
def _kernel_quantize_blocks(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.QuantizeBlocks)
    x, kind, row, group, depth, block = p.x, p.kind, p.row, p.group, p.depth, p.block
    coding, key = Coding(p.codes, p.side, row, group, p.bits, p.levels), (p.key_low, p.key_high)
    slabs = Slabs(depth, p.rows, p.width, p.inner, block, p.blocks, p.per_slab)
    length, in_map = p.rows * p.width * p.inner, -(-depth // block)
    even = p.rows == 1 and p.inner == 1 and block == 8
    room = layout.quantize_blocks_scratch(group, slabs, p.most)
    sums, slab, wide, fresh = scratch + room.sums, scratch + room.slab, scratch + room.wide, scratch + room.fresh
    begin, end = _start(first, row, group), _start(last, row, group)
    at = begin // (depth * length) * in_map + begin % (depth * length) // (block * length)
    line = at % in_map * block
    start = (at // in_map * depth + line) * length
    g, left, skip = first, 0, begin - start
    while g < last:
        n, count, after = _batch(start, line, end, depth, block, length)
        source, means = x + 4 * start, p.low + 2 * at * p.per_slab
        if kind != FLOAT32:
            source = slab
            _widen_run(x + 2 * start, slab, n, kind)
        elif start + n + 8 > p.numel:
            source = slab
            _copy_run(x + 4 * start, slab, n, 0, 0)
        # A slab that the range before began gets its means twice, the same ones.
        if even:
            _split(source, n, line, depth, length, means, fresh, sums, p.most)
        else:
            _split_any(source, n, line, slabs, sums, means, fresh)
        start, line, at = start + n, after, at + count
        where = start - n - left + skip
        stop = min(last, _group_at(start, row, group))
        now = _start(stop, row, group) - where
        signs = x + 4 * where if p.positive else 0
        if kind != FLOAT32 and p.positive:
            signs = wide
            _widen_run(x + 2 * where, wide, now, kind)
        if p.support:
            _mark(signs, now, p.support + (where >> 3))
        ahead = x + 4 * start if kind == FLOAT32 else 0
        _encode(coding, key, fresh + 4 * (skip - left), signs, g, stop, scratch + room.encode, ahead)
        g, left, skip = stop, start - where - now, 0
        _copy_run(fresh + 4 * (n - left), fresh - 4 * left, left, 0, 0)  # so that differences always begin on a line


@_kernel
def _kernel_dequantize_blocks(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.DequantizeBlocks)
    out, kind, row, group, depth, block, support = p.out, p.kind, p.row, p.group, p.depth, p.block, p.support
    coding = Coding(p.codes, p.side, row, group, p.bits, p.levels)
    slabs = Slabs(depth, p.rows, p.width, p.inner, block, p.blocks, p.per_slab)
    length, in_map = p.rows * p.width * p.inner, -(-depth // block)
    even = p.rows == 1 and p.inner == 1 and block == 8
    room = layout.dequantize_blocks_scratch(group, slabs)
    merged, fresh = scratch + room.merged, scratch + room.fresh
    at, line = first, first % in_map * block
    start = (first // in_map * depth + line) * length
    end = (last // in_map * depth + last % in_map * block) * length
    g = _group_at(start, row, group)
    left, skip = 0, start - _start(g, row, group)
    while at < last:
        n, count, after = _batch(start, line, end, depth, block, length)
        stop = min(_group_at(start + n - 1, row, group) + 1, p.groups)
        _decode(coding, p.dither, (p.key_low, p.key_high), fresh, g, stop, scratch + room.codes)
        decoded = _start(stop, row, group) - _start(g, row, group)
        residual = fresh + 4 * (skip - left)
        g, means = stop, p.low + 2 * at * p.per_slab
        # Straight to its place, unless that would touch values beyond the range, which another thread writes.
        values = out + 4 * start
        if kind != FLOAT32 or at + count >= last:
            values = merged
        if even:
            _merge(residual, n, line, depth, length, means, values)
        else:
            _merge_any(residual, n, line, slabs, scratch + room.means, means, values)
        if kind != FLOAT32:
            if support:
                _copy_run(merged, merged, n, support, start)
            _narrow_run(merged, out + 2 * start, n, kind)
        elif support or values == merged:
            _copy_run(values, out + 4 * start, n, support, start)
        start, line, at, left, skip = start + n, after, at + count, left + decoded - skip - n, 0
        _copy_run(fresh + 4 * (decoded - left), fresh - 4 * left, left, 0, 0)


@_kernel
def _kernel_block_means(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.BlockMeans)
    slabs = Slabs(p.depth, p.rows, p.width, p.inner, p.block, p.blocks, p.per_slab)
    length, in_map = p.rows * p.width * p.inner, -(-p.depth // p.block)
    room = layout.means_scratch(slabs)
    means = scratch + room.means
    largest = U32(0x7F7F7FFF if p.out_kind == BFLOAT16 else 0x7F7FFFFF)  # the last that does not become Inf
    line = first % in_map * p.block
    start = (first // in_map * p.depth + line) * length
    for at in range(first, last):
        lines = min(p.block, p.depth - line)
        source = p.x + 4 * start
        if p.kind != FLOAT32:
            source = scratch + room.slab
            _widen_run(p.x + 2 * start, source, lines * length, p.kind)
        if p.out_kind == FLOAT32:
            means = p.out + 4 * at * p.per_slab
        _slab_means(source, lines, slabs, scratch + room.sums, means)
        m = _pointer(means, types.uint32)
        for c in range(p.per_slab):
            m[c] = m[c] if m[c] & U32(0x7FFFFFFF) <= largest else U32(0x7FC00000)
        if p.out_kind != FLOAT32:
            _narrow_run(means, p.out + 2 * at * p.per_slab, p.per_slab, p.out_kind)
        start, line = start + lines * length, _next(line, lines, p.depth)


@_kernel
def _kernel_spread_blocks(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.SpreadBlocks)
    slabs = Slabs(p.depth, p.rows, p.width, p.inner, p.block, p.blocks, p.per_slab)
    length, in_map = p.rows * p.width * p.inner, -(-p.depth // p.block)
    room = layout.spread_scratch(slabs)
    nothing, slab = scratch + room.nothing, scratch + room.slab
    z = _pointer(nothing, types.float32)
    for c in range(p.block * length):
        z[c] = -_ZERO
    for at in range(first, last):
        line = at % in_map * p.block
        start = (at // in_map * p.depth + line) * length
        lines = min(p.block, p.depth - line)
        means = p.low + 4 * at * p.per_slab
        if p.kind != FLOAT32:
            means = scratch + room.means
            _widen_run(p.low + 2 * at * p.per_slab, means, p.per_slab, p.kind)
        to = p.out + 4 * start if p.out_kind == FLOAT32 else slab
        _slab_add(nothing, lines, slabs, means, to)
        if p.out_kind != FLOAT32:
            _narrow_run(slab, p.out + 2 * start, lines * length, p.out_kind)


@_plain
def _scale_shift(x: int, n: int, begin: int, channels: int, inner: int, scale: int, shift: int) -> None:
    """``n`` values of channels in turn, of which the first is value ``begin`` of its tensor."""
    v, a, b = _pointer(x, types.float32), _pointer(scale, types.float32), _pointer(shift, types.float32)
    channel, within, e = begin // inner % channels, begin % inner, 0
    while e < n:
        if inner == 1:
            run = min(n - e, channels - channel)
            for k in range(run):
                v[e + k] = v[e + k] * a[channel + k] + b[channel + k]
            channel += run
        else:
            run, factor, addend = min(n - e, inner - within), a[channel], b[channel]
            for k in range(run):
                v[e + k] = v[e + k] * factor + addend
            channel, within = channel + 1, 0
        e += run
        channel = 0 if channel == channels else channel


@_inline
def _add_and_mask(values: int, n: int, other: int, mask: int, begin: int) -> None:
    """Adds ``other`` and sets to zero what the mask says, if there are any; value 0 has bit ``begin`` of the mask."""
    if other:
        v, o = _pointer(values, types.float32), _pointer(other, types.float32)
        for e in range(n):
            v[e] += o[e]
    if mask:
        _copy_run(values, values, n, mask, begin)


@_kernel
def _kernel_rebuild_affine(parameters: int, scratch: int, first: int, last: int) -> None:
    p, room = _read(parameters, layout.RebuildAffine), layout.affine_scratch()
    for tile in range(first, last):
        begin = TILE * tile
        n = min(TILE, p.numel - begin)
        values, other = p.x + 4 * begin, p.other + 4 * begin
        if p.kind != FLOAT32:
            values, other = scratch + room.wide, scratch + room.other
            _widen_run(p.x + 2 * begin, values, n, p.kind)
            if p.other:
                _widen_run(p.other + 2 * begin, other, n, p.kind)
        _scale_shift(values, n, begin, p.channels, p.inner, p.scale, p.shift)
        _add_and_mask(values, n, other if p.other else 0, p.support, begin)
        if p.kind != FLOAT32:
            _narrow_run(values, p.x + 2 * begin, n, p.kind)


_STAGE = 8 * len(layout.Stage._fields)


@_kernel
def _kernel_rebuild_chain(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.RebuildChain)
    step, room = layout.groups_at_once(p.group), layout.rebuild_chain_scratch(p.group)
    for g in range(first, last, step):
        stop = min(g + step, last)
        start = _start(g, p.row, p.group)
        n = _start(stop, p.row, p.group) - start
        values, spare, before = scratch + room.wide, scratch + room.other, 0
        if p.other and p.kind == FLOAT32:
            before = p.other + 4 * start
        elif p.other:
            before = spare
            _widen_run(p.other + 2 * start, before, n, p.kind)
        for i in range(p.length):
            stage, at_end = _read(p.stages + _STAGE * i, layout.Stage), i == p.length - 1
            if at_end and p.kind == FLOAT32:
                values = p.out + 4 * start
            coding = Coding(stage.codes, stage.side, p.row, p.group, stage.bits, 0)
            _decode(coding, stage.dither, (stage.key_low, stage.key_high), values, g, stop, scratch + room.codes)
            if stage.support:
                _copy_run(values, values, n, stage.support, start)
            if p.kind != FLOAT32:
                _round_run(values, n, p.kind)
            _scale_shift(values, n, start, p.channels, p.row, stage.scale, stage.shift)
            _add_and_mask(values, n, before, stage.mask, start)
            if p.kind != FLOAT32 and not at_end:
                _round_run(values, n, p.kind)
            before, values, spare = values, spare, values
        if p.kind != FLOAT32:
            _narrow_run(before, p.out + 2 * start, n, p.kind)


@_plain
def _pack_flags(flags: int, n: int, out: int) -> None:
    """Bytes of 0 or 1 to bits; reads up to 7 bytes beyond ``n``, which must be 0."""
    f, o = _pointer(flags, types.uint64), _pointer(out, types.uint8)
    for j in range((n + 7) >> 3):
        o[j] = U8((f[j] * _SPREAD_BITS) >> U64(56))


@_kernel
def _kernel_pack_band(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.PackBand)
    low, high, nan, room = I32(p.first), I32(p.last), p.nan != 0, layout.band_scratch()
    flags, wide = scratch + room.flags, scratch + room.wide
    f = _pointer(flags, types.uint8)
    above_zero = low == 1 and high == 0x7F800000 and nan
    for tile in range(first, last):
        n, done, out = min(TILE, p.numel - TILE * tile), 0, p.out + (TILE >> 3) * tile
        if p.kind == BOOL:
            b = _pointer(p.x + TILE * tile, types.uint8)
            for i in range(n):
                f[i] = b[i]
        else:
            source = p.x + 4 * TILE * tile
            if p.kind != FLOAT32:
                source = wide
                _widen_run(p.x + 2 * TILE * tile, wide, n, p.kind)
            if above_zero:  # a ReLU's band: a comparison gives the bits at once
                done = n & ~7
                _mark(source, done, out)
            v = _pointer(source, types.float32)
            for i in range(done, n):
                o = _order(v[i])
                f[i - done] = U8((o >= low and o <= high) or (nan and (o > 0x7F800000 or o < -0x7F800001)))
        for i in range(n - done, (n - done + 7) & ~7):
            f[i] = U8(0)
        _pack_flags(flags, n - done, out + (done >> 3))


@_inline
def _unpack_bits(mask: int, out: Any, first: int, n: int, inside: Any, outside: Any) -> None:
    m = _pointer(mask, types.uint8)
    for j in range(n >> 3):
        byte = U32(m[j])
        for k in range(8):
            out[first + 8 * j + k] = inside if byte & U32(1 << k) else outside
    for e in range(n & ~7, n):
        out[first + e] = inside if (m[e >> 3] >> (e & 7)) & 1 else outside


@_kernel
def _kernel_unpack_band(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.UnpackBand)
    out, item, inside, outside = p.out, p.item, p.inside, p.outside
    start = first * TILE
    n = min(last * TILE, p.numel) - start
    mask = p.mask + (start >> 3)
    if item == 1:
        _unpack_bits(mask, _pointer(out, types.uint8), start, n, U8(inside), U8(outside))
    elif item == 2:
        _unpack_bits(mask, _pointer(out, types.uint16), start, n, U16(inside), U16(outside))
    elif item == 4:
        _unpack_bits(mask, _pointer(out, types.uint32), start, n, U32(inside), U32(outside))
    else:
        _unpack_bits(mask, _pointer(out, types.int64), start, n, inside, outside)


_STRETCH = 2048  # values


@_inline
def _keep_bits(mask: int, x: Any, out: Any, first: int, n: int, every: Any, none: Any) -> None:
    # Bits are spread over a stretch that stays in the first cache, and then meet the values: both loops become vectors,
    # where one that reads a value only if its bit is set does not.
    for i in range(0, n, _STRETCH):
        m = min(_STRETCH, n - i)
        _unpack_bits(mask + (i >> 3), out, first + i, m, every, none)
        for e in range(first + i, first + i + m):
            out[e] &= x[e]


@_inline
def _keep_in_place(mask: int, x: int, n: int, item: int) -> None:
    # In vectors by hand: a compiler would not write where it may still have to read.
    bits, m, w = _pointer(mask, types.uint8), _pointer(mask, types.uint16), _pointer(mask, types.uint32)
    if item == 2:
        for j in range(n >> 5):
            _keep_lanes(w[j], x + 64 * j, x + 64 * j, 2)
        shorts = _pointer(x, types.uint16)
        for e in range(n & ~31, n):
            shorts[e] = shorts[e] & U16(-((bits[e >> 3] >> (e & 7)) & 1))
    else:
        for j in range(n >> 4):
            _keep_lanes(m[j], x + 64 * j, x + 64 * j, 4)
        words = _pointer(x, types.uint32)
        for e in range(n & ~15, n):
            words[e] = words[e] & U32(-((bits[e >> 3] >> (e & 7)) & 1))


@_kernel
def _kernel_mask_values(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.MaskValues)
    x, out = p.x, p.out
    start = first * TILE
    n = min(last * TILE, p.numel) - start
    mask = p.mask + (start >> 3)
    if p.out == p.x:
        _keep_in_place(mask, x + p.item * start, n, p.item)
    elif p.item == 2:
        _keep_bits(mask, _pointer(x, types.uint16), _pointer(out, types.uint16), start, n, U16(0xFFFF), U16(0))
    else:
        _keep_bits(mask, _pointer(x, types.uint32), _pointer(out, types.uint32), start, n, U32(0xFFFFFFFF), U32(0))


@_inline
def _pack_ints(x: Any, out: int, first: int, n: int, offset: int, bits: int) -> None:
    p = _pointer(out, types.uint8)
    per = 8 // bits
    for j in range(n // per):
        byte = U8(0)
        for k in range(per):
            byte |= U8(U8(x[first + per * j + k] - offset) << (k * bits))
        p[j] = byte
    if n % per:
        byte = U8(0)
        for k in range(n % per):
            byte |= U8(U8(x[first + n // per * per + k] - offset) << (k * bits))
        p[n // per] = byte


@_inline
def _pack_any(x: Any, out: int, first: int, n: int, offset: int, bits: int) -> None:
    if bits == 1:
        _pack_ints(x, out, first, n, offset, 1)
    elif bits == 2:
        _pack_ints(x, out, first, n, offset, 2)
    elif bits == 4:
        _pack_ints(x, out, first, n, offset, 4)
    elif bits == 8:
        _pack_ints(x, out, first, n, offset, 8)
    elif bits == 16:
        h = _pointer(out, types.uint16)
        for i in range(n):
            h[i] = U16(x[first + i] - offset)
    else:
        w = _pointer(out, types.uint32)
        for i in range(n):
            w[i] = U32(x[first + i] - offset)


@_kernel
def _kernel_pack_uints(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.PackUints)
    start = first * TILE
    n = min(last * TILE, p.numel) - start
    out = p.out + (start * p.bits >> 3)
    if p.item == 8:
        _pack_any(_pointer(p.x, types.int64), out, start, n, p.offset, p.bits)
    elif p.item == 4:
        _pack_any(_pointer(p.x, types.int32), out, start, n, p.offset, p.bits)
    else:
        _pack_any(_pointer(p.x, types.int8), out, start, n, p.offset, p.bits)


@_inline
def _unpack_ints(packed: int, out: Any, first: int, n: int, offset: int, bits: int) -> None:
    p = _pointer(packed, types.uint8)
    per, mask = 8 // bits, (1 << bits) - 1
    for j in range(n // per):
        byte = U32(p[j])
        for k in range(per):
            out[first + per * j + k] = np.int64((byte >> U32(k * bits)) & mask) + offset
    for e in range(n // per * per, n):
        out[first + e] = np.int64((p[e // per] >> (e % per * bits)) & mask) + offset


@_inline
def _unpack_any(packed: int, out: Any, first: int, n: int, offset: int, bits: int) -> None:
    if bits == 1:
        _unpack_ints(packed, out, first, n, offset, 1)
    elif bits == 2:
        _unpack_ints(packed, out, first, n, offset, 2)
    elif bits == 4:
        _unpack_ints(packed, out, first, n, offset, 4)
    elif bits == 8:
        _unpack_ints(packed, out, first, n, offset, 8)
    elif bits == 16:
        h = _pointer(packed, types.uint16)
        for i in range(n):
            out[first + i] = np.int64(h[i]) + offset
    else:
        w = _pointer(packed, types.uint32)
        for i in range(n):
            out[first + i] = np.int64(w[i]) + offset


@_kernel
def _kernel_unpack_uints(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.UnpackUints)
    start = first * TILE
    n = min(last * TILE, p.numel) - start
    packed = p.packed + (start * p.bits >> 3)
    if p.item == 8:
        _unpack_any(packed, _pointer(p.out, types.int64), start, n, p.offset, p.bits)
    elif p.item == 4:
        _unpack_any(packed, _pointer(p.out, types.int32), start, n, p.offset, p.bits)
    else:
        _unpack_any(packed, _pointer(p.out, types.int8), start, n, p.offset, p.bits)


@_inline
def _tap(position: int, start: int, size: int, span: int, numbers: Any) -> Any:
    found = position - start
    inside = (position >= 0) & (position < size) & (found >= 0) & (found < span)
    number = numbers[found if inside else 0]
    return number if inside else I32(-1)


@_kernel
def _kernel_pack_taps(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.PackTaps)
    x, s, none = _pointer(p.x, types.int64), _pointer(p.starts, types.int64), _pointer(p.none, types.int64)
    numbers, tap = _pointer(p.numbers, types.int32), _pointer(scratch + layout.taps_scratch().wide, types.int32)
    windows, inner, span, size = p.windows, p.inner, p.span, p.size
    for tile in range(first, last):
        begin = TILE * tile
        n, wrong, e = min(TILE, p.numel - begin), I32(0), 0
        window, within = begin // inner % windows, begin % inner
        while e < n:
            if inner == 1:
                run = min(n - e, windows - window)
                for k in range(run):
                    tap[e + k] = _tap(x[begin + e + k], s[window + k], size, span, numbers)
                window += run
            else:
                run, start = min(n - e, inner - within), s[window]
                for k in range(run):
                    tap[e + k] = _tap(x[begin + e + k], start, size, span, numbers)
                window, within = window + 1, 0
            e += run
            window = 0 if window == windows else window
        for e in range(n):
            wrong += I32(tap[e] < 0)
            tap[e] = max(tap[e], I32(0))
        none[tile] = wrong
        _pack_any(tap, p.out + (begin * p.bits >> 3), 0, n, 0, p.bits)


@_kernel
def _kernel_unpack_taps(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.UnpackTaps)
    out, s, taps = _pointer(p.out, types.int64), _pointer(p.starts, types.int64), _pointer(p.taps, types.int64)
    windows, inner = p.windows, p.inner
    tap = _pointer(scratch + layout.taps_scratch().wide, types.int32)
    for tile in range(first, last):
        begin = TILE * tile
        n, e = min(TILE, p.numel - begin), 0
        window, within = begin // inner % windows, begin % inner
        _unpack_any(p.packed + (begin * p.bits >> 3), tap, 0, n, 0, p.bits)
        while e < n:
            if inner == 1:
                run = min(n - e, windows - window)
                for k in range(run):
                    out[begin + e + k] = taps[tap[e + k]] + s[window + k]
                window += run
            else:
                run, start = min(n - e, inner - within), s[window]
                for k in range(run):
                    out[begin + e + k] = taps[tap[e + k]] + start
                window, within = window + 1, 0
            e += run
            window = 0 if window == windows else window


# ---------------------------------------------------------------- batch norm


@_intrinsic
def _call(typing: Any, function: Any, parameters: Any, scratch: Any, first: Any, last: Any) -> Any:
    """Calls the compiled kernel at an address, so that one launcher serves all of them."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word] * 4)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


def _load_kind(builder: Any, kind: int, start: Any, row: Any) -> Any:
    """A row of sixteen values of the type, as float32."""
    if kind == FLOAT32:
        return _load(builder, _FLOATS, start, _times(builder, row, 4 * _SIXTEEN))
    found = _load(builder, _SHORTS, start, _times(builder, row, 2 * _SIXTEEN))
    return builder.bitcast(builder.shl(builder.zext(found, _WORDS), _all(16)), _FLOATS)


def _store_kind(builder: Any, kind: int, values: Any, start: Any, row: Any) -> None:
    """A row of sixteen values of the type, from float32; see :func:`_narrow`."""
    if kind == FLOAT32:
        _store(builder, values, start, _times(builder, row, 4 * _SIXTEEN))
        return
    words = builder.bitcast(values, _WORDS)
    odd = builder.and_(builder.lshr(words, _all(16)), _all(1))
    nearest = builder.lshr(builder.add(builder.add(words, _all(0x7FFF)), odd), _all(16))
    words = builder.select(builder.fcmp_unordered("uno", values, values), _all(0xFFFF), nearest)
    _store(builder, builder.trunc(words, _SHORTS), start, _times(builder, row, 2 * _SIXTEEN))


@_intrinsic
def _norm_sums(typing: Any, x: Any, grad: Any, rows: Any, rest: Any, more: Any, mean: Any, kind: Any) -> Any:
    """The sum of ``grad`` and that of ``(x - mean) * grad``, over ``rows`` rows of sixteen and ``more`` from ``rest``.

    ``kind`` is that of ``grad``; ``rest`` is in float32. In vectors by hand: the order of the sums is fixed, which
    keeps a compiler from finding them.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, grad, rows, rest, more, mean, _ = arguments
        sums = [cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * _SIXTEEN)) for _ in range(2)]
        mean, beside = _same(builder, mean), builder.add(rest, ir.Constant(_LONG, 4 * _SIXTEEN))
        for values, factors, count, of in ((x, grad, rows, kind.literal_value), (rest, beside, more, FLOAT32)):
            with cgutils.for_range(builder, count) as row:
                g = _load_kind(builder, of, factors, row.index)
                away = builder.fsub(_load_kind(builder, FLOAT32, values, row.index), mean)
                product = builder.fmul(away, g)
                for total, term in zip(sums, (g, product), strict=True):
                    builder.store(builder.fadd(builder.load(total), term), total)
        found = []
        for total in sums:
            lanes, half = builder.load(total), _SIXTEEN // 2
            while half:
                other = ir.Constant(_WORDS, [(k + half) % _SIXTEEN for k in range(_SIXTEEN)])
                lanes = builder.fadd(lanes, builder.shuffle_vector(lanes, lanes, other))
                half //= 2
            found.append(builder.extract_element(lanes, ir.Constant(_WORD, 0)))
        return context.make_tuple(builder, signature.return_type, found)

    return types.UniTuple(types.float32, 2)(*[types.int64] * 5, types.float32, kind), generate


@_intrinsic
def _norm_rows(
    typing: Any, x: Any, grad: Any, out: Any, rows: Any, mean: Any, shared: Any, slope: Any, factor: Any, kind: Any
) -> Any:
    """``((grad - shared) - (x - mean) * slope) * factor`` for rows of sixteen; ``out`` may be ``grad``.

    Both are of the type ``kind``.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, grad, out, rows, *numbers, _ = arguments
        of = kind.literal_value
        mean, shared, slope, factor = (_same(builder, number) for number in numbers)
        with cgutils.for_range(builder, rows) as row:
            away = builder.fmul(builder.fsub(_load_kind(builder, FLOAT32, x, row.index), mean), slope)
            value = builder.fsub(builder.fsub(_load_kind(builder, of, grad, row.index), shared), away)
            _store_kind(builder, of, builder.fmul(value, factor), out, row.index)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, *[types.float32] * 4, kind), generate


@_plain
def _decode_channels(p: Any, first: int, last: int, record: int, values: int, length: int, spare: int) -> None:
    """These channels of every sample, one sample ``length`` values after the other."""
    place, size = _pointer(record, types.int64), p.channels * p.inner
    if p.unit == SLABS:
        for n in range(p.samples):
            place[p.place] = values + 4 * (n * length - n * size - first * p.inner)
            _call(p.decode, record, spare, (n * p.channels + first) * p.row, (n * p.channels + last) * p.row)
    elif p.unit == GROUPS:
        for n in range(p.samples):
            begin, end = n * size + first * p.inner, n * size + last * p.inner
            place[p.place] = values + 4 * (n * length - begin)
            groups = _group_at(begin, p.row, p.group), _group_at(end - 1, p.row, p.group) + 1
            _call(p.decode, record, spare, groups[0], groups[1])
    else:
        place[p.place] = values - 4 * first * p.inner
        tiles = (p.channels + TILE_CHANNELS - 1) // TILE_CHANNELS
        before, after = first // TILE_CHANNELS, (last + TILE_CHANNELS - 1) // TILE_CHANNELS
        for block in range((p.samples + p.row - 1) // p.row):
            _call(p.decode, record, spare, block * tiles + before, block * tiles + after)


@_inline
def _gradient_at(row: int, k: int, kind: int) -> Any:
    """The ``k``-th value of a row."""
    return _pointer(row, types.float32)[k] if kind == FLOAT32 else _widen(_pointer(row, types.uint16)[k], BFLOAT16)


@_kernel
def _kernel_norm_backward(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.NormBackward)
    inner, count, size = p.inner, np.float64(p.samples * p.inner), 4 if p.kind == FLOAT32 else 2
    room = layout.norm_scratch(p.samples, p.step * inner, p.group, 0)
    record, rest, spare = scratch + room.record, scratch + room.rest, scratch + room.spare
    values = scratch + room.values + 4 * p.group
    words, own = _pointer(p.parameters, types.int64), _pointer(record, types.int64)
    for w in range(p.words):
        own[w] = words[w]
    means, inverses = _pointer(p.mean, types.float32), _pointer(p.invstd, types.float32)
    weights, last_values = _pointer(p.weight, types.float32), _pointer(rest, types.float32)
    for_weight, for_bias = _pointer(p.for_weight, types.float32), _pointer(p.for_bias, types.float32)
    rows, more = inner // _SIXTEEN, inner % _SIXTEEN
    for item in range(first, last):
        begin = item * p.step
        end = min(begin + p.step, p.channels)
        _decode_channels(p, begin, end, record, values, room.length, spare)
        for c in range(begin, end):
            mean, invstd = means[c], inverses[c]
            total, dot = 0.0, 0.0
            for k in range(more, _SIXTEEN):
                last_values[k], last_values[_SIXTEEN + k] = mean, _ZERO
            for n in range(p.samples):
                x = values + 4 * (n * room.length + (c - begin) * inner)
                grad = p.grad + size * (n * p.channels + c) * inner
                if more:
                    v = _pointer(x + 64 * rows, types.float32)
                    for k in range(more):
                        last_values[k] = v[k]
                        last_values[_SIXTEEN + k] = _gradient_at(grad, _SIXTEEN * rows + k, p.kind)
                if p.kind == FLOAT32:
                    found = _norm_sums(x, grad, rows, rest, 1 if more else 0, mean, FLOAT32)
                else:
                    found = _norm_sums(x, grad, rows, rest, 1 if more else 0, mean, BFLOAT16)
                total, dot = total + found[0], dot + found[1]
            wide = np.float64(invstd)
            shared, slope = F32(total / count), F32(dot * wide * wide / count)
            factor = invstd * weights[c] if p.weight else invstd
            for_weight[c], for_bias[c] = F32(dot * wide), F32(total)
            for n in range(p.samples):
                x, at = values + 4 * (n * room.length + (c - begin) * inner), size * (n * p.channels + c) * inner
                grad, out = p.grad + at, p.out + at
                if p.kind == FLOAT32:
                    _norm_rows(x, grad, out, rows, mean, shared, slope, factor, FLOAT32)
                else:
                    _norm_rows(x, grad, out, rows, mean, shared, slope, factor, BFLOAT16)
                v = _pointer(x, types.float32)
                for k in range(_SIXTEEN * rows, inner):
                    value = ((_gradient_at(grad, k, p.kind) - shared) - (v[k] - mean) * slope) * factor
                    if p.kind == FLOAT32:
                        _pointer(out, types.float32)[k] = value
                    else:
                        _pointer(out, types.uint16)[k] = _narrow(value, BFLOAT16)


_FEW, _WIDE = (ir.VectorType(kind, NORM_CHANNELS) for kind in (_FLOAT, ir.DoubleType()))


@_intrinsic
def _chained_sums(typing: Any, x: Any, apart: Any, count: Any, means: Any, sums: Any, squared: Any) -> Any:
    """Adds ``count`` times eight values of eight channels, which lie ``apart`` values from each other, to eight sums.

    Each sum is a float64 to which one value is added after the other; with ``squared`` the square of its difference to
    the mean. A sum waits for its last addition, so eight channels side by side take the time of one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, apart, count, means, sums, _ = arguments
        total = cgutils.alloca_once_value(builder, _load(builder, _WIDE, sums))
        lanes = _load(builder, _FEW, means)
        chosen = [ir.Constant(ir.VectorType(_WORD, NORM_CHANNELS), [r] * NORM_CHANNELS) for r in range(NORM_CHANNELS)]
        spread = [builder.shuffle_vector(lanes, lanes, lane) for lane in chosen]
        with cgutils.for_range(builder, count) as row:
            at = builder.add(x, _times(builder, row.index, 4 * NORM_CHANNELS))
            values = [_load(builder, _FEW, at, _times(builder, apart, 4 * r)) for r in range(NORM_CHANNELS)]
            if squared.literal_value:
                away = [builder.fsub(value, mean) for value, mean in zip(values, spread, strict=True)]
                values = [builder.fmul(value, value) for value in away]
            found = builder.load(total)
            for column in _zipped(builder, values):
                found = builder.fadd(found, builder.fpext(column, _WIDE))
            builder.store(found, total)
        _store(builder, builder.load(total), sums)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5, squared), generate


@_intrinsic
def _fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.fma(*arguments)

    return types.float32(*[types.float32] * 3), generate


@_inline
def _sum_channels(p: Any, c: int, means: int, sums: int, squared: int) -> None:
    """Of eight channels from ``c`` on, over all samples: the sums of values, or of their squares around the means."""
    total, mean = _pointer(sums, types.float64), _pointer(means, types.float32)
    whole = p.inner // NORM_CHANNELS
    for k in range(NORM_CHANNELS):
        total[k] = 0.0
    for n in range(p.samples):
        start = p.x + 4 * (n * p.channels + c) * p.inner
        if squared:
            _chained_sums(start, p.inner, whole, means, sums, 1)
        else:
            _chained_sums(start, p.inner, whole, means, sums, 0)
        x = _pointer(start, types.float32)
        for k in range(NORM_CHANNELS):
            for j in range(NORM_CHANNELS * whole, p.inner):
                away = x[k * p.inner + j] - mean[k]
                total[k] += np.float64(away * away if squared else x[k * p.inner + j])


@_kernel
def _kernel_native_batch_norm(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.BatchNorm)
    room = layout.batch_norm_scratch()
    means, sums = scratch + room.means, scratch + room.sums
    mean, total = _pointer(means, types.float32), _pointer(sums, types.float64)
    numbers = _pointer(p.numbers, types.float64)
    eps, momentum = numbers[0], F32(numbers[1])
    rest = _ONE - momentum
    count = np.float64(p.samples * p.inner)
    weights, biases = _pointer(p.weight, types.float32), _pointer(p.bias, types.float32)
    running_mean, running_var = _pointer(p.running_mean, types.float32), _pointer(p.running_var, types.float32)
    kept, inverses = _pointer(p.mean, types.float32), _pointer(p.invstd, types.float32)
    for item in range(first, last):
        c = NORM_CHANNELS * item
        _sum_channels(p, c, means, sums, 0)
        for k in range(NORM_CHANNELS):
            mean[k] = F32(total[k] / count)
        _sum_channels(p, c, means, sums, 1)
        for k in range(NORM_CHANNELS):
            squares = F32(total[k])
            invstd = F32(1.0 / np.sqrt(np.float64(squares / F32(count)) + eps))
            kept[c + k], inverses[c + k] = mean[k], invstd
            if p.running_mean:
                running_mean[c + k] = momentum * mean[k] + rest * running_mean[c + k]
            if p.running_var:
                unbiased = np.float64(squares / F32(count - 1.0))
                running_var[c + k] = F32(np.float64(momentum) * unbiased + np.float64(rest * running_var[c + k]))
            scale = invstd * weights[c + k] if p.weight else invstd
            shift = _fused(-mean[k], scale, biases[c + k] if p.bias else _ZERO)
            for n in range(p.samples):
                at = 4 * (n * p.channels + c + k) * p.inner
                x, out = _pointer(p.x + at, types.float32), _pointer(p.out + at, types.float32)
                for j in range(p.inner):
                    out[j] = _fused(x[j], scale, shift)


@_kernel
def _kernel_max_pool2d_with_indices(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.MaxPool)
    room = layout.max_pool_scratch(p.columns, p.width)
    best, place = _pointer(scratch + room.best, types.float32), _pointer(scratch + room.place, types.int32)
    evens, odds = _pointer(scratch + room.evens, types.float32), _pointer(scratch + room.odds, types.float32)
    for item in range(first, last):
        for r in range(p.rows):
            top = r * p.down - p.above
            skipped = (-top + p.row_apart - 1) // p.row_apart if top < 0 else 0
            for c in range(p.columns):
                left = c * p.along - p.before
                left += (-left + p.apart - 1) // p.apart * p.apart if left < 0 else 0
                best[c], place[c] = _MINUS_INF, I32((top + skipped * p.row_apart) * p.width + left)
            for i in range(skipped, p.tall):
                row = top + i * p.row_apart
                if row >= p.height:
                    break
                begun = (item * p.height + row) * p.width
                line = p.x + 4 * begun
                if p.kind != FLOAT32:
                    line = scratch + room.wide
                    _widen_run(p.x + 2 * begun, line, p.width, p.kind)
                if p.along == 2 and p.apart == 1 and (p.wide == 2 or p.wide == 3):
                    _split_line(line, p.before, p.width, p.columns, evens, odds)
                    if p.wide == 3:
                        _take_largest(evens, odds, row * p.width - p.before, 3, p.columns, best, place)
                    else:
                        _take_largest(evens, odds, row * p.width - p.before, 2, p.columns, best, place)
                    continue
                for j in range(p.wide):
                    shift = j * p.apart - p.before
                    begin = (-shift + p.along - 1) // p.along if shift < 0 else 0
                    end = min(p.columns, (p.width - 1 - shift) // p.along + 1) if shift < p.width else 0
                    x, at = _pointer(line + 4 * shift, types.float32), row * p.width + shift
                    if p.along == 2:
                        _take_larger(x, at, 2, begin, end, best, place)
                    elif p.along == 1:
                        _take_larger(x, at, 1, begin, end, best, place)
                    else:
                        _take_larger(x, at, p.along, begin, end, best, place)
            start = (item * p.rows + r) * p.columns
            places = _pointer(p.places + 8 * start, types.int64)
            for c in range(p.columns):
                places[c] = np.int64(place[c])
            size = 4 if p.kind == FLOAT32 else 2
            _narrow_run(scratch + room.best, p.out + size * start, p.columns, p.kind)


@_inline
def _split_line(line: int, before: int, width: int, columns: int, evens: Any, odds: Any) -> None:
    """Every other value of a line that begins ``before`` values earlier, and those between; -Inf is outside of it."""
    x = _pointer(line, types.float32)
    begin = (before + 1) // 2
    end = min(columns + 1, (width + before) // 2)
    for k in range(columns + 1):
        evens[k], odds[k] = _MINUS_INF, _MINUS_INF
    for k in range(begin, end):
        evens[k], odds[k] = x[2 * k - before], x[2 * k + 1 - before]
    if before % 2:
        odds[begin - 1] = x[0]
    if end <= columns and 2 * end - before == width - 1:
        evens[end] = x[width - 1]


@_inline
def _take_largest(evens: Any, odds: Any, at: int, wide: int, columns: int, best: Any, place: Any) -> None:
    """What :func:`_take_larger` does for windows of two or three values, two apart, of which the first is ``at``."""
    for c in range(columns):
        value, where, one = best[c], place[c], evens[c]
        taken = (one > value) | (one != one)
        value, where = one if taken else value, I32(at + 2 * c) if taken else where
        one = odds[c]
        taken = (one > value) | (one != one)
        value, where = one if taken else value, I32(at + 2 * c + 1) if taken else where
        if wide == 3:
            one = evens[c + 1]
            taken = (one > value) | (one != one)
            value, where = one if taken else value, I32(at + 2 * c + 2) if taken else where
        best[c], place[c] = value, where


@_inline
def _take_larger(x: Any, at: int, along: int, begin: int, end: int, best: Any, place: Any) -> None:
    """Replaces results by values that are larger, or NaN; of equal ones the first stays. ``x[0]`` is value ``at``."""
    for c in range(begin, end):
        value = x[c * along]
        taken = (value > best[c]) | (value != value)
        best[c] = value if taken else best[c]
        place[c] = I32(at + c * along) if taken else place[c]


_SIGN_BIT = {2: 0x8000, 4: 0x80000000}  # by the bytes of a value
_INFINITY = {FLOAT32: 0x7F800000, BFLOAT16: 0x7F80, FLOAT16: 0x7C00}


@_intrinsic
def _rectify(typing: Any, x: Any, out: Any, mask: Any, rows: Any, kind: Any) -> Any:
    """Rows of sixteen values with 0.0 in place of those below; the bits of values above zero, or NaN.

    As integers: -0.0 and NaN, whatever its sign, stay as they are.
    """
    size = 4 if kind.literal_value == FLOAT32 else 2
    sign, infinity = _SIGN_BIT[size], _INFINITY[kind.literal_value]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, out, mask, rows, _ = arguments
        word = ir.IntType(8 * size)
        lanes = ir.VectorType(word, _SIXTEEN)

        def same(value: int) -> Any:
            return ir.Constant(lanes, [value] * _SIXTEEN)

        with cgutils.for_range(builder, rows) as row:
            offset = _times(builder, row.index, size * _SIXTEEN)
            values = _load(builder, lanes, x, offset)
            negative = builder.icmp_unsigned("<", builder.sub(values, same(sign + 1)), same(infinity))
            kept = builder.select(negative, same(0), values)
            bits = builder.icmp_unsigned("!=", builder.shl(kept, same(1)), same(0))
            _store(builder, kept, out, offset)
            _store(builder, builder.bitcast(bits, ir.IntType(16)), mask, _times(builder, row.index, 2))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 4, kind), generate


@_inline
def _rectify_tile(x: int, out: int, mask: int, n: int, spare: int, kind: int, item: Any) -> None:
    """Values of a tile; the last ones are rectified in ``spare``, where zeros follow them."""
    rows, size = n // _SIXTEEN, 4 if kind == FLOAT32 else 2
    _rectify(x, out, mask, rows, kind)
    more, at = n - _SIXTEEN * rows, size * _SIXTEEN * rows
    if more:
        v, w, s = _pointer(x + at, item), _pointer(out + at, item), _pointer(spare, item)
        m, bits = _pointer(mask + 2 * rows, types.uint8), _pointer(spare + 64, types.uint8)
        for k in range(8):
            _store64(spare + 8 * k, U64(0))
        for k in range(more):
            s[k] = v[k]
        _rectify(spare, spare, spare + 64, 1, kind)
        for k in range(more):
            w[k] = s[k]
        for k in range((more + 7) >> 3):
            m[k] = bits[k]


@_kernel
def _kernel_relu(parameters: int, scratch: int, first: int, last: int) -> None:
    p = _read(parameters, layout.Relu)
    for tile in range(first, last):
        begin = TILE * tile
        n, mask = min(TILE, p.numel - begin), p.mask + (begin >> 3)
        if p.kind == FLOAT32:
            _rectify_tile(p.x + 4 * begin, p.out + 4 * begin, mask, n, scratch, FLOAT32, types.uint32)
        elif p.kind == BFLOAT16:
            _rectify_tile(p.x + 2 * begin, p.out + 2 * begin, mask, n, scratch, BFLOAT16, types.uint16)
        else:
            _rectify_tile(p.x + 2 * begin, p.out + 2 * begin, mask, n, scratch, FLOAT16, types.uint16)


# ---------------------------------------------------------------- launching


@_intrinsic
def _thread_number(typing: Any, function: Any) -> Any:
    """Calls the C function ``int f(void)`` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        found = builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])
        return builder.sext(found, ir.IntType(64))

    return types.int64(types.int64), generate


@_intrinsic
def _seconds(typing: Any, function: Any) -> Any:
    """Calls the C function ``double f(void)`` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.DoubleType(), [])
        return builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), [])

    return types.float64(types.int64), generate


@_intrinsic
def _take(typing: Any, address: Any, count: Any) -> Any:
    """Adds ``count`` to the integer at an address, at one blow for all threads, and returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        address, count = arguments
        word = builder.inttoptr(address, ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", word, count, "monotonic")

    return types.int64(types.int64, types.int64), generate


def team(launch: int) -> None:
    """What each thread of a team runs: it takes items as long as there are any, and has scratch of its own."""
    p = _read(launch, layout.Launch)
    thread, begin = _thread_number(p.thread_number), _seconds(p.clock)
    first, own = _take(p.progress, p.chunk), 0
    while first < p.items:
        last = min(first + p.chunk, p.items)
        _call(p.kernel, p.parameters, p.scratch + thread * p.stride, first, last)
        own += last - first
        first = _take(p.progress, p.chunk)
    if thread == 0:
        nanoseconds = np.int64(1e9 * (_seconds(p.clock) - begin))
        _write(p.progress, layout.Progress(first, own, nanoseconds))


# ---------------------------------------------------------------- random numbers of torch's own generator

_MIDDLE = 397  # words between a word of a Mersenne Twister and the one that it meets (Matsumoto and Nishimura 1998)


@_inline
def _twisted(this: Any, following: Any, met: Any) -> Any:
    mixed = U32((this & U32(0x80000000)) | (following & U32(0x7FFFFFFF)))
    return U32(met ^ (mixed >> U32(1)) ^ (U32(0x9908B0DF) if following & U32(1) else U32(0)))


@_plain
def _twist(words: int) -> None:
    """The next 624 words, in place of the last."""
    w = _pointer(words, types.uint32)
    for i in range(TWISTER - _MIDDLE):
        w[i] = _twisted(w[i], w[i + 1], w[i + _MIDDLE])
    for i in range(TWISTER - _MIDDLE, TWISTER - 1):
        w[i] = _twisted(w[i], w[i + 1], w[i + _MIDDLE - TWISTER])
    w[TWISTER - 1] = _twisted(w[TWISTER - 1], w[0], w[_MIDDLE - 1])


@_plain
def _temper(words: int, n: int, out: int) -> None:
    w, o = _pointer(words, types.uint32), _pointer(out, types.uint32)
    for i in range(n):
        y = w[i]
        y = U32(y ^ (y >> U32(11)))
        y = U32(y ^ ((y << U32(7)) & U32(0x9D2C5680)))
        y = U32(y ^ ((y << U32(15)) & U32(0xEFC60000)))
        o[i] = U32(y ^ (y >> U32(18)))


@_inline
def _choose(drawn: int, n: int, below: int, out: Any, first: int, one: Any, none: Any) -> None:
    """Two words make a number of 64 bits, of which the lowest 53 count."""
    d, most = _pointer(drawn, types.uint64), U64(below)
    for i in range(n):
        number = U64(((d[i] << U64(32)) | (d[i] >> U64(32))) & U64(0x1FFFFFFFFFFFFF))
        out[first + i] = one if number < most else none


@_kernel
def _kernel_bernoulli(parameters: int, scratch: int, first: int, last: int) -> None:
    p, room = _read(parameters, layout.Bernoulli), layout.bernoulli_scratch()
    left, at = _pointer(p.state + 8, types.int32), _pointer(p.state + 16, types.int64)
    state = _pointer(p.state + 24, types.uint64)
    words, drawn = scratch + room.words, scratch + room.drawn
    w, d = _pointer(words, types.uint32), _pointer(drawn, types.uint32)
    for i in range(TWISTER):
        w[i] = U32(state[i])
    used, done, held = TWISTER if left[0] == 1 else at[0], 0, 0
    while done < p.numel:
        if used == TWISTER:
            _twist(words)
            used = 0
        taken = min(TWISTER - used, 2 * (p.numel - done) - held)
        _temper(words + 4 * used, taken, drawn + 4 * held)
        pairs = (held + taken) >> 1
        if p.size == 4:
            _choose(drawn, pairs, p.below, _pointer(p.out, types.uint32), done, U32(p.one), U32(0))
        else:
            _choose(drawn, pairs, p.below, _pointer(p.out, types.uint16), done, U16(p.one), U16(0))
        d[0] = d[held + taken - 1]
        used, done, held = used + taken, done + pairs, (held + taken) & 1
    for i in range(TWISTER):
        state[i] = U64(w[i])
    left[0], at[0] = I32(TWISTER + 1 - used), used


# ---------------------------------------------------------------- machine code


class _Compiler(dispatcher._FunctionCompiler):  # type: ignore[misc]
    def _customize_flags(self, flags: Any) -> Any:
        flags.no_cpython_wrapper, flags.no_cfunc_wrapper = True, True
        flags.enable_pyobject, flags.no_compile = False, True  # the library gets one function more
        return flags


def machine_code(name: str, entry: str) -> bytes:
    """The object file of a kernel, or of ``team``, whose C function has the name ``entry``.

    It needs nothing of Python or Numba. Nothing in a kernel raises; if something did, the process would end there,
    and not go on with a wrong number.
    """
    function = team if name == team.__name__ else KERNELS[name]
    words = function.__code__.co_argcount
    with locks.global_compiler_lock:
        target = registry.cpu_target
        made = _Compiler(function, target, {"error_model": "numpy"}, {}, compiler.Compiler)
        made = made.compile((types.int64,) * words, types.void)
        context, library, about = target.target_context, made.library, made.fndesc
        module = context.create_module(entry)
        kind = context.call_conv.get_function_type(about.restype, about.argtypes)
        own = ir.Function(module, ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * words), entry)
        builder = ir.IRBuilder(own.append_basic_block())
        callee = ir.Function(module, kind, about.llvm_func_name)
        status, _ = context.call_conv.call_function(builder, callee, about.restype, about.argtypes, own.args)
        with builder.if_then(status.is_error, likely=False):
            builder.call(ir.Function(module, ir.FunctionType(ir.VoidType(), []), "abort"), [])
        builder.ret_void()
        library.add_ir_module(module)
        library.finalize()
        code: bytes = library.codegen._tm.emit_object(library._final_module)
        return code
