"""What a session did, as plain data: one line for each saved tensor, sums by op and by module, text and JSON."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .graph.capture import Site

COMPRESSED = "compressed"
EXACT = "exact"
SHARED = "shared"
HELD = "held"

UNKNOWN_OP = "no rule for this op"

FORMS = ("kept", "mask", "compressed", "rebuilt", "recomputed", "offloaded", "skipped", "shared")
"""What became of a saved tensor, in one word: it stays as it is; a mask, an index or its shape is enough; a codec
stores its values; it is made again from stored tensors, or from a parameter; its bytes lie elsewhere; Lowtide leaves it
alone, because other code holds it or no rule knows its op; its storage is counted at another site."""


@dataclass(frozen=True, slots=True)
class SiteReport:
    """One saved tensor. A storage that several sites saved has its bytes at the first of them.

    ``state`` is ``compressed``, ``exact`` (kept as autograd keeps it), ``shared`` (stored at the site
    that ``why`` names) or ``held`` (your code or another hook keeps it alive, so storing it again
    would save nothing; not counted in the totals).
    """

    site: Site
    shape: tuple[int, ...]
    dtype: str
    state: str
    plain_nbytes: int
    stored_nbytes: int
    codec: str
    why: str
    form: str = "kept"
    """One of :data:`FORMS`."""


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """What was saved in one module, all modules inside it included; each storage counts where it was first saved."""

    module: str
    sites: int
    plain_nbytes: int
    stored_nbytes: int
    held_nbytes: int


@dataclass(frozen=True)
class Report:
    """Everything autograd kept in the last forward, each storage counted once."""

    method: str
    sites: tuple[SiteReport, ...]
    notes: tuple[str, ...] = ()
    kernels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By device type and operator, what has served the calls of this process so far (see ``kernels.served``)."""

    @property
    def plain_nbytes(self) -> int:
        """Bytes that plain PyTorch keeps for backward, without what is known to live anyway."""
        return sum(s.plain_nbytes for s in self.sites if s.state != HELD)

    @property
    def stored_nbytes(self) -> int:
        """Bytes kept instead: packed buffers and what stayed exact."""
        return sum(s.stored_nbytes for s in self.sites if s.state != HELD)

    @property
    def held_nbytes(self) -> int:
        """Bytes that other code keeps alive anyway."""
        return sum(s.plain_nbytes for s in self.sites if s.state == HELD)

    @property
    def ratio(self) -> float:
        """Plain bytes over stored bytes."""
        return self.plain_nbytes / self.stored_nbytes if self.stored_nbytes else float("nan")

    def by_module(self, depth: int | None = None) -> tuple[ModuleReport, ...]:
        """Sums by module, largest first. ``depth`` joins all that lies deeper: with 1, children of the model."""
        if depth is not None and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 1):
            raise ValueError(f"depth must be a whole number of at least 1, or None for every module; got {depth!r}")
        sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
        for s in self.sites:
            total = sums[".".join(s.site.module.split(".")[:depth])]
            total[0] += 1
            if s.state == HELD:
                total[3] += s.plain_nbytes
            else:
                total[1] += s.plain_nbytes
                total[2] += s.stored_nbytes
        found = [ModuleReport(module, *total) for module, total in sums.items()]
        return tuple(sorted(found, key=lambda m: -m.plain_nbytes))

    def module_table(self, depth: int | None = None) -> str:
        """:meth:`by_module` as text."""
        lines = [("module", "sites", "plain", "stored", "kept by other code")]
        for m in self.by_module(depth):
            held = size(m.held_nbytes) if m.held_nbytes else ""
            lines.append((m.module or "(model)", str(m.sites), size(m.plain_nbytes), size(m.stored_nbytes), held))
        return _aligned(lines)

    def to_json(self) -> str:
        """Totals, sums by module, and a line for each saved tensor."""
        data: dict[str, Any] = {
            "method": self.method,
            "plain_nbytes": self.plain_nbytes,
            "stored_nbytes": self.stored_nbytes,
            "held_nbytes": self.held_nbytes,
            "notes": list(self.notes),
            "kernels": {device: dict(operators) for device, operators in self.kernels.items()},
            "modules": [asdict(m) for m in self.by_module()],
            "sites": [{**asdict(s), "site": s.site._asdict()} for s in self.sites],
        }
        return json.dumps(data, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that :meth:`to_json` wrote; anything else raises a ValueError that says what is wrong."""
        try:
            data = json.loads(text)
            sites = tuple(
                SiteReport(**{**row, "site": Site(**row["site"]), "shape": tuple(row["shape"])})
                for row in data["sites"]
            )
            return cls(data["method"], sites, tuple(data["notes"]), data["kernels"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"this report cannot be read: {type(error).__name__}: {error}") from error

    def save(self, path: str | Path, **beside: Any) -> None:
        """Write a page if the name ends in .html, or the document that the page shows if it ends in .json.

        ``beside`` may have ``profile``, ``plan``, ``check`` and ``verification`` of the same model: a report alone does
        not know the peak of a step, nor the error of gradients.
        """
        from .page.writing import save_page  # which stands above: it joins all that there is to show

        save_page(path, report=self, **beside)

    def _repr_html_(self) -> str:
        """In a notebook."""
        from .page.writing import notebook

        return notebook(report=self)

    def table(self, rows: int | None = None) -> str:
        """One line for each site, largest first; ``rows`` limits them."""
        order = sorted(self.sites, key=lambda s: -s.plain_nbytes)[:rows]
        lines = [("site", "shape", "plain", "stored", "codec", "why")]
        for s in order:
            shape = "x".join(map(str, s.shape)) or "scalar"
            stored = "-" if s.state in (SHARED, HELD) else size(s.stored_nbytes)
            plain = "-" if s.state == SHARED else size(s.plain_nbytes)
            name = s.codec if s.state == COMPRESSED else s.state
            lines.append((str(s.site), f"{shape} {s.dtype}", plain, stored, name, s.why))
        text = _aligned(lines)
        hidden = len(self.sites) - len(order)
        return text + (f"\n... and {hidden} smaller sites" if hidden else "")

    def __str__(self) -> str:
        """Totals, then bytes by op and slot."""
        groups: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        for s in self.sites:
            what = s.codec if s.state == COMPRESSED else s.state
            why = "" if s.state in (COMPRESSED, SHARED) else s.why
            row = groups[(f"{s.site.op}.{s.site.slot}", what, why)]
            row[0] += 1
            row[1] += s.plain_nbytes
            row[2] += 0 if s.state == HELD else s.stored_nbytes
        lines = [("saved by", "sites", "plain", "stored", "kept as", "")]
        for (slot, what, why), (count, plain, stored) in sorted(groups.items(), key=lambda g: -g[1][1]):
            lines.append((slot, str(count), size(plain), size(stored), what, why))
        if not self.plain_nbytes:
            return "\n".join((f"{self.method}: nothing was saved for backward", *(f"note: {n}" for n in self.notes)))
        total = (
            f"{self.method}: {size(self.plain_nbytes)} saved by autograd, stored in "
            f"{size(self.stored_nbytes)} ({self.ratio:.1f}x less)"
        )
        if self.held_nbytes:
            total += f"; {size(self.held_nbytes)} more is kept alive by other code"
        return "\n".join((total, *(f"note: {n}" for n in self.notes), _aligned(lines)))


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Columns side by side; the last is as wide as it likes."""
    widths = [max(map(len, column)) for column in list(zip(*lines, strict=True))[:-1]]
    return "\n".join(
        "  ".join((*(cell.ljust(w) for cell, w in zip(line, widths, strict=False)), line[-1])).rstrip()
        for line in lines
    )


def size(nbytes: int) -> str:
    """Bytes for a reader.

    >>> size(1536), size(3 * 2**20)
    ('1.5 KiB', '3.0 MiB')
    """
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    raise AssertionError
