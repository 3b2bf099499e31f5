"""What an adaptive method learns while training: which samples, layers and levels deserve the bits.

A tuner changes the codec a method chose, from what it saw in earlier steps and in the tensor at hand. Its state is
small and plain, and a run that resumes from it decides the same.
"""

from __future__ import annotations

import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import codecs, levels, ops
from .allocation import allocate
from .capture import Site
from .codecs import BlockMean, Codec, GroupQuant, TensorMeta
from .codecs.base import flatten, require_positive
from .codecs.lossy import row_of
from .rules import Need


class Use(NamedTuple):
    """What is known of a stored tensor when its codec is chosen: all its consumers together."""

    need: Need
    meta: TensorMeta
    spatial: bool
    sites: tuple[Site, ...]
    sources: tuple[Site, ...] = ()
    """First sites of stored tensors that are enough to rebuild it; then ``Derived()`` may be its codec."""
    rectified: bool = False
    """It has no negative values, and an exact mask of its zeros is stored."""

    @property
    def derivable(self) -> bool:
        """Need it not be stored at all?"""
        return bool(self.sources)

    @property
    def dims(self) -> int:
        """Trailing spatial dimensions of a feature map, 0 if the tensor is not one."""
        return len(self.meta.shape) - 2 if self.spatial and 3 <= len(self.meta.shape) <= 5 else 0


Rebuild = Callable[[], Tensor]


class Tuner(ABC):
    """What an adaptive method learns while training; lives in a session, holds no graph."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @abstractmethod
    def begin(self, step: int) -> None:
        """Before each forward that will be compressed."""

    @abstractmethod
    def codec_for(self, use: Use, tensor: Tensor, base: Codec, rebuild: Rebuild | None = None) -> Codec:
        """The codec for these values, in place of the method's own ``base``; ``tensor`` is only read.

        ``rebuild`` makes the tensor again from those it can be derived from, as they are stored.
        """

    def wants_gradient(self, site: Site, need: Need) -> bool:
        """Whether backward should show the gradient of this site's node to :meth:`observe`."""
        return False

    def observe(self, site: Site, gradient: Tensor) -> None:
        """In backward: the gradient of the output of the node that saved ``site``."""
        return

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON; NaN is possible."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``: the decisions that follow are the same, bit for bit."""

    def seconds(self) -> float:
        """Time spent deciding so far, as the host sees it."""
        return self._seconds

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time spent inside."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start


def require_keys(state: Mapping[str, Any], keys: set[str]) -> None:
    """Raise unless a state has exactly these."""
    if set(state) != keys:
        raise ValueError(f"expected a state with the keys {sorted(keys)}; got {sorted(state)}")


def site_of(row: list[Any]) -> Site:
    """The site that a state keeps as a list."""
    module, op, slot, ordinal = row
    return Site(module, op, slot, ordinal)


# ---------------------------------------------------------------- bits for samples and layers


@dataclass
class _Layer:
    """What the last forward showed of one stored tensor, and the bits its samples may share."""

    sites: tuple[Site, ...]
    energy: Tensor  # for each sample
    weight: int  # values in a sample
    pixels: int
    shared: tuple[Tensor, int] | None  # bits in total, for that many samples
    seen: bool


def taps(model: nn.Module) -> dict[str, float]:
    """For each convolution, by module path, how many weights of a filter a value meets in each channel of the output.

    >>> taps(nn.Sequential(nn.Conv2d(4, 8, 3, groups=2), nn.ReLU()))
    {'0': 4.5}
    """
    kinds = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    return {n: math.prod(m.kernel_size) / m.groups for n, m in model.named_modules() if isinstance(m, kinds)}


class SampleTuner(Tuner):
    """Bits for each sample of each layer, ``bits`` on average (ActNN's level 3, Chen et al. 2021).

    Rounding a sample's values to ``b`` bits adds to the variance of the layer's weight gradient about
    ``S * taps * E / pixels / (2**b - 1)**2``: ``E`` is the sum of squared ranges of the sample's groups, fresh, and
    ``S`` the mean square of a sample's gradient at the layer's output in the last backward. Once in ``refresh`` steps
    all samples of all layers compete for the bits, weighed by their values, and a layer gets the sum its samples won.
    In each forward the layer's samples share that sum by their ``E`` (``S`` is common to them).

    A layer without a known ``S`` gets ``bits`` for each sample, and so does every layer in the first step. The input of
    a batch norm has no weight gradient to measure by: it takes the bits per sample of the linear layer that was
    stored last before it. A tensor that several layers read has the sum of their costs. Only layers seen since the
    last competition take part in the next; one that comes back later has the bits it had.

    Statistics stay on the tensors' device; the bits of a codec are all that is read back. ``bits`` may be
    fractional. ``taps`` weighs layers as :func:`taps` does; without it every layer counts as one tap.
    """

    def __init__(self, bits: float, group: int, refresh: int = 1, taps: Mapping[str, float] | None = None) -> None:
        super().__init__()
        if not 1 <= bits <= 8:
            raise ValueError(f"bits must be from 1 to 8 on average; got {bits!r}")
        require_positive(group, "group")
        require_positive(refresh, "refresh")
        self.bits = bits
        self.group = group
        self.refresh = refresh
        self._taps = dict(taps or {})
        self._layers: dict[Site, _Layer] = {}
        self._sensitivity: dict[Site, Tensor] = {}
        self._watched: set[Site] = set()
        self._left: set[Site] = set()
        self._refreshed: int | None = None
        self._step = 0
        self._last: _Layer | None = None

    def begin(self, step: int) -> None:
        """Once in ``refresh`` steps, divide the bits among layers."""
        self._last = None
        self._step = step
        if self._refreshed is not None and 0 <= step - self._refreshed < self.refresh:
            return
        pool = [layer for layer in self._layers.values() if layer.seen and self._known(layer)]
        if pool:
            with self.timed():
                self._divide(pool)
            self._refreshed = step

    def _known(self, layer: _Layer) -> list[Site]:
        return [site for site in layer.sites if site in self._sensitivity]

    def _divide(self, pool: list[_Layer]) -> None:
        device = pool[0].energy.device
        costs = []
        for layer in pool:
            known = self._known(layer)
            scale = sum(self._sensitivity[s].to(device) * self._taps.get(s.module, 1.0) for s in known)
            costs.append(layer.energy.to(device, torch.float64) * scale / layer.pixels)
        sizes = [cost.numel() for cost in costs]
        weight = torch.tensor([layer.weight for layer in pool]).repeat_interleave(torch.tensor(sizes))
        bits = allocate(torch.cat(costs), weight, int(self.bits * int(weight.sum())))
        for layer, won in zip(pool, torch.split(bits, sizes), strict=True):
            layer.shared = (won.sum(), won.numel())
        for layer in self._layers.values():
            layer.seen = False

    def codec_for(self, use: Use, tensor: Tensor, base: Codec, rebuild: Rebuild | None = None) -> Codec:
        """Bits for each sample, for maps that a convolution or a batch norm reads."""
        tuned = isinstance(base, GroupQuant) and base.layout == "sample" and tensor.numel() > 0
        if not tuned or use.need not in (Need.LINEAR, Need.BATCH):
            self._left.update(use.sites)
            return base
        with self.timed():
            flat, meta, layout = flatten(tensor.detach())
            if layout.order[0] != 0:  # samples do not lie one after another
                self._left.update(use.sites)
                return base
            row = row_of("sample", layout, meta.numel)
            energy: Tensor = ops.range_energy(flat, row, self.group, use.rectified)
            if use.need is Need.LINEAR:
                self._last = self._remember(use, energy, row)
            bits = allocate(energy, 1, self._budget(self._last, energy)).tolist()
        if len(set(bits)) == 1:
            return GroupQuant(bits[0], self.group, "sample")
        mixed: Codec = codecs.SampleQuant(tuple(bits), self.group)
        return mixed

    def _remember(self, use: Use, energy: Tensor, row: int) -> _Layer:
        known = self._layers.get(use.sites[0])
        shared = None if known is None else known.shared
        layer = _Layer(use.sites, energy, row, math.prod(use.meta.shape[2:]), shared, True)
        self._layers[use.sites[0]] = layer
        self._watched.update(use.sites)
        return layer

    def _budget(self, layer: _Layer | None, energy: Tensor) -> Tensor | int:
        samples = energy.numel()
        if layer is None or layer.shared is None:
            return int(self.bits * samples)
        total, count = layer.shared
        return total.to(energy.device) * samples // count

    def wants_gradient(self, site: Site, need: Need) -> bool:
        """Of linear consumers whose tensors are not left alone, in the step before bits are divided anew."""
        due = self._refreshed is None or self._step + 1 - self._refreshed >= self.refresh
        return due and need is Need.LINEAR and site not in self._left

    def observe(self, site: Site, gradient: Tensor) -> None:
        """Keep the mean square of a sample's gradient; the last backward counts."""
        if site not in self._watched or gradient.numel() == 0:
            return
        with self.timed():
            samples = gradient.shape[0] if gradient.dim() else 1
            norm = torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32)
            self._sensitivity[site] = norm.to(torch.float64).square() / samples

    def state_dict(self) -> dict[str, Any]:
        """Statistics and shares of all layers."""
        layers = [
            {
                "sites": [list(site) for site in layer.sites],
                "energy": layer.energy.tolist(),
                "weight": layer.weight,
                "pixels": layer.pixels,
                "shared": None if layer.shared is None else [int(layer.shared[0]), layer.shared[1]],
                "seen": layer.seen,
            }
            for layer in self._layers.values()
        ]
        sensitivity = [[list(site), float(value)] for site, value in self._sensitivity.items()]
        return {"refreshed": self._refreshed, "layers": layers, "sensitivity": sensitivity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        require_keys(state, {"refreshed", "layers", "sensitivity"})
        layers = {}
        for row in state["layers"]:
            sites = tuple(site_of(site) for site in row["sites"])
            shared = None if row["shared"] is None else (torch.tensor(row["shared"][0]), int(row["shared"][1]))
            energy = torch.tensor(row["energy"], dtype=torch.float32)
            layers[sites[0]] = _Layer(sites, energy, row["weight"], row["pixels"], shared, row["seen"])
        self._layers = layers
        self._sensitivity = {site_of(s): torch.tensor(v, dtype=torch.float64) for s, v in state["sensitivity"]}
        self._watched = {site for layer in layers.values() for site in layer.sites}
        self._left = set()
        self._refreshed = state["refreshed"]
        self._last = None


# ---------------------------------------------------------------- levels for distributions


class _Table(NamedTuple):
    step: int
    bits: int
    levels: tuple[float, ...] | None  # None where equal steps are best


# One bit has no inner level; from 5 bits on there is little to gain.
_FITTED = range(2, 5)
_SAMPLE = 1 << 18


class LevelTuner(Tuner):
    """Levels where the values are (TinyScript, Fu et al. 2020): one table for each site.

    A table is fitted to the tensor at hand when its site is first seen, and again every ``refresh`` steps. A tensor
    without negative values counts by its positive ones, as it is encoded. Codecs of block means get the table
    of the differences they round.
    """

    def __init__(self, refresh: int = 500) -> None:
        super().__init__()
        require_positive(refresh, "refresh")
        self.refresh = refresh
        self._step = 0
        self._tables: dict[Site, _Table] = {}

    def begin(self, step: int) -> None:
        """Remember the step."""
        self._step = step

    def codec_for(self, use: Use, tensor: Tensor, base: Codec, rebuild: Rebuild | None = None) -> Codec:
        """``base`` with levels, where it rounds in groups and unequal steps are better."""
        if not isinstance(base, GroupQuant | BlockMean) or base.bits not in _FITTED:
            return base
        if isinstance(base, BlockMean) and base.faithful:
            return base
        table = self._tables.get(use.sites[0])
        if table is None or table.bits != base.bits or not 0 <= self._step - table.step < self.refresh:
            with self.timed():
                fitted = levels.fit_levels(histogram_of(tensor.detach(), base), base.bits)
            even = fitted == levels.uniform_levels(base.bits)
            table = self._tables[use.sites[0]] = _Table(self._step, base.bits, None if even else fitted)
        if table.levels is None:
            return base
        return dataclasses.replace(base, levels=table.levels)

    def state_dict(self) -> dict[str, Any]:
        """All tables, and when they were fitted."""
        rows = [
            [list(s), t.step, t.bits, None if t.levels is None else list(t.levels)] for s, t in self._tables.items()
        ]
        return {"step": self._step, "tables": rows}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        require_keys(state, {"step", "tables"})
        self._step = state["step"]
        self._tables = {site_of(s): _Table(n, b, None if t is None else tuple(t)) for s, n, b, t in state["tables"]}


def histogram_of(tensor: Tensor, base: GroupQuant | BlockMean) -> Tensor:
    """Where the values that ``base`` rounds lie in their groups."""
    layout = base.layout if isinstance(base, GroupQuant) else "sample"
    if isinstance(base, BlockMean):  # the first samples are enough, and their differences are small
        samples = max(1, _SAMPLE * tensor.shape[0] // max(1, tensor.numel()))
        tensor = tensor[:samples]
    rectified = tensor.numel() > 0 and bool(tensor.amin() >= 0)
    flat, meta, order = flatten(tensor)
    row = row_of(layout, order, meta.numel)
    if isinstance(base, GroupQuant):
        return levels.histogram(flat, row, base.group, rectified)
    means = dataclasses.replace(base, bits=0)
    difference = tensor - means.encode(tensor, key=0).decode()
    return levels.histogram(flatten(difference)[0], row, base.group, rectified, source=flat)
