"""Compiles the GPU kernels for five architectures, without a GPU, and looks at the machine code.

Each row is one launch of one operator with the numbers of a real layer: the operator runs on the host side only, its
launches are written down, and each is compiled as Triton would compile it there. Registers, spills and shared memory
are read from the binaries. ``instructions`` are those of a thread over the values that it works on, without those that
handle a division's rare cases; loops count once, but those over the tiles of a span as often as they run. ``bytes`` are
all bytes of the tensors of the launch over the values of the operator. The float instructions are held against what
bit-equality allows: no fused multiply-add but inside a division, nothing flushed to zero, nothing approximate.

    python benchmarks/gpu_aot.py --out benchmarks/results/gpu_aot.csv
"""

from __future__ import annotations

import argparse
import csv
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lowtide.kernels import gpu, programs, reference

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.int8: "*i8",
}
FIELDS = ["case", "launch", "target", "registers", "spills", "shared", "instructions", "slots", "bytes", "faults"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}


class Launches:
    """Stands in for a kernel and writes down what it is launched with."""

    def __init__(self, kernel: Any, found: list[tuple[Any, dict[str, Any]]]) -> None:
        self.kernel, self.found = kernel, found

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def call(*values: Any, **named: Any) -> None:
            self.found.append((self.kernel, dict(zip(self.kernel.arg_names, values, strict=False)) | named))

        return call


def recorded(call: Callable[[], Any]) -> list[tuple[Any, dict[str, Any]]]:
    """The launches of an operator."""
    found: list[tuple[Any, dict[str, Any]]] = []
    kernels = {name: value for name, value in vars(programs).items() if hasattr(value, "arg_names")}
    try:
        for name, kernel in kernels.items():
            setattr(programs, name, Launches(kernel, found))
        call()
    finally:
        for name, kernel in kernels.items():
            setattr(programs, name, kernel)
    return found


def cases() -> Iterator[tuple[str, int, Callable[[], Any]]]:
    """Name, values, and a call of an operator, with the sizes of layers of ResNet-50 and of a transformer."""
    maps, last = (8 * 64, 1, 56, 56, 1), (8, 1, 56, 56, 64)
    numel = math.prod(maps)
    mask, levels = torch.zeros(numel // 8, dtype=torch.uint8), torch.arange(4.0)
    sample = numel // 8

    def packed(bits: int, row: int = sample, n: int = numel) -> tuple[Tensor, Tensor]:
        size = n // row * reference.row_bytes(row, 256, bits)
        words = n // row * reference.groups_in_row(row, 256) * 2
        return torch.empty(size, dtype=torch.uint8), torch.empty(words, dtype=torch.int16)

    for name, dtype in DTYPES.items():
        x = torch.empty(numel, dtype=dtype)
        for bits in {"float32": (2, 4, 8), "bfloat16": (1, 2, 3, 4, 8), "float16": (2,)}[name]:
            yield (
                f"quantize_groups {bits} bits {name}",
                numel,
                lambda x=x, bits=bits: gpu.quantize_groups(x, sample, 256, bits, 5, False),
            )
            for key in (None, 5) if name == "bfloat16" else (None,):
                extra = " dithered" if key else ""
                yield (
                    f"dequantize_groups {bits} bits {name}{extra}",
                    numel,
                    lambda bits=bits, dtype=dtype, key=key: gpu.dequantize_groups(
                        *packed(bits), numel, sample, 256, bits, dtype, None, None, key
                    ),
                )
        for bits in (2,):
            yield (
                f"quantize_groups {bits} bits {name} rectified, mask",
                numel,
                lambda x=x, bits=bits: gpu.quantize_groups(x, sample, 256, bits, 5, True, None, mask),
            )
            yield (
                f"dequantize_groups {bits} bits {name} support",
                numel,
                lambda bits=bits, dtype=dtype: gpu.dequantize_groups(
                    *packed(bits), numel, sample, 256, bits, dtype, mask
                ),
            )
        for geometry, place in ((maps, "NCHW"), (last, "NHWC")) if name != "float16" else ():
            for support in (None, mask) if place == "NCHW" else (mask,):
                extra = " rectified, mask" if support is not None else ""
                yield (
                    f"quantize_blocks 2 bits {name} {place}{extra}",
                    numel,
                    lambda x=x, g=geometry, s=support: gpu.quantize_blocks(
                        x, g, 8, sample, 256, 2, 5, s is not None, None, s
                    ),
                )
                low = torch.empty(math.prod(reference.low_shape(geometry, 8)), dtype=torch.bfloat16)
                yield (
                    f"dequantize_blocks 2 bits {name} {place}{extra}",
                    numel,
                    lambda g=geometry, s=support, low=low, d=dtype: gpu.dequantize_blocks(
                        low, *packed(2), g, 8, sample, 256, 2, d, s
                    ),
                )
        for geometry in ((8 * 3136, 64, 1), (8, 4096, 49), (8, 1024, 196)):
            if name != "bfloat16":
                continue
            n = math.prod(geometry)
            source = torch.empty(n, dtype=dtype)
            for bits in (3,):
                sizes = reference.channel_sizes(geometry, 256, bits)
                parts = torch.empty(sizes[1], dtype=torch.uint8), torch.empty(2 * sizes[0], dtype=torch.int16)
                yield (
                    f"quantize_channels {bits} bits {name} inner {geometry[2]}",
                    n,
                    lambda s=source, g=geometry, b=bits: gpu.quantize_channels(s, g, 256, b, 5, False),
                )
                yield (
                    f"dequantize_channels {bits} bits {name} inner {geometry[2]} dithered",
                    n,
                    lambda p=parts, g=geometry, b=bits, d=dtype: gpu.dequantize_channels(
                        *p, g, 256, b, d, None, None, 5
                    ),
                )
        yield (
            f"rebuild_affine {name} sum, mask",
            numel,
            lambda x=x: gpu.rebuild_affine(x, (8, 64, 3136), torch.ones(64), torch.ones(64), x, mask),
        )
        if name != "float16":
            values, scales = torch.empty(numel, dtype=torch.float8_e4m3fn), torch.empty(numel // 256)
            yield (
                f"cast_groups {name}",
                numel,
                lambda x=x: gpu.cast_groups(x, sample, 256, torch.float8_e4m3fn),
            )
            yield (
                f"uncast_groups {name}",
                numel,
                lambda v=values, s=scales, d=dtype: gpu.uncast_groups(v, s.to(torch.bfloat16), sample, 256, d),
            )
        yield f"pack_band {name}", numel, lambda x=x: gpu.pack_band(x, 0.0, math.inf, False, True)
        yield f"unpack_band {name}", numel, lambda dtype=dtype: gpu.unpack_band(mask, numel, dtype, 1.0, 0.0)
        yield f"mask_values {name}", numel, lambda x=x: gpu.mask_values(x, mask)
        yield f"range_energy {name}", numel, lambda x=x: gpu.range_energy(x, sample, 256, False)
    x = torch.empty(numel)
    widths = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8)
    total = sum(reference.row_bytes(sample, 256, bits) for bits in range(1, 9))
    codes, side = torch.empty(total, dtype=torch.uint8), packed(2)[1]
    for name in ("bfloat16", "float32"):  # maps of other layers, whose rows have fewer whole units
        dtype = DTYPES[name]
        for width, channels, bits in ((28, 128, 2), (14, 256, 3), (7, 512, 4)):
            geometry, own = (8 * channels, 1, width, width, 1), channels * width * width
            n = 8 * own
            small, low = torch.empty(n, dtype=dtype), torch.empty(math.prod(reference.low_shape(geometry, 8)))
            for b, support in ((bits, None), (2, torch.zeros(n // 8, dtype=torch.uint8))):
                extra = " rectified, mask" if support is not None else ""
                yield (
                    f"quantize_blocks {b} bits {name} NCHW of {width}{extra}",
                    n,
                    lambda x=small, g=geometry, o=own, s=support, b=b: gpu.quantize_blocks(
                        x, g, 8, o, 256, b, 5, s is not None, None, s
                    ),
                )
                yield (
                    f"dequantize_blocks {b} bits {name} NCHW of {width}{extra}",
                    n,
                    lambda low=low, g=geometry, o=own, n=n, s=support, b=b, d=dtype: gpu.dequantize_blocks(
                        low.to(torch.bfloat16), *packed(b, o, n), g, 8, o, 256, b, d, s
                    ),
                )
    yield "quantize_samples float32", numel, lambda: gpu.quantize_samples(x, widths, total, 256, 5, False)
    yield (
        "dequantize_samples float32",
        numel,
        lambda: gpu.dequantize_samples(codes, side, widths, numel, 256, torch.float32, None),
    )
    yield (
        "quantize_groups 2 bits float32 levels",
        numel,
        lambda: gpu.quantize_groups(x, sample, 256, 2, 5, False, levels),
    )
    yield (
        "dequantize_groups 2 bits float32 levels",
        numel,
        lambda: gpu.dequantize_groups(*packed(2), numel, sample, 256, 2, torch.float32, None, levels),
    )
    yield (
        "rebuild_chain 3 bits sum, mask",
        numel,
        lambda: gpu.rebuild_chain(
            *([part] for part in packed(3, 3136)),
            *((8, 64, 3136), 256, [3], torch.float32, [mask], [5], [True], [torch.ones(64)], [torch.ones(64)], x),
            [mask],
        ),
    )
    yield "block_means float32", numel, lambda: gpu.block_means(x, maps, 8, torch.float32)
    deep = (8 * 8, 16, 28, 56, 1)
    yield "block_means float32 3-D", numel, lambda: gpu.block_means(x, deep, 8, torch.float32)
    low = torch.empty(math.prod(reference.low_shape(maps, 8)))
    yield "spread_blocks float32", numel, lambda: gpu.spread_blocks(low, maps, 8, torch.float32)
    yield "pack_band bool", numel, lambda: gpu.pack_band(torch.empty(numel, dtype=torch.bool), 0.0, 1.0, False, False)
    indices = torch.empty(8 * 64 * 56 * 56, dtype=torch.int64)
    starts, taps = torch.zeros(3136, dtype=torch.int64), torch.arange(9)
    yield "pack_taps 4 bits", numel, lambda: gpu.pack_taps(indices, starts, 1, taps, 12544, 4)
    small = torch.empty(numel // 2, dtype=torch.uint8)
    yield "unpack_taps 4 bits", numel, lambda: gpu.unpack_taps(small, numel, starts, 1, taps, 4)
    yield "pack_uints 4 bits", numel, lambda: gpu.pack_uints(indices, 0, 4)
    yield "unpack_uints 4 bits", numel, lambda: gpu.unpack_uints(small, numel, 4, 0, torch.int64)


def compiled(kernel: Any, given: dict[str, Any], target: GPUTarget) -> Any:
    """The kernel as Triton specialises it for these arguments."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, Tensor):
            signature[name], attributes[(i,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1 and not parameter.do_not_specialize:
            signature[name], constants[(i,)] = "constexpr", 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(i,)] = [["tt.divisibility", 16]]
    options = {key: value for key, value in given.items() if key not in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=target, options=options)


# What a float instruction of PTX may be. Conversions are exact, or to float16 as IEEE 754 rounds them; an x2
# is two operations, and a float16 that is added to a float32 is widened exactly.
ALLOWED = re.compile(
    r"(add|sub|mul|div)(\.rn)?\.f32|(add|sub|mul)\.rn\.f32x2|(add|sub)\.rn\.f32\.f16|(neg|abs)\.f32|(min|max)(\.NaN)?\.f32|setp\.[a-z]+(\.and|\.or)?\.f(16|32)|selp\.f32|mov\.f32"
    r"|cvt\.f32\.f16|cvt\.rn\.b?f16(x2)?\.f32|cvt\.rn\.f32\.[us](8|16|32)|(ld|st)\.[a-z0-9_.:]*f32"
)


# Lanes of an SM that take an instruction in a clock, out of the 128 it issues (CUDA programming guide, throughput of
# arithmetic instructions). Products and sums of floats have 128 lanes from sm_90 on; those of integers go there too.
LANES = {"integer": 64, "product": 64, "memory": 32, "special": 16}
PIPES = {
    "product": "FADD FMUL FFMA IMAD",
    "memory": "LDG STG LDS STS LDSM SHFL ATOM ATOMG RED BAR",
    "special": "MUFU I2F F2I F2F POPC FLO BREV",
    "integer": "IADD3 LOP3 SHF SEL ISETP IMNMX PRMT LEA SGXT FMNMX FSEL FSETP FCHK PLOP3 P2R R2P IABS VOTE BMSK VIADD "
    "VIMNMX MOV CS2R F2FP",
}


def slots(kinds: Counter[str], arch: str) -> int:
    """Instructions, or the issue slots that pass while the busiest pipe takes its own."""
    found = [sum(kinds.values())]
    for pipe, names in PIPES.items():
        lanes = 128 if pipe == "product" and arch != "sm_80" else LANES[pipe]
        found.append(sum(kinds[name] for name in names.split()) * 128 // lanes)
    return max(found)


def repeated(
    body: list[tuple[int, str]], loops: list[tuple[int, int]], rounds: list[int]
) -> tuple[Counter[str], list[str]]:
    """Instructions by name, those of a loop (its first and its last place) as often as it runs; once without rounds."""
    kinds: Counter[str] = Counter()
    left = rounds[max(0, len(rounds) - len(loops)) :]  # the first loop may be unrolled
    for at, op in body:
        within = [n for (first, last), n in zip(sorted(loops), left, strict=False) if first <= at <= last]
        kinds[op] += math.prod(within)
    return kinds, [f"{len(loops)} loops, not {len(rounds)}"] if rounds and len(loops) > len(rounds) else []


def nvidia(binary: Any, arch: str, rounds: list[int]) -> tuple[int, int, int, int, list[str]]:
    """Registers, bytes spilled, instructions, issue slots, and what must not be there."""
    ptx = binary.asm["ptx"]
    used = re.findall(
        r"^\s*(?:@!?%p\d+\s+)?([a-z][A-Za-z0-9_.:]*\.(?:f16|f32|f64|bf16|f16x2|bf16x2)[a-z0-9_.]*)\s", ptx, re.M
    )
    faults = [op for op in sorted(set(used)) if not ALLOWED.fullmatch(op)]
    faults += [word for word in (".ftz", "fma.", ".approx", "div.full", ".nc.") if word in ptx]
    faults += sorted(set(re.findall(r"\b(?:div|rem)\.[us]64", ptx)))  # a call of a function that is not counted
    divisions = len(re.findall(r"\bdiv\.rn\.f32", ptx))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        run = [TOOLS / "cuobjdump", "--dump-resource-usage", "-sass", file.name]
        text = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text)
    assert usage is not None
    lines = [
        (int(at, 16), op) for at, op in re.findall(r"/\*([0-9a-f]{4,6})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", text)
    ]
    exits = [at for at, op in lines if op.split()[0] == "EXIT"]
    end = max(exits) + 1  # behind it lie the rare cases of divisions, which flush nothing that counts
    body = [(at, op.split()[0]) for at, op in lines if at < end]
    jumps = ((at, re.match(r"BRA(?:\.U)? (?:!?U?P\w+, )?(0x[0-9a-f]+)", op)) for at, op in lines if at < end)
    loops = [(int(to[1], 16), at) for at, to in jumps if to and int(to[1], 16) < at]
    kinds, wrong = repeated([(at, op.split(".")[0]) for at, op in body], loops, rounds)
    faults += wrong
    body = [op for _, op in body]
    fused = sum(op.split(".")[0] in ("FFMA", "FFMA2") for op in body)
    if fused > 6 * divisions:
        faults.append(f"{fused} FFMA with {divisions} divisions")
    if any(".FTZ" in op for op in body if op.startswith("F") and not op.startswith("F2I")):  # F2I divides integers
        faults.append(".FTZ")
    del kinds["NOP"], kinds["BRA"]
    return int(usage[1]), int(usage[2]) + int(usage[3]), sum(kinds.values()), slots(kinds, arch), faults


def amd(binary: Any, rounds: list[int]) -> tuple[int, int, int, int, list[str]]:
    """Registers, bytes spilled, instructions, the same for want of a table of pipes, and what must not be there."""
    text = binary.asm["amdgcn"]

    def number(name: str) -> int:
        found = re.search(name + r":?\s+(\d+)", text)
        assert found is not None, name
        return int(found[1])

    lines = text.splitlines()
    found = ((at, re.match(r"\s+((?:v|s|ds|global|buffer|flat)_[a-z0-9_]+)", line)) for at, line in enumerate(lines))
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if re.match(r"\.LBB\w+:", line)}
    jumps = ((at, re.match(r"\s+s_c?branch\w*\s+(\.LBB\w+)", line)) for at, line in enumerate(lines))
    loops = [(labels[to[1]], at) for at, to in jumps if to and labels[to[1]] < at]
    ops, faults = repeated([(at, op[1]) for at, op in found if op], loops, rounds)
    fused = len(re.findall(r"^\s+v_(?:pk_)?(?:fma|fmac|mad|mac)_f", text, re.M))
    divisions = len(re.findall(r"^\s+v_div_fixup_f32", text, re.M))
    if fused > 6 * divisions:
        faults.append(f"{fused} fused with {divisions} divisions")
    if number(r"\.amdhsa_float_denorm_mode_32") != 3:
        faults.append("denormals are flushed")
    spilled = number(r"\.vgpr_spill_count") + number(r"\.sgpr_spill_count") + number("ScratchSize")
    return number(r"\.vgpr_count"), spilled, sum(ops.values()), sum(ops.values()), faults


def row(case: str, numel: int, kernel: Any, given: dict[str, Any], arch: str) -> dict[str, Any]:
    target = TARGETS[arch]
    binary = compiled(kernel, given, target)
    rounds = []
    if kernel.fn.__name__ == "quantize_maps":
        rounds = [-(-given["BLOCKS"] // given["SIZE"]), given["SPAN"] // given["GROUPS"]]
    looked = nvidia(binary, arch, rounds) if target.backend == "cuda" else amd(binary, rounds)
    registers, spills, instructions, busy, faults = looked
    if kernel.fn.__name__ == "quantize_maps":
        values = given["SPAN"] * given["group"]
    elif "LANE" in given or "GROUPS" in given:
        values = given["GROUPS"] * given["n"]
    elif kernel.fn.__name__ == "means":
        values = given["SIZE"] * given["BLOCK"] ** (3 if given["DEEP"] else 2)
    elif kernel.fn.__name__ == "row_sums":
        values = given["SIZE"]
    else:
        per = 8 // given["BITS"] if kernel.fn.__name__ in ("pack_uints", "pack_taps") else 1
        values = given["SIZE"] * (8 if kernel.fn.__name__ == "pack_band" else per)
    threads = given.get("num_warps", 4) * target.warp_size
    tensors = {t.data_ptr(): t.nbytes for t in given.values() if isinstance(t, Tensor)}
    written_too = given["x_ptr"].nbytes if kernel.fn.__name__ == "affine" else 0
    return {
        "case": case,
        "launch": kernel.fn.__name__,
        "target": arch,
        "registers": registers,
        "spills": spills,
        "shared": binary.metadata.shared,
        "instructions": round(instructions * threads / values, 1),
        "slots": round(busy * threads / values, 1),
        "bytes": round((sum(tensors.values()) + written_too) / numel, 3),
        "faults": "; ".join(faults),
    }


def write(file: TextIO, rows: Iterable[dict[str, Any]]) -> None:
    writer = csv.DictWriter(file, FIELDS)
    writer.writeheader()
    writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a CSV file, whose other rows stay; printed otherwise")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--only", default="", help="a regular expression for the names of cases")
    given = parser.parse_args()
    rows = []
    table: dict[tuple[str, str], dict[str, Any]] = {}
    if given.out and given.out.exists():
        with given.out.open() as file:
            table = {(r["case"], r["target"]): r for r in csv.DictReader(file)}
    for arch in given.targets:
        gpu._one_pass = lambda _device, nvidia=TARGETS[arch].backend == "cuda": nvidia
        for case, numel, call in cases():
            for number, (kernel, values) in enumerate(recorded(call) if re.search(given.only, case) else ()):
                name = case if number == 0 else f"{case} +{number}"
                rows.append(row(name, numel, kernel, values, arch))
                table[name, arch] = rows[-1]
                if given.out:
                    with given.out.open("w", newline="") as file:
                        write(file, table.values())
    if not given.out:
        write(sys.stdout, rows)
    bad = [r for r in rows if r["faults"] or r["spills"]]
    for r in bad:
        print("not allowed:", *r.values())
    largest = max((r["registers"] for r in rows), default=0)
    print(f"{len(rows)} programs, {len(bad)} with spills or faults; {largest} registers at most")
    return bool(bad or not rows)


if __name__ == "__main__":
    sys.exit(main())
