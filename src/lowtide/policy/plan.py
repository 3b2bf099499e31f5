"""A plan: the finished table site -> codec, as plain data that can be printed, saved and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..codecs import Codec, from_config
from ..graph.capture import Site


@dataclass(frozen=True)
class Plan:
    """Codec for each site; a site that is not listed stays exact.

    >>> from lowtide.codecs import GroupQuant
    >>> plan = Plan({Site("fc", "Addmm", "mat1", 0): GroupQuant(bits=4)})
    >>> Plan.from_json(plan.to_json()) == plan
    True
    """

    codecs: Mapping[Site, Codec] = field(default_factory=dict)

    def codec_for(self, site: Site) -> Codec | None:
        """The codec of ``site``; None keeps it exact."""
        return self.codecs.get(site)

    def to_json(self) -> str:
        """One row a site."""
        rows: list[dict[str, Any]] = [
            {"module": s.module, "op": s.op, "slot": s.slot, "ordinal": s.ordinal, "codec": c.to_config()}
            for s, c in self.codecs.items()
        ]
        return json.dumps({"version": 1, "sites": rows}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that :meth:`to_json` wrote."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("version") != 1:
            raise ValueError("this is not a plan of version 1; write one with Plan.save")
        return cls(
            {Site(r["module"], r["op"], r["slot"], r["ordinal"]): from_config(r["codec"]) for r in data["sites"]}
        )

    def save(self, path: str | Path) -> None:
        """Write JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what :meth:`save` wrote."""
        return cls.from_json(Path(path).read_text(encoding="utf-8"))
