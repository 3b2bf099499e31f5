"""Watching the gradient while training: small probes, and more precision where it is needed.

Now and then a few samples of a batch are kept, and the gradient that backward brings to the model's outputs for them.
With both, the parameters' gradients of these samples can be made again without knowing the loss, exactly and
compressed. That happens at the end of the same backward. The two are compared in units of the whole batch's gradient,
as :func:`lowtide.check` compares them, and ``evidence`` tells when a difference is more than chance.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..codecs import Cast, GroupQuant, LogQuant
from ..graph import capture
from ..policy.choice import Action, Choice
from ..policy.plan import Plan
from ..policy.tuners.base import read, require_keys
from ..policy.use import Use
from ..report import size
from ..session import Session
from ..session.replay import NotDivisible, gradients, leaves_of, mapped, samples_in, slice_of, suspects
from .evidence import BIAS, ERROR, LEAST_NOISE, LONGER, SHORTER, Evidence, Finding, Reading

logger = logging.getLogger("lowtide.guard")

_SHARE = 16
"""A probe runs twice on one of so many parts of a batch, so its exact activations are as small as compressed ones."""

_WINDOW = 8
"""Readings that are kept to be looked at; what judges is the evidence of all."""

_THIN = 1 << 16
"""Values of each parameter's gradient that are compared; more would tell the same."""

_TRIED = 48
"""Tensors that are spared one at a time when the worst are looked for."""

_LEAST_SAMPLES = 4
"""Of a smaller batch even one sample holds more exact activations than all of them do compressed."""

_LEAST_VALUES = 32
"""Values of a channel that a batch norm must see in a part: statistics of fewer are unlike those of training."""

_REPEATS = 1e-6
"""Share of the square by which two exact gradients of the same samples may differ: sums in another order."""

_PATIENCE = 3
"""Looks that may fail one after another before the guard gives up."""


@dataclass(frozen=True)
class Guard:
    """When to look, and what to allow; ``attach(guard=True)`` takes these values.

    Every ``every`` steps, at the end of backward, two parts of a sixteenth of the batch (a sample at least) are run
    exactly and compressed: from 16 samples on a quarter of a step's work. The error may be ``error`` times SGD's own
    noise between the two parts, which counts as at least 0.4 of the gradient. The bias may be ``bias`` of the gradient,
    and of the gradient of each parameter that has at least a tenth of its length.

    While the square of the error is on average at most that of its limit, the chance of an alarm about it is at most
    1 % over all looks of a run, however many there are. The same holds for bias. ``src/lowtide/verify/evidence.py``
    says why, and what is assumed. More than is allowed is found the sooner the larger it is: an error of twice its
    limit in about 5 looks, a bias without noise in about 30, one that noise hides in as many looks as it takes.
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


class _Taken:
    """Some samples of a forward, and what the loss says of its outputs for them, once backward has come by."""

    def __init__(self, inputs: tuple[tuple[Any, ...], dict[str, Any]], step: int) -> None:
        self.samples = samples_in(inputs)
        if self.samples < _LEAST_SAMPLES:
            raise NotDivisible(f"a batch of {self.samples} samples is too small; {_LEAST_SAMPLES} are needed")
        self.step = step
        self.half = max(1, self.samples // _SHARE)
        self.inputs = _copied(slice_of(inputs, 0, 2 * self.half))
        self.weights: dict[int, Tensor] = {}
        self.problem: str | None = None  # must not be raised in the user's backward
        self._covered: dict[int, set[int]] = {}
        self._hooks: list[Any] = []
        device = next((t.device.type for t in leaves_of(self.inputs) if isinstance(t, Tensor)), "cpu")
        self._autocast = (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))

    def cast(self) -> torch.autocast:
        """Autocast as it was in the forward; backward is mostly called outside of it."""
        device, dtype, enabled = self._autocast
        return torch.autocast(device, dtype, enabled)

    @property
    def share(self) -> float:
        """The share of the batch that a probe sees."""
        return self.half / self.samples

    def watch(self, output: Any, arrived: Callable[[], None]) -> None:
        """Keep the gradients that backward brings to the outputs; call ``arrived`` at each."""
        leaves = {i: leaf for i, leaf in enumerate(leaves_of(output)) if isinstance(leaf, Tensor)}
        leaves = {i: leaf for i, leaf in leaves.items() if leaf.requires_grad and not leaf.is_leaf}
        self._covered = _dependencies({i: (leaf.grad_fn, leaf.output_nr) for i, leaf in leaves.items()})
        for i, leaf in leaves.items():
            self._hooks.append(leaf.register_hook(self._keeper(i, arrived)))  # type: ignore[no-untyped-call]

    def _keeper(self, i: int, arrived: Callable[[], None]) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor | None) -> None:
            if gradient is None:
                return  # another output of the same node was read, and this one was not
            own = gradient.detach()
            if own.dim() and own.shape[0] != self.samples:
                self.problem = f"an output of shape {tuple(own.shape)} is not by the batch's {self.samples} samples"
            self.weights[i] = own[: 2 * self.half].clone() if own.dim() else own.clone()
            arrived()

        return keep

    def finish(self) -> None:
        """Take the hooks off; an output that another one is made from counts through that one."""
        while self._hooks:
            self._hooks.pop().remove()
        for i in set(self.weights):
            for other in self._covered.get(i, set()) & set(self.weights):
                self.weights.pop(other)
        self._covered = {}

    def loss(self, model: nn.Module, which: int) -> Tensor:
        """Has the gradient of the real loss, for one half of the samples and with random numbers of its own."""
        torch.manual_seed(which)
        start, stop = which * self.half, (which + 1) * self.half
        args, kwargs = _copied(slice_of(self.inputs, start, stop))
        leaves = list(leaves_of(model(*args, **kwargs)))
        mixed = any(weight.dim() for weight in self.weights.values())
        terms = []
        for i, weight in self.weights.items():
            # A mean over samples comes once, not once for each part.
            own = weight[start:stop] if weight.dim() else weight * (self.share if mixed else 1.0)
            if leaves[i].shape != own.shape:
                raise NotDivisible(f"an output of {self.half} samples has the shape {tuple(leaves[i].shape)}")
            terms.append((leaves[i].float() * own.float()).sum())
        return torch.stack(terms).sum()


def _dependencies(edges: Mapping[int, tuple[Any, int]]) -> dict[int, set[int]]:
    """For each output, given as (node, number), the others that it was made from.

    One node may have several outputs, such as the two of ``chunk``; none of them is made from another. A tensor that is
    returned twice counts as made from its first appearance.
    """
    found: dict[int, set[int]] = {i: set() for i in edges}
    if len(edges) < 2:
        return found
    named: dict[tuple[Any, int], list[int]] = {}
    for i, edge in edges.items():
        named.setdefault(edge, []).append(i)
    for i, (node, _) in edges.items():
        seen, nodes, waiting = set(), {node}, [node]
        while waiting:
            for below, number in waiting.pop().next_functions:
                seen.add((below, number))
                if below is not None and below not in nodes:
                    nodes.add(below)
                    waiting.append(below)
        found[i] = {other for edge in seen for other in named.get(edge, ())}
        found[i] |= {other for other in named[edges[i]] if other < i}
    return found


def _copied(batch: Any) -> Any:
    """The batch with tensors of its own, so that a model that changes its inputs harms nobody."""
    return mapped(batch, lambda leaf: _cloned(leaf) if isinstance(leaf, Tensor) else leaf)


def _cloned(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class Watch:
    """A guard at work on one attached model."""

    def __init__(self, model: nn.Module, session: Session, guard: Guard) -> None:
        reason = _unfit(model)
        if reason:
            raise ValueError(f"guard cannot be used here: {reason}")
        self.guard = guard
        self.readings: deque[Reading] = deque(maxlen=_WINDOW)
        """The last looks since precision was last raised."""
        self._evidence = Evidence(guard.error, guard.bias)
        self._finding: Finding | None = None  # what is being raised for
        self.raised = Plan()
        """What each raised tensor has at least, by its first site."""
        self.log: list[str] = []
        self.off: str | None = None
        """Why the guard no longer looks."""
        self._model = model
        self._session = session
        self._taken: _Taken | None = None
        self._failures = 0  # one after another
        self._lost = False  # the last gradient was not finite
        self._repeats = False  # an exact gradient came out the same a second time
        session.policy.demand = self.demand

    # ------------------------------------------------------------ around each forward and backward

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take some samples, if it is time."""
        if not self._idle(module) and (self._session.step + 1) % self.guard.every == 0:
            self._safely(self._take, args, kwargs)

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Wait for the gradient of what the forward returned."""
        taken = self._taken
        if taken is not None and taken.step == self._session.step and not self._idle(module):
            self._safely(taken.watch, output, partial(self._arrived, taken))

    def _idle(self, module: nn.Module) -> bool:
        out = self.off is not None or self._session.is_aside or not torch.is_grad_enabled()
        return out or capture.in_backward() or capture.calls_on_stack(module) > 1

    def _take(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        waiting, self._taken = self._taken, None
        if waiting is not None:
            waiting.finish()
        self._taken = _Taken((args, kwargs), self._session.step + 1)
        if waiting is not None:
            raise NotDivisible(f"no gradient came to the outputs of step {waiting.step}")

    def _arrived(self, taken: _Taken) -> None:
        """In backward, with the first gradient: look when backward is at its end, and all gradients are there."""
        if len(taken.weights) == 1 and taken is self._taken:
            self._taken = None
            capture.after_backward(partial(self._safely, self.look, taken))

    def _safely(self, act: Callable[..., None], *given: Any) -> None:
        """Training goes on whatever a probe meets; after some failures the guard says that it looks no more."""
        try:
            act(*given)
        except Exception as error:
            self._failures += 1
            if self._failures >= _PATIENCE:
                self.off = str(error) if isinstance(error, NotDivisible) else f"{type(error).__name__}: {error}"
                warnings.warn(f"lowtide's guard is off: {self.off}", stacklevel=2)

    def stop(self) -> None:
        """Let go of a model that is no longer attached."""
        if self._taken is not None:
            self._taken.finish()
        self._taken = None

    # ------------------------------------------------------------ looking

    def look(self, taken: _Taken) -> None:
        """Compare exact and compressed gradients of the samples taken; act if they differ too much."""
        taken.finish()
        reason = taken.problem or _unfit(self._model)
        if reason:
            raise NotDivisible(reason)
        model = self._model
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        probes = [partial(taken.loss, model, which) for which in (0, 1)]
        with self._session.aside(), taken.cast():
            with _norms_see_enough(model):
                exact = [_thin(gradients(self._model, probe)) for probe in probes]
            if not all(_is_finite(found) for found in exact):
                if not self._lost:
                    self._say(f"step {taken.step}: the gradient is not finite, with or without compression")
                self._lost = True
                return
            if not self._repeats:
                again = _minus(_thin(gradients(self._model, probes[0])), exact[0])
                if _product(again, again) > _REPEATS * _product(exact[0], exact[0]):
                    raise NotDivisible("the exact gradient of the same samples differs from run to run")
                self._repeats = True
            found = self._compressed(probes, taken)
            reading = self._read(exact, found, taken)
            if not reading.square:
                return  # a gradient of zero is no measure
            self.readings.append(reading)
            parameters = {name: self._read([_only(e, name) for e in exact], found, taken) for name in exact[0]}
            self._finding = self._evidence.look(reading, parameters)
            if self._finding is not None:
                place = self._finding.parameter or None
                try:
                    self._raise(self._finding.what, [_only(e, place) for e in exact], found, probes, taken)
                finally:
                    self._evidence = Evidence(self.guard.error, self.guard.bias)
        self._failures, self._lost = 0, False

    def _compressed(
        self, probes: Sequence[Callable[[], Tensor]], taken: _Taken, *spared: Use
    ) -> list[dict[str, Tensor]]:
        """Gradients with what the last forward compressed, but for ``spared``: no more, whatever lives shorter here."""
        main = self._session
        stored = [use for use, choice in main.chosen.items() if choice.action is not Action.KEEP]
        found = []
        for i, probe in enumerate(probes):
            session = main.beside(seed=main.seed + 1 + i, share=taken.share, spared=spared, stored=stored)
            found.append(_thin(session.gradients(probe, main.step)))
        return found

    def _read(self, exact: list[dict[str, Tensor]], found: list[dict[str, Tensor]], taken: _Taken) -> Reading:
        """What a look says of the parameters in ``exact``.

        A part's noise is that of the batch times the root of how many parts there are.
        """
        share = taken.share
        found = [{name: f[name] for name in e if name in f} for f, e in zip(found, exact, strict=True)]
        difference = [_minus(f, e) for f, e in zip(found, exact, strict=True)]
        noise = share * _product(_minus(*exact), _minus(*exact)) / 2
        error = share * sum(_product(d, d) for d in difference) / 2
        square = max(0.0, _product(*exact)) + noise
        own = sum(_product(e, e) for e in exact)
        along = sum(_product(d, e) for d, e in zip(difference, exact, strict=True)) / own if own else 0.0
        return Reading(taken.step, square, error, noise, _product(*difference), along)

    def _mean(self, what: str) -> float:
        """The mean of the last readings, each in units of its own gradient."""
        shares: list[float] = [getattr(reading, what) / reading.square for reading in self.readings]
        return sum(shares) / len(shares)

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
        stored = {use: choice for use, choice in self._session.chosen.items() if not choice.exact}
        pairs = list(zip(found, exact, strict=True))
        errors = {name: math.sqrt(sum(_damage(f, e, name) for f, e in pairs)) for name in exact[0]}
        whole = self._read(exact, found, taken)
        falls = []
        for use in suspects(stored, errors)[:_TRIED]:
            spared = self._read(exact, self._compressed(probes, taken, use), taken)
            falls.append((_fall(whole, spared, what), use))
        falls.sort(key=lambda row: -row[0])
        limit, left = self._limit(whole, what), _amount(whole, what)
        names: list[str] = []
        raised = dict(self.raised.choices)
        more = 0
        for fall, use in falls:
            if fall <= 0 or (names and left <= limit / 2):
                break
            choice = stored[use]
            better = raised[use.sites[0]] = _better(use, choice)
            more += better.nbytes(use.meta) - choice.nbytes(use.meta)
            names.append(f"{' / '.join(map(str, use.sites))} from {choice} to {better}")
            left -= fall
        self.raised = Plan(raised)
        text = self._said(what, taken.step)
        self.readings.clear()
        if not names:
            raise NotDivisible(f"{text}, and more precision for one tensor does not help")
        self._say(f"{text}; raised {', '.join(names)}: {size(more)} more in a step")

    def _limit(self, reading: Reading, what: str) -> float:
        """How much of ``what`` is allowed, in the units of :func:`_amount`."""
        if what == ERROR:
            return self.guard.error**2 * max(reading.noise, LEAST_NOISE**2 * reading.square)
        return self.guard.bias**2 * reading.square if what == BIAS else self.guard.bias

    def _said(self, what: str, step: int) -> str:
        """What was found, and what is allowed, in words."""
        if what == ERROR or self._finding is None:
            error, noise = math.sqrt(self._mean("error")), math.sqrt(self._mean("noise"))
            allowed = self.guard.error * max(noise, LEAST_NOISE)
            return f"step {step}: an error of {error:.2g} of the gradient, {allowed:.2g} is allowed"
        whose = f"{self._finding.parameter}'s gradient" if self._finding.parameter else "the gradient"
        bias, allowed = self._finding.size, self.guard.bias
        if what in (SHORTER, LONGER):
            return f"step {step}: a bias that makes {whose} {bias:.2g} of itself {what}, {allowed:.2g} is allowed"
        return f"step {step}: a bias of {bias:.2g} of {whose}, {allowed:.2g} is allowed"

    def _say(self, text: str) -> None:
        self.log.append(text)
        logger.warning(text)

    def demand(self, use: Use, choice: Choice) -> Choice:
        """What the method chose, or what the guard asks for if that is more."""
        least = self.raised.choices.get(use.sites[0])
        return choice if least is None or least.nbytes(use.meta) <= choice.nbytes(use.meta) else least

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
            "raised": self.raised.to_data(),
            "readings": [list(reading) for reading in self.readings],
            "evidence": self._evidence.state_dict(),
            "log": list(self.log),
            "off": self.off,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``."""
        try:
            require_keys(state, {"raised", "readings", "evidence", "log", "off"})
            evidence = Evidence(self.guard.error, self.guard.bias)
            evidence.load_state_dict(state["evidence"])
            raised = Plan.from_data(state["raised"])
            readings = [Reading(*numbers) for numbers in state["readings"]]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"the guard's state cannot be read: {type(error).__name__}: {error}") from error
        self._evidence, self.raised = evidence, raised
        self.readings = deque(readings, maxlen=_WINDOW)
        self.log = list(state["log"])
        self.off = state["off"]
        self.stop()


def _better(use: Use, choice: Choice) -> Choice:
    """The next choice that keeps more: 4 bits, 8 bits, bfloat16, all."""
    groups = GroupQuant(layout="sample" if use.dims else "row")
    if isinstance(choice.codec, GroupQuant):  # other groups, or none of its dither, could add noise
        groups = dataclasses.replace(choice.codec, levels=None)
    even = not isinstance(choice.codec, LogQuant)  # even steps of log-probabilities would be worse
    more = (dataclasses.replace(groups, bits=bits) for bits in (4, 8) if even)
    for codec in (*more, Cast("bfloat16")):
        if choice.nbytes(use.meta) < codec.packed_nbytes(use.meta) < use.meta.nbytes:
            return Choice.store(codec, choice.home, "raised by the guard")
    why = "kept exactly, because its noise was too much"
    return Choice.keep(why) if choice.home == "device" else Choice.offload(choice.home, why)


def _fall(whole: Reading, spared: Reading, what: str) -> float:
    """How much less there is without a tensor's noise; a gradient that becomes finite counts as all."""
    if not math.isfinite(whole.error):
        return math.inf if math.isfinite(spared.error) else 0.0
    if not math.isfinite(spared.error):
        return -math.inf
    return _amount(whole, what) - _amount(spared, what)


def _amount(reading: Reading, what: str) -> float:
    """How much of ``what`` a reading shows: squares for an error and a bias, a share of the gradient's length else."""
    return {ERROR: reading.error, BIAS: reading.bias, SHORTER: -reading.along, LONGER: reading.along}[what]


# ---------------------------------------------------------------- gradients


def _thin(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some values of each gradient, in main memory by one read.

    They are scaled so that inner products are those of all on average. The distance between them is odd, so that it
    does not fall into step with rows whose lengths are powers of two.
    """
    some, scales = [], []
    for gradient in found.values():
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        flat = (torch.view_as_real(dense) if dense.is_complex() else dense).reshape(-1)
        stride = flat.numel() // _THIN
        stride += 1 - stride % 2
        some.append(flat[::stride])
        scales.append(math.sqrt(stride))
    values = [piece.to(torch.float64) * scale for piece, scale in zip(read(some), scales, strict=True)]
    return dict(zip(found, values, strict=True))


def _only(found: Mapping[str, Tensor], name: str | None) -> dict[str, Tensor]:
    """The gradient of one parameter; all of them for None."""
    return {key: gradient for key, gradient in found.items() if name is None or key == name}


def _minus(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A parameter that is not reached has a gradient of zero."""
    empty = torch.zeros((), device="cpu")
    return {name: a.get(name, empty) - b.get(name, empty) for name in {**a, **b}}


def _product(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    return sum(float(torch.dot(a[name], b[name])) for name in a if name in b)


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
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import DTensor

    waits = (nn.SyncBatchNorm, FullyShardedDataParallel, nn.parallel.DistributedDataParallel)
    for module in model.modules():
        if isinstance(module, waits) and not (module is model and isinstance(module, waits[-1])):
            return f"a {type(module).__name__} waits for other processes, and each process probes for itself"
    if any(isinstance(p, DTensor) for p in model.parameters()):
        return "its parameters are spread over processes, and each process probes for itself"
    return None


@contextmanager
def _norms_see_enough(model: nn.Module) -> Iterator[None]:
    """Raise where a batch norm that trains would see a part of too few values."""

    def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["input"]
        values = x.numel() // x.shape[1]
        if module.training and values < _LEAST_VALUES:
            raise NotDivisible(f"a batch norm would see {values} values of a channel, {_LEAST_VALUES} are needed")

    norms = [m for m in model.modules() if isinstance(m, capture.BATCH_NORMS)]
    hooks = [norm.register_forward_pre_hook(look, with_kwargs=True) for norm in norms]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
