"""Real steps in child processes, one mode in each: what a plan brings, measured."""

from __future__ import annotations

import contextlib
import importlib
import math
import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..graph import capture
from ..machine.measure import Emit, peak_above, run_child
from ..policy.plan import Plan
from ..report import size
from ..session.opening import new_session
from ..session.replay import gradients, leaves_of
from ..session.session import Session
from ..verify.check import LossFn, default_loss

_STEPS = 3
_SEEDS = 2


@dataclass(frozen=True)
class Verification:
    """What was predicted of a plan, and what real steps showed. Made by ``plan.verify``."""

    peak: int
    """Measured bytes at the highest moment: what the step adds to the process, and what is there at rest."""
    plain_peak: int | None
    """The same for a plain step; None if it was not run."""
    error: float
    """The relative error of the whole gradient."""
    slowdown: float | None
    """The time of a step beside that of a plain one, each the fastest of three in a process of its own."""
    seconds: float
    predicted_peak: int | None = None
    predicted_error: float | None = None
    predicted_slowdown: float | None = None

    @property
    def peak_ratio(self) -> float:
        """The measured peak beside the predicted one."""
        return math.nan if not self.predicted_peak else self.peak / self.predicted_peak

    def to_data(self) -> dict[str, Any]:
        """Plain data, fit for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Measured and predicted, side by side."""
        rows = [("", "measured", "predicted")]
        predicted = "" if self.predicted_peak is None else size(self.predicted_peak)
        rows.append(("peak", size(self.peak), predicted))
        if self.plain_peak is not None:
            rows.append(("plain peak", size(self.plain_peak), ""))
        rows.append(("gradient error", f"{self.error:.3g}", _shown(self.predicted_error, ".3g")))
        rows.append(("time of a step", _shown(self.slowdown, ".2f", "x"), _shown(self.predicted_slowdown, ".2f", "x")))
        return "\n".join(f"{a:15} {b:>12} {c:>12}".rstrip() for a, b, c in rows)


def _shown(value: float | None, form: str, unit: str = "") -> str:
    return "" if value is None else f"{value:{form}}{unit}"


def verify(
    plan: Plan | str | None,
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    *,
    plain: bool = True,
    steps: int = _STEPS,
    compare: bool = True,
    beside: int = 0,
    predicted_peak: int | None = None,
    predicted_error: float | None = None,
    predicted_slowdown: float | None = None,
) -> Verification:
    """Run a plan or a method by its name, or with None a plain step, and measure it; ``plain`` runs that beside it.

    The fastest of so many ``steps`` tells the time; with 0 of them nothing is timed. Without ``compare`` no gradient is
    compared with that of a plain step, which may not fit in memory, and the error is NaN. ``beside`` are bytes that
    count with every peak though they are not there in these steps, such as an optimizer's.
    """
    loss_fn = default_loss(batch) if loss_fn is None else loss_fn
    rest = _rest(model, batch) + beside
    with tempfile.TemporaryDirectory(prefix="lowtide-") as folder:
        path = Path(folder) / "step"
        _send((model, batch, loss_fn, plan), path)

        def run(function: str, *, exact: bool = False, planned: bool = plan is not None) -> dict[str, Any]:
            argument = {"path": str(path), "threads": torch.get_num_threads(), "planned": planned, "steps": steps}
            argument["compare"] = compare
            return run_child(f"{__name__}:{function}", argument, exact_rss=exact)

        peak = rest + run("_peak", exact=True)["above"]
        comparing = compare and plan is not None
        timed = run("_timed") if steps or comparing else {"seconds": math.nan, "error": 0.0}
        plain_peak = rest + run("_peak", exact=True, planned=False)["above"] if plain and plan is not None else None
        plain_seconds = run("_timed", planned=False)["seconds"] if plain and plan is not None and steps else None
    return Verification(
        peak=peak,
        plain_peak=plain_peak,
        error=timed["error"] if comparing or plan is None else math.nan,
        slowdown=None if plain_seconds is None else timed["seconds"] / plain_seconds,
        seconds=timed["seconds"],
        predicted_peak=predicted_peak,
        predicted_error=predicted_error,
        predicted_slowdown=predicted_slowdown,
    )


def _rest(model: nn.Module, batch: Any) -> int:
    """Bytes of weights, buffers and batch, each storage once."""
    tensors = [*model.parameters(), *model.buffers(), *(leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor))]
    storages = {capture.storage_id(s): s.nbytes() for t in tensors if (s := capture.storage_of(t)) is not None}
    return sum(storages.values())


def _send(what: Any, path: Path) -> None:
    """Write what a child will read."""
    pickler: Any = pickle
    with contextlib.suppress(ModuleNotFoundError):
        pickler = importlib.import_module("cloudpickle")
    try:
        path.write_bytes(pickler.dumps(what))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ValueError(
            f"the model, the batch or loss_fn cannot be sent to another process: {error}. Define loss_fn in a module, "
            "or pip install cloudpickle"
        ) from error


def _read(argument: dict[str, Any]) -> tuple[nn.Module, Callable[[], Tensor], Session | None]:
    torch.set_num_threads(argument["threads"])
    model, batch, loss_fn, plan = pickle.loads(Path(argument["path"]).read_bytes())
    return model, lambda: loss_fn(model, batch), new_session(model, plan, {}) if argument["planned"] else None


def _stepper(
    model: nn.Module, loss: Callable[[], Tensor], session: Session | None, warm: int = 1
) -> Callable[[], None]:
    """A step, run so often that nothing happens for the first time any more, and no method still measures."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        with session or contextlib.nullcontext():
            found = loss()
        torch.autograd.backward(found)

    for _ in range(3 if session is not None and session.adapts else warm):
        step()
    return step


def _peak(argument: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """In a child: bytes that a step adds."""
    model, loss, session = _read(argument)
    step = _stepper(model, loss, session)
    model.zero_grad(set_to_none=True)
    return {"above": peak_above(step)}


def _timed(argument: dict[str, Any], emit: Emit) -> dict[str, Any]:
    """In a child: the fastest step, and how far its gradients are from exact ones."""
    model, loss, session = _read(argument)
    step = _stepper(model, loss, session, min(1, argument["steps"]))
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    seconds = []
    for _ in range(argument["steps"]):
        began, busy = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - began)
        if on_cpu:  # other processes may have had the cores meanwhile
            seconds.append(time.process_time() - busy)
    error = 0.0
    if session is not None and argument["compare"]:
        model.zero_grad(set_to_none=True)
        exact = gradients(model, loss)
        square = math.fsum(float(g.square().sum(dtype=torch.float64)) for g in exact.values())
        off = 0.0
        plan = session.plan() if session.adapts else None  # one that adapts is judged by what it came to
        for seed in range(_SEEDS):
            found = session.beside(plan=plan, seed=seed).gradients(loss, 1)
            off += math.fsum(float((found[n] - g).square().sum(dtype=torch.float64)) for n, g in exact.items())
        error = math.sqrt(off / _SEEDS / square) if square else 0.0
    return {"seconds": min(seconds, default=math.nan), "error": error}
