"""Methods: named policies that give each stored tensor a codec. No tensors here, only decisions.

What can be kept losslessly (masks, indices, shapes, casts of parameters) is kept so in every method,
before a method is asked. A method decides about the values that remain.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..codecs import BlockMean, Cast, Codec, Derived, GroupQuant, Projection, SixSigma
from ..codecs.base import layout_of, require, require_positive
from ..codecs.groups import BITS
from ..graph.capture import Site
from ..graph.rules import Need
from ..graph.twins import pooled_convolution
from .plan import Plan
from .tuners.base import Probed, Tuner
from .tuners.bits import BitTuner
from .tuners.levels import LevelTuner
from .tuners.mix import MixTuner
from .tuners.samples import SampleTuner, taps
from .use import Use


class Method(ABC):
    """A policy. Subclass as a frozen dataclass with a ``name``; fields are the user's options."""

    name: ClassVar[str]
    derives: ClassVar[bool] = False
    """Does it ask for tensors to be rebuilt from others? Finding out which can be costs a little time."""
    home: str = "device"
    """Where the packed values lie (``offload.HOMES``). Masks and other exact forms stay on the device."""

    @abstractmethod
    def codec_for(self, use: Use) -> Codec | None:
        """The codec for these values; None keeps them exact."""

    def twin(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """Another callable for this call of torch, with the same result and a thriftier backward; None for none."""
        return None

    def tuner(self, model: nn.Module) -> Tuner | None:
        """A new learner for a session, if the method adapts while training."""
        return None


# Bits by need, measured (docs/design.md, "Bits by need"): values whose noise reaches every earlier
# layer get at least 4 bits, those that pass through an exponential at least 8.
_FLOOR = {Need.LINEAR: 1, Need.BATCH: 1, Need.PROPAGATE: 4, Need.EXPONENT: 8}


def _bits(need: Need, bits: int, propagating: int | None) -> int:
    if need is Need.PROPAGATE and propagating is not None:
        return propagating
    return max(bits, _FLOOR[need])


def _groups(use: Use, bits: int, group: int, propagating: int | None) -> Codec:
    """Groups of random rounding; log-probabilities as bfloat16, which is finest near zero."""
    if use.need is Need.LOGARITHM:
        return Cast("bfloat16")
    return GroupQuant(_bits(use.need, bits, propagating), group, "sample" if use.dims else "row")


@dataclass(frozen=True)
class Lossless(Method):
    """Only what costs no precision: masks, indices, shapes, shared storages, casts of weights."""

    name: ClassVar[str] = "lossless"

    def codec_for(self, use: Use) -> Codec | None:
        """Keep all values."""
        return None


@dataclass(frozen=True)
class ActNN(Method):
    """Random rounding in groups within a sample (Chen et al. 2021); bits by sample and layer from level L3 on.

    ``level`` as published: L0 only what is lossless; L1 4 bits, batch norms exact; L2 4 bits for all; L3 ``bits`` (2)
    on average, given to the samples and layers of maps where they lower the variance of the gradient most; samples by
    their ranges in every step, layers by the gradients of every ``refresh``-th. ``bits`` replaces a level's own; a
    fraction goes with L3. L4 and L5 are L3 with the codes in host memory (the same on a CPU) or in memory that a file
    backs, which the system may write out.
    """

    name: ClassVar[str] = "actnn"
    bits: float | None = None
    level: str = "L3"
    group: int = 256
    refresh: int = 10
    propagating_bits: int | None = None

    def __post_init__(self) -> None:
        require(self.level, _LEVELS, "level")
        if self.bits is not None and self._adapts:
            _average(self.bits)
        _check(self._whole, self.propagating_bits)
        require_positive(self.group, "group")
        require_positive(self.refresh, "refresh")

    @property
    def home(self) -> str:  # type: ignore[override]
        """Where codes lie."""
        return {"L4": "host", "L5": "file"}.get(self.level, "device")

    @property
    def _adapts(self) -> bool:
        return self.level >= "L3"

    @property
    def _whole(self) -> int:
        """Bits where they do not vary."""
        bits = (2 if self._adapts else 4) if self.bits is None else self.bits
        return math.ceil(bits) if self._adapts else bits  # type: ignore[return-value]

    def codec_for(self, use: Use) -> Codec | None:
        """Groups for everything, from level L2 on."""
        if self.level == "L0" or (self.level == "L1" and use.need is Need.BATCH):
            return None
        return _groups(use, self._whole, self.group, self.propagating_bits)

    def tuner(self, model: nn.Module) -> Tuner | None:
        """Bits for samples and layers."""
        if not self._adapts:
            return None
        return SampleTuner(2 if self.bits is None else self.bits, self.group, self.refresh, taps(model))


@dataclass(frozen=True)
class Division(Method):
    """Block means in bfloat16 plus a coarse difference for maps (Wang et al. 2023), groups elsewhere."""

    name: ClassVar[str] = "division"
    block: int = 8
    bits: int = 2
    group: int = 256
    propagating_bits: int | None = None
    faithful: bool = False

    def __post_init__(self) -> None:
        _check(self.bits, self.propagating_bits)
        require_positive(self.block, "block")
        require_positive(self.group, "group")

    def codec_for(self, use: Use) -> Codec | None:
        """Block means where there are maps."""
        if use.dims and max(use.meta.shape[2:]) > 1:
            bits = _bits(use.need, self.bits, self.propagating_bits)
            return BlockMean(self.block, use.dims, bits, self.group, self.faithful)
        return _groups(use, self.bits, self.group, self.propagating_bits)


@dataclass(frozen=True)
class Blpa(Method):
    """One code for a unit of convolution, BN and ReLU: BN's input (Chakrabarti and Moseley 2019), groups elsewhere.

    The convolution's input is rebuilt from the code and the exact mask, as is every input that can be and needs no
    more than ``bits`` bits. What cannot (after an addition, say) is stored in ``bits`` bits as in ``division``.

    ``faithful=True`` stores BN's inputs by the published quantizer, which is **biased** (see ``SixSigma``).
    """

    name: ClassVar[str] = "blpa"
    derives: ClassVar[bool] = True
    bits: int = 4
    faithful: bool = False

    def __post_init__(self) -> None:
        _check(self.bits, None)
        if self.faithful:
            SixSigma(self.bits)

    def codec_for(self, use: Use) -> Codec | None:
        """Nothing for what can be rebuilt from values that are precise enough."""
        if use.derivable and use.need in _FLOOR and self.bits >= _FLOOR[use.need]:
            return Derived()
        if self.faithful and use.need is Need.BATCH and len(use.meta.shape) >= 2:
            return SixSigma(self.bits)
        return Division(bits=self.bits).codec_for(use)


@dataclass(frozen=True)
class Pool(Method):
    """Average-pooled inputs of convolutions (Barley and Froening 2024), everything else exact.

    Biased: the weight gradient loses the high frequencies, and no averaging over steps returns them. 1x1 convolutions
    whose maps the kernel divides never spread the means again; they cannot be differentiated twice.
    """

    name: ClassVar[str] = "pool"
    kernel: int = 2

    def __post_init__(self) -> None:
        require_positive(self.kernel, "kernel")

    def codec_for(self, use: Use) -> Codec | None:
        """Means alone, for maps that only a convolution's weight gradient reads."""
        if use.need is Need.LINEAR and use.dims:
            return BlockMean(self.kernel, use.dims, bits=0)
        return None

    def twin(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """1x1 convolutions take their weight gradient from means alone."""
        return pooled_convolution(self.kernel, func, args, kwargs)


@dataclass(frozen=True)
class LowRank(Method):
    """Rows of linear layers' inputs projected to ``rank`` values (Liu et al. 2022), groups elsewhere.

    ``rank`` is a number of columns, or a fraction of them. ``kind="random"`` is unbiased; ``"subspace"`` has a much
    smaller error, which is a bias (see ``Projection``). ``bits`` are those of the projected values, 0 to leave them
    in the tensor's type; ``other_bits`` those of everything that is not projected.
    """

    name: ClassVar[str] = "lowrank"
    rank: int | float = 0.25
    kind: str = "random"
    bits: int = 0
    other_bits: int = 2
    group: int = 256
    propagating_bits: int | None = None

    def __post_init__(self) -> None:
        fraction = isinstance(self.rank, float) and 0 < self.rank < 1
        whole = isinstance(self.rank, int) and not isinstance(self.rank, bool) and self.rank >= 1
        if not (fraction or whole):
            raise ValueError(f"rank must be a whole number of at least 1 or a fraction below 1; got {self.rank!r}")
        Projection(1, self.bits, self.kind, self.group)
        _check(self.other_bits, self.propagating_bits)

    def codec_for(self, use: Use) -> Codec | None:
        """Projections where only a weight gradient reads wide rows."""
        if use.need is Need.LINEAR and len(use.meta.shape) >= 2 and not use.spatial:
            columns = layout_of(use.meta.shape, use.meta.stride).sizes[-1]
            rank = math.ceil(self.rank * columns) if isinstance(self.rank, float) else self.rank
            if columns >= _WIDE and rank < columns:
                return Projection(rank, self.bits, self.kind, self.group)
        return _groups(use, self.other_bits, self.group, self.propagating_bits)


# Narrower rows (coordinates, a few channels) hold no subspace worth the name, and groups cost as little.
_WIDE = 32


@dataclass(frozen=True)
class TinyScript(Method):
    """Random rounding to levels that lie where the values are (Fu et al. 2020), fitted every ``refresh`` steps."""

    name: ClassVar[str] = "tinyscript"
    bits: int = 2
    group: int = 256
    refresh: int = 500
    propagating_bits: int | None = None

    def __post_init__(self) -> None:
        _check(self.bits, self.propagating_bits)
        require_positive(self.group, "group")
        require_positive(self.refresh, "refresh")

    def codec_for(self, use: Use) -> Codec | None:
        """Groups; the tuner gives them their levels."""
        return _groups(use, self.bits, self.group, self.propagating_bits)

    def tuner(self, model: nn.Module) -> Tuner | None:
        """Levels for each site."""
        return LevelTuner(self.refresh)


@dataclass(frozen=True)
class Gact(Method):
    """Any op, ``bits`` on average, divided among tensors by probes of the gradient (Liu et al. 2022).

    Every tensor has the same bits until ``adapt(closure)`` of the session or attachment is called. Attention's tensors
    have 8 always, and what propagates has ``propagating_bits`` if they are given; both count in the average.
    """

    name: ClassVar[str] = "gact"
    bits: float = 4
    group: int = 256
    propagating_bits: int | None = None

    def __post_init__(self) -> None:
        _average(self.bits)
        _check(math.ceil(self.bits), self.propagating_bits)
        require_positive(self.group, "group")

    def codec_for(self, use: Use) -> Codec | None:
        """Groups for everything."""
        return _groups(use, math.ceil(self.bits), self.group, self.propagating_bits)

    def tuner(self, model: nn.Module) -> Tuner | None:
        """Bits for each tensor."""
        return BitTuner(self.bits, self.group, self.propagating_bits)


@dataclass(frozen=True)
class Auto(Method):
    """The best of all codecs for each tensor under ``bits`` on average; rebuilt from others where that is better.

    The average is that of values which a weight gradient or a batch norm reads; what propagates has bits of its own.
    The first step measures and stores 2 bits; ``adapt(closure)`` replaces a formula by probes.
    """

    name: ClassVar[str] = "auto"
    derives: ClassVar[bool] = True
    bits: float = 2.3
    group: int = 256
    propagating_bits: int | None = None

    def __post_init__(self) -> None:
        _average(self.bits)
        _check(2, self.propagating_bits)
        require_positive(self.group, "group")

    def codec_for(self, use: Use) -> Codec | None:
        """Until more is known: block means for inputs of batch norms, groups for the rest."""
        if use.need is Need.BATCH and use.dims and max(use.meta.shape[2:]) > 1:
            return BlockMean(8, use.dims, 2, self.group)
        return _groups(use, 2, self.group, self.propagating_bits)

    def tuner(self, model: nn.Module) -> Tuner | None:
        """A codec for each tensor."""
        return MixTuner(self.bits, self.group, taps(model))


@dataclass(frozen=True)
class CastAll(Method):
    """Every value in a smaller float type: bfloat16, float16, float8_e4m3fn or float8_e5m2.

    ``group`` gives each run of so many values of an 8-bit type its own scale; 0 takes one for the tensor.
    """

    name: ClassVar[str] = "cast"
    dtype: str = "bfloat16"
    group: int = 0

    def __post_init__(self) -> None:
        Cast(self.dtype, self.group)

    def codec_for(self, use: Use) -> Codec | None:
        """One type for all; what passes through an exponential keeps at least 16 bits."""
        if use.need in (Need.EXPONENT, Need.LOGARITHM) and self.dtype.startswith("float8"):
            return Cast("bfloat16")
        return Cast(self.dtype, self.group)


@dataclass(frozen=True)
class Uniform(Method):
    """One codec for every value."""

    name: ClassVar[str] = "uniform"
    codec: Codec

    def codec_for(self, use: Use) -> Codec | None:
        """Always the same."""
        return self.codec


@dataclass(frozen=True)
class Planned(Method):
    """A finished plan; a tensor with several consumers takes the codec of the first that is listed."""

    name: ClassVar[str] = "plan"
    plan: Plan

    def codec_for(self, use: Use) -> Codec | None:
        """What the plan says."""
        return next((c for s in use.sites if (c := self.plan.codec_for(s)) is not None), None)


@dataclass(frozen=True)
class Survey(Method):
    """Everything exact; notes what a tuner would like to probe, and with which codec."""

    name: ClassVar[str] = "survey"
    asker: Probed
    found: dict[Site, tuple[Use, Codec]]

    def codec_for(self, use: Use) -> Codec | None:
        """Nothing is compressed."""
        codec = self.asker.probe_codec(use)
        if codec is not None:
            self.found[use.sites[0]] = (use, codec)
        return None


@dataclass(frozen=True)
class Only(Method):
    """One tensor by one codec, everything else exact."""

    name: ClassVar[str] = "only"
    site: Site
    codec: Codec

    def codec_for(self, use: Use) -> Codec | None:
        """The one at ``site``."""
        return self.codec if self.site in use.sites else None


_LEVELS = ("L0", "L1", "L2", "L3", "L4", "L5")


def _average(bits: float) -> None:
    if isinstance(bits, bool) or not isinstance(bits, (int, float)) or not 1 <= bits <= 8:
        raise ValueError(f"bits must be a number from 1 to 8, the average; got {bits!r}")


def _check(bits: int, propagating: int | None) -> None:
    require(bits, BITS, "bits")
    if propagating is not None:
        require(propagating, BITS, "propagating_bits")


_NAMED: dict[str, type[Method]] = {
    m.name: m for m in (Lossless, Auto, Division, ActNN, Gact, Blpa, TinyScript, Pool, LowRank, CastAll)
}


def methods() -> dict[str, str]:
    """Every method by name, with its options and what it does.

    >>> print(*methods(), sep=", ")
    lossless, auto, division, actnn, gact, blpa, tinyscript, pool, lowrank, cast
    """
    return {name: f"{name}{_options(kind)}: {(kind.__doc__ or '').splitlines()[0]}" for name, kind in _NAMED.items()}


def _options(kind: type[Method]) -> str:
    parameters = inspect.signature(kind).parameters.values()
    return f"({', '.join(f'{p.name}={p.default!r}' for p in parameters)})"


def resolve(method: str | Method | Codec | Plan, options: dict[str, Any]) -> Method:
    """The method a user names, with options; or a method, codec or plan as it is."""
    if isinstance(method, str):
        kind = _NAMED.get(method)
        if kind is None:
            raise ValueError(f"unknown method {method!r}; choose one of {', '.join(_NAMED)}")
        known = inspect.signature(kind).parameters
        for option in options:
            if option not in known:
                raise TypeError(f"method {method!r} has no option {option!r}; its options are {_options(kind)}")
        return kind(**options)
    if options:
        raise TypeError(f"options {sorted(options)} go with a method's name; got {method!r}")
    if isinstance(method, Codec):
        return Uniform(method)
    if isinstance(method, Plan):
        return Planned(method)
    if isinstance(method, Method):
        return method
    raise TypeError(f"expected a method's name ({', '.join(_NAMED)}), a Method, a Codec or a Plan; got {method!r}")
