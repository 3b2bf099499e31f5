"""What a kernel is given: the fields of its parameters, and where its scratch memory is divided.

The parameters of a kernel are 64-bit integers in the order of the fields of its record below. ``cpu`` builds a record
and writes it to memory; ``compiled`` reads it back with ``_read(address, Record)``. So a field has one name on both
sides, and its place follows from the record alone. An address is 0 where there is no such tensor; sizes and starts
count values unless they say bytes.

A function ``*_scratch`` divides the private memory of a kernel. It returns offsets in bytes; the last one, ``end``, is
the size that ``cpu`` allocates. Kernels call the same functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

SHARED: list[Callable[..., Any]] = []
"""Functions that kernels call too: ``compiled`` tells Numba of them, which a process without it need not import."""


def _shared(function: F) -> F:
    SHARED.append(function)
    return function


BATCH = 2048  # values worked on at once where several groups or slabs fit: they stay in L1
TILE = 4096  # values of an item, for kernels that know no groups
LINE = 64  # bytes of a cache line
NORM_CHANNELS = 8  # channels whose sums a batch norm makes side by side
TWISTER = 624  # words of the state of a Mersenne Twister
TILE_CHANNELS = 16  # channels worked on at once: a line of float32, where channels lie side by side

FLOAT32, BFLOAT16, FLOAT16, BOOL = 0, 1, 2, 3  # ``kind``: the type of values
E4M3, E5M2 = 0, 1  # ``kind8``: the type of 8-bit values
GROUPS, SLABS, TILES = 0, 1, 2  # ``unit``: what an item of a kernel is


# ---------------------------------------------------------------- parameters


class QuantizeGroups(NamedTuple):
    """An item is a group."""

    x: int
    kind: int
    codes: int
    side: int
    row: int
    group: int
    bits: int
    levels: int
    """Levels, then the inverse of the distance from each to the next, as float32."""
    positive: int
    """1 if only values above zero, or NaN, set ranges."""
    support: int
    """Where the bits of those values go; groups begin on a byte then."""
    key_low: int
    key_high: int


class DequantizeGroups(NamedTuple):
    """An item is a group."""

    out: int
    kind: int
    codes: int
    side: int
    row: int
    group: int
    bits: int
    levels: int
    support: int
    """A bit for each value; values whose bit is 0 become zero."""
    dither: int
    """1 if thresholds, made from the key of the encoding, are subtracted."""
    key_low: int
    key_high: int


class RebuildChain(NamedTuple):
    """An item is a group, and a row belongs to one channel."""

    out: int
    kind: int
    row: int
    group: int
    channels: int
    other: int
    """What is added in the first stage."""
    length: int
    stages: int
    """The address of ``length`` records."""


class Stage(NamedTuple):
    """Codes of a tensor that is scaled and added to what the stage before has left."""

    codes: int
    side: int
    bits: int
    support: int
    """Of the decoded values, before they are scaled."""
    dither: int
    key_low: int
    key_high: int
    scale: int
    shift: int
    mask: int
    """Of the sum."""


class QuantizeChannels(NamedTuple):
    """An item is a tile: up to ``TILE_CHANNELS`` channels of a block of ``step`` outer indices."""

    x: int
    kind: int
    codes: int
    side: int
    outer: int
    channels: int
    inner: int
    step: int
    bits: int
    levels: int
    positive: int
    support: int
    """Where the bits of positive values go; all tiles begin on a byte then."""
    key_low: int
    key_high: int


class DequantizeChannels(NamedTuple):
    """An item is a tile."""

    out: int
    kind: int
    codes: int
    side: int
    outer: int
    channels: int
    inner: int
    step: int
    bits: int
    levels: int
    support: int
    dither: int
    key_low: int
    key_high: int
    apart: int
    """From one outer index to the next in ``out``."""


class QuantizeSamples(NamedTuple):
    """An item is a group; a sample is a row."""

    x: int
    kind: int
    codes: int
    side: int
    row: int
    group: int
    widths: int
    """The bits of each sample, a byte each."""
    positive: int
    support: int
    key_low: int
    key_high: int


class DequantizeSamples(NamedTuple):
    """An item is a group."""

    out: int
    kind: int
    codes: int
    side: int
    row: int
    group: int
    widths: int
    support: int


class QuantizeBlocks(NamedTuple):
    """An item is a group. The first fields are those of :class:`Slabs`."""

    depth: int
    rows: int
    width: int
    inner: int
    block: int
    blocks: int
    per_slab: int
    x: int
    kind: int
    codes: int
    side: int
    row: int
    group: int
    bits: int
    levels: int
    positive: int
    support: int
    key_low: int
    key_high: int
    low: int
    """Where the means go, in bfloat16."""
    numel: int
    most: int
    """Blocks of eight by eight worked on at once, at most; 0 for other blocks."""


class DequantizeBlocks(NamedTuple):
    """An item is a slab."""

    depth: int
    rows: int
    width: int
    inner: int
    block: int
    blocks: int
    per_slab: int
    out: int
    kind: int
    codes: int
    side: int
    row: int
    group: int
    bits: int
    levels: int
    support: int
    dither: int
    key_low: int
    key_high: int
    low: int
    groups: int


class BlockMeans(NamedTuple):
    """An item is a slab."""

    depth: int
    rows: int
    width: int
    inner: int
    block: int
    blocks: int
    per_slab: int
    x: int
    kind: int
    out: int
    out_kind: int


class SpreadBlocks(NamedTuple):
    """An item is a slab."""

    depth: int
    rows: int
    width: int
    inner: int
    block: int
    blocks: int
    per_slab: int
    low: int
    kind: int
    out: int
    out_kind: int


class RangeEnergy(NamedTuple):
    """An item is a row."""

    x: int
    kind: int
    out: int
    row: int
    group: int
    positive: int


class CastGroups(NamedTuple):
    """An item is a group."""

    x: int
    kind: int
    out: int
    kind8: int
    row: int
    group: int
    scales: int
    shared: int
    """1 if there is one float32 scale for all groups, not a bfloat16 for each."""


class UncastGroups(NamedTuple):
    """An item is a group."""

    codes: int
    kind8: int
    out: int
    kind: int
    row: int
    group: int
    scales: int
    shared: int


class RebuildAffine(NamedTuple):
    """An item is a tile."""

    x: int
    kind: int
    numel: int
    channels: int
    inner: int
    """Values of a channel that lie together."""
    scale: int
    shift: int
    other: int
    """What is added, of the same kind."""
    support: int


class NormBackward(NamedTuple):
    """An item is ``step`` channels of all samples, which the kernel at ``decode`` puts into scratch."""

    decode: int
    parameters: int
    """The address of that kernel's record."""
    words: int
    place: int
    """The word of the record that says where the values go."""
    unit: int
    """What an item of that kernel is."""
    row: int
    """Of its groups; for slabs their number in a map, for tiles the samples that share a group."""
    group: int
    grad: int
    out: int
    kind: int
    """Of both: float32 or bfloat16."""
    for_weight: int
    for_bias: int
    mean: int
    invstd: int
    weight: int
    samples: int
    channels: int
    inner: int
    step: int


class BatchNorm(NamedTuple):
    """An item is eight channels of all samples."""

    x: int
    out: int
    mean: int
    invstd: int
    weight: int
    bias: int
    running_mean: int
    running_var: int
    numbers: int
    """The address of two float64: epsilon and momentum."""
    samples: int
    channels: int
    inner: int


class Bernoulli(NamedTuple):
    """There is one item."""

    out: int
    size: int
    """Bytes of a value."""
    numel: int
    one: int
    """The bits of 1.0."""
    below: int
    """A number of 53 random bits below this gives 1.0."""
    state: int
    """The state of torch's generator, which is brought up to date."""


class MaxPool(NamedTuple):
    """An item is a map. Of a pair of sizes the first is that of rows."""

    x: int
    kind: int
    out: int
    places: int
    height: int
    width: int
    rows: int
    columns: int
    tall: int
    wide: int
    down: int
    along: int
    above: int
    before: int
    row_apart: int
    apart: int


class Relu(NamedTuple):
    """An item is a tile. ``out`` may be ``x``."""

    x: int
    kind: int
    out: int
    mask: int
    """The bits that ``pack_band`` finds in the result."""
    numel: int


class PackBand(NamedTuple):
    """An item is a tile."""

    x: int
    kind: int
    out: int
    numel: int
    first: int
    """The band as integers that sort as floats do; it has its ends."""
    last: int
    nan: int
    """1 if NaN lies in the band."""


class MaskValues(NamedTuple):
    """An item is a tile. ``out`` may be ``x`` if values have four bytes."""

    x: int
    mask: int
    out: int
    item: int
    """Bytes of a value."""
    numel: int


class UnpackBand(NamedTuple):
    """An item is a tile."""

    mask: int
    out: int
    item: int
    """Bytes of a value."""
    numel: int
    inside: int
    """The bits of a value."""
    outside: int


class PackUints(NamedTuple):
    """An item is a tile."""

    x: int
    item: int
    """Bytes of a value."""
    out: int
    numel: int
    offset: int
    bits: int


class UnpackUints(NamedTuple):
    """An item is a tile."""

    packed: int
    out: int
    item: int
    """Bytes of a value."""
    numel: int
    offset: int
    bits: int


class PackTaps(NamedTuple):
    """An item is a tile."""

    x: int
    starts: int
    numbers: int
    """For each place of a window the number of the tap there, or -1."""
    none: int
    """For each tile how many positions are none."""
    out: int
    numel: int
    windows: int
    inner: int
    span: int
    """Places of a window, from its first tap to its last."""
    size: int
    bits: int


class UnpackTaps(NamedTuple):
    """An item is a tile."""

    packed: int
    out: int
    starts: int
    taps: int
    numel: int
    windows: int
    inner: int
    bits: int


class Launch(NamedTuple):
    """What the threads of a team share."""

    thread_number: int
    """The address of OpenMP's function for it, as ``clock`` is."""
    clock: int
    kernel: int
    parameters: int
    scratch: int
    stride: int
    """Bytes of scratch for each thread."""
    items: int
    chunk: int
    """Items that a thread takes at once."""
    progress: int
    """The address of a :class:`Progress`."""


class Progress(NamedTuple):
    """What the threads of a team write."""

    next: int
    """The first item that no thread has taken."""
    own: int
    """Items that the calling thread worked on."""
    nanoseconds: int
    """How long it worked on them."""


class Slabs(NamedTuple):
    """Blocks of a tensor (outer, s1, s2, s3, inner), seen as slabs: up to ``block`` lines along its first long side.

    Slabs are contiguous, as are their means. A line is what that side steps over: ``rows`` rows of ``width`` positions
    of ``inner`` values.
    """

    depth: int
    """Lines of a map."""
    rows: int
    width: int
    inner: int
    block: int
    blocks: int
    """Blocks of a row."""
    per_slab: int
    """Means of a slab."""


class Coding(NamedTuple):
    """How groups are coded: fields that the kernels for groups, samples and blocks have in common."""

    codes: int
    side: int
    row: int
    group: int
    bits: int
    levels: int


# ---------------------------------------------------------------- scratch


@_shared
def aligned(size: int) -> int:
    """The next multiple of a cache line, in bytes."""
    return (size + LINE - 1) // LINE * LINE


@_shared
def groups_at_once(group: int) -> int:
    """Groups that are worked on together, so that their values stay in L1."""
    return max(1, BATCH // group)


class EncodeScratch(NamedTuple):
    """For groups that are encoded together."""

    ends: int
    """The smallest values of all groups, then their largest: 32 bits each."""
    codes: int
    """The codes of one group, a byte each, and eight bytes more."""
    warped: int
    """The values of one group in levels, float32."""
    end: int


@_shared
def encode_scratch(groups: int, group: int) -> EncodeScratch:
    """For up to ``groups`` groups."""
    codes = aligned(8 * groups)
    warped = codes + aligned(group + 8)
    return EncodeScratch(0, codes, warped, warped + aligned(4 * group))


class GroupsScratch(NamedTuple):
    """Of ``quantize_groups`` and ``quantize_samples``."""

    encode: int
    wide: int
    """Values of a batch as float32."""
    end: int


@_shared
def quantize_groups_scratch(group: int) -> GroupsScratch:
    """See :class:`GroupsScratch`."""
    wide = encode_scratch(groups_at_once(group), group).end
    return GroupsScratch(0, wide, wide + 4 * max(group, BATCH))


class ValuesScratch(NamedTuple):
    """Of kernels that need values as float32 and nothing else."""

    wide: int
    end: int


class DequantizeScratch(NamedTuple):
    """Of ``dequantize_groups`` and ``dequantize_samples``."""

    codes: int
    """The codes of one group, a byte each, and eight bytes more."""
    wide: int
    """Values of a batch as float32."""
    end: int


@_shared
def dequantize_groups_scratch(group: int) -> DequantizeScratch:
    """See :class:`DequantizeScratch`."""
    wide = aligned(group + 8)
    return DequantizeScratch(0, wide, wide + 4 * max(group, BATCH))


class RebuildChainScratch(NamedTuple):
    """As :class:`DequantizeScratch`."""

    codes: int
    wide: int
    other: int
    """As ``wide``: a stage adds to the one what is in the other."""
    end: int


@_shared
def rebuild_chain_scratch(group: int) -> RebuildChainScratch:
    """Of ``rebuild_chain``."""
    room = dequantize_groups_scratch(group)
    return RebuildChainScratch(room.codes, room.wide, room.end, 2 * room.end - room.wide)


class ChannelsScratch(NamedTuple):
    """Of ``quantize_channels`` and ``dequantize_channels``."""

    encode: int
    """Or the codes of one group, as in :class:`DequantizeScratch`."""
    staged: int
    """A tile as float32 in the order of memory, without what lies between."""
    gathered: int
    """The same group by group."""
    end: int


@_shared
def channels_scratch(group: int) -> ChannelsScratch:
    """See :class:`ChannelsScratch`."""
    staged = encode_scratch(TILE_CHANNELS, group).end
    gathered = staged + 4 * TILE_CHANNELS * group
    return ChannelsScratch(0, staged, gathered, gathered + 4 * TILE_CHANNELS * group)


@_shared
def one_group_scratch(group: int) -> ValuesScratch:
    """The values of one group."""
    return ValuesScratch(0, 4 * group)


class QuantizeBlocksScratch(NamedTuple):
    """A batch has whole slabs. Differences that do not fill a group wait for the next batch, before its own."""

    encode: int
    sums: int
    """Sums and means of blocks: see ``split_scratch`` and ``means_scratch``."""
    slab: int
    """The batch as float32, and eight values that are read beyond it."""
    wide: int
    """The values that say which count, as float32."""
    fresh: int
    """The differences of the batch, and eight values that are written beyond it; the rest of a group lies before."""
    end: int


@_shared
def quantize_blocks_scratch(group: int, slabs: Slabs, most: int) -> QuantizeBlocksScratch:
    """See :class:`QuantizeBlocksScratch`."""
    batch = BATCH + slabs.block * slabs.rows * slabs.width * slabs.inner
    sums = encode_scratch(batch + group, group).end
    slab = sums + max(split_scratch(most).end, means_scratch(slabs).slab)
    wide = slab + 4 * (batch + 8)
    fresh = aligned(wide + 4 * (batch + group) + 4 * group)
    return QuantizeBlocksScratch(0, sums, slab, wide, fresh, fresh + 4 * (batch + 8))


class SplitScratch(NamedTuple):
    """For blocks of eight by eight: float32 each."""

    sums: int
    """Eight column sums of each block."""
    counts: int
    """The number of values of each block."""
    means: int
    end: int


@_shared
def split_scratch(most: int) -> SplitScratch:
    """For up to ``most`` blocks."""
    return SplitScratch(0, 32 * most, 36 * most, 40 * most)


class MeansScratch(NamedTuple):
    """For the means of one slab, float32."""

    sums: int
    means: int
    slab: int
    """The slab itself, where it has to be widened."""
    end: int


@_shared
def means_scratch(slabs: Slabs) -> MeansScratch:
    """Also of ``block_means``."""
    means = 4 * slabs.width * slabs.inner
    slab = means + 4 * slabs.per_slab
    return MeansScratch(0, means, slab, slab + 4 * slabs.block * slabs.rows * slabs.width * slabs.inner)


class DequantizeBlocksScratch(NamedTuple):
    """A batch has whole slabs. Differences decoded beyond it wait for the next batch, before its own."""

    codes: int
    """The codes of one group, a byte each, and eight bytes more."""
    means: int
    """The means of a slab as float32."""
    merged: int
    """The batch, and eight values that are written beyond it."""
    fresh: int
    """The differences of the groups that make up the batch, and eight values that are read beyond."""
    end: int


@_shared
def dequantize_blocks_scratch(group: int, slabs: Slabs) -> DequantizeBlocksScratch:
    """See :class:`DequantizeBlocksScratch`."""
    batch = BATCH + slabs.block * slabs.rows * slabs.width * slabs.inner
    means = aligned(group + 8)
    merged = means + 4 * slabs.per_slab
    fresh = aligned(merged + 4 * (batch + 8) + 4 * group)
    return DequantizeBlocksScratch(0, means, merged, fresh, fresh + 4 * (batch + 2 * group + 8))


class SpreadScratch(NamedTuple):
    """For one slab, float32."""

    means: int
    nothing: int
    """A slab of -0.0, the value whose sum with any other is that other."""
    slab: int
    end: int


@_shared
def spread_scratch(slabs: Slabs) -> SpreadScratch:
    """Of ``spread_blocks``."""
    size = 4 * slabs.block * slabs.rows * slabs.width * slabs.inner
    nothing = 4 * slabs.per_slab
    return SpreadScratch(0, nothing, nothing + size, nothing + 2 * size)


class AffineScratch(NamedTuple):
    """For one tile, float32."""

    wide: int
    other: int
    end: int


@_shared
def affine_scratch() -> AffineScratch:
    """Of ``rebuild_affine``."""
    return AffineScratch(0, 4 * TILE, 8 * TILE)


class NormScratch(NamedTuple):
    """For one item."""

    record: int
    """Of the kernel that decodes."""
    rest: int
    """The last values of a map and those of its gradient, filled up to sixteen each, float32."""
    values: int
    """Of each sample, in lines of ``length`` values."""
    spare: int
    """For the kernel that decodes."""
    length: int
    end: int


@_shared
def norm_scratch(samples: int, values: int, group: int, spare: int) -> NormScratch:
    """Of ``norm_backward``: groups may begin before the first of ``values`` values, and end after the last."""
    length = aligned(4 * (values + 2 * group)) // 4
    after = 256 + 128 + 4 * samples * length
    return NormScratch(0, 256, 256 + 128, after, length, after + spare)


class BatchNormScratch(NamedTuple):
    """For eight channels."""

    means: int
    """float32."""
    sums: int
    """float64."""
    end: int


@_shared
def batch_norm_scratch() -> BatchNormScratch:
    """Of ``native_batch_norm``."""
    return BatchNormScratch(0, 64, 128)


class BernoulliScratch(NamedTuple):
    """For all words of the generator."""

    words: int
    drawn: int
    """Random words, and one that is left from before."""
    end: int


@_shared
def bernoulli_scratch() -> BernoulliScratch:
    """Of ``bernoulli_``."""
    return BernoulliScratch(0, 4 * TWISTER, 8 * TWISTER + 64)


class MaxPoolScratch(NamedTuple):
    """For a row of results."""

    best: int
    """float32."""
    place: int
    """32-bit integers."""
    wide: int
    """A row of values, float32."""
    evens: int
    """Every other value of a row, float32."""
    odds: int
    """Those between."""
    end: int


@_shared
def max_pool_scratch(columns: int, width: int) -> MaxPoolScratch:
    """Of ``max_pool2d_with_indices``."""
    place, line = aligned(4 * columns), aligned(4 * (columns + 1))
    evens = 2 * place + aligned(4 * width)
    return MaxPoolScratch(0, place, 2 * place, evens, evens + line, evens + 2 * line)


class BandScratch(NamedTuple):
    """For one tile."""

    flags: int
    """A byte for each value."""
    wide: int
    end: int


@_shared
def band_scratch() -> BandScratch:
    """Of ``pack_band``."""
    return BandScratch(0, TILE, 5 * TILE)


class ReluScratch(NamedTuple):
    """For one tile: its last values, and their bits."""

    end: int


@_shared
def relu_scratch() -> ReluScratch:
    """Of ``relu``."""
    return ReluScratch(128)


@_shared
def taps_scratch() -> ValuesScratch:
    """The taps of one tile, as 32-bit integers."""
    return ValuesScratch(0, 4 * TILE)
