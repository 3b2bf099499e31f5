"""The Triton kernels give the bytes of the reference: in Triton's interpreter, so without a GPU.

``make test`` installs Triton and runs this file in a process of its own; ``make test-gpu-full`` runs many more cases.
The interpreter takes milliseconds for each program, however small, so cases are few and each is awkward in several
ways. It accepts kernels that the compiler refuses; one test compiles some, and ``make gpu-aot`` all.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: make test installs it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("TRITON_INTERPRET=1 is not set: make test runs this file by itself", allow_module_level=True)

import test_kernels as contract
from lowtide.kernels import backends, gpu, ops, reference
from lowtide.tools import accelerator
from test_kernels import FLOATS, INF, assert_same, levels_of, numel_of, sample, special

REPO = Path(__file__).parent.parent
FULL = os.environ.get("LOWTIDE_TEST_GPU") == "full"

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")  # of NumPy, in Triton


@pytest.fixture(autouse=True)
def fallbacks(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[tuple[str, str]]]:
    """The checks of the contract call Triton's operators, and no call may go to the reference unless a test says so."""
    monkeypatch.setattr(contract, "ops", gpu)
    found: set[tuple[str, str]] = set()
    monkeypatch.setattr(backends, "_fallbacks", found)
    yield found
    assert not found


@pytest.fixture(autouse=True)
def as_devices_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the interpreter does otherwise: it rounds to bfloat16 by another rule, and NaN is the smaller of two.

    Here the nearest is taken, of two the even one, NaN is 0x7FFF (as PTX has it), and NaN is left out if another number
    is there. Reductions are folded row by row, not value by value, which takes minutes.
    """
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    convert = interpreter._convert_float

    def rounded(x: Any, source: Any, target: Any, mode: Any) -> Any:
        if str(source) != "fp32" or str(target) != "bf16":
            return convert(x, source, target, mode)
        words = torch.from_numpy(np.ascontiguousarray(x).view(np.float32)).to(torch.bfloat16).view(torch.int16).numpy()
        return np.where(np.isnan(x.view(np.float32)), 0x7FFF, words.view(np.uint16)).astype(np.uint16)

    def folded(self: Any, given: Any) -> Any:
        data = [np.moveaxis(part.handle.data, self.axis, 0) for part in given]
        found = tuple(self.to_tensor(part[0], own.dtype) for part, own in zip(data, given, strict=True))
        for i in range(1, len(data[0])):
            more = (self.to_tensor(part[i], own.dtype) for part, own in zip(data, given, strict=True))
            found = self.combine_fn.fn(*found, *more)
            found = found if isinstance(found, tuple) else (found,)
        return list(found)

    def smaller(self: Any, a: Any, b: Any) -> Any:
        return self.binary_op(a, b, np.fmin)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_minnumf", smaller)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", folded)


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_full_groups(bits: int, positive: bool) -> None:
    """Two groups of 256 a row, the main case; the mask of positive values is written on the way."""
    dtype = FLOATS[bits % 3]
    contract.check_groups(sample(1024, dtype), 512, 256, bits, positive)


@pytest.mark.parametrize("bits", range(1, 9))
def test_awkward_values_in_short_groups(bits: int) -> None:
    """Groups of 64 and 33 values."""
    contract.check_groups(special(FLOATS[(bits + 1) % 3]), 97, 64, bits, bits % 2 == 0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_awkward_values_in_whole_groups(dtype: torch.dtype) -> None:
    x = special(dtype).view(20, 97)[:, :64].reshape(-1)
    for positive in (False, True):
        contract.check_groups(x, 64, 64, 2, positive)


@pytest.mark.parametrize(
    ("row", "bits"), [(1, 1), (2, 4), (3, 3), (5, 7), (13, 5), (257, 6), (300, 1), (1021, 2), (1000, 4)]
)
def test_sizes(row: int, bits: int) -> None:
    contract.check_groups(sample(3 * row, FLOATS[row % 3]), row, 256, bits, row % 2 == 0)


def test_a_large_group() -> None:
    contract.check_groups(sample(4097, torch.float32), 4097, 1 << 20, 2, True)


def test_keys() -> None:
    x = sample(256, torch.float32)
    for key in (-1, -(2**63), 2**63 - 1, 2**32 - 1, 2**32, random.Random(0).getrandbits(63)):
        assert_same(
            gpu.quantize_groups(x, 256, 256, 4, key, False), reference.quantize_groups(x, 256, 256, 4, key, False), key
        )


def test_no_value_is_rounded_beyond_the_largest_code() -> None:
    contract.test_no_value_is_rounded_beyond_the_largest_code()


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels(bits: int) -> None:
    contract.check_groups(special(FLOATS[bits % 3])[:970], 97, 64, bits, bits % 2 == 0, levels_of(bits))


CHANNELS = [((300, 16, 1), 3), ((12, 5, 49), 3), ((9, 24, 3), 4), ((2, 3, 300), 1), ((17, 40, 1), 2), ((20, 97, 1), 5)]


@pytest.mark.parametrize(("geometry", "bits"), CHANNELS, ids=str)
def test_channels(geometry: tuple[int, ...], bits: int) -> None:
    x = special(FLOATS[bits % 3]) if numel_of(geometry) == 1940 else sample(numel_of(geometry), FLOATS[bits % 3])
    contract.check_channels(x, geometry, 256, bits, bits % 2 == 1)


def test_levels_of_channels() -> None:
    contract.check_channels(sample(900, torch.float32), (300, 3, 1), 256, 2, True, levels_of(2))


def test_samples() -> None:
    contract.check_samples(sample(8 * 300, torch.float16), 8, 256, True)
    contract.check_samples(special(torch.float32)[: 97 * 10], 10, 40, False)


GEOMETRIES = [
    ((2, 1, 28, 20, 1), 8, 2),
    ((2, 1, 9, 7, 3), 8, 4),  # channels last
    ((2, 5, 6, 21, 1), 2, 3),  # 3-D
    ((3, 1, 1, 301, 1), 8, 2),  # 1-D
    ((5, 1, 7, 7, 1), 8, 8),  # blocks larger than maps
]


@pytest.mark.parametrize(("geometry", "block", "bits"), GEOMETRIES, ids=str)
def test_blocks(geometry: tuple[int, ...], block: int, bits: int) -> None:
    x = sample(numel_of(geometry), FLOATS[bits % 3])
    contract.check_blocks(x, geometry, block, x.numel() // geometry[0], 256, bits)
    if bits == 3:
        contract.check_blocks(x, geometry, block, x.numel(), 64, bits, levels_of(bits))


UNITS = [
    ((4, 1, 16, 16, 1), 8, 256, 256, 2),  # eight neighbours in one block, masks as whole bytes
    ((16, 1, 14, 14, 1), 8, 3136, 64, 3),  # two, and groups across maps
    ((4, 1, 12, 28, 1), 4, 672, 32, 4),  # four, in the smallest groups that have units
    ((2, 1, 4, 8, 16), 4, 512, 128, 2),  # channels last: eight in neighbouring blocks
    ((2, 4, 8, 8, 1), 4, 256, 64, 4),  # 3-D
]


@pytest.mark.parametrize(("geometry", "block", "row", "group", "bits"), UNITS, ids=str)
def test_neighbours_that_share_a_block(
    geometry: tuple[int, ...], block: int, row: int, group: int, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass where that is possible, and in two, as on ROCm."""
    for one in (True, False):
        monkeypatch.setattr(gpu, "_one_pass", lambda _device, one=one: one)
        contract.check_blocks(sample(numel_of(geometry), FLOATS[bits % 3]), geometry, block, row, group, bits)


def test_means_that_are_not_finite() -> None:
    maps = sample(3 * 256, torch.float32).view(-1, 16, 16).abs()
    maps[:, :8, :8] *= -1.0
    maps[:, 0, 0] = torch.tensor([contract.NAN, INF, -3e38])
    maps[2, 0, :8] = -3e38
    contract.check_blocks(maps.view(-1), (3, 1, 16, 16, 1), 8, 256, 16, 2)
    for kind in FLOATS:
        means = gpu.block_means(maps.view(-1), (3, 1, 16, 16, 1), 8, kind)
        assert_same(means, reference.block_means(maps.view(-1), (3, 1, 16, 16, 1), 8, kind), kind)


@pytest.mark.parametrize(("geometry", "block"), [((3, 1, 17, 23, 1), 8), ((2, 5, 6, 7, 3), 2)], ids=str)
def test_means(geometry: tuple[int, ...], block: int) -> None:
    for number, dtype in enumerate(FLOATS):
        kind = FLOATS[(number + 1) % 3]
        low = reference.block_means(sample(numel_of(geometry), dtype), geometry, block, kind)
        assert_same(gpu.block_means(sample(numel_of(geometry), dtype), geometry, block, kind), low, (dtype, kind))
        spread = reference.spread_blocks(low, geometry, block, dtype)
        assert_same(gpu.spread_blocks(low, geometry, block, dtype), spread, (dtype, kind))


@pytest.mark.parametrize("dtype", FLOATS)
def test_affine(dtype: torch.dtype) -> None:
    x = special(dtype)
    mask = reference.pack_band(x, 0.0, INF, False, True)
    for geometry in ((4, 5, 97), (20, 97, 1), (1, 1, 1940)):
        contract.check_affine(x, geometry, x.flip(0), mask)
    contract.check_affine(x, (97, 20, 1), None, None)


def test_affine_rounds_each_operation() -> None:
    contract.test_affine_rounds_each_operation()


@pytest.mark.parametrize("geometry", [(2, 3, 784), (6, 5, 49), (300, 13, 1)], ids=str)
def test_chain(geometry: tuple[int, int, int]) -> None:
    for has in (0, 7):
        contract.check_chain(geometry, 256, [3, 4], dither=has == 7, has=has)


@pytest.mark.parametrize("how", contract.NORMS)
def test_norm_backward(how: str) -> None:
    x = sample(6 * 5 * 49, torch.float32)
    given = contract.norm_arguments(x, (6, 5, 49), how, 256, 3, dither=True, weighted=True)
    for grad in (given[0], given[0].bfloat16()):
        given = (grad, *given[1:])
        assert_same(gpu.norm_backward(*given), reference.norm_backward(*given), how)


@pytest.mark.parametrize("target", contract.FP8)
def test_casts(target: torch.dtype) -> None:
    for number, dtype in enumerate(FLOATS):
        contract.check_casts(special(dtype), 97, (1, 7, 1000)[number], target)
        contract.check_casts(sample(1024, dtype), 512, 128, target)
    for scale in (0.37, 1e-4, INF, contract.NAN):
        contract.check_casts(sample(300, torch.float32), 300, 200, target, torch.tensor([scale]))
    contract.test_casts_round_as_torch_does(target)


BANDS = [(0.0, INF, False, True), (-1.0, 1.0, True, False), (-INF, 3.0, False, False), (0.0, 6.0, False, True)]


def test_bands() -> None:
    for dtype in FLOATS:
        for band in BANDS:
            assert_same(gpu.pack_band(special(dtype), *band), reference.pack_band(special(dtype), *band), (dtype, band))
    bits = torch.rand(1001) < 0.5
    mask = reference.pack_band(bits, 0.0, 1.0, False, False)
    assert_same(gpu.pack_band(bits, 0.0, 1.0, False, False), mask, "bool")
    for dtype in (*FLOATS, torch.float64, torch.bool):
        for values in ((1.25, 0.0), (-INF, math.nan), (INF, -3.3)):
            truth = reference.unpack_band(mask, 1001, dtype, *values)
            assert_same(gpu.unpack_band(mask, 1001, dtype, *values), truth, (dtype, values))
    for dtype in FLOATS:
        x = torch.randn(1001).to(dtype)
        x[:2] = math.nan
        assert_same(gpu.mask_values(x, mask), reference.mask_values(x, mask), dtype)


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_integers(bits: int) -> None:
    for dtype, offset in ((torch.int64, -5), (torch.int32, 3), (torch.int16, 0), (torch.uint8, 0)):
        largest = min(2**bits - 1, torch.iinfo(dtype).max - max(0, offset))
        x = (torch.randint(0, largest + 1, (1003,)) + offset).to(dtype)
        packed = reference.pack_uints(x, offset, bits)
        assert_same(gpu.pack_uints(x, offset, bits), packed, dtype)
        assert_same(gpu.unpack_uints(packed, 1003, bits, offset, dtype), x, dtype)


@pytest.mark.parametrize(
    "window", [contract.WINDOWS[0], contract.WINDOWS[3], ((9, 11), 2, 3, [0, 1, 2, 24, 25], 4)], ids=str
)
def test_taps(window: tuple[tuple[int, int], int, int, list[int], int]) -> None:
    contract.test_taps(1, *window)


def test_divisions_by_multiplication() -> None:
    numbers = random.Random(0)
    for divisor in (
        *range(1, 300),
        3136,
        2**31 - 1,
        2**30,
        2**16 + 1,
        *(numbers.randrange(1, 2**31) for _ in range(300)),
    ):
        m, s = gpu.magic(divisor)
        edges = [n for k in (1, 2, 2**31 // divisor - 1) for n in (k * divisor - 1, k * divisor, k * divisor + 1)]
        for n in (0, 2**31 - 1, *edges, *(numbers.randrange(2**31) for _ in range(20))):
            if 0 <= n < 2**31:
                found = n if m == 0 else (n * (m & 0xFFFFFFFF) >> 32) >> s
                assert found == n // divisor, (n, divisor)
        m, s = gpu.wide_magic(divisor)
        for n in (2**63 - 1, *(numbers.randrange(2**63) // divisor * divisor - k for k in (0, 1))):
            found = n if m == 0 else (n * (m % 2**64) >> 64) >> s
            assert m == 0 or m % 2**64 >= 2**63
            assert found == n // divisor, (n, divisor)


def test_what_kernels_do_not_know_goes_to_the_reference_and_is_noted(fallbacks: set[tuple[str, str]]) -> None:
    x = sample(1000, torch.float64)
    assert_same(
        gpu.quantize_groups(x, 1000, 256, 2, 0, False), reference.quantize_groups(x, 1000, 256, 2, 0, False), ""
    )
    assert fallbacks == {("cpu", "quantize_groups")}
    huge = sample(2 * gpu.LARGEST, torch.float32)
    truth = reference.quantize_groups(huge, huge.numel(), huge.numel(), 2, 0, False)
    assert_same(gpu.quantize_groups(huge, huge.numel(), huge.numel(), 2, 0, False), truth, "")
    assert fallbacks == {("cpu", "quantize_groups")}
    assert all(hasattr(gpu, name) for name in ops.SCHEMAS)
    fallbacks.clear()


def test_wrong_sizes_raise(fallbacks: set[tuple[str, str]]) -> None:
    x = sample(1000, torch.float32)
    codes, side = gpu.quantize_groups(x, 1000, 256, 2, 0, False)
    for wrong in ((codes[:-4], side), (codes, side[:-2])):
        with pytest.raises(RuntimeError):
            gpu.dequantize_groups(*wrong, 1000, 1000, 256, 2, torch.float32, None)
    with pytest.raises(RuntimeError):
        gpu.quantize_groups(x, 999, 256, 2, 0, False)
    with pytest.raises(RuntimeError, match="levels must be 4 float32 values"):
        gpu.quantize_groups(x, 1000, 256, 2, 0, False, torch.arange(3.0))
    with pytest.raises(RuntimeError, match="1000 values are not 10 x 10 x 9"):
        gpu.quantize_channels(x, (10, 10, 9), 256, 2, 0, False)
    fallbacks.clear()


def test_every_launch_goes_to_the_device_of_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no call of the doctor's goes to the reference."""
    depth = 0
    launched = set()

    @contextmanager
    def guard(_tensor: torch.Tensor) -> Iterator[None]:
        nonlocal depth
        depth += 1
        yield
        depth -= 1

    class Launch:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: Any) -> Callable[..., None]:
            assert depth > 0, self.name
            launched.add(self.name)
            return lambda *_values, **_named: None

    kind = type(gpu.programs.quantize)
    names = {name for name, value in vars(gpu.programs).items() if name[0] != "_" and isinstance(value, kind)}
    monkeypatch.setattr(gpu, "_guard", guard)
    for name in names:
        monkeypatch.setattr(gpu.programs, name, Launch(name))
    for operator, _label, given in accelerator._calls():
        getattr(gpu, operator)(*given)
    assert launched == names
    assert "quantize_maps" in names


class Mutation(NamedTuple):
    """What is changed in the text of the kernels, and to what; and a check that must fail then."""

    text: str
    other: str
    check: Callable[[], None]


def _usual() -> None:
    contract.check_groups(sample(512, torch.float32), 512, 256, 2, False)


def _float_means() -> None:
    x = (sample(4096, torch.float32) * 10.0 ** (torch.arange(4096) % 7 - 3)).to(torch.float16)
    geometry = (4, 1, 32, 32, 1)
    means = gpu.block_means(x, geometry, 8, torch.float32)
    assert_same(means, reference.block_means(x, geometry, 8, torch.float32), "block_means")


MUTATIONS = {
    "the low end is rounded to zero": Mutation(
        "away = (exact >> 31) & ((exact & 0xFFFF) != 0).to(tl.uint32)", "away = exact & 0", _usual
    ),
    "the step is rounded down": Mutation(
        "step_word = (bits >> 16) + ((bits & 0xFFFF) != 0).to(tl.uint32)", "step_word = bits >> 16", _usual
    ),
    "an inverse leaves values beyond the largest code": Mutation(
        "(extent * inverse > top)",
        "(extent * inverse > 2.0 * top)",
        contract.test_no_value_is_rounded_beyond_the_largest_code,
    ),
    "a strip has the random bytes of another": Mutation(
        "_coded(x1, _threshold(word, 8,", "_coded(x1, _threshold(word, 16,", _usual
    ),
    "a strand of random numbers begins later": Mutation(
        "c0 = _coded(x0, _threshold(word,", "word = _mix(word)\n    c0 = _coded(x0, _threshold(word,", _usual
    ),
    "columns of a block are added in another order": Mutation(
        "+ c5) + c6) + c7",
        "+ c5) + c7) + c6",
        _float_means,
    ),
    "a row of an edge block is dropped": Mutation(
        "tl.minimum(s2 - c2 * BLOCK, BLOCK)",
        "tl.minimum(s2 - c2 * BLOCK - 1, BLOCK)",
        lambda: contract.check_blocks(sample(560, torch.float32), (1, 1, 28, 20, 1), 8, 560, 256, 2),
    ),
    "the last value of a short group is dropped": Mutation(
        "((e < n) & (j < lane))[None, :]\n    return inside",
        "((e < n - 1) & (j < lane))[None, :]\n    return inside",
        lambda: contract.check_groups(torch.arange(300.0), 300, 256, 2, False),
    ),
    "bits of a mask move by one": Mutation(
        "(tl.sum(ones, 2) >> 24) ^ 0xFF",
        "(tl.sum(ones, 2) >> 25) ^ 0xFF",
        lambda: contract.check_groups(sample(512, torch.float32), 512, 256, 2, True),
    ),
    "NaN sets no range": Mutation(
        "return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)",
        "return tl.where(a == a, tl.where(b == b, tl.maximum(a, b), a), b)",
        lambda: contract.check_groups(special(torch.float32), 97, 64, 2, False),
    ),
    "decoding cuts where it should round": Mutation(
        "y = x.to(tl.bfloat16).to(tl.int16, bitcast=True)",
        "y = (_bits(x) >> 16).to(tl.uint16).to(tl.int16, bitcast=True)",
        lambda: contract.check_groups(sample(512, torch.bfloat16), 512, 256, 3, False),
    ),
    "a gradient passes where the mask is zero": Mutation(
        "tl.where(bit != 0, tl.load(x_ptr + at, mask=there, other=0), 0)",
        "tl.load(x_ptr + at, mask=there, other=0)",
        lambda: assert_same(
            gpu.mask_values(torch.ones(80), torch.zeros(10, dtype=torch.uint8)), torch.zeros(80), "mask_values"
        ),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_changed_kernel_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, other, check = MUTATIONS[name]
    source = Path(str(gpu.programs.__file__)).read_text()
    assert text in source
    path = tmp_path / "mutated.py"
    path.write_text(source.replace(text, other, 1))
    spec = importlib.util.spec_from_file_location("mutated", path)
    assert spec is not None
    assert spec.loader is not None
    mutated = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutated)
    check()
    monkeypatch.setattr(gpu, "programs", mutated)
    with pytest.raises(AssertionError):
        check()


def test_some_kernels_compile() -> None:
    """The interpreter accepts what the compiler refuses. No fused multiply-add, nothing flushed to zero, no spills."""
    run = [
        sys.executable,
        "benchmarks/gpu_aot.py",
        "--targets",
        "sm_80",
        "gfx942",
        "--only",
        "2 bits bfloat16 NCHW rect|3-D",
    ]
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(run, cwd=REPO, env=without, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    # Codes, values and 3-D means, for two targets; and on gfx942 means by themselves.
    assert "\n7 programs, 0 with spills or faults" in result.stdout


full = pytest.mark.skipif(not FULL, reason="make test-gpu-full runs it")


@full
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_groups(dtype: torch.dtype, bits: int, positive: bool) -> None:
    for row in contract.ROWS:
        for group in contract.GROUPS:
            contract.check_groups(sample(3 * row, dtype), row, group, bits, positive)
            if bits <= 4:
                contract.check_groups(sample(3 * row, dtype), row, group, bits, positive, levels_of(bits))
    for group in (1, 7, 64, 1000):
        contract.check_groups(special(dtype), 97, group, bits, positive)


@full
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("geometry", "block"), contract.GEOMETRIES, ids=str)
def test_all_blocks(geometry: tuple[int, ...], block: int, dtype: torch.dtype) -> None:
    contract.test_blocks(geometry, block, dtype)


@full
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_all_channels(dtype: torch.dtype, positive: bool) -> None:
    contract.test_channels(dtype, positive)


@full
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_all_chains(bits: int, dtype: torch.dtype) -> None:
    contract.test_chain(bits, dtype)
