"""Methods: named policies that give each saved tensor a choice. No tensors here, only decisions.

What can be kept losslessly (masks, indices, shapes, casts of parameters) is kept so in every method,
before a method is asked. A method decides about the values that remain.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from torch import nn

from ..codecs import BlockMean, Cast, Codec, GroupQuant, Projection, SixSigma
from ..codecs.base import layout_of, require, require_positive
from ..codecs.groups import BITS
from ..graph.rules import Need
from ..graph.twins import pooled_convolution
from .choice import Choice
from .plan import Plan, named
from .tuners.base import Tuner
from .tuners.bits import BitTuner
from .tuners.levels import LevelTuner
from .tuners.mix import MixTuner, groups_for
from .tuners.samples import SampleTuner, taps
from .use import Use


class Method(ABC):
    """A policy. Subclass as a frozen dataclass with a ``name``; fields are the user's options."""

    name: ClassVar[str]
    rebuilds: ClassVar[bool] = False
    """Does it ask for tensors to be rebuilt from others? Finding out which can be costs a little time."""
    checkpoints: ClassVar[tuple[str, ...]] = ()
    """Paths of modules whose forward runs once more in backward."""

    @abstractmethod
    def choose(self, use: Use) -> Choice:
        """What happens to these values. The answer depends on ``use`` and on the options alone."""

    def twin(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """Another callable for this call of torch, with the same result and a thriftier backward; None for none."""
        return None

    def tuner(self, model: nn.Module) -> Tuner | None:
        """A new learner, if the method adapts while training."""
        return None

    def notes(self, made: Plan) -> tuple[str, ...]:
        """What a report should say of the plan that was made in the last forward."""
        return ()

    def __str__(self) -> str:
        """The name with all options: it tells two methods apart."""
        return repr(self).replace(type(self).__name__, self.name, 1)


def _bits(use: Use, bits: int, propagating: int | None) -> int:
    if use.need is Need.PROPAGATE and propagating is not None:
        return propagating
    return max(bits, use.least_bits)


def _groups(use: Use, bits: int, group: int, propagating: int | None) -> Codec:
    """Groups of random rounding; log-probabilities and divisors as bfloat16, which is finest near zero."""
    if use.need >= Need.LOGARITHM:
        return Cast("bfloat16")
    return GroupQuant(_bits(use, bits, propagating), group, "sample" if use.dims else "row")


@dataclass(frozen=True)
class Lossless(Method):
    """Only what costs no precision: masks, indices, shapes, shared storages, casts of weights."""

    name: ClassVar[str] = "lossless"

    def choose(self, use: Use) -> Choice:
        """Keep all values."""
        return Choice.keep("lossless keeps these values")


@dataclass(frozen=True)
class ActNN(Method):
    """Random rounding in groups within a sample (Chen et al. 2021); bits by sample and layer from level L3 on.

    ``level`` as published: L0 only what is lossless; L1 4 bits, batch norms exact; L2 4 bits for all; L3 ``bits`` (2)
    on average, given to the samples and layers of maps where they lower the variance of the gradient most; samples by
    their ranges in every step, layers by the gradients of every ``refresh``-th. ``bits`` replaces a level's own; a
    fraction goes with L3. L4 and L5 are L3 with the codes in host memory (the same on a CPU) or in memory that a file
    backs, which the system may write out.

    A narrow ResNet-14 on CIFAR-10 lost 1.7 points with it in nine epochs (docs/evidence.md).
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
    def _adapts(self) -> bool:
        return self.level >= "L3"

    @property
    def _whole(self) -> int:
        """Bits where they do not vary."""
        bits = (2 if self._adapts else 4) if self.bits is None else self.bits
        return math.ceil(bits) if self._adapts else bits  # type: ignore[return-value]

    def choose(self, use: Use) -> Choice:
        """Groups for everything, from level L2 on."""
        if self.level == "L0" or (self.level == "L1" and use.need is Need.BATCH):
            return Choice.keep(f"actnn keeps these values at level {self.level}")
        home = {"L4": "host", "L5": "file"}.get(self.level, "device")
        return Choice.store(_groups(use, self._whole, self.group, self.propagating_bits), home)

    def tuner(self, model: nn.Module) -> Tuner | None:
        """Bits for samples and layers."""
        if not self._adapts:
            return None
        return SampleTuner(2 if self.bits is None else self.bits, self.group, self.refresh, taps(model))


@dataclass(frozen=True)
class Division(Method):
    """Block means in bfloat16 plus a coarse difference for maps (Wang et al. 2023), groups elsewhere.

    A narrow ResNet-14 on CIFAR-10 lost 1.4 points with it in nine epochs (docs/evidence.md).
    """

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

    def choose(self, use: Use) -> Choice:
        """Block means where there are maps."""
        if use.dims and max(use.meta.shape[2:]) > 1 and use.need < Need.LOGARITHM:
            bits = _bits(use, self.bits, self.propagating_bits)
            return Choice.store(BlockMean(self.block, use.dims, bits, self.group, self.faithful))
        return Choice.store(_groups(use, self.bits, self.group, self.propagating_bits))


@dataclass(frozen=True)
class Blpa(Method):
    """One code for a unit of convolution, BN and ReLU: BN's input (Chakrabarti and Moseley 2019), groups elsewhere.

    The convolution's input is rebuilt from the code and the exact mask, as is every input that can be and needs no
    more than ``bits`` bits, also through the additions of residual blocks. What cannot (the input of the first
    convolution, say) is stored in ``bits`` bits as in ``division``.

    ``faithful=True`` stores BN's inputs by the published quantizer, which is **biased** (see ``SixSigma``).
    """

    name: ClassVar[str] = "blpa"
    rebuilds: ClassVar[bool] = True
    bits: int = 4
    faithful: bool = False

    def __post_init__(self) -> None:
        _check(self.bits, None)
        if self.faithful:
            SixSigma(self.bits)

    def choose(self, use: Use) -> Choice:
        """Nothing for what can be rebuilt from values that are precise enough."""
        if use.derivable and self.bits >= use.least_bits:
            return Choice.rebuild()
        if self.faithful and use.need is Need.BATCH and len(use.meta.shape) >= 2:
            return Choice.store(SixSigma(self.bits))
        return Division(bits=self.bits).choose(use)


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

    def choose(self, use: Use) -> Choice:
        """Means alone, for maps that only a convolution's weight gradient reads."""
        if use.need is Need.LINEAR and use.dims:
            return Choice.store(BlockMean(self.kernel, use.dims, bits=0))
        return Choice.keep("pool keeps all but the maps that a convolution's weight gradient reads")

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

    def choose(self, use: Use) -> Choice:
        """Projections where only a weight gradient reads wide rows."""
        if use.need is Need.LINEAR and len(use.meta.shape) >= 2 and not use.spatial:
            columns = layout_of(use.meta.shape, use.meta.stride).sizes[-1]
            rank = math.ceil(self.rank * columns) if isinstance(self.rank, float) else self.rank
            if columns >= _WIDE and rank < columns:
                return Choice.store(Projection(rank, self.bits, self.kind, self.group))
        return Choice.store(_groups(use, self.other_bits, self.group, self.propagating_bits))


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

    def choose(self, use: Use) -> Choice:
        """Groups; the tuner gives them their levels."""
        return Choice.store(_groups(use, self.bits, self.group, self.propagating_bits))

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

    def choose(self, use: Use) -> Choice:
        """Groups for everything."""
        return Choice.store(_groups(use, math.ceil(self.bits), self.group, self.propagating_bits))

    def tuner(self, model: nn.Module) -> Tuner | None:
        """Bits for each tensor."""
        return BitTuner(self.bits, self.group, self.propagating_bits)


@dataclass(frozen=True)
class Auto(Method):
    """The codec that each tensor deserves under ``bits`` on average; nothing where it can be rebuilt from others.

    What counts is the noise in each parameter's gradient, beside that gradient. The first step measures it; steps 3, 9,
    27 and so on, at most a thousand apart, measure again. All values that may be approximated share the average,
    those that are rebuilt included. ``adapt(closure)`` replaces the measurement by probes of the whole gradient.
    """

    name: ClassVar[str] = "auto"
    rebuilds: ClassVar[bool] = True
    bits: float = 3
    group: int = 256

    def __post_init__(self) -> None:
        _average(self.bits)
        require_positive(self.group, "group")

    def choose(self, use: Use) -> Choice:
        """Until more is known: groups with the bits that each need takes."""
        if use.need >= Need.LOGARITHM:
            return Choice.store(Cast("bfloat16"))
        return Choice.store(groups_for(use, _bits(use, 2, None), self.group))

    def tuner(self, model: nn.Module) -> Tuner | None:
        """A codec for each tensor."""
        return MixTuner(self.bits, self.group)


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

    def choose(self, use: Use) -> Choice:
        """One type for all; what passes through an exponential keeps at least 16 bits, a divisor its exponent."""
        if use.need is Need.RELATIVE or (use.need >= Need.EXPONENT and self.dtype.startswith("float8")):
            return Choice.store(Cast("bfloat16"))
        return Choice.store(Cast(self.dtype, self.group))


@dataclass(frozen=True)
class Uniform(Method):
    """One codec for every value."""

    name: ClassVar[str] = "uniform"
    codec: Codec

    def choose(self, use: Use) -> Choice:
        """Always the same."""
        return Choice.store(self.codec)


@dataclass(frozen=True)
class Planned(Method):
    """A finished plan; a tensor with several sites follows the first of them that the plan lists."""

    name: ClassVar[str] = "plan"
    plan: Plan = dataclasses.field(hash=False)

    @property
    def rebuilds(self) -> bool:  # type: ignore[override]
        """If the plan says so anywhere."""
        return self.plan.rebuilds

    @property
    def checkpoints(self) -> tuple[str, ...]:  # type: ignore[override]
        """Those of the plan."""
        return self.plan.checkpoints

    def choose(self, use: Use) -> Choice:
        """What the plan says; a tensor that it does not list stays exact."""
        return self.plan.choice_for(use.sites) or Choice.keep("not in the plan")

    def twin(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Callable[..., Any] | None:
        """That of ``pool``, if the plan pools with one kernel. It cannot be differentiated twice."""
        kernels = self._kernels
        return pooled_convolution(kernels[0], func, args, kwargs) if len(kernels) == 1 else None

    @cached_property
    def _kernels(self) -> tuple[int, ...]:
        codecs = [choice.codec for choice in self.plan.choices.values()]
        return tuple({c.block for c in codecs if isinstance(c, BlockMean) and c.bits == 0})

    def __str__(self) -> str:
        rows = [f"{site} {c.action} {c.codec!r} {c.home}" for site, c in self.plan.choices.items()]
        rows += self.plan.checkpoints
        digest = hashlib.blake2b("\n".join(rows).encode(), digest_size=4).hexdigest()
        return f"plan {digest} of {len(self.plan)} sites"

    def require_some_module(self, model: nn.Module) -> None:
        """Raise if the plan is for another model: none of the modules that it names is there.

        A module that is to be computed again must be there in any case.
        """
        named_here = {name for name, _ in model.named_modules()}
        unknown = [path for path in self.plan.checkpoints if path not in named_here]
        if unknown:
            raise ValueError(
                f"this plan computes {named(unknown)} again, and the model has no such module; it has "
                f"{', '.join(map(repr, sorted(named_here)[1:6]))} and so on. Plan for this model"
            )
        modules = {site.module for site in self.plan.choices}
        if modules and not modules & named_here:
            raise ValueError(
                f"this plan is for another model: none of its modules exists here, such as {min(modules)!r}; the "
                f"model has {', '.join(map(repr, sorted(named_here)[:5]))} and so on"
            )

    def notes(self, made: Plan) -> tuple[str, ...]:
        """Which sites of the plan were met, which were not, and which it does not list, by name."""
        met = self.plan.diff(made)
        found = len(self.plan) - len(met.missing)
        notes = [f"{found} of the plan's {len(self.plan)} sites were met"] if met.missing else []
        if met.missing:
            notes.append(f"in the plan and not met: {named(met.missing)}")
        if self.checkpoints:
            notes.append(f"computed again in backward, so nothing that they save is stored: {named(self.checkpoints)}")
        kept = [site for site in met.added if made.choices[site] == Choice.keep()]
        if kept:
            notes.append(f"met and not in the plan, so kept exactly: {named(kept)}")
        return tuple(notes)


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


def resolve(method: str | Method | Codec | Plan, options: Mapping[str, Any]) -> Method:
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
        Choice.store(method)  # raises if the codec does not keep values
        return Uniform(method)
    if isinstance(method, Plan):
        return Planned(method)
    if isinstance(method, Method):
        return method
    raise TypeError(f"expected a method's name ({', '.join(_NAMED)}), a Method, a Codec or a Plan; got {method!r}")
