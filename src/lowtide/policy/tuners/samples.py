"""Bits for samples and layers (ActNN's level 3, Chen et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...codecs import GroupQuant, SampleQuant
from ...codecs.base import flatten, form_of, require_positive
from ...codecs.groups import BITS, row_of
from ...graph.capture import Site
from ...graph.rules import Need
from ...kernels import ops
from ..choice import Choice
from ..solve import allocate
from ..use import Use
from .base import FromSources, Tuner, Wanted, read, require_keys, site_of


@dataclass
class _Layer:
    """What a forward showed of one stored tensor, and the bits its samples may share."""

    sites: tuple[Site, ...]
    energy: Tensor | None  # for each sample, if it was measured since the last competition
    weight: int  # values in a sample
    pixels: int
    shared: tuple[int, int] | None  # bits in total, for that many samples


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
    In each forward the codec divides that sum among the layer's samples by their ``E`` (``S`` is common to them).

    A layer without a known ``S`` gets ``bits`` for each sample, and so does every layer in the first step. The input of
    a batch norm has no weight gradient to measure by: it takes the bits per sample of the linear layer that was
    stored last before it, and never less than its statistics demand. A tensor that several layers read has the sum of
    their costs. Only layers that the step before a competition stored take part in it; one that comes back later has
    the bits it had.

    Statistics stay on the tensors' device, and a competition reads them all at once. ``bits`` may be fractional.
    ``taps`` weighs layers as :func:`taps` does; without it every layer counts as one tap.
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
        pool = [layer for layer in self._layers.values() if layer.energy is not None and self._known(layer)]
        if pool:
            with self.timed():
                self._divide(pool)
            self._refreshed = step

    def _known(self, layer: _Layer) -> list[Site]:
        return [site for site in layer.sites if site in self._sensitivity]

    def _divide(self, pool: list[_Layer]) -> None:
        energies, sensitivity = self._read()
        costs, sizes = [], []
        for layer in pool:
            scale = sum(sensitivity[s] * self._taps.get(s.module, 1.0) for s in self._known(layer))
            energy = energies[layer.sites[0]]
            costs.append(energy.to(torch.float64) * scale / layer.pixels)
            sizes.append(energy.numel())
        weights = torch.tensor([layer.weight for layer in pool], device="cpu")
        weight = weights.repeat_interleave(torch.tensor(sizes, device="cpu"))
        bits = allocate(torch.cat(costs), weight, int(self.bits * int(weight.sum())))
        for layer, won in zip(pool, torch.split(bits, sizes), strict=True):
            layer.shared = (int(won.sum()), won.numel())
        for layer in self._layers.values():
            layer.energy = None

    def _read(self) -> tuple[dict[Site, Tensor], dict[Site, Tensor]]:
        """In main memory: what was measured of each layer, by its first site, and the sensitivity of each site."""
        measured = {first: layer.energy for first, layer in self._layers.items() if layer.energy is not None}
        found = read([*measured.values(), *self._sensitivity.values()])
        numbers = dict(zip(self._sensitivity, found[len(measured) :], strict=True))
        return dict(zip(measured, found, strict=False)), numbers

    def choose(self, use: Use, tensor: Tensor, base: Choice, from_sources: FromSources | None = None) -> Choice:
        """Bits for each sample, for maps that a convolution or a batch norm reads."""
        tuned = isinstance(base.codec, GroupQuant) and base.codec.layout == "sample" and tensor.numel() > 0
        if not tuned or use.need not in (Need.LINEAR, Need.BATCH):
            self._left.update(use.sites)
            return base
        with self.timed():
            meta, layout = form_of(tensor)
            if layout.order[0] != 0:  # samples do not lie one after another
                self._left.update(use.sites)
                return base
            if use.need is Need.LINEAR:
                self._last = self._remember(use, tensor.detach(), row_of("sample", layout, meta.numel))
        samples, most = meta.shape[0], BITS[-1]
        shared = None if self._last is None else self._last.shared
        total, count = (int(self.bits * samples), samples) if shared is None else shared
        each, rest = divmod(max(total * samples // count, use.least_bits * samples), samples)
        if rest == 0 and (samples == 1 or each in (use.least_bits, most)):  # nobody can have more than the others
            return base.with_codec(GroupQuant(each, self.group, "sample"))
        return base.with_codec(SampleQuant(total, count, use.least_bits, self.group))

    def _remember(self, use: Use, tensor: Tensor, row: int) -> _Layer:
        known = self._layers.get(use.sites[0])
        energy = None if known is None else known.energy
        if self._due:
            energy = ops.range_energy(flatten(tensor)[0], row, self.group, use.rectified)
        shared = None if known is None else known.shared
        layer = _Layer(use.sites, energy, row, math.prod(use.meta.shape[2:]), shared)
        self._layers[use.sites[0]] = layer
        self._watched.update(use.sites)
        return layer

    @property
    def _due(self) -> bool:
        """Will bits be divided anew after this step?"""
        return self._refreshed is None or self._step + 1 - self._refreshed >= self.refresh

    def wants(self, site: Site, need: Need) -> Wanted:
        """Gradients of linear consumers whose tensors are not left alone, in the step before bits are divided anew."""
        return Wanted.GRADIENT if self._due and need is Need.LINEAR and site not in self._left else Wanted.NOTHING

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
        energies, numbers = self._read()
        layers = [
            {
                "sites": [list(site) for site in layer.sites],
                "energy": energies[first].tolist() if first in energies else None,
                "weight": layer.weight,
                "pixels": layer.pixels,
                "shared": None if layer.shared is None else list(layer.shared),
            }
            for first, layer in self._layers.items()
        ]
        sensitivity = [[list(site), float(value)] for site, value in numbers.items()]
        return {"refreshed": self._refreshed, "layers": layers, "sensitivity": sensitivity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        require_keys(state, {"refreshed", "layers", "sensitivity"})
        layers = {}
        for row in state["layers"]:
            sites = tuple(site_of(site) for site in row["sites"])
            shared = None if row["shared"] is None else (int(row["shared"][0]), int(row["shared"][1]))
            energy = None if row["energy"] is None else torch.tensor(row["energy"], dtype=torch.float32, device="cpu")
            layers[sites[0]] = _Layer(sites, energy, row["weight"], row["pixels"], shared)
        self._layers = layers
        self._sensitivity = {
            site_of(s): torch.tensor(v, dtype=torch.float64, device="cpu") for s, v in state["sensitivity"]
        }
        self._watched = {site for layer in layers.values() for site in layer.sites}
        self._left = set()
        self._refreshed = state["refreshed"]
        self._last = None
