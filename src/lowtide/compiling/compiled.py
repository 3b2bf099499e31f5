"""``lowtide.compile``: a model compiled by torch whose graphs pack what they hand from forward to backward."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import nn

from ..codecs import Codec
from ..graph import shards
from ..graph.capture import is_compiled
from ..kernels import backends
from ..policy.methods import Auto, Method, Planned, resolve
from ..policy.plan import Plan
from ..report import Report
from ..session.opening import MIN_NUMEL
from .running import Forward, running

BACKENDS = ("inductor", "aot_eager")


class Compiled(nn.Module):
    """A compiled model that keeps packed tensors for backward; made by :func:`compile`.

    It is called, trained and saved like the model. The model itself is ``_orig_mod``, as in what ``torch.compile``
    returns; it shares all weights and stays as it was. Other attributes are the model's own.
    """

    def __init__(self, model: nn.Module, call: Any, method: Method, seed: int) -> None:
        super().__init__()
        self._orig_mod = model
        self.training = model.training
        self._call = partial(call)  # not as the module that it is, which would list all weights twice
        self.method = method
        self.seed = seed
        self.step = 0
        """Forwards with gradients so far. A run that resumes sets it, and rounds as if it had not stopped."""
        self._last: Forward | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)

    @torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own, compiled."""
        saves = torch.is_grad_enabled()
        self.step += saves
        team = shards.team_of(self._orig_mod)
        forward = Forward(self.seed, self.step, shards.own_rank() if team is None else team.rank)
        if saves:
            self._last = forward
        with running(forward):
            return self._call(*args, **kwargs)

    def report(self) -> Report:
        """What the graphs of the last forward saved, how it is stored, and why.

        The graphs write it themselves while they run, so it is the same for graphs from a cache. ``plain_nbytes`` is
        what the same graphs would hold without packing.
        """
        rows = () if self._last is None else tuple(self._last.rows())
        notes = [] if self._last is not None else ["no forward was seen yet"]
        if isinstance(self.method, Auto):
            notes.append(
                "auto cannot measure inside a compiled graph: these are the choices it begins with. A plan that an "
                "eager session measured takes their place: lowtide.compile(model, session.plan())"
            )
        return Report(str(self.method), rows, tuple(notes), backends.served())


def compile(
    model: nn.Module,
    method: str | Method | Codec | Plan = "auto",
    *,
    backend: str = "inductor",
    dynamic: bool | None = None,
    seed: int = 0,
    min_numel: int = MIN_NUMEL,
    fullgraph: bool = False,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **method_options: Any,
) -> Compiled:
    """``torch.compile`` with packed tensors between forward and backward.

    The compiled forward is exact. What torch's partitioner would save for backward is packed inside the graphs, as
    ``method`` says, and ``report()`` of the result lists it.

    ``method`` is one that needs no learning, with its options: ``"lossless"``, ``"division"``, ``"actnn"`` with
    ``level="L2"``, ``"cast"``, ``"pool"``, ``"lowrank"``; or a codec, or a plan that an eager session made, which is
    looked up by module, op and slot. ``"auto"`` measures in backward, which a compiled graph cannot do; here it keeps
    to the choices that it begins with (dithered groups; 2, 4 or 8 bits by need), and has no ``bits``.

    ``backend`` is ``"inductor"`` or ``"aot_eager"``; ``dynamic``, ``fullgraph``, ``mode`` and ``options`` are those of
    ``torch.compile``. ``seed`` and the count of forwards, ``step``, set the noise of rounding. It is read when a
    graph runs, so a new step needs no new graph, and torch's random numbers are left alone.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> compiled = lowtide.compile(model, "actnn", level="L2", backend="aot_eager")
    >>> compiled(torch.randn(128, 64)).sum().backward()
    >>> compiled.report().ratio > 4
    True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if is_compiled(model):
        raise TypeError("this model is compiled already; give lowtide.compile the model as it was before")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a whole number; got {seed!r}")
    if isinstance(min_numel, bool) or not isinstance(min_numel, int) or min_numel < 0:
        raise ValueError(f"min_numel must be a whole number of at least 0; got {min_numel!r}")
    resolved = resolve(method, method_options)
    _require_fixed(resolved, model)
    given: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph}
    if backend == "inductor":
        given["options"] = options
    elif options is not None or mode is not None:
        raise ValueError(f"mode and options go with backend='inductor'; got backend={backend!r}")
    try:
        from .dynamo import Partitioner, compiled
    except ImportError as error:
        raise RuntimeError(
            f"lowtide.compile needs a torch whose compiler takes a partitioner of ours; {torch.__version__} has not "
            f"all of it ({error}). lowtide.attach works without"
        ) from error
    partitioner = Partitioner(resolved, min_numel, is_fused=backend == "inductor")
    return Compiled(model, compiled(model, partitioner, backend, mode, given), resolved, seed)


def _require_fixed(method: Method, model: nn.Module) -> None:
    """Raise unless the method decides without looking at values or gradients, and a graph can do all that it asks."""
    if isinstance(method, Planned):
        method.require_some_module(model)
        if method.checkpoints:
            raise ValueError(
                f"the plan runs {', '.join(method.checkpoints[:4])} again in backward, which torch decides "
                "by itself in a compiled graph; plan without 'checkpoint', or call torch.utils.checkpoint in the model"
            )
    if isinstance(method, Auto):
        options = [f.name for f in dataclasses.fields(method) if f.name == "bits" and method.bits != f.default]
        if options:
            raise ValueError(
                f"auto divides bits by what it measures, which a compiled graph cannot do; got bits={method.bits}. "
                "Leave bits out, or let an eager session measure and give its plan"
            )
    elif method.tuner(model) is not None:
        other = ", such as level='L2'" if method.name == "actnn" else ""
        raise ValueError(
            f"{method} learns while it trains, which a compiled graph cannot do; take a method that does not{other}, "
            "or let an eager session learn and give its plan"
        )
    elif method.rebuilds and method.name != "plan":
        raise ValueError(
            f"{method} rebuilds tensors, which torch's partitioner decides in a compiled graph; take 'division' or "
            "'auto' with the same bits"
        )
