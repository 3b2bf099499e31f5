"""How a user begins: ``compress`` for one forward, ``attach`` for every forward of a model."""

from __future__ import annotations

import dataclasses
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .codecs import Codec
from .graph import shards
from .machine.measure import peak_so_far
from .planning.budgeted import Budgeted
from .planning.planner import nbytes_of
from .policy.methods import Auto, Method
from .policy.plan import Plan
from .policy.policy import BOUNDARY_BITS
from .report import Report, size
from .session import MIN_NUMEL, OPENER, Session, attached, new_session
from .verify.guard import Guard, Watch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

logger = logging.getLogger("lowtide")

_UNSEEN = (
    "no forward was seen yet; that of a module inside it does not count, nor does another method of it, such as "
    "training_step: attach the module that is called. Forwards inside torch.compile stay exact and are not seen"
)


class Attachment:
    """Compression of every forward of a model until :meth:`remove`; made by :func:`attach`.

    It is also a context: ``with lowtide.attach(model):`` removes itself at the end, whatever happens inside.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        guard: Guard | None = None,
        budget: Budgeted | None = None,
        log_every: int | None = None,
    ) -> None:
        self._session = session
        self._budget = budget
        self.guard = None if guard is None else Watch(model, session, guard)
        """The guard at work, if there is one: its readings, and what it raised."""
        self._hooks: list[RemovableHandle] = []
        if self.guard is not None:  # sees inputs before any other hook, and outputs after all
            first = _before(self.guard)
            self._hooks.append(model.register_forward_pre_hook(_Hook(model, first), prepend=True, with_kwargs=True))
        if budget is not None:
            self._hooks.append(model.register_forward_pre_hook(_Hook(model, _planner(budget)), with_kwargs=True))
        opener = _Hook(model, _opener(session))
        setattr(opener, OPENER, True)
        self._hooks.append(model.register_forward_pre_hook(opener))
        self._hooks.append(model.register_forward_hook(_Hook(model, _closer(session)), always_call=True))
        if self.guard is not None:
            self._hooks.append(model.register_forward_hook(_Hook(model, _after(self.guard)), with_kwargs=True))
        if log_every is not None:
            teller = _teller(session, self.guard, log_every)
            self._hooks.append(model.register_forward_hook(_Hook(model, teller)))

    def __enter__(self) -> Attachment:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Take all hooks off the model; may be called again, also within a forward."""
        while self._hooks:
            self._hooks.pop().remove()
        self._session.abandon()
        if self.guard is not None:
            self.guard.stop()

    def report(self) -> Report:
        """What was saved in the last forward, how it is stored, and why."""
        report = self._session.report()
        notes = () if self.guard is None else self.guard.notes()
        if self._budget is not None:
            notes = (*self._budget.notes(), *notes)
        if not self._session.step:
            notes = (_UNSEEN, *notes)
        return dataclasses.replace(report, notes=(*report.notes, *notes)) if notes else report

    def plan(self) -> Plan:
        """What the last forward did to each tensor, as a plan that can be saved and run again."""
        return self._session.plan()

    def adapt(self, closure: Callable[[], Tensor], *, every: int | None = None) -> None:
        """Let the method decide anew by probes, as :meth:`Session.adapt` does; with ``every``, every so many steps.

        The closure is not part of :meth:`state_dict`: a run that resumes calls this again.
        """
        self._session.adapt_every(closure, every)
        self._session.adapt(closure)

    def state_dict(self) -> dict[str, Any]:
        """Format, method, seed, step, what was learned: with the model's and optimizer's, a run resumes bit for bit."""
        state = self._session.state_dict()
        return state if self.guard is None else {**state, "guard": self.guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``, which must come from the same method, with a guard if this has one."""
        if not isinstance(state, Mapping):
            raise TypeError(f"expected what state_dict() gave; got {type(state).__name__}")
        if ("guard" in state) != (self.guard is not None):
            has, lacks = ("this state", "this attachment") if "guard" in state else ("this attachment", "this state")
            raise ValueError(f"{has} has a guard and {lacks} has none; give attach() the same guard as before")
        before = self._session.state_dict()
        self._session.load_state_dict({key: value for key, value in state.items() if key != "guard"})
        if self.guard is not None:
            try:
                self.guard.load_state_dict(state["guard"])
            except ValueError:
                self._session.load_state_dict(before)
                raise


class _Hook:
    """A hook on one model. What a copy of the model gets in its place, also by pickle, does nothing."""

    def __init__(self, model: nn.Module, act: Callable[..., None]) -> None:
        self._model = weakref.ref(model)
        self._act = act

    def __call__(self, module: nn.Module, *rest: Any) -> None:
        if torch.compiler.is_compiling() or module is self._model():  # not a shallow copy, which shares its hooks
            self._act(module, *rest)

    def __reduce__(self) -> tuple[Any, ...]:
        return _hook_of_a_copy, ()


def _hook_of_a_copy() -> Callable[..., None]:
    return _do_nothing


def _do_nothing(*_: Any) -> None:
    """What is left of a hook on a copy of an attached model."""


def _opener(session: Session) -> Callable[..., None]:
    def open_session(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # compiled code saves what it likes, exactly
            session.begin(module)

    return open_session


def _planner(budget: Budgeted) -> Callable[..., None]:
    def plan_ahead(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            budget.before(module, args, kwargs)

    return plan_ahead


def _closer(session: Session) -> Callable[..., None]:
    def close_session(module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            session.end()

    return close_session


def _before(watch: Watch) -> Callable[..., None]:
    def take(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling():
            watch.before(module, args, kwargs)

    return take


def _after(watch: Watch) -> Callable[..., None]:
    def wait(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.compiler.is_compiling():
            watch.after(module, args, kwargs, output)

    return wait


def _teller(session: Session, guard: Watch | None, every: int) -> Callable[..., None]:
    def tell(module: nn.Module, args: Any, output: Any) -> None:
        due = session.step > 0 and session.step % every == 0 and torch.is_grad_enabled()
        if due and not torch.compiler.is_compiling() and not session.is_aside and logger.isEnabledFor(logging.INFO):
            logger.info(_status(session, guard, next(module.parameters(), None)))

    return tell


def _status(session: Session, guard: Watch | None, parameter: Tensor | None) -> str:
    """One line: what the last forward kept, the highest memory so far, what the guard says."""
    report = session.report()
    parts = [f"{size(report.stored_nbytes)} kept for backward instead of {size(report.plain_nbytes)}"]
    peak = peak_so_far(None if parameter is None else parameter.device)
    if peak is not None:
        parts.append(f"peak so far {size(peak)}")
    if guard is not None:
        read = guard.readings[-1] if guard.readings else None
        last = "" if read is None else f", last error {math.sqrt(read.error / read.square) if read.square else 0.0:.3g}"
        parts.append(f"guard off: {guard.off}" if guard.off else f"guard raised {len(guard.raised)} tensors{last}")
    return f"step {session.step}: {'; '.join(parts)}"


def compress(
    model: nn.Module,
    method: str | Method | Codec | Plan = "auto",
    *,
    seed: int = 0,
    min_numel: int = MIN_NUMEL,
    derive: bool = False,
    boundary_bits: int | None = BOUNDARY_BITS,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    tensor_parallel: DeviceMesh | ProcessGroup | None = None,
    **options: Any,
) -> Session:
    """Run the forward inside this context: autograd then keeps compressed copies for backward.

    The forward is exact; backward may run inside or outside. ``method`` is a name from
    :func:`lowtide.methods` with its ``options``, a method such as ``lowtide.Auto(bits=3)``, a codec to use for every
    value, or a plan. The model, torch's random streams and the loop are left as they were, also after an exception.

    Calls in a loop belong together: what an adaptive method learns about ``model`` is kept for the next call with
    the same arguments, as long as the model lives (:func:`lowtide.forget` drops it), and a step that begins with such a
    call is the same, bit for bit, as that step of :func:`attach`. Rounding noise depends on ``seed``, on how many such
    calls there were for this model before, and on the site; not on sessions of other models. So leave ``seed`` alone in
    a loop: with another seed each step nothing would be learned.

    Sessions do not nest: within one, an inner one finds nothing left to do. Under autocast, call backward before the
    optimizer's step, because copies of parameters are cast again instead of kept.

    With ``derive=True`` a tensor that is a cheap function of stored ones (the input of a convolution after BN and ReLU
    or after a residual block, of a linear layer after a norm, an activation or a product) is not stored but rebuilt
    from them: about half the bytes, which are better spent on more ``bits`` for what is stored.

    What ``torch.utils.checkpoint`` keeps of a region, its inputs, is stored with ``boundary_bits`` bits a value (16 for
    bfloat16), and with None exactly (docs/checkpointing.md).

    ``include`` and ``exclude`` are patterns of module paths, such as ``"blocks.*.mlp"``; each stands for the modules
    that match it and all inside them. What is saved outside of ``include``, or in ``exclude``, stays as it is.

    Ranks that work on different samples round independently. Ranks that work on the same samples (tensor parallel)
    round and decide alike, so that parameters which they all hold get equal gradients. They are found by themselves if
    parameters are ``DTensor``; for other kinds of tensor parallelism give their mesh or process group as
    ``tensor_parallel``.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> x = torch.randn(128, 64)
    >>> with lowtide.compress(model, "actnn", bits=4) as session:
    ...     loss = model(x).square().mean()
    >>> loss.backward()
    >>> session.report().ratio > 4
    True
    """
    return new_session(
        model,
        method,
        options,
        seed=seed,
        min_numel=min_numel,
        derive=derive,
        boundary_bits=boundary_bits,
        include=include,
        exclude=exclude,
        tensor_parallel=tensor_parallel,
        remembers=True,
    )


def attach(
    model: nn.Module,
    method: str | Method | Codec | Plan = "auto",
    *,
    seed: int = 0,
    min_numel: int = MIN_NUMEL,
    derive: bool = False,
    boundary_bits: int | None = BOUNDARY_BITS,
    guard: bool | Guard = False,
    budget: int | float | str | None = None,
    log_every: int | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    tensor_parallel: DeviceMesh | ProcessGroup | None = None,
    **options: Any,
) -> Attachment:
    """Compress every forward of ``model`` from now on, in a loop that does not change.

    Arguments are those of :func:`compress`. Covers what happens inside ``model``'s forward; a loss computed outside
    stays exact. Forwards under ``torch.no_grad()`` are left alone, and so are those in another thread while one is
    running. ``handle.remove()``, or the end of ``with lowtide.attach(...)``, undoes it. A copy of the model, by
    ``copy.deepcopy`` or ``torch.save``, is not attached (``torch.jit.script`` refuses a model with hooks). A model that
    is attached cannot be attached again.

    With ``guard=True``, or a :class:`Guard` with other limits, the gradient of a few samples is compared with the exact
    one every 100 steps. Where the error exceeds SGD's own noise, or a bias shows, the tensors that cause it get more
    bits; this is logged, noted in the report and kept in ``state_dict``. The loop stays as it is; weights, buffers,
    ``.grad`` and random streams are as without a guard. Inputs and outputs must have samples as first dimension.

    With a ``budget`` for the peak of a step, such as ``"6 GiB"``, ``auto`` chooses by :func:`plan` instead of ``bits``:
    before the first step from shapes alone, after it from what noise does to this model's gradients. The budget holds
    weights, gradients and batch too, but not the optimizer. One that no plan meets is an error at the first forward.

    With ``log_every=100`` every hundredth step logs one line at level INFO to the logger "lowtide": the bytes kept for
    backward, the highest memory of the process or the device so far, and what the guard found.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> handle = lowtide.attach(model, "cast")
    >>> model(torch.randn(128, 64)).sum().backward()
    >>> handle.state_dict()
    {'format': 1, 'method': "cast(dtype='bfloat16', group=0)", 'seed': 0, 'step': 1}
    >>> handle.remove()
    """
    if not isinstance(guard, (bool, Guard)):
        raise TypeError(f"guard must be True, False or a lowtide.Guard; got {guard!r}")
    if guard and tensor_parallel is not None:
        raise ValueError("a guard decides for its own process, and ranks that share samples must decide alike")
    if log_every is not None and (isinstance(log_every, bool) or not isinstance(log_every, int) or log_every < 1):
        raise ValueError(f"log_every must be a whole number of at least 1, or None; got {log_every!r}")
    limit = None if budget is None else nbytes_of(budget)
    session = new_session(
        model,
        method,
        options,
        seed=seed,
        min_numel=min_numel,
        derive=derive,
        boundary_bits=boundary_bits,
        include=include,
        exclude=exclude,
        tensor_parallel=tensor_parallel,
    )
    if limit is not None and (options or not isinstance(session.method, Auto)):
        raise TypeError(f"a budget goes with method 'auto' and takes the place of its options; got {session.method}")
    if limit is not None and shards.is_spread(model):
        raise ValueError(
            "a budget is planned on a copy of the model, and its parameters are spread over processes; "
            "give bits in place of a budget, or the plan of a model that is not spread"
        )
    if attached(model):
        raise RuntimeError("this model, or a module of it, is attached already; remove() that handle first")
    planned = None if limit is None else Budgeted(session, limit)
    return Attachment(model, session, Guard() if guard is True else guard or None, planned, log_every)
