"""The kernels for GPUs, in Triton: the bytes of ``reference``. ``gpu`` launches them.

What makes the bytes the same on every device
    Integers alone decide directed rounding, random numbers, codes and the rounding to 8-bit floats.
    Floats meet operations alone that IEEE 754 rounds correctly: ``+``, ``-``, ``*``, ``div_rn``, comparisons and the
    conversion to the nearest 16-bit value. No sum of floats is a ``tl.sum``: order is part of the format. Products and
    sums must not be fused, so every launch says ``enable_fp_fusion=False``; ``benchmarks/gpu_aot.py`` looks for it in
    machine code. Ranges are taken by ``minimum``, which leaves NaN out, and by ``maximum``, which passes it on; which
    zero is the smaller does not matter. What is decoded to NaN may be another NaN on another device.

How a group is held
    Its ``n`` values are four strips of ``lane = ceil(n / 4)``, because one hash serves four values that lie ``lane``
    apart. A plane of 2 bits has byte ``j`` for the four values of lane ``j``, for any ``n``; planes of 4 and 8 bits
    are made of whole strips if four divides ``n``, and one of 1 bit if lanes are a power of two. Otherwise ``_gather``
    reads the values again, from cache, in the order of the plane.

What neighbours share
    Work by value is what a kernel costs. So places among blocks and channels are found for units of up to eight
    neighbours that share them (UNIT), bits of masks are read as whole bytes, and no division is by a number that is
    not known: ``_over`` multiplies.

What an SM has most of
    It takes half as many integer operations, comparisons and selections in a clock as it issues, and as many products
    and sums beside them. So shifts of fields whose place is fixed are products with numbers that the compiler does not
    know (``grain``, ``four``), and values that set no range are moved to the infinities by sums.

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
GENERAL = ["key_low", "key_high", "byte0", "m_per", "h_per", "grain", "four", *FRAME]
MAGIC = [first + last for first in ("", "m_", "h_", "M_", "H_") for last in ("inner", "channels")]
BLOCKS = [f"{a}{b}" for a in "sbmh" for b in "123"]
SIZES = [*BLOCKS, "inner", "m_inner", "h_inner", "blocks", "units"]


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
def _infinite(x):
    """Or NaN."""
    return ~(tl.abs(x) < float("inf"))


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
def _narrow(x, KIND: tl.constexpr):
    """The nearest value of the type, ties to even. NaN is whatever NaN the device makes of it."""
    if KIND == 1:
        y = x.to(tl.bfloat16).to(tl.int16, bitcast=True)
    elif KIND == 2:  # finite values beyond float16 become its largest
        infinite = (_bits(x) & 0x7FFFFFFF) == 0x7F800000
        near = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))
        y = tl.where(infinite, x, near).to(tl.float16)
    else:
        y = x
    return y


@triton.jit
def _over(n, magic, shift):
    """``n // d`` of 0 <= n < 2**31 by a multiplication; ``gpu.magic`` makes both numbers. A magic of 0 stands for 1.

    With 64 bits for 32, ``n`` may have 63.
    """
    return tl.where(magic == 0, n, tl.umulhi(n, magic.to(tl.int64).to(n.dtype)) >> shift.to(n.dtype))


# ---------------------------------------------------------------- places


@triton.jit
def _numbers(count, ALL: tl.constexpr, GROUPS: tl.constexpr):
    """The groups of a program, and whether they exist; ALL says that programs have whole numbers of groups."""
    o = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    live = o < count
    if ALL:
        live = tl.full((GROUPS,), 1, tl.int1)
    return o, live


@triton.jit
def _place(o, live, per, m_per, h_per, first, row, group, per_row, row_bytes, full_bytes, channels, inner, step, byte0,
           LAYOUT: tl.constexpr, GROUPS: tl.constexpr):  # fmt: skip
    """Of each group here: does it exist, number, row (or channel), first value, the same in its row, first byte.

    LAYOUT 0 has rows without a short group, 1 rows of any kind, 2 blocks of ``step`` outer indices by channels, and 3
    one row without a short group.
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
        if LAYOUT == 3:
            r = tl.zeros((GROUPS,), tl.int32)
            g = o
        else:
            r = _over(o.to(tl.uint32), m_per, h_per).to(tl.int32)
            g = o - r * per + first
        within = g * group
        if LAYOUT == 0 or LAYOUT == 3:
            number = o
            value = o.to(tl.int64) * group
            byte = o.to(tl.int64) * full_bytes
        else:
            number = r * per_row + g
            value = r.to(tl.int64) * row + within
            byte = r.to(tl.int64) * row_bytes + g.to(tl.int64) * full_bytes
    return live, number, r, value, within, byte


@triton.jit
def _ahead(e, hop, inner, frame, LAYOUT: tl.constexpr, ONE: tl.constexpr):
    """How far value ``e`` of a group lies behind its first; ``inner`` is divided by as in ``_mean_at``."""
    if LAYOUT == 2:
        if ONE:
            at = e.to(tl.int64) * hop
        else:
            line = _over(e.to(tl.uint32), frame[1], frame[2]).to(tl.int32)
            at = line.to(tl.int64) * hop + (e - line * inner)
    else:
        at = e
    return at


@triton.jit
def _mean_at(at, inside, low, frame, KIND: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
             DEEP: tl.constexpr, MAPS: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """The means of the blocks in which the UNIT values of unit ``at`` of a row lie, side by side. ``low`` points to
    those of the row.

    FLAT says that inner is 1, DEEP that s1 is not; MAPS is for maps of few values, see ``gpu._frame``. A unit lies in
    one block, or in UNIT of them that are neighbours; the frame counts in units.
    """
    at = at.to(tl.uint32)
    inner = frame[3].to(tl.uint32)
    if FLAT:
        t = at
        i = tl.zeros_like(at)
    else:
        t = _over(at, frame[1], frame[2])
        i = at - t * inner
    if MAPS:  # a map, and its row without a shift, for numbers in a map are small
        o = tl.umulhi(t, frame[4].to(tl.uint32)) >> frame[5].to(tl.uint32)
        c3 = t + o * frame[6].to(tl.uint32)
        c2 = tl.umulhi(c3, frame[7].to(tl.uint32))
        c3 = c3 + c2 * frame[9].to(tl.uint32)
    else:
        line = _over(t, frame[4], frame[5])
        c3 = t - line * frame[6].to(tl.uint32)
        o = _over(line, frame[7], frame[8])
        c2 = line - o * frame[9].to(tl.uint32)
    if DEEP:
        plane = _over(o, frame[10], frame[11])
        c1 = o - plane * frame[12].to(tl.uint32)
        o = plane * frame[13].to(tl.uint32) + c1 // BLOCK
    if FLAT:
        c3 = c3 // (BLOCK // UNIT)
    else:
        c3 = c3 // BLOCK
    index = (o * frame[14].to(tl.uint32) + c2 // BLOCK) * frame[15].to(tl.uint32) + c3
    if not FLAT:
        index = index * inner + i
    low += (index * (1 if FLAT else UNIT)).to(tl.int32)
    if UNIT == 1:
        mean = _widen(tl.load(low, mask=inside, other=0), KIND)
    else:
        G: tl.constexpr = at.shape[0]
        U: tl.constexpr = at.shape[1]
        if FLAT:
            mean = tl.broadcast_to(_widen(tl.load(low, mask=inside, other=0), KIND)[:, :, None], (G, U, UNIT))
        else:
            low = low[:, :, None] + tl.arange(0, UNIT)[None, None, :]
            mean = _widen(tl.load(low, mask=inside[:, :, None], other=0), KIND)
        mean = tl.reshape(mean, (G, U * UNIT))
    return mean


@triton.jit
def _bits_at(mask_ptr, pid, numel, SIZE: tl.constexpr):
    """The bits of the values of a program, SIZE of them; 0 or 1 each."""
    at = pid * (SIZE // 8) + tl.arange(0, SIZE // 8)
    byte = tl.load(mask_ptr + at, mask=at * 8 < numel, other=0).to(tl.uint32)
    return tl.reshape((byte[:, None] >> tl.arange(0, 8).to(tl.uint32)[None, :]) & 1, (SIZE,))


@triton.jit
def _bits_of(bytes_ptr, first, live, GROUPS: tl.constexpr, LANE: tl.constexpr):
    """LANE bits of a mask for each group, of which ``first`` is the first byte; 0 or 1 each."""
    byte = tl.load(bytes_ptr + first[:, None] + tl.arange(0, LANE // 8)[None, :], mask=live[:, None], other=0)
    bits = (byte.to(tl.uint32)[:, :, None] >> tl.arange(0, 8).to(tl.uint32)[None, None, :]) & 1
    return tl.reshape(bits, (GROUPS, LANE))


# ---------------------------------------------------------------- one group


@triton.jit
def _fit(least, most, top):
    """Side word, low, inverse, coded?, and the first code of a group of one value.

    Where no value sets the range, the least is NaN or infinite and the greatest -Inf; otherwise that is NaN if one is.
    """
    none = ~(least <= most) & (most == most)
    low, high = tl.where(none, 0.0, least) + 0.0, tl.where(none, 0.0, most) + 0.0  # -0.0 becomes 0.0
    finite = (low > float("-inf")) & (high < float("inf"))
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
def _threshold(word, byte, base, grain):
    """``2**bits + u``: eight bits of the word of four values, above the dither of the group.

    ``grain`` is ``2**(15 - bits)``: a product with a number that the compiler does not know spares the integer pipe.
    """
    return _float(((word >> byte) & 0xFF) * grain + base[:, None])


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
def _coded(x, threshold, low, inverse, levels_ptr, LEVELS: tl.constexpr):
    """Bits of a float whose mantissa begins with the code."""
    s = (x - low[:, None]) * inverse[:, None]
    if LEVELS > 0:
        s = _between(s, levels_ptr, LEVELS)
    return _bits(s + threshold)


@triton.jit
def _stack(c0, c1, c2, c3, four, shift, W: tl.constexpr):
    """W bits from ``shift`` on of each of four, two bits apart. ``four`` is 4: see ``_threshold``."""
    mask = ((1 << W) - 1) << shift
    return ((((c3 & mask) * four + (c2 & mask)) * four + (c1 & mask)) * four + (c0 & mask)) >> shift


@triton.jit
def _upper(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _wider(low, high, least, most):
    return tl.minimum(low, least), _upper(high, most)


@triton.jit
def _strip(x_ptr, means_at, value, within, e, u, inside, units, frame, hop, inner, KIND: tl.constexpr,
           POSITIVE: tl.constexpr, LAYOUT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
           DEEP: tl.constexpr, MAPS: tl.constexpr, UNIT: tl.constexpr):  # fmt: skip
    """Values ``e`` of each group as they are coded, and which of the tensor's own are above zero or NaN."""
    at = value[:, None] + _ahead(e, hop, inner, frame, LAYOUT, ONE)[None, :]
    x = _widen(tl.load(x_ptr + at, mask=inside, other=0), KIND)
    keep = ~(x <= 0.0)
    if BLOCK > 0:
        at = (within.to(tl.uint32) // UNIT)[:, None] + u.to(tl.uint32)[None, :]
        mean = _mean_at(at, units, means_at, frame, 1, BLOCK, FLAT, DEEP, MAPS, UNIT)
        if POSITIVE:  # what sets no range must not spoil it; otherwise the group is NaN all the same
            mean = tl.where(_infinite(mean), float("inf"), mean)
        x = x - mean
    return x, keep


@triton.jit
def _here(e, live, n, lane, j, EVEN: tl.constexpr):
    if EVEN:
        inside = tl.broadcast_to(live[:, None], (live.shape[0], e.shape[0]))
    else:
        inside = live[:, None] & ((e < n) & (j < lane))[None, :]
    return inside


@triton.jit
def _encode(
    o, live, x_ptr, codes_ptr, side_ptr, mask_ptr, low_ptr, levels_ptr, widths_ptr, starts_ptr,
    per, m_per, h_per, first, row, group, n, per_row, row_bytes, full_bytes, key_low, key_high,
    channels, inner, step, byte0, grain, four, frame,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIVE: tl.constexpr, MASK: tl.constexpr, LEVELS: tl.constexpr,
    LAYOUT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, DEEP: tl.constexpr,
    MAPS: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, QUAD: tl.constexpr, GROUPS: tl.constexpr,
    LANE: tl.constexpr,
):  # fmt: skip
    """Codes and side words of the groups ``o``. ``quantize`` has the arguments."""
    live, number, r, value, within, byte = _place(
        o, live, per, m_per, h_per, first, row, group, per_row, row_bytes, full_bytes, channels, inner, step, byte0,
        LAYOUT, GROUPS,
    )  # fmt: skip
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
    if BITS == 0:
        unit = (1 << (15 - widths))[:, None]
    else:
        unit = grain.to(tl.uint32)
    lane = (n + 3) // 4
    if EVEN:
        lane = LANE
    means_at = low_ptr
    if BLOCK > 0 and LAYOUT != 3:
        means_at = low_ptr + (r.to(tl.int64) * frame[0])[:, None]
    hop = channels * inner
    j = tl.arange(0, LANE)
    e0, e1, e2, e3 = j, lane + j, 2 * lane + j, 3 * lane + j
    in0, in1 = _here(e0, live, n, lane, j, EVEN), _here(e1, live, n, lane, j, EVEN)
    in2, in3 = _here(e2, live, n, lane, j, EVEN), _here(e3, live, n, lane, j, EVEN)
    u0, u1, u2, u3, un0, un1, un2, un3 = e0, e1, e2, e3, in0, in1, in2, in3
    if UNIT > 1:
        u0 = tl.arange(0, LANE // UNIT)
        u1, u2, u3 = u0 + LANE // UNIT, u0 + 2 * (LANE // UNIT), u0 + 3 * (LANE // UNIT)
        un0 = tl.broadcast_to(live[:, None], (GROUPS, LANE // UNIT))
        un1, un2, un3 = un0, un0, un0
    x0, k0 = _strip(
        x_ptr, means_at, value, within, e0, u0, in0, un0, frame, hop, inner, KIND, POSITIVE, LAYOUT, ONE, BLOCK,
        FLAT, DEEP, MAPS, UNIT,
    )  # fmt: skip
    x1, k1 = _strip(
        x_ptr, means_at, value, within, e1, u1, in1, un1, frame, hop, inner, KIND, POSITIVE, LAYOUT, ONE, BLOCK,
        FLAT, DEEP, MAPS, UNIT,
    )  # fmt: skip
    x2, k2 = _strip(
        x_ptr, means_at, value, within, e2, u2, in2, un2, frame, hop, inner, KIND, POSITIVE, LAYOUT, ONE, BLOCK,
        FLAT, DEEP, MAPS, UNIT,
    )  # fmt: skip
    x3, k3 = _strip(
        x_ptr, means_at, value, within, e3, u3, in3, un3, frame, hop, inner, KIND, POSITIVE, LAYOUT, ONE, BLOCK,
        FLAT, DEEP, MAPS, UNIT,
    )  # fmt: skip
    least, most = tl.minimum(tl.minimum(x0, x1), tl.minimum(x2, x3)), _upper(_upper(x0, x1), _upper(x2, x3))
    if POSITIVE or not EVEN:
        if not POSITIVE:
            r0, r1, r2, r3 = in0, in1, in2, in3
        elif EVEN:
            r0, r1, r2, r3 = k0, k1, k2, k3
        else:
            r0, r1, r2, r3 = in0 & k0, in1 & k1, in2 & k2, in3 & k3
        # What sets no range goes to either infinity. -Inf becomes NaN on the way up, which the least leaves out.
        p0, p1 = tl.where(r0, 0.0, float("inf")), tl.where(r1, 0.0, float("inf"))
        p2, p3 = tl.where(r2, 0.0, float("inf")), tl.where(r3, 0.0, float("inf"))
        least = tl.minimum(tl.minimum(x0 + p0, x1 + p1), tl.minimum(x2 + p2, x3 + p3))
        most = _upper(_upper(x0 - p0, x1 - p1), _upper(x2 - p2, x3 - p3))
        if MASK:  # lanes are a multiple of eight, and every group begins on a byte of the mask
            _mark(mask_ptr, value, 0, p0, live, GROUPS, LANE)
            _mark(mask_ptr, value, 1, p1, live, GROUPS, LANE)
            _mark(mask_ptr, value, 2, p2, live, GROUPS, LANE)
            _mark(mask_ptr, value, 3, p3, live, GROUPS, LANE)
    least, most = tl.reduce((least, most), 1, _wider)
    side, low, inverse, coded, only = _fit(least, most, top)
    tl.store(side_ptr + number, side, mask=live)

    h = _hash(number, key_low, key_high)
    base = ((127 + widths) << 23) | (_mix(h ^ 0x5BD1E995) >> (17 + widths))
    word = _mix(h[:, None] + j.to(tl.uint32)[None, :] * 0x9E3779B9)
    c0 = _coded(x0, _threshold(word, 0, base, unit), low, inverse, levels_ptr, LEVELS)
    c1 = _coded(x1, _threshold(word, 8, base, unit), low, inverse, levels_ptr, LEVELS)
    c2 = _coded(x2, _threshold(word, 16, base, unit), low, inverse, levels_ptr, LEVELS)
    c3 = _coded(x3, _threshold(word, 24, base, unit), low, inverse, levels_ptr, LEVELS)
    shift = 23 - bits
    if not EVEN:
        c0, c1 = tl.where(in0, c0, 0), tl.where(in1, c1, 0)
        c2, c3 = tl.where(in2, c2, 0), tl.where(in3, c3, 0)
    four = four.to(tl.uint32)
    every = tl.where(coded, 0xFF, 0).to(tl.uint32)[:, None]
    one = tl.where(j[None, :] == 0, only[:, None], 0)  # in the first plane

    at = codes_ptr + byte[:, None]
    rows = live[:, None] & (j < lane)[None, :]
    if EVEN:
        rows = tl.broadcast_to(live[:, None], (GROUPS, LANE))
    if BITS == 0 or BITS == 8:
        has = (bits & 8) != 0
        tl.store(at + e0[None, :], (((c0 >> shift) & every) | one).to(tl.uint8), mask=in0 & has)
        tl.store(at + e1[None, :], ((c1 >> shift) & every).to(tl.uint8), mask=in1 & has)
        tl.store(at + e2[None, :], ((c2 >> shift) & every).to(tl.uint8), mask=in2 & has)
        tl.store(at + e3[None, :], ((c3 >> shift) & every).to(tl.uint8), mask=in3 & has)
    if BITS == 0 or (BITS & 4) != 0:  # the first plane, for no width has 8 bits and 4
        has = (bits & 4) != 0
        if QUAD:
            mask = 15 << shift
            left = (((c2 & mask) * (four * four) + (c0 & mask)) >> shift) & every
            right = (((c3 & mask) * (four * four) + (c1 & mask)) >> shift) & every
            tl.store(at + j[None, :], (left | one).to(tl.uint8), mask=rows & has)
            tl.store(at + lane + j[None, :], right.to(tl.uint8), mask=rows & has)
        else:
            _gather(at, x_ptr, means_at, levels_ptr, value, within, live, n, lane, frame, hop, inner, h, base,
                    low, inverse, coded, only, widths, unit, 0, 4, BITS, 2 * LANE, KIND, POSITIVE, LEVELS, LAYOUT,
                    ONE, BLOCK, FLAT, DEEP, MAPS)  # fmt: skip
    if BITS == 0 or (BITS & 2) != 0:
        has = (bits & 2) != 0
        plane = ((n + 1) // 2) * ((bits & 4) // 4)
        packed = _stack(c0, c1, c2, c3, four, shift + (bits & 4), 2) & every
        if BITS == 0 or (BITS & 4) == 0:
            packed = packed | tl.where((bits & 4) == 0, one, 0)
        tl.store(at + plane + j[None, :], packed.to(tl.uint8), mask=rows & has)
    if BITS == 0 or (BITS & 1) != 0:
        has = (bits & 1) != 0
        if EVEN:
            plane = (LANE * 2) * ((bits & 4) // 4) + LANE * ((bits & 2) // 2)
            packed = _stack(c0, c1, c2, c3, four, shift + (bits & 6), 1) & every
            if BITS <= 1:
                packed = packed | tl.where((bits & 6) == 0, one, 0)
            halves = tl.permute(tl.reshape(packed, (GROUPS, 2, LANE // 2)), (0, 2, 1))
            left, right = tl.split(halves)
            i = tl.arange(0, LANE // 2)
            tl.store(at + plane + i[None, :], (left | (right << 1)).to(tl.uint8), mask=live[:, None] & has)
        else:
            _gather(at, x_ptr, means_at, levels_ptr, value, within, live, n, lane, frame, hop, inner, h, base,
                    low, inverse, coded, only, widths, unit, 6, 1, BITS, LANE // 2, KIND, POSITIVE, LEVELS, LAYOUT,
                    ONE, BLOCK, FLAT, DEEP, MAPS)  # fmt: skip


@triton.jit(do_not_specialize=GENERAL)
def quantize(
    x_ptr, codes_ptr, side_ptr, mask_ptr, low_ptr, levels_ptr, widths_ptr, starts_ptr,
    count, per, m_per, h_per, first, row, group, n, per_row, row_bytes, full_bytes, key_low, key_high,
    channels, inner, step, byte0, grain, four,
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIVE: tl.constexpr, MASK: tl.constexpr, LEVELS: tl.constexpr,
    LAYOUT: tl.constexpr, ALL: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
    DEEP: tl.constexpr, MAPS: tl.constexpr, UNIT: tl.constexpr, EVEN: tl.constexpr, QUAD: tl.constexpr,
    GROUPS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Codes and side words of GROUPS groups of ``n`` values; BITS 0 takes the bits of each row from memory.

    EVEN says that ``n`` is ``4 * LANE``, QUAD that four divides it. BLOCK 0 codes values, otherwise their difference to
    means.
    """
    frame = (f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15)
    o, live = _numbers(count, ALL, GROUPS)
    _encode(o, live, x_ptr, codes_ptr, side_ptr, mask_ptr, low_ptr, levels_ptr, widths_ptr, starts_ptr, per, m_per,
            h_per, first, row, group, n, per_row, row_bytes, full_bytes, key_low, key_high, channels, inner, step,
            byte0, grain, four, frame, KIND, BITS, POSITIVE, MASK, LEVELS, LAYOUT, ONE, BLOCK, FLAT, DEEP, MAPS, UNIT,
            EVEN, QUAD, GROUPS, LANE)  # fmt: skip


@triton.jit(do_not_specialize=[*GENERAL, *SIZES])
def quantize_maps(
    x_ptr, codes_ptr, side_ptr, mask_ptr, low_ptr, levels_ptr, count, group, full_bytes, key_low, key_high, grain, four,
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15,
    blocks, s1, s2, s3, b1, b2, b3, m1, h1, m2, h2, m3, h3, inner, m_inner, h_inner, units,
    KIND: tl.constexpr, BITS: tl.constexpr, POSITIVE: tl.constexpr, MASK: tl.constexpr, LEVELS: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, VECTOR: tl.constexpr, GROUPS: tl.constexpr, LANE: tl.constexpr,
    SPAN: tl.constexpr, REST: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """``means`` and then ``quantize``, of SPAN groups that are whole maps with BLOCKS blocks.

    GROUPS of them are coded at once, and then REST. The second time values come from a cache. Groups beyond the span
    are its last again, with the same bytes.
    """
    frame = (f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15)
    pid = tl.program_id(0)
    for i in range(0, BLOCKS, SIZE):
        k = i + tl.arange(0, SIZE)
        at = pid * BLOCKS + k
        _mean_of(x_ptr, low_ptr, at, (k < BLOCKS) & (at < blocks), s1, s2, s3, b1, b2, b3, m1, h1, m2, h2, m3, h3,
                 inner, m_inner, h_inner, units, KIND, 1, False, BLOCK, False, VECTOR, SIZE)  # fmt: skip
    tl.debug_barrier()
    last = tl.minimum((pid + 1) * SPAN, count) - 1
    for i in range(0, SPAN // GROUPS * GROUPS, GROUPS):
        o = tl.minimum(pid * SPAN + i + tl.arange(0, GROUPS), last)
        _encode(o, tl.full((GROUPS,), 1, tl.int1), x_ptr, codes_ptr, side_ptr, mask_ptr, low_ptr, levels_ptr, None,
                None, 0, 0, 0, 0, 0, group, 4 * LANE, 0, 0, full_bytes, key_low, key_high, 1, 1, 1, 0, grain, four,
                frame, KIND, BITS, POSITIVE, MASK, LEVELS, 3, False, BLOCK, True, False, True, UNIT, True, True,
                GROUPS, LANE)  # fmt: skip
    if REST > 0:
        o = tl.minimum(pid * SPAN + SPAN // GROUPS * GROUPS + tl.arange(0, REST), last)
        _encode(o, tl.full((REST,), 1, tl.int1), x_ptr, codes_ptr, side_ptr, mask_ptr, low_ptr, levels_ptr, None, None,
                0, 0, 0, 0, 0, group, 4 * LANE, 0, 0, full_bytes, key_low, key_high, 1, 1, 1, 0, grain, four, frame,
                KIND, BITS, POSITIVE, MASK, LEVELS, 3, False, BLOCK, True, False, True, UNIT, True, True, REST,
                LANE)  # fmt: skip


@triton.jit
def _plane_bytes(n, W: tl.constexpr, widths):
    """Bytes of the plane of W bits, for groups of ``n`` values: 0 where the widths have no such plane."""
    return ((n * W + 7) // 8) * ((widths & W) // W).to(tl.int32)


@triton.jit
def _gather(at, x_ptr, means_at, levels_ptr, value, within, live, n, lane, frame, hop, inner, h, base, low,
            inverse, coded, only, widths, unit, DOWN: tl.constexpr, W: tl.constexpr, BITS: tl.constexpr,
            SIZE: tl.constexpr, KIND: tl.constexpr, POSITIVE: tl.constexpr, LEVELS: tl.constexpr, LAYOUT: tl.constexpr,
            ONE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, DEEP: tl.constexpr,
            MAPS: tl.constexpr):  # fmt: skip
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
            x_ptr, means_at, value, within, e, e, inside, inside, frame, hop, inner, KIND, POSITIVE, LAYOUT, ONE,
            BLOCK, FLAT, DEEP, MAPS, 1,
        )  # fmt: skip
        k = e // lane
        word = _mix(h[:, None] + (e - k * lane).to(tl.uint32)[None, :] * 0x9E3779B9)
        threshold = _threshold(word, (8 * k).to(tl.uint32)[None, :], base, unit)
        code = _coded(x, threshold, low, inverse, levels_ptr, LEVELS) >> (23 - bits)
        code = tl.where(coded[:, None] & inside, code, 0)
        if t == 0:
            code = code | tl.where(b[None, :] == 0, only[:, None], 0)
        packed |= ((code >> (bits & DOWN)) & ((1 << W) - 1)) << (t * W)
    if W == 1:
        plane = ((n + 1) // 2) * ((bits & 4) // 4) + ((n + 3) // 4) * ((bits & 2) // 2)
    else:
        plane = 0
    tl.store(at + plane + b[None, :], packed.to(tl.uint8), mask=live[:, None] & (b < size)[None, :] & ((bits & W) != 0))


@triton.jit
def _mark(mask_ptr, value, k: tl.constexpr, away, live, GROUPS: tl.constexpr, LANE: tl.constexpr):
    """Writes the bits of strip ``k``: 0 where ``away`` is infinite, 1 where it is zero.

    The bits of an infinity are ``255 * 2**23``. Times ``512 - 2**(k + 1)`` they are ``2**(24 + k)``, modulo ``2**32``.
    """
    factor = 512 - (2 << tl.arange(0, 8).to(tl.uint32))
    ones = tl.reshape(_bits(away), (GROUPS, LANE // 8, 8)) * factor[None, None, :]
    packed = (tl.sum(ones, 2) >> 24) ^ 0xFF  # of integers
    at = (value >> 3) + k * (LANE // 8)
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
    mask_ptr, count, per, m_per, h_per, first, row, group, n, per_row, row_bytes, full_bytes, key_low, key_high,
    channels, inner, step, byte0, grain, four,
    f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15,
    KIND: tl.constexpr, BITS: tl.constexpr, SUPPORT: tl.constexpr, DITHER: tl.constexpr, LEVELS: tl.constexpr,
    LAYOUT: tl.constexpr, ALL: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
    DEEP: tl.constexpr, MAPS: tl.constexpr, UNIT: tl.constexpr, AFFINE: tl.constexpr, OTHER: tl.constexpr,
    MASK: tl.constexpr, EVEN: tl.constexpr, GROUPS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """The values of GROUPS groups; AFFINE scales and shifts them by channel afterwards."""
    frame = (f0, f1, f2, f3, f4, f5, f6, f7, f8, f9, f10, f11, f12, f13, f14, f15)
    o, live = _numbers(count, ALL, GROUPS)
    live, number, r, value, within, byte = _place(
        o, live, per, m_per, h_per, first, row, group, per_row, row_bytes, full_bytes, channels, inner, step, byte0,
        LAYOUT, GROUPS,
    )  # fmt: skip
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
    means_at = low_ptr
    if BLOCK > 0 and LAYOUT != 3:
        means_at = low_ptr + (r.to(tl.int64) * f0)[:, None]
    hop = channels * inner
    j = tl.arange(0, LANE)
    e0, e1, e2, e3 = j, lane + j, 2 * lane + j, 3 * lane + j
    in0, in1 = _here(e0, live, n, lane, j, EVEN), _here(e1, live, n, lane, j, EVEN)
    in2, in3 = _here(e2, live, n, lane, j, EVEN), _here(e3, live, n, lane, j, EVEN)
    u0, u1, u2, u3, un0, un1, un2, un3 = e0, e1, e2, e3, in0, in1, in2, in3
    if UNIT > 1:
        u0 = tl.arange(0, LANE // UNIT)
        u1, u2, u3 = u0 + LANE // UNIT, u0 + 2 * (LANE // UNIT), u0 + 3 * (LANE // UNIT)
        un0 = tl.broadcast_to(live[:, None], (GROUPS, LANE // UNIT))
        un1, un2, un3 = un0, un0, un0
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
        unit = grain.to(tl.uint32)
        t0, t1 = _threshold(word, 0, dither, unit), _threshold(word, 8, dither, unit)
        t2, t3 = _threshold(word, 16, dither, unit), _threshold(word, 24, dither, unit)
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
    _put(out_ptr, support_ptr, means_at, levels_ptr, other_ptr, mask_ptr, value, within, e0, u0, in0,
         un0, live, 0, c0, t0, base, size, factor, added, frame, hop, inner, KIND, BITS, SUPPORT, DITHER, LEVELS,
         LAYOUT, ONE, BLOCK, FLAT, DEEP, MAPS, UNIT, AFFINE, OTHER, MASK, EVEN, GROUPS, LANE)  # fmt: skip
    _put(out_ptr, support_ptr, means_at, levels_ptr, other_ptr, mask_ptr, value, within, e1, u1, in1,
         un1, live, 1, c1, t1, base, size, factor, added, frame, hop, inner, KIND, BITS, SUPPORT, DITHER, LEVELS,
         LAYOUT, ONE, BLOCK, FLAT, DEEP, MAPS, UNIT, AFFINE, OTHER, MASK, EVEN, GROUPS, LANE)  # fmt: skip
    _put(out_ptr, support_ptr, means_at, levels_ptr, other_ptr, mask_ptr, value, within, e2, u2, in2,
         un2, live, 2, c2, t2, base, size, factor, added, frame, hop, inner, KIND, BITS, SUPPORT, DITHER, LEVELS,
         LAYOUT, ONE, BLOCK, FLAT, DEEP, MAPS, UNIT, AFFINE, OTHER, MASK, EVEN, GROUPS, LANE)  # fmt: skip
    _put(out_ptr, support_ptr, means_at, levels_ptr, other_ptr, mask_ptr, value, within, e3, u3, in3,
         un3, live, 3, c3, t3, base, size, factor, added, frame, hop, inner, KIND, BITS, SUPPORT, DITHER, LEVELS,
         LAYOUT, ONE, BLOCK, FLAT, DEEP, MAPS, UNIT, AFFINE, OTHER, MASK, EVEN, GROUPS, LANE)  # fmt: skip


@triton.jit
def _kept(x, mask_ptr, y, inside):
    """Zero where the bit of value ``y`` is 0."""
    bit = tl.load(mask_ptr + y // 8, mask=inside, other=0).to(tl.uint32) >> (y % 8).to(tl.uint32)
    return tl.where((bit & 1) != 0, x, 0.0)


@triton.jit
def _put(out_ptr, support_ptr, means_at, levels_ptr, other_ptr, mask_ptr, value, within, e, u, inside, units,
         live, k: tl.constexpr, code, threshold, base, size, factor, added, frame, hop, inner, KIND: tl.constexpr,
         BITS: tl.constexpr, SUPPORT: tl.constexpr, DITHER: tl.constexpr, LEVELS: tl.constexpr, LAYOUT: tl.constexpr,
         ONE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr, DEEP: tl.constexpr, MAPS: tl.constexpr,
         UNIT: tl.constexpr, AFFINE: tl.constexpr, OTHER: tl.constexpr, MASK: tl.constexpr, EVEN: tl.constexpr,
         GROUPS: tl.constexpr, LANE: tl.constexpr):  # fmt: skip
    if LEVELS > 0:
        steps = tl.load(levels_ptr + code, mask=inside, other=0)
    else:
        steps = _float(code | 0x4B000000) - 8388608.0  # the code behind 2**23: both are exact
    if DITHER:
        steps = (steps + ((1 << BITS) + 0.5)) - threshold
    x = steps * size[:, None] + base[:, None]
    if BLOCK > 0:
        at = (within.to(tl.uint32) // UNIT)[:, None] + u.to(tl.uint32)[None, :]
        x = _mean_at(at, units, means_at, frame, 1, BLOCK, FLAT, DEEP, MAPS, UNIT) + x
    y = value[:, None] + _ahead(e, hop, inner, frame, LAYOUT, ONE)[None, :]
    if SUPPORT:
        if EVEN and (LAYOUT == 0 or LAYOUT == 3):
            x = tl.where(_bits_of(support_ptr, (value >> 3) + k * (LANE // 8), live, GROUPS, LANE) != 0, x, 0.0)
        else:
            x = _kept(x, support_ptr, y, inside)
    if AFFINE:
        x = x * factor[:, None] + added[:, None]
        if OTHER:
            x = x + tl.load(other_ptr + y, mask=inside, other=0)
        if MASK:
            if EVEN and LAYOUT == 0:
                x = tl.where(_bits_of(mask_ptr, (value >> 3) + k * (LANE // 8), live, GROUPS, LANE) != 0, x, 0.0)
            else:
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


@triton.jit
def _across(total, columns, SIZE: tl.constexpr, UNIT: tl.constexpr):
    """Adds columns that lie side by side, from the first to the last."""
    if UNIT == 2:
        c0, c1 = tl.split(columns)
        total = (total + c0) + c1
    elif UNIT == 4:
        even, odd = tl.split(tl.reshape(columns, (SIZE, 2, 2)))
        c0, c2 = tl.split(even)
        c1, c3 = tl.split(odd)
        total = (((total + c0) + c1) + c2) + c3
    else:
        even, odd = tl.split(tl.reshape(columns, (SIZE, 2, 2, 2)))
        c04, c26 = tl.split(even)
        c15, c37 = tl.split(odd)
        c0, c4 = tl.split(c04)
        c1, c5 = tl.split(c15)
        c2, c6 = tl.split(c26)
        c3, c7 = tl.split(c37)
        total = (((((((total + c0) + c1) + c2) + c3) + c4) + c5) + c6) + c7
    return total


@triton.jit
def _mean_of(
    x_ptr, low_ptr, at, live, s1, s2, s3, b1, b2, b3, m1, h1, m2, h2, m3, h3, inner, m_inner, h_inner, units,
    KIND: tl.constexpr, OUT: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr,
    UNIT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Means of blocks: rows of each column first, then columns, each sum from +0.0 on, in order.

    NAN makes what is not finite NaN. Rows of a map are ``units`` of UNIT values, which are read at once.
    """
    n = at.to(tl.uint32)
    t = _over(n, m_inner, h_inner)
    i = n - t * inner.to(tl.uint32)
    line = _over(t, m3, h3)
    c3 = (t - line * b3.to(tl.uint32)).to(tl.int32)
    plane = _over(line, m2, h2)
    c2 = (line - plane * b2.to(tl.uint32)).to(tl.int32)
    if DEEP:
        o = _over(plane, m1, h1)
        c1 = (plane - o * b1.to(tl.uint32)).to(tl.int32)
    else:
        o = plane
        c1 = 0
    o = o.to(tl.int64)
    origin = x_ptr + (((o * s1 + c1 * BLOCK) * s2 + c2 * BLOCK) * s3 + c3 * BLOCK) * inner + i.to(tl.int64)
    depth = tl.minimum(s1 - c1 * BLOCK, BLOCK)
    rows, columns = tl.minimum(s2 - c2 * BLOCK, BLOCK), tl.minimum(s3 - c3 * BLOCK, BLOCK)
    total = tl.zeros((SIZE,), tl.float32)
    if UNIT > 1:
        unit = (o * s2 + c2 * BLOCK) * units + c3 * (BLOCK // UNIT)
        v = tl.arange(0, UNIT)
        for k in tl.static_range(BLOCK // UNIT):
            some = tl.zeros((SIZE, UNIT), tl.float32)
            for r in tl.static_range(BLOCK):
                there = live & (r < rows) & (k * UNIT < columns)
                place = (unit + (r * units + k))[:, None] * UNIT + v[None, :]
                some += _widen(tl.load(x_ptr + place, mask=there[:, None], other=0), KIND)
            total = _across(total, some, SIZE, UNIT)
    elif BLOCK <= 8 and not DEEP:
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
                for q in range(BLOCK):
                    column = _column(origin, q, k, depth, rows, columns, s2, s3, inner, live, column, KIND, BLOCK, DEEP)
            else:
                column = _column(origin, 0, k, depth, rows, columns, s2, s3, inner, live, column, KIND, BLOCK, DEEP)
            total += column
    mean = tl.div_rn(total, (depth * rows * columns).to(tl.float32))
    y = _narrow(mean, OUT)
    if OUT == 1:
        y = tl.where(mean != mean, 0x7FC0, y).to(tl.int16)  # one NaN on all devices, for it is stored
    if NAN:
        if OUT == 1:
            y = tl.where((y & 0x7F80) == 0x7F80, 0x7FC0, y).to(tl.int16)
        else:
            y = tl.where(_infinite(mean), float("nan"), y)
    tl.store(low_ptr + at, y, mask=live)


@triton.jit(do_not_specialize=SIZES)
def means(
    x_ptr, low_ptr, blocks, s1, s2, s3, b1, b2, b3, m1, h1, m2, h2, m3, h3, inner, m_inner, h_inner, units,
    KIND: tl.constexpr, OUT: tl.constexpr, NAN: tl.constexpr, BLOCK: tl.constexpr, DEEP: tl.constexpr,
    UNIT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The means of SIZE blocks."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    _mean_of(x_ptr, low_ptr, at, at < blocks, s1, s2, s3, b1, b2, b3, m1, h1, m2, h2, m3, h3, inner, m_inner, h_inner,
             units, KIND, OUT, NAN, BLOCK, DEEP, UNIT, SIZE)  # fmt: skip


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
    x = _mean_at(at, inside, low_ptr + o * means_in_sample, frame, KIND, BLOCK, FLAT, DEEP, False, 1)
    tl.store(out_ptr + o * sample + at, _narrow(x, OUT), mask=inside)


@triton.jit
def _values_of(count, per, first, row, group, n, per_row, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Of each group here: does it exist, its number, and where its values are and which exist."""
    o = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    live = o < count
    r = o // per
    g = o - r * per + first
    e = tl.arange(0, SIZE)
    inside = live[:, None] & (e < n)[None, :]
    at = (r.to(tl.int64) * row + g.to(tl.int64) * group)[:, None] + e[None, :]
    return live, r.to(tl.int64) * per_row + g, at, inside


@triton.jit
def extents(x_ptr, out_ptr, count, per, first, row, group, n, per_row, KIND: tl.constexpr, POSITIVE: tl.constexpr,
            GROUPS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """The square of the range of each group, NaN if a value is not finite."""
    live, number, at, inside = _values_of(count, per, first, row, group, n, per_row, GROUPS, SIZE)
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
    tl.store(out_ptr + number, extent * extent, mask=live)


@triton.jit
def row_sums(x_ptr, out_ptr, rows, row, SIZE: tl.constexpr):
    """The sum of each row, from its first value to its last."""
    r = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    live = r < rows
    total = tl.zeros((SIZE,), tl.float32)
    for i in range(row):
        total += tl.load(x_ptr + r.to(tl.int64) * row + i, mask=live, other=0)
    tl.store(out_ptr + r, total, mask=live)


# ---------------------------------------------------------------- 8-bit floats


@triton.jit
def cast(x_ptr, out_ptr, scale_ptr, count, per, first, row, group, n, per_row, KIND: tl.constexpr, E5M2: tl.constexpr,
         SHARED: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Values over the scale of their group in 8 bits; SHARED reads one scale, otherwise they are made and written."""
    live, number, at, inside = _values_of(count, per, first, row, group, n, per_row, GROUPS, SIZE)
    x = _widen(tl.load(x_ptr + at, mask=inside, other=0), KIND)
    MANTISSA: tl.constexpr = 2 if E5M2 else 3
    BIAS: tl.constexpr = 15 if E5M2 else 7
    LARGEST: tl.constexpr = 57344.0 if E5M2 else 448.0
    if SHARED:
        own = tl.full((GROUPS,), 0.0, tl.float32) + tl.load(scale_ptr)
    else:
        most = tl.max((_bits(x) & 0x7FFFFFFF).to(tl.int32), 1)
        bits = _bits(tl.div_rn(_float(most), tl.full((GROUPS,), LARGEST, tl.float32)))
        bits = tl.where(bits > 0x00800000, bits, 0x00800000)  # of floats that are not negative
        word = (bits >> 16) + ((bits & 0xFFFF) != 0).to(tl.uint32)
        word = tl.where(most == 0, 0x3F80, tl.where(most < 0x7F800000, word, 0x7FC0))
        tl.store(scale_ptr + number, word.to(tl.uint16).to(tl.int16, bitcast=True), mask=live)
        own = _float(word << 16)
    scaled = tl.div_rn(x, tl.broadcast_to(own[:, None], (GROUPS, SIZE)))
    bits = _bits(scaled)
    size = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - MANTISSA
    normal = ((size + ((1 << (drop - 1)) - 1) + ((size >> drop) & 1)) >> drop) - ((127 - BIAS) << MANTISSA)
    # A small one is added to the number whose last bit is the smallest of the type, so the sum is rounded to it.
    unit: tl.constexpr = 128.0 if E5M2 else 16384.0
    small = _bits(_float(size) + unit) - (0x43000000 if E5M2 else 0x46800000)
    code = tl.where(size < ((128 - BIAS) << 23), small, normal)
    code = tl.where(_float(size) <= LARGEST * 1.0078125, code, 0x7F) | ((bits >> 24) & 0x80)
    finite = ((_bits(own) & 0x7F800000) != 0x7F800000)[:, None]
    tl.store(out_ptr + at, tl.where(finite, code, 0).to(tl.uint8), mask=inside)


@triton.jit
def uncast(values_ptr, out_ptr, scale_ptr, count, per, first, row, group, n, per_row, KIND: tl.constexpr,
           E5M2: tl.constexpr, SHARED: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """The values again."""
    live, number, at, inside = _values_of(count, per, first, row, group, n, per_row, GROUPS, SIZE)
    code = tl.load(values_ptr + at, mask=inside, other=0).to(tl.uint32)
    size = code & 0x7F
    if E5M2:  # the exponent is moved by a product, which is exact for small ones too
        x = _float(size << 21) * 5192296858534827628530496329220096.0
        x = tl.where(size >= 0x7C, _float(0x7F800000 | ((size & 3) << 21)), x)
    else:
        x = _float(size << 20) * 1329227995784915872903807060280344576.0
        x = tl.where(size == 0x7F, float("nan"), x)
    x = _float(_bits(x) | ((code & 0x80) << 24))
    if SHARED:
        own = tl.full((GROUPS,), 0.0, tl.float32) + tl.load(scale_ptr)
    else:
        own = _widen(tl.load(scale_ptr + number, mask=live, other=0), 1)
    tl.store(out_ptr + at, _narrow(x * own[:, None], KIND), mask=inside)


# ---------------------------------------------------------------- one value after the other


@triton.jit
def _channel_at(first, e, inner, M_inner, H_inner, m_inner, h_inner, channels, M_channels, H_channels, m_channels,
                h_channels):  # fmt: skip
    """The channel of values ``first + e``: divisions by 64 bits for the first alone, the rest in 32 bits."""
    n = first.to(tl.uint64)
    line = _over(n, M_inner, H_inner)
    channel = line - _over(line, M_channels, H_channels) * channels.to(tl.uint64)
    e = (n - line * inner.to(tl.uint64)).to(tl.uint32) + e.to(tl.uint32)
    c = channel.to(tl.uint32) + _over(e, m_inner, h_inner)
    return c - _over(c, m_channels, h_channels) * channels.to(tl.uint32)


@triton.jit(do_not_specialize=MAGIC)
def affine(x_ptr, scale_ptr, shift_ptr, other_ptr, support_ptr, numel, inner, M_inner, H_inner, m_inner, h_inner,
           channels, M_channels, H_channels, m_channels, h_channels, KIND: tl.constexpr, OTHER: tl.constexpr,
           SUPPORT: tl.constexpr, UNIT: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """``x * scale + shift`` by channel, plus another tensor, in the place of ``x``.

    UNIT neighbours are of one channel, and ``inner`` counts in units.
    """
    pid = tl.program_id(0).to(tl.int64)
    first = pid * SIZE
    y = first + tl.arange(0, SIZE)
    inside = y < numel
    U: tl.constexpr = SIZE // UNIT
    c = _channel_at(pid * U, tl.arange(0, U), inner, M_inner, H_inner, m_inner, h_inner, channels, M_channels,
                    H_channels, m_channels, h_channels)  # fmt: skip
    factor, added = tl.load(scale_ptr + c), tl.load(shift_ptr + c)
    if UNIT > 1:
        factor = tl.reshape(tl.broadcast_to(factor[:, None], (U, UNIT)), (SIZE,))
        added = tl.reshape(tl.broadcast_to(added[:, None], (U, UNIT)), (SIZE,))
    x = _widen(tl.load(x_ptr + y, mask=inside, other=0), KIND)
    x = x * factor + added
    if OTHER:
        x = x + _widen(tl.load(other_ptr + y, mask=inside, other=0), KIND)
    if SUPPORT:
        x = tl.where(_bits_at(support_ptr, pid, numel, SIZE) != 0, x, 0.0)
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
    bit = _bits_at(mask_ptr, tl.program_id(0).to(tl.int64), numel, SIZE)
    tl.store(out_ptr + at, tl.where(bit != 0, inside, outside).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def mask_values(x_ptr, mask_ptr, out_ptr, numel, SIZE: tl.constexpr):
    """Values, given as bits, where the bit of the mask is set, and zero elsewhere."""
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    there = at < numel
    bit = _bits_at(mask_ptr, tl.program_id(0).to(tl.int64), numel, SIZE)
    tl.store(out_ptr + at, tl.where(bit != 0, tl.load(x_ptr + at, mask=there, other=0), 0), mask=there)


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


@triton.jit(do_not_specialize=MAGIC)
def pack_taps(x_ptr, starts_ptr, taps_ptr, out_ptr, none_ptr, numel, inner, M_inner, H_inner, m_inner, h_inner,
              channels, M_channels, H_channels, m_channels, h_channels, taps, size, BITS: tl.constexpr,
              SIZE: tl.constexpr):  # fmt: skip
    """Positions as numbers of taps, and how many are none. Windows are counted as channels are."""
    pid = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, SIZE)
    byte = pid * SIZE + i
    k = tl.arange(0, 8 // BITS)
    e = i[:, None] * (8 // BITS) + k[None, :]
    first = pid * (SIZE * (8 // BITS))
    at = first + e
    there = at < numel
    x = tl.load(x_ptr + at, mask=there, other=0)
    window = _channel_at(first, e, inner, M_inner, H_inner, m_inner, h_inner, channels, M_channels, H_channels,
                         m_channels, h_channels)  # fmt: skip
    found = x - tl.load(starts_ptr + window)
    tap = tl.zeros(at.shape, tl.int32)
    for b in tl.static_range(BITS):  # the last tap that does not lie behind
        next = tap + (1 << (BITS - 1 - b))
        near = tl.load(taps_ptr + next, mask=next < taps, other=0)
        tap = tl.where((next < taps) & (near <= found), next, tap)
    none = (tl.load(taps_ptr + tap) != found) | (x < 0) | (x >= size)
    code = tl.where(there & ~none, tap, 0).to(tl.uint32) << (k * BITS).to(tl.uint32)[None, :]
    tl.store(out_ptr + byte, _join(code).to(tl.uint8), mask=byte * (8 // BITS) < numel)
    tl.atomic_add(none_ptr, tl.sum(tl.sum((there & none).to(tl.int32), 1), 0).to(tl.int64))


@triton.jit(do_not_specialize=MAGIC)
def unpack_taps(packed_ptr, starts_ptr, taps_ptr, out_ptr, numel, inner, M_inner, H_inner, m_inner, h_inner, channels,
                M_channels, H_channels, m_channels, h_channels, BITS: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """The positions again."""
    first, e = tl.program_id(0).to(tl.int64) * SIZE, tl.arange(0, SIZE)
    at = first + e
    there = at < numel
    tap = _uint_at(packed_ptr, at, there, BITS)
    window = _channel_at(first, e, inner, M_inner, H_inner, m_inner, h_inner, channels, M_channels, H_channels,
                         m_channels, h_channels)  # fmt: skip
    start = tl.load(starts_ptr + window)
    tl.store(out_ptr + at, start + tl.load(taps_ptr + tap, mask=there, other=0), mask=there)
