"""The kernels for GPUs, in Triton: the bytes of ``reference``. ``gpu`` launches them.

What makes the bytes the same on every device
    Integers alone decide ranges (the least and the greatest of integers that sort as floats do, so no rule for NaN
    matters), directed rounding, random numbers, codes, and the rounding to bfloat16.
    Floats meet six operations only, which IEEE 754 rounds correctly: ``+``, ``-``, ``*``, ``div_rn``, a comparison and
    the conversion to float16. No sum of floats is a ``tl.sum``: order is part of the format. Products and sums must
    not be fused,
    so every launch says ``enable_fp_fusion=False``; ``benchmarks/gpu_aot.py`` looks for it in machine code.

How a group is held
    Its ``n`` values are four strips of ``lane = ceil(n / 4)``, because one hash serves four values that lie ``lane``
    apart. A plane of 2 bits has byte ``j`` for the four values of lane ``j``, for any ``n``; planes of 4 and 8 bits
    are made of whole strips if four divides ``n``, and one of 1 bit if lanes are a power of two. Otherwise ``_gather``
    reads the values again, from cache, in the order of the plane.

Values ``raw`` of bfloat16 are passed as 16-bit integers. Names in capitals are compiled in.
"""

# Triton reads these functions itself, and knows no annotation but its own.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, misc, untyped-decorator, type-arg, name-defined"

from __future__ import annotations

from importlib import import_module
from typing import Any

triton: Any = import_module("triton")
tl: Any = import_module("triton.language")

# Numbers for which no program of its own is made: keys change with each call, and a size of 1 is no constant here.
FRAME = [f"f{i}" for i in range(16)]
GENERAL = ["key_low", "key_high", "byte0", *FRAME]
SIZES = ["s1", "s2", "s3", "b1", "b2", "b3", "inner", "blocks"]
MAGIC = ["m_inner", "h_inner", "channels", "m_channels", "h_channels", "inner"]


# ---------------------------------------------------------------- numbers


@triton.jit
def _mix(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _float(b):
    return b.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _order(x):
    """An integer that sorts as the float does; NaN lies beyond the infinities, -0.0 just below 0.0."""
    b = x.to(tl.int32, bitcast=True)
    return b ^ ((b >> 31) & 0x7FFFFFFF)


@triton.jit
def _value(o):
    o = tl.where(o == -1, 0, o)  # -0.0 becomes 0.0
    return (o ^ ((o >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _widen(raw, KIND: tl.constexpr):
    if KIND == 1:
        x = _float(raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16)
    else:
        x = raw.to(tl.float32)
    return x


@triton.jit
def _nearest(x):
    """The bits of the nearest bfloat16, ties to even; any NaN is 0x7FC0."""
    b = _bits(x)
    word = (b + 0x7FFF + ((b >> 16) & 1)) >> 16
    return tl.where((b & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, word)


@triton.jit
def _narrow(x, KIND: tl.constexpr):
    if KIND == 1:
        y = _nearest(x).to(tl.uint16).to(tl.int16, bitcast=True)
    elif KIND == 2:  # finite values beyond float16 become its largest
        infinite = (_bits(x) & 0x7FFFFFFF) == 0x7F800000
        near = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
        y = tl.where(infinite, x, near).to(tl.float16)
    else:
        y = x
    return y


@triton.jit
def _over(n, magic, shift):
    """``n // d`` of 0 <= n < 2**31 by a multiplication; ``gpu.magic`` makes both numbers. A magic of 0 stands for 1."""
    return tl.where(magic == 0, n, tl.umulhi(n, magic.to(tl.uint32)) >> shift.to(tl.uint32))


# ---------------------------------------------------------------- places


@triton.jit
def _place(per, first, row, group, per_row, row_bytes, full_bytes, channels, inner, step, byte0, LAYOUT: tl.constexpr,
           GROUPS: tl.constexpr, count):  # fmt: skip
    """Of each group here: does it exist, number, row (or channel), first value, the same in its row, first byte.

    LAYOUT 0 has rows without a short group, 1 rows of any kind, 2 blocks of ``step`` outer indices by channels.
    """
    if LAYOUT == 2:
        block = tl.program_id(0) + first
        r = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        live = r < channels
        number = block * channels + r
        start = block.to(tl.int64) * step * channels
        value = (start + r) * inner
        byte = byte0 + ((block - first).to(tl.int64) * channels + r) * full_bytes
        within = r
    else:
        o = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
        live = o < count
        r = o // per
        g = o - r * per + first
        within = g * group
        if LAYOUT == 0:
            number = o
            value = o.to(tl.int64) * group
            byte = o.to(tl.int64) * full_bytes
        else:
            number = r * per_row + g
            value = r.to(tl.int64) * row + within
            byte = r.to(tl.int64) * row_bytes + g.to(tl.int64) * full_bytes
    return live, number, r, value, within, byte


@triton.jit
def _ahead(e, hop, inner, LAYOUT: tl.constexpr, ONE: tl.constexpr):
    """How far value ``e`` of a group lies behind its first."""
    if LAYOUT == 2:
        if ONE:
            at = e.to(tl.int64) * hop
        else:
            at = (e // inner).to(tl.int64) * hop + e % inner
    else:
        at = e
    return at


@triton.jit
def _mean_at(at, inside, low_ptr, start, frame, KIND: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
             DEEP: tl.constexpr):  # fmt: skip
    """The mean of the block in which value ``at`` of a row lies; FLAT says that inner is 1, DEEP that s1 is not."""
    at = at.to(tl.uint32)
    inner = frame[3].to(tl.uint32)
    if FLAT:
        t = at
        i = tl.zeros_like(at)
    else:
        t = _over(at, frame[1], frame[2])
        i = at - t * inner
    line = _over(t, frame[4], frame[5])
    c3 = t - line * frame[6].to(tl.uint32)
    o = _over(line, frame[7], frame[8])
    c2 = line - o * frame[9].to(tl.uint32)
    if DEEP:
        plane = _over(o, frame[10], frame[11])
        c1 = o - plane * frame[12].to(tl.uint32)
        o = plane * frame[13].to(tl.uint32) + c1 // BLOCK
    index = (o * frame[14].to(tl.uint32) + c2 // BLOCK) * frame[15].to(tl.uint32) + c3 // BLOCK
    if not FLAT:
        index = index * inner + i
    return _widen(tl.load(low_ptr + (start + index.to(tl.int64)), mask=inside, other=0), KIND)


# ---------------------------------------------------------------- one group


@triton.jit
def _fit(first, last, top):
    """Side word, low, inverse, coded?, and the first code of a group of one value."""
    none = first > last
    first, last = tl.where(none, 0, first), tl.where(none, 0, last)
    finite = (last < 0x7F800000) & (first >= -0x7F800000)
    low, high = _value(first), _value(last)
    exact = _bits(low)
    away = (exact >> 31) & ((exact & 0xFFFF) != 0).to(tl.uint32)
    low_word = (exact >> 16) + away
    kept = _float(low_word << 16)
    extent = high - kept
    step = tl.div_rn(extent, top)
    step = tl.where(step > 1.1754943508222875e-38, step, 1.1754943508222875e-38)
    bits = _bits(step)
    step_word = (bits >> 16) + ((bits & 0xFFFF) != 0).to(tl.uint32)
    constant = finite & (low == high)
    coded = finite & (low != high) & ((low_word & 0x7F80) != 0x7F80) & (step_word < 0x7F80)
    lower = tl.where(coded, low_word, tl.where(constant, exact >> 16, 0x7FC0))
    upper = tl.where(coded, step_word, tl.where(constant, 0x8000 | ((exact & 0xFFFF) >> 1), 0))
    side = ((upper << 16) | lower).to(tl.int32, bitcast=True)
    inverse = tl.div_rn(tl.full(extent.shape, 1.0, tl.float32), _float(tl.where(coded, step_word, 0x3F80) << 16))
    above = coded & (extent * inverse > top)  # once is enough: see the reference
    inverse = _float(_bits(inverse) - above.to(tl.uint32))
    return side, kept, inverse, coded, tl.where(constant, exact & 1, 0)


@triton.jit
def _hash(number, key_low, key_high):
    return _mix(_mix(number.to(tl.uint32) + key_low.to(tl.uint32)) ^ key_high.to(tl.uint32))


@triton.jit
def _threshold(word, byte, base, bits):
    """``2**bits + u``: eight bits of the word of four values, above the dither of the group."""
    return _float((((word >> byte) & 0xFF) << (15 - bits)) | base[:, None])


@triton.jit
def _between(s, levels_ptr, BITS: tl.constexpr):
    """How many intervals between levels lie below each value, with the fraction of its own.

    The inverse of the distance from each level to the next follows the levels in memory.
    """
    total = tl.zeros_like(s)
    for i in tl.static_range((1 << BITS) - 1):
        level = tl.load(levels_ptr + i)
        part = (s - level) * tl.load(levels_ptr + (1 << BITS) + i)
        total += tl.where(part > 1.0, 1.0, tl.where(part > 0.0, part, 0.0))
    return total


@triton.jit
def _code(x, threshold, some, low, inverse, bits, levels_ptr, LEVELS: tl.constexpr):
    s = (x - low[:, None]) * inverse[:, None]
    if LEVELS > 0:
        s = _between(s, levels_ptr, LEVELS)
    code = (_bits(s + threshold) >> (23 - bits)) & ((1 << bits) - 1)
    return tl.where(some, code, 0)


@triton.jit
def _strip(x_ptr, low_ptr, value, start, within, e, inside, frame, hop, inner, KIND: tl.constexpr, LAYOUT: tl.constexpr,
           ONE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """Values ``e`` of each group as they are coded, and which of the tensor's own are above zero or NaN."""
    at = value[:, None] + _ahead(e, hop, inner, LAYOUT, ONE)[None, :]
    x = _widen(tl.load(x_ptr + at, mask=inside, other=0), KIND)
    keep = ~(x <= 0.0)
    if BLOCK > 0:
        mean = _mean_at(within[:, None] + e[None, :], inside, low_ptr, start[:, None], frame, 1, BLOCK, FLAT, DEEP)
        x = x - tl.where((_bits(mean) & 0x7F800000) == 0x7F800000, float("inf"), mean)
    return x, keep


@triton.jit
def _here(e, live, n, lane, j, EVEN: tl.constexpr):
    if EVEN:
        inside = tl.broadcast_to(live[:, None], (live.shape[0], e.shape[0]))
    else:
        inside = live[:, None] & ((e < n) & (j < lane))[None, :]
    return inside


@triton.jit(do_not_specialize=GENERAL)
def quantize(
    x_ptr, codes_ptr, side_ptr, mask_ptr, low_ptr, levels_ptr, widths_ptr, starts_ptr,
    count, per, first, row, group, n, per_row, row_bytes, full_bytes, key_low, key_high,
    channels, inner, step, byte0,
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIVE: tl.constexpr, MASK: tl.constexpr, LEVELS: tl.constexpr,
    LAYOUT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, DEEP: tl.constexpr,
    EVEN: tl.constexpr, QUAD: tl.constexpr, GROUPS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Codes and side words of GROUPS groups of ``n`` values; BITS 0 takes the bits of each row from memory.

    EVEN says that ``n`` is ``4 * LANE``, QUAD that four divides it. BLOCK 0 codes values, otherwise their difference to
    means.
    """
    frame = (f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15)
    live, number, r, value, within, byte = _place(
        per, first, row, group, per_row, row_bytes, full_bytes, channels, inner, step, byte0, LAYOUT, GROUPS, count
    )
    if BITS == 0:
        widths = tl.load(widths_ptr + r, mask=live, other=1).to(tl.uint32)
        bits = widths[:, None]
        top = ((1 << widths) - 1).to(tl.float32)
        byte = tl.load(starts_ptr + r, mask=live, other=0) + (number - r * per_row).to(tl.int64) * (
            _plane_bytes(group, 8, widths) + _plane_bytes(group, 4, widths)
            + _plane_bytes(group, 2, widths) + _plane_bytes(group, 1, widths))  # fmt: skip
    else:
        widths = BITS
        bits = BITS
        top = tl.full((GROUPS,), (1 << BITS) - 1, tl.float32)
    lane = (n + 3) // 4
    if EVEN:
        lane = LANE
    start = r.to(tl.int64) * f0
    hop = channels * inner
    j = tl.arange(0, LANE)
    e0, e1, e2, e3 = j, lane + j, 2 * lane + j, 3 * lane + j
    in0, in1 = _here(e0, live, n, lane, j, EVEN), _here(e1, live, n, lane, j, EVEN)
    in2, in3 = _here(e2, live, n, lane, j, EVEN), _here(e3, live, n, lane, j, EVEN)
    x0, k0 = _strip(
        x_ptr, low_ptr, value, start, within, e0, in0, frame, hop, inner, KIND, LAYOUT, ONE, BLOCK, FLAT, DEEP
    )
    x1, k1 = _strip(
        x_ptr, low_ptr, value, start, within, e1, in1, frame, hop, inner, KIND, LAYOUT, ONE, BLOCK, FLAT, DEEP
    )
    x2, k2 = _strip(
        x_ptr, low_ptr, value, start, within, e2, in2, frame, hop, inner, KIND, LAYOUT, ONE, BLOCK, FLAT, DEEP
    )
    x3, k3 = _strip(
        x_ptr, low_ptr, value, start, within, e3, in3, frame, hop, inner, KIND, LAYOUT, ONE, BLOCK, FLAT, DEEP
    )
    if POSITIVE:
        r0, r1, r2, r3 = in0 & k0, in1 & k1, in2 & k2, in3 & k3
    else:
        r0, r1, r2, r3 = in0, in1, in2, in3
    o0, o1, o2, o3 = _order(x0), _order(x1), _order(x2), _order(x3)
    least = tl.minimum(tl.minimum(tl.where(r0, o0, 0x7FFFFFFF), tl.where(r1, o1, 0x7FFFFFFF)),
                       tl.minimum(tl.where(r2, o2, 0x7FFFFFFF), tl.where(r3, o3, 0x7FFFFFFF)))  # fmt: skip
    most = tl.maximum(tl.maximum(tl.where(r0, o0, -0x80000000), tl.where(r1, o1, -0x80000000)),
                      tl.maximum(tl.where(r2, o2, -0x80000000), tl.where(r3, o3, -0x80000000)))  # fmt: skip
    side, low, inverse, coded, only = _fit(tl.min(least, 1), tl.max(most, 1), top)
    tl.store(side_ptr + number, side, mask=live)

    h = _hash(number, key_low, key_high)
    base = ((127 + widths) << 23) | (_mix(h ^ 0x5BD1E995) >> (17 + widths))
    word = _mix(h[:, None] + j.to(tl.uint32)[None, :] * 0x9E3779B9)
    some = coded[:, None]
    c0 = _code(x0, _threshold(word, 0, base, bits), some & in0, low, inverse, bits, levels_ptr, LEVELS)
    c1 = _code(x1, _threshold(word, 8, base, bits), some & in1, low, inverse, bits, levels_ptr, LEVELS)
    c2 = _code(x2, _threshold(word, 16, base, bits), some & in2, low, inverse, bits, levels_ptr, LEVELS)
    c3 = _code(x3, _threshold(word, 24, base, bits), some & in3, low, inverse, bits, levels_ptr, LEVELS)
    c0 = c0 | tl.where(j[None, :] == 0, only[:, None], 0)

    at = codes_ptr + byte[:, None]
    rows = live[:, None] & (j < lane)[None, :]
    if EVEN:
        rows = tl.broadcast_to(live[:, None], (GROUPS, LANE))
    if BITS == 0 or BITS == 8:
        has = (bits & 8) != 0
        tl.store(at + e0[None, :], c0.to(tl.uint8), mask=in0 & has)
        tl.store(at + e1[None, :], c1.to(tl.uint8), mask=in1 & has)
        tl.store(at + e2[None, :], c2.to(tl.uint8), mask=in2 & has)
        tl.store(at + e3[None, :], c3.to(tl.uint8), mask=in3 & has)
    if BITS == 0 or (BITS & 4) != 0:  # the first plane, for no width has 8 bits and 4
        has = (bits & 4) != 0
        if QUAD:
            tl.store(at + j[None, :], ((c0 & 15) | ((c2 & 15) << 4)).to(tl.uint8), mask=rows & has)
            tl.store(at + lane + j[None, :], ((c1 & 15) | ((c3 & 15) << 4)).to(tl.uint8), mask=rows & has)
        else:
            _gather(at, x_ptr, low_ptr, levels_ptr, value, start, within, live, n, lane, frame, hop, inner, h, base,
            low,
                    inverse, coded, only, widths, 0, 4, BITS, 2 * LANE, KIND, LEVELS, LAYOUT, ONE, BLOCK, FLAT,
                    DEEP)  # fmt: skip
    if BITS == 0 or (BITS & 2) != 0:
        has = (bits & 2) != 0
        down = bits & 4
        plane = ((n + 1) // 2) * ((bits & 4) // 4)
        packed = ((c0 >> down) & 3) | (((c1 >> down) & 3) << 2) | (((c2 >> down) & 3) << 4) | (((c3 >> down) & 3) << 6)
        tl.store(at + plane + j[None, :], packed.to(tl.uint8), mask=rows & has)
    if BITS == 0 or (BITS & 1) != 0:
        has = (bits & 1) != 0
        down = bits & 6
        if EVEN:
            plane = (LANE * 2) * ((bits & 4) // 4) + LANE * ((bits & 2) // 2)
            packed = (
                ((c0 >> down) & 1) | (((c1 >> down) & 1) << 2) | (((c2 >> down) & 1) << 4) | (((c3 >> down) & 1) << 6)
            )
            halves = tl.permute(tl.reshape(packed, (GROUPS, 2, LANE // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            i = tl.arange(0, LANE // 2)
            tl.store(at + plane + i[None, :], (left | (right << 1)).to(tl.uint8), mask=live[:, None] & has)
        else:
            _gather(at, x_ptr, low_ptr, levels_ptr, value, start, within, live, n, lane, frame, hop, inner, h, base,
            low,
                    inverse, coded, only, widths, 6, 1, BITS, LANE // 2, KIND, LEVELS, LAYOUT, ONE, BLOCK, FLAT,
                    DEEP)  # fmt: skip
    if MASK:  # lanes are a multiple of eight, and every group begins on a byte of the mask
        _mark(mask_ptr, value, 0, lane, k0, live, GROUPS, LANE)
        _mark(mask_ptr, value, 1, lane, k1, live, GROUPS, LANE)
        _mark(mask_ptr, value, 2, lane, k2, live, GROUPS, LANE)
        _mark(mask_ptr, value, 3, lane, k3, live, GROUPS, LANE)


@triton.jit
def _plane_bytes(n, W: tl.constexpr, widths):
    """Bytes of the plane of W bits, for groups of ``n`` values: 0 where the widths have no such plane."""
    return ((n * W + 7) // 8) * ((widths & W) // W).to(tl.int32)


@triton.jit
def _gather(at, x_ptr, low_ptr, levels_ptr, value, start, within, live, n, lane, frame, hop, inner, h, base, low,
inverse,
            coded, only, widths, DOWN: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr, SIZE: tl.constexpr,
            KIND: tl.constexpr, LEVELS: tl.constexpr, LAYOUT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr,
            FLAT: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """Writes the plane of W bits of groups of any length: its values are read once more, in the order of the plane."""
    size = (n * W + 7) // 8
    b = tl.arange(0, SIZE)
    if BITS == 0:
        bits = widths[:, None]
    else:
        bits = BITS
    packed = tl.zeros((live.shape[0], SIZE), tl.uint32)
    for t in tl.static_range(8 // W):
        e = b + t * size
        inside = live[:, None] & ((b < size) & (e < n))[None, :]
        x, _ = _strip(
            x_ptr, low_ptr, value, start, within, e, inside, frame, hop, inner, KIND, LAYOUT, ONE, BLOCK, FLAT, DEEP
        )
        k = e // lane
        word = _mix(h[:, None] + (e - k * lane).to(tl.uint32)[None, :] * 0x9E3779B9)
        threshold = _threshold(word, (8 * k).to(tl.uint32)[None, :], base, bits)
        code = _code(x, threshold, coded[:, None] & inside, low, inverse, bits, levels_ptr, LEVELS)
        if t == 0:
            code = code | tl.where(b[None, :] == 0, only[:, None], 0)
        packed |= ((code >> (bits & DOWN)) & ((1 << W) - 1)) << (t * W)
    if W == 1:
        plane = ((n + 1) // 2) * ((bits & 4) // 4) + ((n + 3) // 4) * ((bits & 2) // 2)
    else:
        plane = 0
    tl.store(at + plane + b[None, :], packed.to(tl.uint8), mask=live[:, None] & (b < size)[None, :] & ((bits & W) != 0))


@triton.jit
def _mark(mask_ptr, value, k: tl.constexpr, lane, keep, live, GROUPS: tl.constexpr, LANE: tl.constexpr):
    bits = tl.reshape(keep.to(tl.uint32), (GROUPS, LANE // 8, 8)) << tl.arange(0, 8).to(tl.uint32)[None, None, :]
    at = (value + k * lane) // 8
    packed = tl.sum(bits, 2)  # of integers
    tl.store(mask_ptr + at[:, None] + tl.arange(0, LANE // 8)[None, :], packed.to(tl.uint8), mask=live[:, None])


@triton.jit
def _read(at, e, j, k: tl.constexpr, n, lane, inside, rows, widths, bits, BITS: tl.constexpr):
    """The codes of values ``e``, strip ``k`` of each group."""
    code = tl.zeros(inside.shape, tl.uint32)
    if BITS == 0 or BITS == 8:
        code |= tl.load(at + e[None, :], mask=inside & ((bits & 8) != 0), other=0).to(tl.uint32)
    if BITS == 0 or (BITS & 4) != 0:
        half = (n + 1) // 2
        second = e >= half
        loaded = tl.load(at + tl.where(second, e - half, e)[None, :], mask=inside & ((bits & 4) != 0), other=0).to(
            tl.uint32
        )
        code |= (loaded >> tl.where(second, 4, 0).to(tl.uint32)[None, :]) & 15
    if BITS == 0 or (BITS & 2) != 0:
        plane = ((n + 1) // 2) * ((bits & 4) // 4)
        loaded = tl.load(at + plane + j[None, :], mask=rows & ((bits & 2) != 0), other=0).to(tl.uint32)
        code |= ((loaded >> (2 * k)) & 3) << (bits & 4)
    if BITS == 0 or (BITS & 1) != 0:
        plane = ((n + 1) // 2) * ((bits & 4) // 4) + ((n + 3) // 4) * ((bits & 2) // 2)
        size = (n + 7) // 8
        t = e // size
        loaded = tl.load(at + plane + (e - t * size)[None, :], mask=inside & ((bits & 1) != 0), other=0).to(tl.uint32)
        code |= ((loaded >> t.to(tl.uint32)[None, :]) & 1) << (bits & 6)
    return code


@triton.jit(do_not_specialize=GENERAL)
def dequantize(
    out_ptr, codes_ptr, side_ptr, support_ptr, low_ptr, levels_ptr, widths_ptr, starts_ptr, scale_ptr, shift_ptr,
    other_ptr,
    mask_ptr, count, per, first, row, group, n, per_row, row_bytes, full_bytes, key_low, key_high,
    channels, inner, step, byte0,
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15,
    KIND: tl.constexpr, BITS: tl.constexpr, SUPPORT: tl.constexpr, DITHER: tl.constexpr, LEVELS: tl.constexpr,
    LAYOUT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, DEEP: tl.constexpr,
    AFFINE: tl.constexpr, OTHER: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr,
    LANE: tl.constexpr,
):  # fmt: skip
    """The values of GROUPS groups; AFFINE scales and shifts them by channel afterwards."""
    frame = (f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15)
    live, number, r, value, within, byte = _place(
        per, first, row, group, per_row, row_bytes, full_bytes, channels, inner, step, byte0, LAYOUT, GROUPS, count
    )
    if BITS == 0:
        widths = tl.load(widths_ptr + r, mask=live, other=1).to(tl.uint32)
        bits = widths[:, None]
        byte = tl.load(starts_ptr + r, mask=live, other=0) + (number - r * per_row).to(tl.int64) * (
            _plane_bytes(group, 8, widths) + _plane_bytes(group, 4, widths)
            + _plane_bytes(group, 2, widths) + _plane_bytes(group, 1, widths))  # fmt: skip
    else:
        widths = BITS
        bits = BITS
    lane = (n + 3) // 4
    if EVEN:
        n = 4 * LANE
        lane = LANE
    start = r.to(tl.int64) * f0
    hop = channels * inner
    j = tl.arange(0, LANE)
    e0, e1, e2, e3 = j, lane + j, 2 * lane + j, 3 * lane + j
    in0, in1 = _here(e0, live, n, lane, j, EVEN), _here(e1, live, n, lane, j, EVEN)
    in2, in3 = _here(e2, live, n, lane, j, EVEN), _here(e3, live, n, lane, j, EVEN)
    rows = live[:, None] & (j < lane)[None, :]
    if EVEN:
        rows = tl.broadcast_to(live[:, None], (GROUPS, LANE))
    at = codes_ptr + byte[:, None]
    c0 = _read(at, e0, j, 0, n, lane, in0, rows, widths, bits, BITS)
    c1 = _read(at, e1, j, 1, n, lane, in1, rows, widths, bits, BITS)
    c2 = _read(at, e2, j, 2, n, lane, in2, rows, widths, bits, BITS)
    c3 = _read(at, e3, j, 3, n, lane, in3, rows, widths, bits, BITS)
    side = tl.load(side_ptr + number, mask=live, other=0).to(tl.uint32, bitcast=True)
    # The first code's lowest bit: in the first byte of the first plane, whatever the bits.
    one = tl.load(codes_ptr + byte, mask=live, other=0).to(tl.uint32) & 1
    upper, lower = side >> 16, side & 0xFFFF
    constant = (upper & 0x8000) != 0
    base = _float((lower << 16) | tl.where(constant, ((upper & 0x7FFF) << 1) | one, 0))
    size = _float(tl.where(constant, 0, upper) << 16)
    if DITHER:
        h = _hash(number, key_low, key_high)
        dither = ((127 + widths) << 23) | (_mix(h ^ 0x5BD1E995) >> (17 + widths))
        word = _mix(h[:, None] + j.to(tl.uint32)[None, :] * 0x9E3779B9)
        t0, t1 = _threshold(word, 0, dither, bits), _threshold(word, 8, dither, bits)
        t2, t3 = _threshold(word, 16, dither, bits), _threshold(word, 24, dither, bits)
    else:
        t0, t1, t2, t3 = base, base, base, base
    if AFFINE:
        if LAYOUT == 2:
            channel = r
        else:
            channel = r % channels
        factor = tl.load(scale_ptr + channel, mask=live, other=0)
        added = tl.load(shift_ptr + channel, mask=live, other=0)
    else:
        factor, added = base, base
    _put(out_ptr, support_ptr, low_ptr, levels_ptr, other_ptr, mask_ptr, value, start, within, e0, in0, c0, t0,
    base, size,
         factor, added, frame, hop, inner, KIND, BITS, SUPPORT, DITHER, LEVELS, LAYOUT, ONE, BLOCK, FLAT, DEEP, AFFINE,
         OTHER, MASK)  # fmt: skip
    _put(out_ptr, support_ptr, low_ptr, levels_ptr, other_ptr, mask_ptr, value, start, within, e1, in1, c1, t1,
    base, size,
         factor, added, frame, hop, inner, KIND, BITS, SUPPORT, DITHER, LEVELS, LAYOUT, ONE, BLOCK, FLAT, DEEP, AFFINE,
         OTHER, MASK)  # fmt: skip
    _put(out_ptr, support_ptr, low_ptr, levels_ptr, other_ptr, mask_ptr, value, start, within, e2, in2, c2, t2,
    base, size,
         factor, added, frame, hop, inner, KIND, BITS, SUPPORT, DITHER, LEVELS, LAYOUT, ONE, BLOCK, FLAT, DEEP, AFFINE,
         OTHER, MASK)  # fmt: skip
    _put(out_ptr, support_ptr, low_ptr, levels_ptr, other_ptr, mask_ptr, value, start, within, e3, in3, c3, t3,
    base, size,
         factor, added, frame, hop, inner, KIND, BITS, SUPPORT, DITHER, LEVELS, LAYOUT, ONE, BLOCK, FLAT, DEEP, AFFINE,
         OTHER, MASK)  # fmt: skip


@triton.jit
def _kept(x, mask_ptr, y, inside):
    """Zero where the bit of value ``y`` is 0."""
    bit = tl.load(mask_ptr + y // 8, mask=inside, other=0).to(tl.uint32) >> (y % 8).to(tl.uint32)
    return tl.where((bit & 1) != 0, x, 0.0)


@triton.jit
def _put(out_ptr, support_ptr, low_ptr, levels_ptr, other_ptr, mask_ptr, value, start, within, e, inside, code,
threshold,
         base, size, factor, added, frame, hop, inner, KIND: tl.constexpr, BITS: tl.constexpr, SUPPORT: tl.constexpr,
         DITHER: tl.constexpr, LEVELS: tl.constexpr, LAYOUT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr,
         FLAT: tl.constexpr, DEEP: tl.constexpr, AFFINE: tl.constexpr, OTHER: tl.constexpr,
         MASK: tl.constexpr):  # fmt: skip
    if LEVELS > 0:
        steps = tl.load(levels_ptr + code, mask=inside, other=0)
    else:
        steps = code.to(tl.float32)
    if DITHER:
        steps = (steps + ((1 << BITS) + 0.5)) - threshold
    x = steps * size[:, None] + base[:, None]
    if BLOCK > 0:
        x = _mean_at(within[:, None] + e[None, :], inside, low_ptr, start[:, None], frame, 1, BLOCK, FLAT, DEEP) + x
    y = value[:, None] + _ahead(e, hop, inner, LAYOUT, ONE)[None, :]
    if SUPPORT:
        x = _kept(x, support_ptr, y, inside)
    if AFFINE:
        x = x * factor[:, None] + added[:, None]
        if OTHER:
            x = x + tl.load(other_ptr + y, mask=inside, other=0)
        if MASK:
            x = _kept(x, mask_ptr, y, inside)
    tl.store(out_ptr + y, _narrow(x, KIND), mask=inside)


# ---------------------------------------------------------------- blocks and rows


@triton.jit
def _column(origin, i, k, depth, rows, columns, s2, s3, inner, live, total, KIND: tl.constexpr, BLOCK: tl.constexpr,
            DEEP: tl.constexpr):  # fmt: skip
    """Adds column ``k`` of layer ``i``, from its first row to its last: +0.0 for what is not there changes no sum."""
    for r in range(BLOCK):
        there = live & (r < rows) & (k < columns)
        if DEEP:
            there = there & (i < depth)
        at = ((i * s2.to(tl.int64) + r) * s3 + k) * inner
        total += _widen(tl.load(origin + at, mask=there, other=0), KIND)
    return total


@triton.jit(do_not_specialize=SIZES)
def means(
    x_ptr, low_ptr, blocks, s1, s2, s3, b1, b2, b3, inner,
    KIND: tl.constexpr, OUT: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Means of blocks: rows of each column first, then columns, each sum from +0.0 on, in order.

    NAN makes what is not finite NaN.
    """
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < blocks
    i, t = at % inner, at // inner
    c3, t = (t % b3).to(tl.int32), t // b3
    c2, t = (t % b2).to(tl.int32), t // b2
    c1, o = (t % b1).to(tl.int32), t // b1
    origin = x_ptr + (((o * s1 + c1 * BLOCK) * s2 + c2 * BLOCK) * s3 + c3 * BLOCK) * inner + i
    depth = tl.minimum(s1 - c1 * BLOCK, BLOCK)
    rows, columns = tl.minimum(s2 - c2 * BLOCK, BLOCK), tl.minimum(s3 - c3 * BLOCK, BLOCK)
    total = tl.zeros((SIZE,), tl.float32)
    if BLOCK <= 8 and not DEEP:
        for k in tl.static_range(BLOCK):
            column = tl.zeros((SIZE,), tl.float32)
            for r in tl.static_range(BLOCK):
                there = live & (r < rows) & (k < columns)
                column += _widen(tl.load(origin + (r * s3.to(tl.int64) + k) * inner, mask=there, other=0), KIND)
            total += column
    else:
        for k in range(BLOCK):
            column = tl.zeros((SIZE,), tl.float32)
            if DEEP:
                for i in range(BLOCK):
                    column = _column(origin, i, k, depth, rows, columns, s2, s3, inner, live, column, KIND, BLOCK, DEEP)
            else:
                column = _column(origin, 0, k, depth, rows, columns, s2, s3, inner, live, column, KIND, BLOCK, DEEP)
            total += column
    mean = tl.div_rn(total, (depth * rows * columns).to(tl.float32))
    y = _narrow(mean, OUT)
    if NAN:
        if OUT == 1:
            y = tl.where((y & 0x7F80) == 0x7F80, 0x7FC0, y).to(tl.int16)
        else:
            y = tl.where((_bits(mean) & 0x7F800000) == 0x7F800000, float("nan"), y)
    tl.store(low_ptr + at, y, mask=live)


@triton.jit(do_not_specialize=["means_in_sample", *FRAME[1:]])
def spread(
    low_ptr, out_ptr, sample, means_in_sample,
    f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15,
    KIND: tl.constexpr, OUT: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, DEEP: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Each block filled with its mean; program 1 of the grid is the sample."""
    frame = (0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15)
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < sample
    o = tl.program_id(1).to(tl.int64)
    x = _mean_at(at, inside, low_ptr, o * means_in_sample, frame, KIND, BLOCK, FLAT, DEEP)
    tl.store(out_ptr + o * sample + at, _narrow(x, OUT), mask=inside)


@triton.jit
def extents(x_ptr, out_ptr, count, per, first, row, group, n, per_row, KIND: tl.constexpr, POSITIVE: tl.constexpr,
            GROUPS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """The square of the range of each group, NaN if a value is not finite."""
    o = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    live = o < count
    r = o // per
    g = o - r * per + first
    e = tl.arange(0, SIZE)
    inside = live[:, None] & (e < n)[None, :]
    at = (r.to(tl.int64) * row + g.to(tl.int64) * group)[:, None] + e[None, :]
    x = _widen(tl.load(x_ptr + at, mask=inside, other=0), KIND)
    if POSITIVE:
        inside = inside & ~(x <= 0.0)
    order = _order(x)
    least = tl.min(tl.where(inside, order, 0x7FFFFFFF), 1)
    most = tl.max(tl.where(inside, order, -0x80000000), 1)
    none = least > most
    least, most = tl.where(none, 0, least), tl.where(none, 0, most)
    finite = (most < 0x7F800000) & (least >= -0x7F800000)
    extent = tl.where(finite, _value(most) - _value(least), float("nan"))
    tl.store(out_ptr + r.to(tl.int64) * per_row + g, extent * extent, mask=live)


@triton.jit
def row_sums(x_ptr, out_ptr, rows, row, SIZE: tl.constexpr):
    """The sum of each row, from its first value to its last."""
    r = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    live = r < rows
    total = tl.zeros((SIZE,), tl.float32)
    for i in range(row):
        total += tl.load(x_ptr + r.to(tl.int64) * row + i, mask=live, other=0)
    tl.store(out_ptr + r, total, mask=live)


# ---------------------------------------------------------------- one value after the other


@triton.jit
def _channel_at(at, inner, m_inner, h_inner, channels, m_channels, h_channels, SIZE: tl.constexpr):
    """The channel of SIZE values in a row from ``at`` on: one division of 64 bits for all, the rest in 32 bits."""
    line = at // inner
    e = (at - line * inner).to(tl.uint32) + tl.arange(0, SIZE).to(tl.uint32)
    c = (line % channels).to(tl.uint32) + _over(e, m_inner, h_inner)
    return c - _over(c, m_channels, h_channels) * channels.to(tl.uint32)


@triton.jit(do_not_specialize=MAGIC)
def affine(x_ptr, scale_ptr, shift_ptr, other_ptr, support_ptr, numel, inner, m_inner, h_inner, channels, m_channels,
           h_channels, KIND: tl.constexpr, OTHER: tl.constexpr, SUPPORT: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """``x * scale + shift`` by channel, plus another tensor, in the place of ``x``."""
    first = tl.program_id(0).to(tl.int64) * SIZE
    y = first + tl.arange(0, SIZE)
    inside = y < numel
    c = _channel_at(first, inner, m_inner, h_inner, channels, m_channels, h_channels, SIZE)
    x = _widen(tl.load(x_ptr + y, mask=inside, other=0), KIND)
    x = x * tl.load(scale_ptr + c, mask=inside, other=0) + tl.load(shift_ptr + c, mask=inside, other=0)
    if OTHER:
        x = x + _widen(tl.load(other_ptr + y, mask=inside, other=0), KIND)
    if SUPPORT:
        x = _kept(x, support_ptr, y, inside)
    tl.store(x_ptr + y, _narrow(x, KIND), mask=inside)


@triton.jit
def pack_band(x_ptr, out_ptr, numel, low, high, KIND: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr,
              NAN: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """A bit for each value: is it in the band? FROM and TO: 0 without that end, 1 without its own value, 2 with it."""
    byte = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    k = tl.arange(0, 8)
    at = byte[:, None] * 8 + k[None, :]
    there = at < numel
    raw = tl.load(x_ptr + at, mask=there, other=0)
    if KIND == 3:
        inside = raw != 0
    else:
        x = _widen(raw, KIND)
        inside = x == x
        if FROM == 1:
            inside = inside & (x > low)
        if FROM == 2:
            inside = inside & (x >= low)
        if TO == 1:
            inside = inside & (x < high)
        if TO == 2:
            inside = inside & (x <= high)
        if NAN:
            inside = inside | (x != x)
    packed = tl.sum((inside & there).to(tl.uint32) << k.to(tl.uint32)[None, :], 1)  # of integers
    tl.store(out_ptr + byte, packed.to(tl.uint8), mask=byte * 8 < numel)


@triton.jit(do_not_specialize=["inside", "outside"])
def unpack_band(mask_ptr, out_ptr, numel, inside, outside, SIZE: tl.constexpr):
    """One of two values, given as bits, for each bit of the mask."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    bit = (tl.load(mask_ptr + at // 8, mask=there, other=0).to(tl.uint32) >> (at % 8).to(tl.uint32)) & 1
    tl.store(out_ptr + at, tl.where(bit != 0, inside, outside).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["offset"])
def pack_uints(x_ptr, out_ptr, numel, offset, BITS: tl.constexpr, SIZE: tl.constexpr):
    """Integers minus ``offset`` in BITS bits each, lowest bits first."""
    if BITS >= 8:
        at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        x = tl.load(x_ptr + at, mask=at < numel, other=0).to(tl.int64) - offset
        tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < numel)
    else:
        byte = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
        k = tl.arange(0, 8 // BITS)
        at = byte[:, None] * (8 // BITS) + k[None, :]
        x = tl.load(x_ptr + at, mask=at < numel, other=0).to(tl.int64) - offset
        code = tl.where(at < numel, (x & 0xFF).to(tl.uint32), 0) << (k * BITS).to(tl.uint32)[None, :]
        tl.store(out_ptr + byte, _join(code).to(tl.uint8), mask=byte * (8 // BITS) < numel)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _join(code):
    """All of a row in one: a code too large for its bits reaches into the next, as in the reference."""
    return tl.reduce(code, 1, _either)


@triton.jit
def _uint_at(packed_ptr, at, there, BITS: tl.constexpr):
    """Value ``at`` of those packed in BITS bits each."""
    if BITS >= 8:
        x = tl.load(packed_ptr + at, mask=there, other=0).to(tl.int64) & ((1 << BITS) - 1)
    else:
        per = 8 // BITS
        loaded = tl.load(packed_ptr + at // per, mask=there, other=0).to(tl.int64)
        x = (loaded >> ((at % per) * BITS)) & ((1 << BITS) - 1)
    return x


@triton.jit(do_not_specialize=["offset"])
def unpack_uints(packed_ptr, out_ptr, numel, offset, BITS: tl.constexpr, SIZE: tl.constexpr):
    """The integers again."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    x = _uint_at(packed_ptr, at, at < numel, BITS) + offset
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=at < numel)


@triton.jit
def pack_taps(x_ptr, starts_ptr, taps_ptr, out_ptr, none_ptr, numel, windows, inner, taps, size, BITS: tl.constexpr,
              SIZE: tl.constexpr):  # fmt: skip
    """Positions as numbers of taps, and how many are none."""
    byte = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    k = tl.arange(0, 8 // BITS)
    at = byte[:, None] * (8 // BITS) + k[None, :]
    there = at < numel
    x = tl.load(x_ptr + at, mask=there, other=0)
    found = x - tl.load(starts_ptr + (at // inner) % windows, mask=there, other=0)
    tap = tl.zeros(at.shape, tl.int32)
    for m in range(taps - 1):
        tap += (tl.load(taps_ptr + m) < found).to(tl.int32)
    none = (tl.load(taps_ptr + tap) != found) | (x < 0) | (x >= size)
    code = tl.where(there & ~none, tap, 0).to(tl.uint32) << (k * BITS).to(tl.uint32)[None, :]
    tl.store(out_ptr + byte, _join(code).to(tl.uint8), mask=byte * (8 // BITS) < numel)
    tl.atomic_add(none_ptr, tl.sum(tl.sum((there & none).to(tl.int32), 1), 0).to(tl.int64))


@triton.jit
def unpack_taps(
    packed_ptr, starts_ptr, taps_ptr, out_ptr, numel, windows, inner, BITS: tl.constexpr, SIZE: tl.constexpr
):
    """The positions again."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    tap = _uint_at(packed_ptr, at, there, BITS)
    start = tl.load(starts_ptr + (at // inner) % windows, mask=there, other=0)
    tl.store(out_ptr + at, start + tl.load(taps_ptr + tap, mask=there, other=0), mask=there)
