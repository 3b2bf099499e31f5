"""What things cost on this machine: seconds of codecs and copies, and memory that ops take only while they run.

Each number is measured once. It is then kept in this process and in a file of the user's cache folder, apart for each
processor, number of threads, and version of torch, Numba and lowtide (:func:`forget_costs` drops it). The folder is
``LOWTIDE_CACHE_DIR`` if that is set, otherwise ``lowtide`` in ``XDG_CACHE_HOME`` or ``~/.cache``. A file that cannot be
read or written is no error: then each process measures for itself.

Seconds are those of a quiet moment, the least of several runs. Memory that the system hands out anew costs page faults
on top, which these runs do not have; :func:`fresh_seconds` tells what they cost with the allocator of this process, and
is kept in the process only. Seconds have to be measured outside of sessions, fake tensors and other modes of
torch, and while no other thread of the process computes: the number of threads is 1 for a moment.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..codecs import BlockMean, Codec, GroupQuant, Indices, LogQuant, PoolOffsets, SampleQuant, SixSigma, TwoValue
from ..malloc import is_tuned
from .measure import ChildError, Emit, available_nbytes, peak_above, run_child

_LARGE, _SMALL = 1_600_000, 4096  # values of the two tensors that a codec's seconds follow from
_RUNS = {_LARGE: 7, _SMALL: 30}
_PATIENCE = 0.5  # seconds after which no further run begins, however few there were
_KEY = 0x5EED  # any number: it names the random numbers of an encoding
_COPIED = 1 << 26  # bytes: more than any cache of a processor holds
# Blocks that glibc's heap serves once it has seen one, and together more than it ever keeps free at its top, 64 MiB.
_BLOCK, _BLOCKS = 1 << 23, 16
_PIECE = 1 << 20
_NOISE = 1 << 20  # bytes: resident memory is not known better than that
# Threads that wait for each other without a pause take many times as long if other processes keep the cores busy.
_PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}
_CRASHES = 3  # so many calls may end the process that measures them before the rest is given up
_SECTIONS = 8  # machines and versions that the file keeps

# What is known in this process: for each machine (see ``_machine``) the numbers of each name.
_known: dict[str, dict[str, tuple[float, ...]]] = {}


class Seconds(NamedTuple):
    """Seconds for each value (of a codec) or byte (of a file), and those that each call costs beside them."""

    encode: float
    """Seconds to encode one value, or to write one byte."""
    decode: float
    """Seconds to decode one value, or to read one byte."""
    encode_call: float = 0.0
    """Seconds of one call of encode, however small the tensor is."""
    decode_call: float = 0.0
    """Seconds of one call of decode, however small the tensor is."""

    def to_encode(self, count: int) -> float:
        """Seconds to encode ``count`` values at once."""
        return self.encode_call + self.encode * count

    def to_decode(self, count: int) -> float:
        """Seconds to decode ``count`` values at once."""
        return self.decode_call + self.decode * count


def codec_seconds(codec: Codec, dtype: torch.dtype = torch.float32, rectified: bool = False) -> Seconds:
    """Return what ``codec`` takes for tensors of ``dtype`` on the CPU, with as many threads as torch has now.

    With ``rectified`` these are the seconds of a tensor behind a ReLU: encoding finds its support too, and decoding
    reads that. The tensor has maps of 56 x 56 where channels or blocks matter and for codecs that are not lowtide's
    own, and rows of 768 values elsewhere; codecs of integers get int64, whatever ``dtype`` is. Raises what the codec
    raises if it does not store ``dtype``. Seconds of a codec that is not lowtide's own are kept in this process only.
    """
    name = f"codec {codec!r} {_short(dtype)}{' rectified' if rectified else ''}"
    if not _is_ours(codec):  # it may be another one tomorrow, under the same name
        name = f"{name} of definition {codec._definition}"
    return Seconds(*_once(name, 4, lambda: _time_codec(codec, dtype, rectified), lasting=_is_ours(codec)))


def copy_seconds() -> float:
    """Return the seconds for each byte of a large copy in memory, both ends of which were in use before."""
    return _once("copy", 1, _time_copy)[0]


def fresh_seconds() -> float:
    """Return the seconds for each byte that the page faults of a large tensor cost with the allocator of this process.

    Tensors are taken until they are more than glibc keeps, and are freed the last first, as a step does it. What
    filling them takes beyond filling them again are the faults. An allocator that keeps what was freed, as glibc's does
    after ``tune_cpu_allocator``, has none after its first round. It is measured once for each process, and anew after
    such a call, and needs 128 MiB for a moment.
    """
    return _once(f"fresh{' tuned' * is_tuned()}", 1, _time_fresh, lasting=False)[0]


def file_seconds() -> Seconds:
    """Return the seconds for each byte of writing packed bytes to a temporary file and of reading them there.

    The file is mapped, as that of the home "file" is. So these are the seconds as long as its pages stay in memory. If
    memory is short and the disk has to be waited for, both take longer. Raises OSError if there is no room for a file.
    """
    return Seconds(*_once(f"file {tempfile.gettempdir()}", 4, _time_file))


class Call(NamedTuple):
    """One call of an op, without any data: what can be compared, written down as JSON, and run somewhere else.

    ``arguments`` holds None, whole numbers and strings as they are. All else is a tuple with a word first: "tensor"
    (shape, strides, dtype), "list", "bool", "float" (its text, so that NaN equals itself), "dtype", "layout",
    "memory_format", "device", and "named" for a keyword argument (name, value). Whether two arguments are the same
    tensor, and where in its storage a tensor begins, is not kept.
    """

    op: str
    arguments: tuple[Any, ...]

    @classmethod
    def of(cls, func: object, args: Sequence[Any], kwargs: Mapping[str, Any] = MappingProxyType({})) -> Call | None:
        """Describe a call as a ``TorchDispatchMode`` sees it; None if something in it cannot be described.

        No data is read, so fake tensors do as well as real ones.
        """
        if not re.fullmatch(r"\w+\.\w+(\.\w+)?", str(func)):
            return None
        try:
            named = (("named", name, _described(kwargs[name])) for name in sorted(kwargs))
            return cls(str(func), (*map(_described, args), *named))
        except TypeError:
            return None

    def to_config(self) -> list[Any]:
        """Plain data that JSON can carry and :meth:`from_config` turns back into an equal call."""
        return [self.op, _lists(self.arguments)]

    @classmethod
    def from_config(cls, config: Sequence[Any]) -> Call:
        """Return the call that plain data describe."""
        op, arguments = config
        return cls(op, _tuples(arguments))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors among the arguments."""
        return sum(map(_nbytes, self.arguments))

    def prepare(self) -> tuple[Callable[..., Any], list[Any], dict[str, Any]]:
        """Return the op and arguments of this form on the CPU.

        Float tensors hold random numbers between 0 and 1, which are the same each time and leave torch's generators
        alone. Integers are 0, so that they are indices of anything.
        """
        function: Any = torch.ops
        for part in self.op.split("."):
            function = getattr(function, part)
        random = torch.Generator().manual_seed(0)
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for argument in self.arguments:
            if isinstance(argument, tuple) and argument[0] == "named":
                kwargs[argument[1]] = _built(argument[2], random)
            else:
                args.append(_built(argument, random))
        return function, args, kwargs

    def run(self) -> Any:
        """Call the op with arguments of this form, and return what it returns."""
        function, args, kwargs = self.prepare()
        with torch.no_grad():
            return function(*args, **kwargs)


def workspaces(calls: Iterable[Call], limit_nbytes: int | None = None) -> dict[Call, int]:
    """Return the bytes that each call takes from the system while it runs and gives back before it returns.

    No dispatcher sees them: copies that a library reorders, unfolded maps, partial sums of threads. They come on top of
    the arguments and of what the call returns. Less than 1 MiB counts as nothing. Libraries may keep buffers from call
    to call; those are not counted, since a process has them from its first step on.

    The calls run in a child process, one after the other, two or three times each. A call is absent from the result if
    its arguments are larger than ``limit_nbytes`` (half of the free memory unless given), if it raises, or if it ends
    the process. On systems other than Linux the result is empty.
    """
    if not sys.platform.startswith("linux"):
        return {}
    limit = available_nbytes() // 2 if limit_nbytes is None else limit_nbytes
    names = {call: f"call {json.dumps(call.to_config(), separators=(',', ':'))}" for call in calls}
    known = _recall(names.values())
    unknown = [call for call, name in names.items() if name not in known and call.nbytes <= limit]
    found = _run_calls(unknown)
    _note({names[call]: (nbytes,) for call, nbytes in found.items() if nbytes is not None})
    # Another time it may not raise: there may be more memory, or another op of that name.
    _note({names[call]: () for call, nbytes in found.items() if nbytes is None}, lasting=False)
    known |= _recall(names[call] for call in found)
    return {call: int(known[name][0]) for call, name in names.items() if len(known.get(name, ())) == 1}


def forget_costs() -> None:
    """Drop all that was measured, in this process and in the user's cache folder."""
    _known.clear()
    with contextlib.suppress(OSError, RuntimeError):
        _file().unlink()


# Measuring. Nothing below here looks at what is known.


def _time_codec(codec: Codec, dtype: torch.dtype, rectified: bool) -> Seconds:
    (few, *small), (many, *large) = (_time_codec_at(codec, dtype, rectified, size) for size in (_SMALL, _LARGE))
    each = [max(0.0, (slow - fast) / (many - few)) for fast, slow in zip(small, large, strict=True)]
    call = [max(0.0, fast - slope * few) for fast, slope in zip(small, each, strict=True)]
    return Seconds(*each, *call)


def _time_codec_at(codec: Codec, dtype: torch.dtype, rectified: bool, size: int) -> tuple[int, float, float]:
    """The number of values of a tensor of about ``size``, and the seconds to encode and to decode it."""
    tensor = _sample(codec, dtype, size)
    if rectified:
        tensor.clamp_min_(0)
    method: Callable[..., Any] = codec.encode_rectified if rectified else codec.encode

    def encode() -> Any:
        return method(tensor, key=_KEY)

    packed, support = encode() if rectified else (encode(), None)
    return tensor.numel(), _least(encode, _RUNS[size]), _least(lambda: packed.decode(support), _RUNS[size])


def _sample(codec: Codec, dtype: torch.dtype, size: int) -> Tensor:
    """A tensor that the codec stores, with about ``size`` values."""
    random = torch.Generator().manual_seed(0)
    if isinstance(codec, PoolOffsets):
        return _positions(codec, size, random)
    if isinstance(codec, Indices):
        whole = dtype if not dtype.is_floating_point and not dtype.is_complex and dtype != torch.bool else torch.int64
        return torch.randint(codec.low, codec.high + 1, (size,), generator=random, dtype=whole, device="cpu")
    values = torch.randn(_shape(codec, size), generator=random, dtype=torch.float32, device="cpu")
    if isinstance(codec, LogQuant):
        values = values.abs_().neg_()
    return values.gt_(0).to(dtype) if isinstance(codec, TwoValue) or dtype == torch.bool else values.to(dtype)


def _is_ours(codec: Codec) -> bool:
    return type(codec).__module__.startswith(f"{Codec.__module__.rpartition('.')[0]}.")


def _shape(codec: Codec, size: int) -> tuple[int, ...]:
    if isinstance(codec, SampleQuant):
        return codec.samples, max(1, size // codec.samples)
    if isinstance(codec, BlockMean) and codec.dims != 2:
        if codec.dims == 1:
            return (8, 64, 3136) if size == _LARGE else (1, 4, 1024)
        return (4, 32, 14, 28, 32) if size == _LARGE else (1, 4, 8, 8, 16)
    by_channels = isinstance(codec, GroupQuant) and codec.layout == "channel"
    if by_channels or isinstance(codec, (BlockMean, SixSigma)) or not _is_ours(codec):
        return (8, 64, 56, 56) if size == _LARGE else (1, 4, 32, 32)
    return max(4, size // 768), 768


def _positions(codec: PoolOffsets, size: int, random: torch.Generator) -> Tensor:
    """Positions that max pooling with the settings of ``codec`` finds."""
    pools: tuple[Any, ...] = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
    pool = pools[len(codec.size) - 1]
    planes = max(1, size * math.prod(codec.stride) // math.prod(codec.size))
    maps = torch.randn((1, planes, *codec.size), generator=random, dtype=torch.float32, device="cpu")
    found = pool(maps, codec.kernel, codec.stride, codec.padding, codec.dilation, return_indices=True)
    positions: Tensor = found[1]
    return positions


def _time_copy() -> tuple[float]:
    source = torch.ones(_COPIED, dtype=torch.uint8, device="cpu")
    target = torch.ones_like(source)
    return (_least(lambda: target.copy_(source), 5) / _COPIED,)


def _time_fresh() -> tuple[float]:
    threads = torch.get_num_threads()
    _faulted()  # the heap may have to grow first
    try:
        seconds = _faulted()
        if threads > 1:
            torch.set_num_threads(1)
            seconds = min(seconds, _faulted())  # as in _least
    finally:
        torch.set_num_threads(threads)
    return (max(0.0, seconds),)


def _faulted() -> float:
    """Seconds for each byte by which filling memory that was just taken is slower than filling it again.

    It is timed in pieces, and their median counts: a few may be memory that the process still had, and in a few another
    process may have had the core.
    """
    blocks = [torch.empty(_BLOCK, dtype=torch.uint8, device="cpu") for _ in range(_BLOCKS)]
    taken = []
    for block in blocks:
        for piece in block.view(-1, _PIECE):
            start = time.perf_counter()
            piece.fill_(1)
            middle = time.perf_counter()
            piece.fill_(2)
            taken.append(2 * middle - start - time.perf_counter())
    while blocks:  # the last first, as backward does it
        blocks.pop()
    return statistics.median(taken) / _PIECE


def _time_file() -> Seconds:
    size = _COPIED // 2
    source = torch.ones(size, dtype=torch.uint8, device="cpu")
    target = torch.ones_like(source)

    def write() -> Tensor:
        return _mapped(size).copy_(source)

    written = write()
    return Seconds(_least(write, 4) / size, _least(lambda: target.copy_(written), 4) / size)


def _mapped(size: int) -> Tensor:
    """Memory of a file without a name, whose room is taken: as in ``session/offload.py``."""
    descriptor, name = tempfile.mkstemp(prefix="lowtide-")
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        return torch.from_file(name, shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(descriptor)
        Path(name).unlink()


def _least(run: Callable[[], object], runs: int) -> float:
    """The seconds of the fastest of some runs with torch's threads, and of some with one thread.

    Other processes may keep a core busy all the while. Then threads that wait for each other take many times as long as
    one alone, and what one alone takes is the better guess at a quiet moment.
    """
    threads = torch.get_num_threads()
    run()  # kernels may have to be compiled
    try:
        seconds = _fastest(run, runs)
        if threads > 1:
            torch.set_num_threads(1)
            seconds = min(seconds, _fastest(run, runs))
    finally:
        torch.set_num_threads(threads)
    return seconds


def _fastest(run: Callable[[], object], runs: int) -> float:
    seconds, end = math.inf, time.perf_counter() + _PATIENCE
    with torch.no_grad():
        for _ in range(runs + 1):  # the first finds caches as others left them
            start = time.perf_counter()
            run()
            seconds = min(seconds, time.perf_counter() - start)
            if start > end:
                break
    return seconds


def _run_calls(calls: list[Call]) -> dict[Call, int | None]:
    """The workspace of each call, and None if it raised. One that ended the process is absent."""
    found: dict[Call, int | None] = {}
    crashes = 0
    while calls and crashes < _CRASHES:
        heard: list[int | None] = []
        argument = {"threads": torch.get_num_threads(), "calls": [call.to_config() for call in calls]}
        try:
            run_child(
                "lowtide.machine.costs:serve_calls",
                argument,
                exact_rss=True,
                variables=_PASSIVE,
                on_event=lambda event, heard=heard: heard.append(event["nbytes"]),  # type: ignore[misc]
            )
        except ChildError:
            crashes += 1
        found.update(zip(calls, heard, strict=False))
        calls = calls[len(heard) + 1 :]  # behind the one that ended the process, if one did
    return found


def serve_calls(argument: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """Be the child of :func:`workspaces`: tell the workspace of each call as soon as it is known."""
    warnings.simplefilter("ignore")  # whoever made the calls has seen what they warn of
    torch.set_num_threads(argument["threads"])
    gc.freeze()  # each measurement begins with a collection, which need not look at every module again
    for config in argument["calls"]:
        emit({"nbytes": _workspace(Call.from_config(config))})
    return {}


def _workspace(call: Call) -> int | None:
    """The bytes that a call takes and gives back; None if it raises."""
    try:
        function, args, kwargs = call.prepare()

        def rise() -> int:
            kept: list[Any] = []
            above = peak_above(lambda: kept.append(function(*args, **kwargs)))
            return above - sum(nbytes for start, nbytes in _storages(kept).items() if start not in given)

        with torch.no_grad():
            function(*args, **kwargs)
            given = _storages([args, list(kwargs.values())])
            least = rise()
            if least >= _NOISE:  # anything else in the process may have taken memory at that moment
                least = min(least, rise())
    except Exception:  # an op that is not there, arguments that it does not take as they are, no memory
        return None
    return least if least >= _NOISE else 0


def _storages(values: object) -> dict[int, int]:
    """Where the storages of all tensors in lists and tuples begin, and their bytes."""
    if isinstance(values, Tensor):
        storage = values.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()} if storage.nbytes() else {}
    if isinstance(values, (list, tuple)):
        return {start: nbytes for value in values for start, nbytes in _storages(value).items()}
    return {}


# Arguments of calls.


def _described(value: object) -> Any:
    """The form of an argument; TypeError if it has none."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "bool", int(value)
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return "float", repr(value)
    if isinstance(value, Tensor):
        return _described_tensor(value)
    if isinstance(value, (list, tuple)):
        return "list", *map(_described, value)
    for kind in ("dtype", "layout", "memory_format", "device"):
        if isinstance(value, getattr(torch, kind)):
            return kind, _short(value)
    raise TypeError(f"an argument of type {type(value)} cannot be described")


def _described_tensor(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError("a tensor without strides cannot be described")
    shape, stride = tuple(tensor.shape), tensor.stride()
    if not all(type(number) is int for number in (*shape, *stride)):
        raise TypeError("a tensor of unknown size cannot be described")
    return "tensor", shape, stride, _short(tensor.dtype)


def _short(value: object) -> str:
    """The name of something that belongs to torch."""
    return str(value).removeprefix("torch.")


def _built(form: Any, random: torch.Generator) -> Any:
    """An argument of a form that :func:`_described` gives."""
    if not isinstance(form, tuple):
        return form
    kind, *rest = form
    if kind == "tensor":
        return _built_tensor(rest[0], rest[1], rest[2], random)
    if kind == "list":
        return [_built(item, random) for item in rest]
    if kind == "bool":
        return bool(rest[0])
    if kind == "float":
        return float(rest[0])
    return torch.device("cpu") if kind == "device" else getattr(torch, rest[0])


def _built_tensor(shape: tuple[int, ...], stride: tuple[int, ...], dtype: str, random: torch.Generator) -> Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    extent = _extent(shape, stride)
    if kind.is_floating_point or kind.is_complex:
        memory = torch.rand(extent, generator=random, dtype=torch.float32, device="cpu").to(kind)
    else:
        memory = torch.zeros(extent, dtype=kind, device="cpu")
    return memory.as_strided(shape, stride)


def _extent(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many values lie between the first and the last of a tensor, both included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _nbytes(form: Any) -> int:
    if not isinstance(form, tuple):
        return 0
    if form[0] == "tensor":
        dtype: torch.dtype = getattr(torch, form[3])
        return _extent(form[1], form[2]) * dtype.itemsize
    return sum(map(_nbytes, form))


def _lists(form: Any) -> Any:
    return [_lists(item) for item in form] if isinstance(form, tuple) else form


def _tuples(plain: Any) -> Any:
    return tuple(_tuples(item) for item in plain) if isinstance(plain, (list, tuple)) else plain


# What is known, in this process and in the file. Processes that write at the same time do so one after the other, each
# a whole file with what it read just before. The last one may miss what another has just added; that is measured again.


def _once(name: str, count: int, measure: Callable[[], Sequence[float]], lasting: bool = True) -> tuple[float, ...]:
    """The ``count`` numbers of a name, measured if they are not known. They go to the file if they are ``lasting``."""
    known = _recall([name]).get(name, ())
    if len(known) == count:
        return known
    if type(torch.empty(0, device="cpu")) is not Tensor:
        raise RuntimeError("seconds are measured with real tensors; leave the mode that makes others first")
    numbers = tuple(measure())
    _note({name: numbers}, lasting)
    return numbers


def _recall(names: Iterable[str]) -> dict[str, tuple[float, ...]]:
    """The numbers of those names that are known. The file is read again if one is not known in this process."""
    names, here = list(names), _known.setdefault(_machine(), {})
    if any(name not in here for name in names):
        for name, numbers in _read().get(_machine(), {}).items():
            here.setdefault(name, numbers)
    return {name: here[name] for name in names if name in here}


def _note(numbers: Mapping[str, tuple[float, ...]], lasting: bool = True) -> None:
    """Keep numbers by their names, in this process and in the file."""
    _known.setdefault(_machine(), {}).update(numbers)
    if lasting and numbers:
        with contextlib.suppress(OSError, RuntimeError):
            _write(_machine(), numbers)


def _write(machine: str, numbers: Mapping[str, tuple[float, ...]]) -> None:
    sections = _read()
    sections[machine] = {**sections.pop(machine, {}), **numbers}  # the newest section stands last
    text = json.dumps(dict(list(sections.items())[-_SECTIONS:]))
    path = _file()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=".costs-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)  # noqa: PTH105 - the names are texts here
    except BaseException:
        Path(name).unlink()
        raise


def _read() -> dict[str, dict[str, tuple[float, ...]]]:
    """What the file holds, without anything that is not as it should be."""
    try:
        sections = json.loads(_file().read_text(encoding="utf-8"))
        return {
            machine: {name: tuple(numbers) for name, numbers in section.items() if _are_numbers(numbers)}
            for machine, section in sections.items()
        }
    except (OSError, ValueError, RuntimeError, AttributeError):
        return {}


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and 0 <= v < math.inf for v in values
    )


def _file() -> Path:
    """Where numbers are kept; RuntimeError if the user has no home."""
    own, shared = os.environ.get("LOWTIDE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own) / "costs.json"
    return (Path(shared) if shared else Path.home() / ".cache") / "lowtide" / "costs.json"


def _machine() -> str:
    """What the numbers depend on."""
    kernels = os.environ.get("LOWTIDE_KERNELS")
    return f"{_hardware()}, {torch.get_num_threads()} threads, {_versions()}{f', {kernels} kernels' if kernels else ''}"


@lru_cache(maxsize=1)
def _hardware() -> str:
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{model} {torch.backends.cpu.get_cpu_capability()}"


@lru_cache(maxsize=1)
def _versions() -> str:
    from .. import __version__  # which does not exist yet while the package is imported

    try:
        numba = importlib.metadata.version("numba")
    except importlib.metadata.PackageNotFoundError:
        numba = "absent"
    return f"torch {torch.__version__}, numba {numba}, lowtide {__version__}"
