"""Watching the gradient while training: small probes, and more precision where it is needed.

Now and then a few samples of a batch, and the gradient of the loss at the model's outputs for them, are kept until the
next step. With both the parameters' gradients of these samples can be made again without knowing the loss, exactly
and compressed. They are compared as :func:`lowtide.check` does, in units of the whole batch's gradient.
"""

from __future__ import annotations

import logging
import math
import statistics
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import capture
from .capture import Site
from .codecs import Cast, Codec, GroupQuant, from_config
from .replay import NotDivisible, gradients, leaves_of, part_of, samples_in, suspects
from .report import size
from .session import Session
from .tuning import Use, require_keys, site_of

logger = logging.getLogger("lowtide.guard")

LEAST_NOISE = 0.4
"""SGD's noise counts as at least this part of the gradient: see ``check.LEAST_NOISE``."""

_SHARE = 16
"""A probe runs twice on one of so many parts of a batch, so its exact activations are as small as compressed ones."""

_WINDOW = 8
"""Probes that are judged together."""

_FEW = 4
_CERTAIN = 4.54
"""Bias counts if its mean is so many standard errors from zero: 1 % by Student's t with 4 probes, less with more."""

_THIN = 1 << 16
"""Values of each parameter's gradient that are compared; more would tell the same."""

_TRIED = 48
"""Tensors that are spared one at a time when the worst are looked for."""


@dataclass(frozen=True)
class Guard:
    """When to look, and what to allow; ``attach(guard=True)`` takes these values.

    Every ``every`` steps two probes of a sixteenth of the batch are run exactly and compressed: a quarter of a step's
    work. The error may be ``error`` times SGD's own noise between the two parts, which counts as at least 0.4 of the
    gradient; a bias that shows over at least four looks may be ``bias`` of the gradient.
    """

    every: int = 100
    error: float = 1.0
    bias: float = 0.05

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"every must be a whole number of at least 1; got {self.every!r}")
        for name, value in (("error", self.error), ("bias", self.bias)):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0; got {value!r}")


class Reading(NamedTuple):
    """What one look found, as squares in one common unit.

    ``square`` is the whole batch's gradient, ``error`` that of compression, ``noise`` SGD's own, ``bias`` the product
    of the errors of two parts, which noise leaves at zero on average.
    """

    step: int
    square: float
    error: float
    noise: float
    bias: float


class _Taken:
    """Some samples of a forward, and what the loss says of its outputs for them, once backward has run."""

    def __init__(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], samples: int) -> None:
        self.samples = samples
        self.half = max(1, samples // _SHARE)
        args, kwargs = (part_of(i, 0, 2 * self.half) for i in inputs)
        self.inputs = (tuple(_copied(args)), _copied(kwargs))
        self.weights: dict[int, Tensor] = {}
        self.problem: str | None = None  # must not be raised in the user's backward

    def watch(self, output: Any) -> None:
        """Keep the gradients that backward brings to the outputs."""
        for i, leaf in enumerate(leaves_of(output)):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self._keeper(i))  # type: ignore[no-untyped-call]

    def _keeper(self, i: int) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            own = gradient.detach()
            if own.dim() and own.shape[0] != self.samples:
                self.problem = f"an output of shape {tuple(own.shape)} is not by the batch's {self.samples} samples"
            self.weights[i] = own[: 2 * self.half].clone() if own.dim() else own

        return keep

    def loss(self, model: nn.Module, which: int) -> Tensor:
        """Has the gradient of the real loss, for one half of the samples."""
        start, stop = which * self.half, (which + 1) * self.half
        args, kwargs = part_of(self.inputs, start, stop)
        leaves = list(leaves_of(model(*args, **kwargs)))
        terms = []
        for i, weight in self.weights.items():
            rows = weight[start:stop] if weight.dim() else weight
            terms.append((leaves[i].float() * rows.float()).sum())
        return torch.stack(terms).sum()


def _copied(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if isinstance(batch, Mapping):
        return {key: _copied(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        parts = [_copied(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


class Watch:
    """A guard at work on one attached model."""

    def __init__(self, model: nn.Module, session: Session, guard: Guard) -> None:
        reason = _unfit(model)
        if reason:
            raise ValueError(f"guard cannot be used here: {reason}")
        self.guard = guard
        self.readings: deque[Reading] = deque(maxlen=_WINDOW)
        """The last looks since precision was last raised."""
        self.raised: dict[Site, Codec | None] = {}
        """The codec that each raised tensor has at least, by its first site; None is exact."""
        self.log: list[str] = []
        self.off: str | None = None
        """Why the guard no longer looks."""
        self._model = model
        self._session = session
        self._taken: _Taken | None = None
        session.override = self.codec_for

    # ------------------------------------------------------------ around each forward

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look, if samples of an earlier step are there; take some, if it is time."""
        if self._idle(module):
            return
        taken, self._taken = self._taken, None
        if taken is not None and taken.weights:
            self._safely(self.look, taken)
        if self.off is None and (self._session.step + 1) % self.guard.every == 0:
            self._safely(self._take, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Wait for the gradient of what the forward returned."""
        if self._taken is not None and not self._taken.weights and not self._idle(module):
            self._taken.watch(output)

    def _idle(self, module: nn.Module) -> bool:
        out = self.off is not None or self._session.is_aside or not torch.is_grad_enabled()
        return out or capture.calls_on_stack(module) > 1

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._taken = _Taken((args, kwargs), samples_in((args, kwargs)))

    def _safely(self, act: Callable[..., None], *given: Any) -> None:
        """Training goes on whatever a probe meets; the guard says that it does not watch any more."""
        try:
            act(*given)
        except Exception as error:
            self._taken = None
            self.off = str(error) if isinstance(error, NotDivisible) else f"{type(error).__name__}: {error}"
            warnings.warn(f"lowtide's guard is off: {self.off}", stacklevel=5)

    # ------------------------------------------------------------ looking

    def look(self, taken: _Taken) -> None:
        """Compare exact and compressed gradients of the samples taken; act if they differ too much."""
        reason = taken.problem or _unfit(self._model)
        if reason:
            raise NotDivisible(reason)
        model = self._model
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        probes = [partial(taken.loss, model, which) for which in (0, 1)]
        with self._session.aside():
            exact = [_thin(gradients(self._model, probe)) for probe in probes]
            if not all(_is_finite(found) for found in exact):
                return  # a step that is lost anyway, such as one whose loss was scaled too much
            found = self._compressed(probes, taken, frozenset())
            reading = self._read(exact, found, taken)
            self.readings.append(reading)
            too_much = self.verdict()
            if too_much is None:
                return
            self._raise(too_much, exact, found, probes, taken)

    def _compressed(
        self, probes: Sequence[Callable[[], Tensor]], taken: _Taken, spared: frozenset[Site]
    ) -> list[dict[str, Tensor]]:
        found = []
        for i, probe in enumerate(probes):
            session = self._session.like(self._session.seed + 1 + i, taken.half / taken.samples)
            if spared:
                session.override = lambda use, codec: None if use.sites[0] in spared else self.codec_for(use, codec)
            found.append(_thin(session.gradients(probe, self._session.step)))
        return found

    def _read(self, exact: list[dict[str, Tensor]], found: list[dict[str, Tensor]], taken: _Taken) -> Reading:
        """A part's noise is that of the batch times the root of how many parts there are."""
        share = taken.half / taken.samples
        difference = [_minus(f, e) for f, e in zip(found, exact, strict=True)]
        noise = share * _product(_minus(*exact), _minus(*exact)) / 2
        error = share * sum(_product(d, d) for d in difference) / 2
        square = max(0.0, _product(*exact)) + noise
        return Reading(self._session.step, square, error, noise, _product(*difference))

    def verdict(self) -> str | None:
        """What is out of the band over the last readings: "error", "bias" or None."""
        square = math.fsum(r.square for r in self.readings)
        error = math.fsum(r.error for r in self.readings)
        if not math.isfinite(error):
            return "error"
        noise = math.fsum(r.noise for r in self.readings)
        if error > self.guard.error**2 * max(noise, LEAST_NOISE**2 * square):
            return "error"
        products = [r.bias for r in self.readings]
        if len(products) < _FEW or math.fsum(products) <= self.guard.bias**2 * square:
            return None
        spread = statistics.stdev(products) / math.sqrt(len(products))
        return "bias" if statistics.fmean(products) > _CERTAIN * spread else None

    # ------------------------------------------------------------ raising

    def _raise(
        self,
        what: str,
        exact: list[dict[str, Tensor]],
        found: list[dict[str, Tensor]],
        probes: Sequence[Callable[[], Tensor]],
        taken: _Taken,
    ) -> None:
        """Give the tensors that matter most their next codec, until what they add is half of what is allowed."""
        stored = {use: codec for use, codec in self._session.chosen.items() if not codec.exact}
        errors = {name: math.sqrt(sum(_damage(f, e, name) for f, e in zip(found, exact, strict=True)))
                  for name in exact[0]}  # fmt: skip
        whole = self._read(exact, found, taken)
        falls = []
        for use in suspects(stored, errors)[:_TRIED]:
            spared = self._read(exact, self._compressed(probes, taken, frozenset(use.sites[:1])), taken)
            falls.append((_fall(whole, spared, what), use))
        falls.sort(key=lambda row: -row[0])
        limit = self.guard.bias**2 * whole.square
        if what == "error":
            limit = self.guard.error**2 * max(whole.noise, LEAST_NOISE**2 * whole.square)
        left = whole.error if what == "error" else whole.bias
        names: list[str] = []
        more = 0
        for fall, use in falls:
            if names and (fall <= 0 or left <= limit / 2):
                break
            codec = stored[use]
            better = self.raised[use.sites[0]] = _better(use, codec)
            more += (use.meta.nbytes if better is None else better.packed_nbytes(use.meta)) - codec.packed_nbytes(
                use.meta
            )
            names.append(f"{' / '.join(map(str, use.sites))} from {codec} to {better or 'exact'}")
            left -= fall
        text = self._said(what)
        if names:
            text += f"; raised {', '.join(names)}: {size(more)} more in a step"
        else:
            text += "; nothing is left to raise"
        self.log.append(text)
        logger.warning(text)
        self.readings.clear()

    def _said(self, what: str) -> str:
        square = math.fsum(r.square for r in self.readings) or math.nan
        if what == "bias":
            bias = math.sqrt(math.fsum(r.bias for r in self.readings) / square)
            return f"step {self._session.step}: a bias of {bias:.2g} of the gradient, {self.guard.bias:.2g} is allowed"
        error = math.sqrt(math.fsum(r.error for r in self.readings) / square)
        noise = math.sqrt(math.fsum(r.noise for r in self.readings) / square)
        allowed = self.guard.error * max(noise, LEAST_NOISE)
        return f"step {self._session.step}: an error of {error:.2g} of the gradient, {allowed:.2g} is allowed"

    def codec_for(self, use: Use, codec: Codec) -> Codec | None:
        """The codec that the method chose, or what the guard demands if that is more."""
        if use.sites[0] not in self.raised:
            return codec
        least = self.raised[use.sites[0]]
        if least is None or least.packed_nbytes(use.meta) > codec.packed_nbytes(use.meta):
            return least
        return codec

    # ------------------------------------------------------------ telling and keeping

    def notes(self) -> tuple[str, ...]:
        """For the report: what was raised, and whether the guard still looks."""
        found = [f"guard: {text}" for text in self.log]
        if self.off is not None:
            found.append(f"guard: off: {self.off}")
        return tuple(found)

    def state_dict(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return {
            "raised": [[list(s), None if c is None else c.to_config()] for s, c in self.raised.items()],
            "readings": [list(reading) for reading in self.readings],
            "log": list(self.log),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        require_keys(state, {"raised", "readings", "log"})
        self.raised = {site_of(s): None if c is None else from_config(c) for s, c in state["raised"]}
        self.readings = deque((Reading(*row) for row in state["readings"]), maxlen=_WINDOW)
        self.log = list(state["log"])
        self._taken = None


def _better(use: Use, codec: Codec) -> Codec | None:
    """The next codec that keeps more: 4 bits, 8 bits, bfloat16, exact (None)."""
    layout = "sample" if use.dims else "row"
    for better in (GroupQuant(4, layout=layout), GroupQuant(8, layout=layout), Cast("bfloat16")):
        if codec.packed_nbytes(use.meta) < better.packed_nbytes(use.meta) < use.meta.nbytes:
            return better
    return None


def _fall(whole: Reading, spared: Reading, what: str) -> float:
    """How much less there is without a tensor's noise; a gradient that becomes finite counts as all."""
    if not math.isfinite(whole.error):
        return math.inf if math.isfinite(spared.error) else 0.0
    if not math.isfinite(spared.error):
        return -math.inf
    return whole.error - spared.error if what == "error" else whole.bias - spared.bias


# ---------------------------------------------------------------- gradients


def _thin(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some values of each gradient, in main memory, scaled so that inner products are those of all on average.

    The distance between them is odd, so that it does not fall into step with rows whose lengths are powers of two.
    """
    thin = {}
    for name, gradient in found.items():
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
        stride = flat.numel() // _THIN
        stride += 1 - stride % 2
        thin[name] = flat[::stride].to("cpu", torch.float64) * math.sqrt(stride)
    return thin


def _minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A parameter that is not reached has a gradient of zero."""
    empty = torch.zeros(())
    return {name: a.get(name, empty) - b.get(name, empty) for name in {**a, **b}}


def _product(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return math.fsum(float(torch.dot(a[name], b[name])) for name in a if name in b)


def _damage(found: Mapping[str, Tensor], exact: Mapping[str, Tensor], name: str) -> float:
    if name not in found or name not in exact:
        return 0.0
    square = float((found[name] - exact[name]).square().sum())
    return square if math.isfinite(square) else float(exact[name].square().sum())


def _is_finite(found: Mapping[str, Tensor]) -> bool:
    return all(bool(g.isfinite().all()) for g in found.values())


# ---------------------------------------------------------------- models that probes would harm


def _unfit(model: nn.Module) -> str | None:
    """Why probes of one process alone would make others wait for ever; None if they would not."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    if any(isinstance(m, nn.SyncBatchNorm) for m in model.modules()):
        return "a SyncBatchNorm waits for other processes, and each process probes for itself"
    from torch.distributed.tensor import DTensor

    if any(isinstance(p, DTensor) for p in model.parameters()):
        return "its parameters are spread over processes, and each process probes for itself"
    return None
