"""Is a compressed gradient still good enough? Exact and compressed gradients of one batch, compared and judged.

Both come from the same weights, buffers and random state, so they differ by compression alone. Every number is in
units of the exact gradient's length. The verdict weighs what averages out (noise, next to SGD's own) apart from
what does not (bias).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..codecs import Codec
from ..graph import capture
from ..graph.capture import Site
from ..policy.methods import Method
from ..policy.plan import Plan, is_page
from ..policy.policy import BOUNDARY_BITS
from ..policy.use import Use
from ..report import Report, size
from ..session import MIN_NUMEL, Session, attached, new_session
from ..session.replay import NotDivisible, gradients, samples_in, slice_of, suspects
from .evidence import LEADING, LEAST_NOISE

LossFn = Callable[[nn.Module, Any], Tensor]

SAFE = "safe"
NOISY = "noisy"
UNSAFE = "unsafe"

SAFE_SHARE = 0.25
"""An error of a quarter of SGD's noise adds 1/16 to the variance of a step: that of a batch 6 % smaller."""

SAFE_BIAS = 0.02
"""Noise as large as the gradient, averaged over 2500 steps, is still as large as this bias."""

UNSAFE_BIAS = 0.05
"""The same for 400 steps: beyond it bias, not noise, decides where training goes."""

SIGNIFICANCE = 0.01
"""Bias counts if noise alone would look as biased with at most this chance, divided by the number of tests made."""

WARM = 3
"""Steps that an adaptive method sees before it is judged."""

SLICES = 4
"""SGD's noise is the spread of the gradients of so many slices of the batch."""

NEGLIGIBLE = 1e-3
"""A parameter with less than this share of the gradient's length is never called the worst layer: the gradient of a
bias before a batch norm, for one, is zero but for rounding, and so is SGD's noise in it."""

_SHOWN = 8


@dataclass(frozen=True)
class Difference:
    """How far compressed gradients are from the exact one, in units of the exact one's length ``norm``.

    ``error`` is the root mean square over seeds. ``mean_error`` is that of the mean over seeds, ``noise_left`` what
    noise without bias would leave there, the spread over the root of the seeds; ``bias`` is what the first has
    beyond the second, in squares. ``chance`` is the probability that noise without bias looks as biased.
    ``sgd_noise`` is the spread of the exact gradient from batch to batch of this size; None if unknown.
    """

    norm: float
    error: float
    mean_error: float
    noise_left: float
    bias: float
    chance: float
    cosine: float
    sgd_noise: float | None = None


@dataclass(frozen=True)
class SiteCheck:
    """One stored tensor, and the share of the squared error that goes when it alone is kept exact.

    The share may be negative by chance, and shares need not add up to 1. Where gradients are not finite, it is
    the share of the spoilt parameters that become finite.
    """

    sites: tuple[Site, ...]
    codec: str
    fall: float


@dataclass(frozen=True)
class CheckResult:
    """What :func:`check` found; ``str()`` is a page to read, :meth:`to_json` all of it."""

    method: str
    verdict: str
    reason: str
    seeds: int
    overall: Difference
    parameters: Mapping[str, Difference]
    nonfinite: tuple[str, ...]
    """Parameters whose compressed gradient has NaN or Inf, and the exact one has not."""
    sites: tuple[SiteCheck, ...]
    """Those that were switched to exact within the time, greatest fall first."""
    stored: int
    """How many tensors are stored with a codec that can err."""
    report: Report
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Not ``unsafe``."""
        return self.verdict != UNSAFE

    @property
    def worst_layer(self) -> tuple[str, float] | None:
        """The parameter whose error is largest beside SGD's own noise in it, and their ratio; None if that is unknown.

        It is no part of the verdict, which weighs the whole gradient: a layer may be as noisy as SGD makes it, or more,
        while the whole is hardly changed.
        """
        known = {
            name: d.error / d.sgd_noise if d.sgd_noise else math.inf if d.error else 0.0
            for name, d in self.parameters.items()
            if d.sgd_noise is not None and d.norm >= NEGLIGIBLE * self.overall.norm
        }
        return max(known.items(), key=lambda item: item[1], default=None)

    def to_json(self) -> str:
        """All numbers; what is infinite or NaN becomes null."""
        data = asdict(self)
        worst = self.worst_layer
        data["worst_layer"] = None if worst is None else {"parameter": worst[0], "error_by_sgd_noise": worst[1]}
        data["report"] = json.loads(self.report.to_json())
        data["sites"] = [{**asdict(s), "sites": [site._asdict() for site in s.sites]} for s in self.sites]
        return json.dumps(finite(data), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> CheckResult:
        """The result that :meth:`to_json` wrote, with NaN for each null; anything else raises a ValueError."""
        try:
            data = json.loads(text)
            sites = [
                SiteCheck(tuple(Site(**s) for s in r["sites"]), r["codec"], _number(r["fall"])) for r in data["sites"]
            ]
            return cls(
                **{name: data[name] for name in ("method", "verdict", "reason", "seeds", "stored")},
                overall=_difference(data["overall"]),
                parameters={name: _difference(row) for name, row in data["parameters"].items()},
                nonfinite=tuple(data["nonfinite"]),
                sites=tuple(sites),
                report=Report.from_json(json.dumps(data["report"])),
                notes=tuple(data["notes"]),
            )
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is not the result of a check: {type(error).__name__}: {error}") from error

    def save(self, path: str | Path, **beside: Any) -> None:
        """Write JSON, or a page if the name ends in .html.

        A page shows what is given ``beside`` too: ``profile``, ``plan`` and ``verification`` of the same model.
        """
        if is_page(path):
            from ..page.writing import save_page  # which stands above: it joins all that there is to show

            save_page(path, check=self, **beside)
            return
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def _repr_html_(self) -> str:
        """In a notebook."""
        from ..page.writing import notebook

        return notebook(check=self)

    def __str__(self) -> str:
        """Verdict, reason, totals, worst parameters and sites."""
        total, report = self.overall, self.report
        noise = "unknown" if total.sgd_noise is None else f"{total.sgd_noise:.3g}"
        lines = [
            f"{self.method}: {self.verdict}: {self.reason}",
            f"  error   {total.error:.3g} of the gradient (SGD's own noise: {noise}), cosine {total.cosine:.4f}",
            f"  bias    {total.bias:.3g}: the mean of {self.seeds} gradients is off by {total.mean_error:.3g}, noise "
            f"would leave {total.noise_left:.3g} (chance {total.chance:.2g})",
            f"  memory  {size(report.plain_nbytes)} saved by autograd, {size(report.stored_nbytes)} stored instead",
        ]
        if self.worst_layer is not None and total.error > 0:
            lines.append(
                "  layer   the worst is {}: its error is {:.3g} times SGD's own noise in it".format(*self.worst_layer)
            )
        if self.nonfinite:
            lines.append(f"  NaN or Inf in the gradient of {', '.join(self.nonfinite)}")
        worst = sorted(self.parameters.items(), key=lambda item: -item[1].error * item[1].norm)
        table: list[tuple[str, ...]] = [("worst parameters", "length", "error", "bias", "chance", "cosine", "SGD")]
        for name, d in worst[:_SHOWN]:
            sgd = "-" if d.sgd_noise is None else f"{d.sgd_noise:.3g}"
            numbers = (d.norm, d.error, d.bias, d.chance, d.cosine)
            table.append((name, *(f"{number:.3g}" for number in numbers), sgd))
        if total.error > 0:
            lines += _aligned(table)
            head = f"worst sites ({len(self.sites)} of {self.stored} switched to exact, one at a time)"
            rows = [(", ".join(map(str, s.sites)), s.codec, f"{s.fall:.1%}") for s in self.sites[:_SHOWN]]
            lines += _aligned([(head, "codec", "squared error falls by"), *rows])
        return "\n".join((*lines, *(f"note: {note}" for note in self.notes)))


def _difference(row: Mapping[str, Any]) -> Difference:
    return Difference(**{name: value if name == "sgd_noise" else _number(value) for name, value in row.items()})


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]


def finite(value: Any) -> Any:
    """Plain data that fits JSON in any reader: what is infinite or NaN becomes None."""
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def check(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None = None,
    method: str | Method | Codec | Plan = "auto",
    *,
    seeds: int = 4,
    seconds: float = 30.0,
    seed: int = 0,
    min_numel: int = MIN_NUMEL,
    derive: bool = False,
    boundary_bits: int | None = BOUNDARY_BITS,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    **options: Any,
) -> CheckResult:
    """Compare the compressed gradient of ``batch`` with the exact one, and judge it.

    ``loss_fn(model, batch)`` returns the loss of one value; left out, a mapping means ``model(**batch).loss``. Method
    and options are those of :func:`compress`, which covers the loss too. ``seeds`` is how often the rounding is drawn;
    fewer than 4 can hardly tell bias from noise. Weights, buffers, ``.grad`` and random states stay as they were, and
    so does the noise of later sessions; the loss must leave the batch as it was. Each seed's gradient is held in main
    memory until all are there.

    An adaptive method first sees the batch three times, with no step in between, and goes on learning in one session
    over all seeds; the probes of ``adapt`` are not run. Gradients must be repeatable: a note says if they are not.

    The verdict, from the relative error of the whole gradient and from bias:

    - ``safe``: the error is at most a quarter of SGD's noise (the variance of a step grows by 1/16), and there is no
      significant bias above 0.02. An error of 0 is called exact.
    - ``noisy``: the error is at most SGD's noise (like half the batch), and there is no significant bias above 0.05.
    - ``unsafe``: more than that, or NaN or Inf in a gradient that is finite without compression.

    SGD's noise is measured on four slices of the batch, cut along the first dimension of its tensors. It counts as
    0.4 where it is smaller or cannot be known, so an error of 0.1 is always safe and one of 0.4 at worst noisy.
    Bias does not average out over steps: noise as large as the gradient sinks to 0.05 in 400 steps and to 0.02 in
    2500. It is tested for the whole gradient and for each parameter with a tenth of its length or more, at a
    level of 1 % for all tests together. A method that draws no random numbers has the same error each time, so all of
    it counts as bias.

    The page and :attr:`CheckResult.worst_layer` also name the parameter whose error is largest beside SGD's noise in
    that parameter alone. The verdict does not depend on it.

    Then stored tensors are switched to exact one at a time, for at most ``seconds``, to see which ones matter: first
    those whose own layers err most.

    >>> import torch, lowtide
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
    >>> x = torch.randn(128, 64)
    >>> result = lowtide.check(model, x, lambda model, x: (model(x) - x[:, :1]).square().mean(), "actnn", bits=8)
    >>> result.verdict, result.overall.error < 0.02
    ('safe', True)
    >>> lowtide.check(model, x, lambda model, x: model(x).square().mean(), "lossless").overall.error
    0.0
    """
    if isinstance(seeds, bool) or not isinstance(seeds, int) or seeds < 2:
        raise ValueError(f"seeds must be a whole number of at least 2; got {seeds!r}")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise ValueError(f"seconds must be a number of at least 0; got {seconds!r}")
    loss = default_loss(batch) if loss_fn is None else loss_fn
    session = new_session(
        *(model, method, options),
        seed=seed,
        min_numel=min_numel,
        derive=derive,
        boundary_bits=boundary_bits,
        include=include,
        exclude=exclude,
    )
    if capture.watching() or attached(model):
        raise RuntimeError(
            "this model is being compressed already, so its exact gradient is out of reach; call check() outside of "
            "compress(), and remove() the handle of attach() first"
        )

    def run() -> Tensor:
        return loss(model, batch)

    exact, notes = _exact(model, run)
    sgd = _sgd_noise(model, batch, loss, exact)
    if isinstance(sgd, str):
        notes.append(f"SGD's own noise is unknown: {sgd}")
        sgd = {}
    draws = _draws(session, run, seeds)
    overall, parameters, nonfinite = _compared(draws, exact, sgd)
    if len(draws) < seeds and overall.error > 0:
        notes.append("the method draws no random numbers: all of its error counts as bias")
    leading = {name: d for name, d in parameters.items() if d.norm >= LEADING * overall.norm}
    verdict, reason = judge(overall, leading, nonfinite)
    report, count, last = session.report(), len(draws), draws[-1]
    del draws

    # A plan has one choice for a site; forwards that were treated differently are decided about anew.
    plan, step = None if session.ambiguous() else session.plan(), session.step
    lossy = {use: choice for use, choice in session.chosen.items() if not choice.exact}

    def spared(use: Use) -> dict[str, Tensor]:
        return _gathered(session.beside(plan=plan, spared=[use]).gradients(run, step))

    sites = []
    if overall.error > 0:
        whole, stop = _damage(last, exact), time.perf_counter() + seconds
        each = 0.0
        for use in suspects(lossy, {name: d.error * d.norm for name, d in parameters.items()}):
            start = time.perf_counter()
            if start + each >= stop:
                break
            sites.append(SiteCheck(use.sites, str(lossy[use]), _fall(whole, _damage(spared(use), exact))))
            each = time.perf_counter() - start
    return CheckResult(
        method=report.method,
        verdict=verdict,
        reason=reason,
        seeds=count,
        overall=overall,
        parameters=parameters,
        nonfinite=nonfinite,
        sites=tuple(sorted(sites, key=lambda s: -s.fall)),
        stored=len(lossy),
        report=report,
        notes=(*notes, *report.notes),
    )


def default_loss(batch: Any) -> LossFn:
    """The loss that a mapping implies; an error for any other batch."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"only a mapping has a loss of its own, model(**batch).loss; got a batch of type {type(batch).__name__}: "
            "give loss_fn(model, batch), such as lambda model, batch: cross_entropy(model(batch[0]), batch[1])"
        )

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = model(**batch)
        value = found["loss"] if isinstance(found, Mapping) and "loss" in found else getattr(found, "loss", None)
        if not isinstance(value, Tensor):
            raise TypeError("model(**batch) has no loss; put labels into the batch, or give loss_fn(model, batch)")
        return value

    return loss


def judge(overall: Difference, leading: Mapping[str, Difference], nonfinite: Sequence[str]) -> tuple[str, str]:
    """The verdict and its reason; :func:`check` explains the limits.

    >>> judge(Difference(1.0, error=0.3, mean_error=0.15, noise_left=0.15, bias=0.0, chance=0.5, cosine=0.95), {}, ())
    ('noisy', 'the error is above 0.1, a quarter of the noise that SGD is assumed to have')
    """
    if nonfinite:
        return UNSAFE, f"NaN or Inf in the gradient of {len(nonfinite)} parameters"
    if overall.error == 0:
        return SAFE, "the gradient is exact"
    known = overall.sgd_noise is not None and overall.sgd_noise > LEAST_NOISE
    noise = overall.sgd_noise if known and overall.sgd_noise is not None else LEAST_NOISE
    whose = "SGD's own noise" if known else "the noise that SGD is assumed to have"
    tested = {"the whole gradient": overall, **leading}
    biased = {name: d.bias for name, d in tested.items() if d.chance <= SIGNIFICANCE / len(tested)}
    place, bias = max(biased.items(), key=lambda item: item[1], default=("", 0.0))
    if bias > UNSAFE_BIAS:
        return UNSAFE, f"a bias of {bias:.3g} in {place} is above {UNSAFE_BIAS} and will not average out"
    if overall.error > noise:
        return UNSAFE, f"the error is above {noise:.3g}, {whose}"
    if bias > SAFE_BIAS:
        return NOISY, f"a bias of {bias:.3g} in {place} is above {SAFE_BIAS} and will not average out"
    if overall.error > SAFE_SHARE * noise:
        return NOISY, f"the error is above {SAFE_SHARE * noise:.3g}, a quarter of {whose}"
    return (
        SAFE,
        f"the error is at most {SAFE_SHARE * noise:.3g}, a quarter of {whose}, and no bias above {SAFE_BIAS} shows",
    )


# ---------------------------------------------------------------- gradients


def _gathered(found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In main memory, dense, as real numbers of at least 32 bits."""
    wide = {}
    for name, gradient in found.items():
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        wide[name] = real.to("cpu", torch.promote_types(real.dtype, torch.float32))
    return wide


def _exact(model: nn.Module, run: Callable[[], Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The exact gradient of every parameter where it is finite, and what to note about it."""
    notes = [] if model.training else ["the model is in evaluation mode, not as it trains"]
    found = _gathered(gradients(model, run))
    exact = {name: g for name, g in found.items() if bool(g.isfinite().all())}
    left = [name for name in found if name not in exact]
    if not exact:
        raise ValueError("no parameter has a finite exact gradient, so there is nothing to compare with")
    if left:
        notes.append(f"left out, because their exact gradients have NaN or Inf: {', '.join(left)}")
    again = _gathered(gradients(model, run))
    off = _damage(again, exact)[1]
    if off:
        off = math.sqrt(off / sum(_square(g) for g in exact.values()))
        notes.append(f"the exact gradient cannot be repeated: a second one is off by {off:.2g}, which counts as error")
    return exact, notes


def _draws(session: Session, run: Callable[[], Tensor], seeds: int) -> list[dict[str, Tensor]]:
    """Compressed gradients for ``seeds`` draws of the rounding; two are enough where the second is the first again."""
    first = 1
    if session.adapts:
        for step in range(first, first + WARM):
            session.gradients(run, step)
        first += WARM
    draws: list[dict[str, Tensor]] = []
    for step in range(first, first + seeds):
        draws.append(_gathered(session.gradients(run, step)))
        if len(draws) == 2 and all(torch.equal(g, draws[1][name]) for name, g in draws[0].items()):
            break
    return draws


def _compared(
    draws: Sequence[Mapping[str, Tensor]], exact: Mapping[str, Tensor], sgd: Mapping[str, float]
) -> tuple[Difference, dict[str, Difference], tuple[str, ...]]:
    """The whole gradient, each parameter, and the parameters that compression makes infinite or NaN."""
    parameters, nonfinite = {}, []
    total = torch.zeros(len(draws) + 1, len(draws) + 1, dtype=torch.float64, device="cpu")
    for name, right in exact.items():
        errors = [_of(found, name, right) - right for found in draws]
        products = _products([*errors, right])
        total += products
        parameters[name] = difference(products, sgd.get(name))
        if not all(bool(error.isfinite().all()) for error in errors):
            nonfinite.append(name)
    return difference(total, sgd.get("")), parameters, tuple(nonfinite)


def _of(found: Mapping[str, Tensor], name: str, right: Tensor) -> Tensor:
    """A parameter that is not reached has a gradient of zero."""
    gradient = found.get(name)
    return torch.zeros_like(right) if gradient is None else gradient


def _products(vectors: Sequence[Tensor]) -> Tensor:
    """Inner products of all pairs, in float64: float32 sums over millions of values err in the fourth digit."""
    flat = torch.stack([vector.reshape(-1) for vector in vectors]).to(torch.float64)
    return flat @ flat.T


def _square(vector: Tensor) -> float:
    return float(torch.linalg.vector_norm(vector, dtype=torch.float64)) ** 2


def difference(products: Tensor, sgd_noise: float | None = None) -> Difference:
    """All measures, from the inner products of the seeds' errors and, in the last row, of the exact gradient.

    With ``n`` errors the square of their mean has the expectation ``bias**2 + variance / n``; the mean product of two
    different errors has ``bias**2`` alone.
    """
    square = float(products[-1, -1])
    norm = math.sqrt(square)
    errors, along = products[:-1, :-1], products[:-1, -1]
    if not bool(errors.isfinite().all()):
        return Difference(norm, math.inf, math.inf, math.inf, math.inf, 0.0, math.nan, sgd_noise)
    n = len(errors)
    own, total = float(errors.trace()), float(errors.sum())
    variance = max(0.0, own - total / n) / (n - 1)
    lengths = (square + 2 * along + errors.diagonal()).clamp_min(0).sqrt() * norm
    cosine = float(((square + along) / lengths).mean()) if own and square and bool(lengths.all()) else float(not own)
    return Difference(
        norm,
        error=_ratio(own / n, square),
        mean_error=_ratio(total / n**2, square),
        noise_left=_ratio(variance / n, square),
        bias=_ratio((total - own) / (n * (n - 1)), square),
        chance=_chance(errors),
        cosine=cosine,
        sgd_noise=sgd_noise,
    )


def _ratio(square: float, by: float) -> float:
    """The root of a ratio of squares; a negative estimate of a square counts as zero."""
    if square <= 0:
        return 0.0
    return math.sqrt(square / by) if by else math.inf


_ALIKE = 1e-12
"""A spread of this share of the square is rounding of the sums: the seeds made no difference."""


def _chance(errors: Tensor) -> float:
    """The probability that noise without bias gives products of different seeds as much above zero as these.

    In many dimensions products of independent noise are themselves independent and normal, so as one vector they
    point anywhere alike, and bias turns it to (1, ..., 1). What counts is the angle to that; its density is
    ``cos(t) ** (pairs - 2)``. A level of 1 % is really 1.5 % with 4 seeds and noise in 30 independent directions,
    1.8 % in 10 (simulated). For 2 seeds the chance is never below a half.
    """
    n = len(errors)
    i, j = torch.triu_indices(n, n, 1, device="cpu")
    pairs, own = errors[i, j], float(errors.trace())
    length = float(pairs.norm()) * math.sqrt(len(pairs))
    if own == 0 or length == 0:
        return 1.0
    if own - float(errors.sum()) / n <= _ALIKE * own:
        return 0.0
    slope = max(-1.0, min(1.0, float(pairs.sum()) / length))
    if len(pairs) == 1:
        return 0.5 if slope > 0 else 1.0
    return _tail(math.asin(slope), len(pairs)) / _tail(-math.pi / 2, len(pairs))


def _tail(start: float, dimensions: int) -> float:
    """The integral of ``cos(t) ** (dimensions - 2)`` from ``start`` to a right angle, by midpoints."""
    width = (math.pi / 2 - start) / _MIDPOINTS
    return width * math.fsum(math.cos(start + (k + 0.5) * width) ** (dimensions - 2) for k in range(_MIDPOINTS))


_MIDPOINTS = 1000


# ---------------------------------------------------------------- SGD's own noise


def _sgd_noise(model: nn.Module, batch: Any, loss: LossFn, exact: Mapping[str, Tensor]) -> dict[str, float] | str:
    """SGD's noise by parameter, for the whole gradient under ""; or why it cannot be known.

    The spread of the gradients of slices of ``b`` samples, times the root of ``b / B``, is that of batches of ``B``. A
    loss that sums over samples is recognized by gradients of slices that are too short by ``B / b``. Slices stand for
    the batch only if the mean of their gradients is near its gradient; batch norms and losses that couple samples can
    prevent that. The mean must be within half the noise, so that at most a quarter of the variance is due to them.
    Dropout alone makes the two differ by noise of its own: where random numbers are drawn, and no batch norm is
    suspect, a distance of twice the noise is accepted.
    """
    try:
        samples = samples_in(batch)
        count = min(SLICES, samples)
        each = samples // count
        probes = [_Probe(model, loss, slice_of(batch, i * each, (i + 1) * each), i) for i in range(count)]
        found = [_gathered(gradients(model, probe)) for probe in probes]
    except NotDivisible as reason:
        return str(reason)
    except Exception as error:  # the user's code may do anything with a slice, and the check can go on without
        return f"a slice of the batch failed with {type(error).__name__}: {error}"
    products = {n: _products([*(_of(g, n, right) for g in found), right]) for n, right in exact.items()}
    whole = torch.stack(list(products.values())).sum(0)
    if not bool(whole.isfinite().all()):
        return "the gradient of a slice of the batch has NaN or Inf"
    mean, along, square = float(whole[:-1, :-1].mean()), float(whole[:-1, -1].mean()), float(whole[-1, -1])
    shrink = samples / each
    scale = shrink if mean and along / mean > math.sqrt(shrink) else 1.0

    def noise(p: Tensor) -> float:
        inner = p[:-1, :-1]
        variance = max(0.0, float(inner.trace() - inner.sum() / count)) / (count - 1)
        return _ratio(scale**2 * variance / shrink, float(p[-1, -1]))

    off = _ratio(scale**2 * mean - 2 * scale * along + square, square)
    normed = any(isinstance(m, capture.BATCH_NORMS) and (m.training or m.running_mean is None) for m in model.modules())
    limit = 2.0 if any(probe.random for probe in probes) and not normed else 0.5
    if off > max(limit * noise(whole), _SUMS):
        cause = "batch norms see fewer samples in a slice" if normed else "the loss couples samples"
        return f"gradients of {count} slices of the batch do not add up to its own (off by {off:.2g}): {cause}"
    return {"": noise(whole), **{name: noise(p) for name, p in products.items()}}


_SUMS = 1e-3
"""Slices of equal samples have no noise, and their mean is off by the rounding of sums in another order."""


class _Probe:
    """The loss of a slice, with random numbers of its own; ``gradients`` restores them with all else."""

    def __init__(self, model: nn.Module, loss: LossFn, samples: Any, seed: int) -> None:
        self._model, self._loss, self._samples, self._seed = model, loss, samples, seed
        self.random = any(p.device.type != "cpu" for p in model.parameters())  # may draw elsewhere, unseen

    def __call__(self) -> Tensor:
        torch.manual_seed(self._seed)
        before = torch.get_rng_state()
        value = self._loss(self._model, self._samples)
        self.random = self.random or not torch.equal(before, torch.get_rng_state())
        return value


# ---------------------------------------------------------------- sites


def _damage(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> tuple[int, float]:
    """Parameters with NaN or Inf, and the squared error of all others."""
    squares = [_square(_of(found, name, right) - right) for name, right in exact.items()]
    finite = [s for s in squares if math.isfinite(s)]
    return len(squares) - len(finite), math.fsum(finite)


def _fall(whole: tuple[int, float], spared: tuple[int, float]) -> float:
    """The share of the damage that is gone."""
    if whole[0]:
        return (whole[0] - spared[0]) / whole[0]
    if spared[0] or not whole[1]:
        return 0.0
    return 1 - spared[1] / whole[1]
