"""From the document to a file: one HTML page that needs nothing else, JSON, text, or a few lines for a notebook."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from ..planning.planner import BudgetPlan
from ..planning.profiling import Profile
from ..policy.plan import is_page
from ..report import Report, size
from ..verify.check import CheckResult
from .document import FORMAT, KIND, document

_OPENING = '<script type="application/json" id="lowtide-document">'
_CLOSING = "</script>"
_SHOWN = 8


def save_page(path: str | Path, **parts: Any) -> None:
    """Write what :func:`document` makes of ``parts``: a page if the name ends in .html, JSON if in .json."""
    write(document(**parts), path)


def write(made: dict[str, Any], path: str | Path) -> None:
    """Write a document to a file, as its name wants it."""
    path = Path(path)
    if is_page(path):
        path.write_text(page(made), encoding="utf-8")
    elif path.suffix.lower() == ".json":
        path.write_text(json.dumps(made, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    else:
        raise ValueError(f"expected a name that ends in .html (a page) or .json (what it shows); got {str(path)!r}")


def page(made: dict[str, Any]) -> str:
    """The page. It loads nothing and sends nothing: its policy allows just the scripts and styles that are in it."""
    styles = [_asset("uPlot.min.css"), _asset("page.css")]
    scripts = [_asset("theme.js"), _asset("uPlot.iife.min.js"), _asset("page.js")]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; "
        f"style-src {' '.join(map(_digest, styles))}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "TITLE": html.escape(f"{made['title']} · Lowtide"),
        "POLICY": html.escape(policy),
        "STYLES": "\n".join(f"<style>{style}</style>" for style in styles),
        "THEME": f"<script>{scripts[0]}</script>",
        "DOCUMENT": f"{_OPENING}{embedded(made)}{_CLOSING}",
        "SCRIPTS": "\n".join(f"<script>{script}</script>" for script in scripts[1:]),
    }
    # In one pass, so that nothing that was put in is read as a place to put something.
    return re.sub(r"@@([A-Z]+)@@", lambda match: parts[match[1]], _asset("page.html"))


def embedded(made: dict[str, Any]) -> str:
    r"""JSON that may stand inside a script element, whatever names it has.

    >>> embedded({"</script>": "<!-- & \u2028"})
    '{"\\u003c/script\\u003e":"\\u003c!-- \\u0026 \\u2028"}'
    """
    text = json.dumps(made, separators=(",", ":"), allow_nan=False)  # only ASCII, so no separator of lines
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# ---------------------------------------------------------------- reading what was written


def read(*paths: str | Path) -> dict[str, Any]:
    """The document of files: a page or its document, or profiles, plans, reports and checks of one model as JSON.

    Anything else raises a ValueError that names the file and says what is wrong.
    """
    parts: dict[str, Any] = {}
    for path in paths:
        try:
            name, part = _part(Path(path))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if name in parts or (paths[1:] and name == KIND):
            raise ValueError(f"{path}: one profile, plan, report and check each can be joined, and no whole page")
        parts[name] = part
    made: dict[str, Any] = parts[KIND] if KIND in parts else document(**parts)
    return made


def _part(path: Path) -> tuple[str, Any]:
    """What a file has, and the name under which :func:`document` takes it."""
    text = path.read_text(encoding="utf-8")
    if is_page(path):
        start = text.find(_OPENING)
        if start < 0:
            raise ValueError("this page was not written by Lowtide")
        start += len(_OPENING)
        text = text[start : text.index(_CLOSING, start)]
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"this is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f"this is no document of Lowtide: expected a mapping; got {type(data).__name__}")
    if data.get("kind") == KIND:
        if data.get("format") != FORMAT:
            raise ValueError(f"this document has format {data.get('format')!r}; this version reads {FORMAT}")
        return KIND, data
    if "blocks" in data:
        return "profile", Profile.from_json(text)
    if "version" in data:
        return "plan", BudgetPlan.from_data(data)
    if "verdict" in data:
        return "check", CheckResult.from_json(text)
    if "plain_nbytes" in data:
        return "report", Report.from_json(text)
    raise ValueError("this is no profile, plan, report, check or page of Lowtide; write one with save()")


# ---------------------------------------------------------------- in a few lines


def headline(made: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and remark of what matters most.

    >>> headline({"headline": {"peak": {"before": 2048, "after": 1024, "how": "x"}, "kept": None, "step": None,
    ...                        "gradient": None}})
    [('Peak of a step', '2.0 KiB → 1.0 KiB', 'x')]
    """
    head, found = made["headline"], []
    if head["peak"] is not None:
        found.append(("Peak of a step", _change(head["peak"], size), head["peak"]["how"]))
    if head["kept"] is not None:
        held = head["kept"]["held"]
        remark = f"{size(held)} more is kept alive by other code" if held else ""
        found.append(("Kept for backward", _change(head["kept"], size), remark))
    if head["step"] is not None:
        found.append(("Time of a step", _change(head["step"], lambda s: f"{s:.3g} s"), head["step"]["how"]))
    gradient = head["gradient"]
    if gradient is not None:
        error = "not finite" if gradient["error"] is None else f"{gradient['error']:.3g}"
        noise = "" if gradient["sgd_noise"] is None else f", SGD's own noise {gradient['sgd_noise']:.3g}"
        verdict = "" if gradient["verdict"] is None else f"{gradient['verdict']}: {gradient['reason']}; "
        found.append(("Error of the gradient", error + noise, verdict + gradient["how"]))
    return found


def _change(pair: dict[str, Any], shown: Any) -> str:
    known = [shown(pair[side]) for side in ("before", "after") if pair[side] is not None]
    return " → ".join(known) or "unknown"


def text(made: dict[str, Any]) -> str:
    """The document in a few lines, for a terminal."""
    lines = [made["title"]]
    rows = headline(made)
    width = max((len(name) for name, _, _ in rows), default=0)
    lines += [f"  {name:{width}}  {value}{f'  ({remark})' if remark else ''}" for name, value, remark in rows]
    if made["why"]:
        lines += ["why:", *(f"  - {sentence}" for sentence in made["why"])]
    for table in made["tables"]:
        cells = [[str(cell) for cell in row] for row in (table["head"], *table["rows"])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", table["title"]]
        lines += ["  " + "  ".join(f"{c:{w}}" for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join((*lines, *(f"note: {note}" for note in made["notes"])))


def notebook(**parts: Any) -> str:
    """A headline and the largest tensors, as HTML without scripts: notebooks drop those, or run them anywhere."""
    made = document(**parts, frontier=False)
    e = html.escape
    head = "".join(f"<tr><th>{e(n)}</th><td>{e(v)}</td><td>{e(r)}</td></tr>" for n, v, r in headline(made))
    rows = [row for row in made["sites"] if row["form"] != "shared"][:_SHOWN]
    body = "".join(
        f"<tr><td>{e(row['module'] or '(model)')}</td><td>{e(row['op'])}.{e(row['slot'])}</td>"
        f"<td>{e('x'.join(map(str, row['shape'])))}</td><td>{size(row['plain_nbytes'])}</td>"
        f"<td>{size(row['stored_nbytes'])}</td><td>{e(row['codec'] or row['form'])}</td></tr>"
        for row in rows
    )
    columns = "".join(f"<th>{name}</th>" for name in ("module", "saved by", "shape", "plain", "stored", "as"))
    why = "".join(f"<li>{e(sentence)}</li>" for sentence in made["why"])
    more = len([row for row in made["sites"] if row["form"] != "shared"]) - len(rows) + made["left_out"]["sites"]
    rest = f"<p>... and {more} smaller ones; save(&quot;x.html&quot;) writes a page with all.</p>" if more > 0 else ""
    return (
        f"<div><p><strong>{e(made['title'])}</strong></p><table>{head}</table><ul>{why}</ul>"
        f"<table><thead><tr>{columns}</tr></thead><tbody>{body}</tbody></table>{rest}</div>"
    )
