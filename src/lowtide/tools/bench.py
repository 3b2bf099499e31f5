"""``lowtide bench``: real steps of a user's model, plain and with some methods, each in processes of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..planning.verifying import verify
from ..report import size
from ..verify.check import LossFn

PLAIN = "plain"
METHODS = ("auto", "division", "actnn", "lossless")


@dataclass(frozen=True, slots=True)
class Row:
    """One mode. The peak holds weights, gradients and batch; seconds are those of the fastest of three steps."""

    method: str
    peak: int
    seconds: float
    error: float
    """Of the whole gradient, beside the exact one."""


def bench(
    model: nn.Module,
    batch: Any,
    loss_fn: LossFn | None,
    methods: Iterable[str] = METHODS,
    on_method: Callable[[str], None] = lambda method: None,
) -> list[Row]:
    """Measure a plain step first, then one with each method; ``on_method`` hears each before it runs."""
    rows = []
    for method in (PLAIN, *methods):
        on_method(method)
        found = verify(None if method == PLAIN else method, model, batch, loss_fn, plain=False)
        rows.append(Row(method, found.peak, found.seconds, found.error))
    return rows


def table(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows for a page, which :func:`text` aligns for a terminal."""
    plain = rows[0]
    return {
        "title": "Real steps, measured",
        "head": ["method", "peak of a step", "beside plain", "seconds a step", "beside plain", "gradient error"],
        "rows": [
            [
                *(row.method, size(row.peak), f"{row.peak / max(1, plain.peak):.2f}x"),
                *(f"{row.seconds:.3g}", f"{row.seconds / plain.seconds:.2f}x", f"{row.error:.3g}"),
            ]
            for row in rows
        ],
        "note": "Each mode in processes of its own: one for the peak, one for error and the fastest of three steps.",
    }


def text(rows: Sequence[Row]) -> str:
    """For a terminal."""
    made = table(rows)
    lines = [made["head"], *made["rows"]]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    )


def to_data(rows: Sequence[Row]) -> dict[str, Any]:
    """Plain data, fit for JSON."""
    return {"rows": [asdict(row) for row in rows]}
