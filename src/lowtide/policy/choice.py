"""The one record of a decision: what happens to a saved tensor, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..codecs import Codec, TensorMeta, from_config

HOMES = ("device", "host", "file")
"""Where stored bytes may lie: beside the computation, in host memory, or in memory that a file backs."""


class Action(str, Enum):
    """What can happen to the values of a saved tensor."""

    KEEP = "keep"
    """Autograd keeps the tensor as it is."""
    STORE = "store"
    """A codec encodes the tensor, and its bytes lie in a home."""
    REBUILD = "rebuild"
    """Nothing is stored. Backward makes the tensor again from other stored tensors."""
    OFFLOAD = "offload"
    """The exact bytes lie in another home than the device."""

    @property
    def shown(self) -> str:
        """As a report names what became of a tensor."""
        return {"keep": "exact", "store": "stored", "rebuild": "rebuilt", "offload": "exact"}[self.value]


@dataclass(frozen=True, slots=True)
class Choice:
    """What happens to one saved tensor; made by :meth:`keep`, :meth:`store`, :meth:`rebuild` or :meth:`offload`.

    ``why`` is for a reader of reports and plans. Two choices that differ only in it are equal.

    >>> from lowtide.codecs import GroupQuant
    >>> choice = Choice.store(GroupQuant(bits=4), why="its noise reaches every earlier layer")
    >>> print(choice)
    group_quant(4 bits)
    >>> Choice.from_config(choice.to_config()) == choice
    True
    """

    action: Action
    codec: Codec | None = None
    home: str = "device"
    why: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if (self.codec is not None) != (self.action is Action.STORE):
            raise ValueError(f"a codec goes with 'store' and with nothing else; got {self.action.value}, {self.codec}")
        if self.codec is not None and not self.codec.keeps_values:
            raise ValueError(
                f"{self.codec} does not give back the values of a tensor, and backward would read something else; the "
                "rules use it where that is enough. Choose a codec that keeps values, such as GroupQuant(bits=4)"
            )
        if self.home not in HOMES:
            raise ValueError(f"home must be one of {', '.join(HOMES)}; got {self.home!r}")
        elsewhere = self.home != "device"
        if elsewhere and self.action in (Action.KEEP, Action.REBUILD):
            raise ValueError(f"{self.action.value} stores nothing, so it has no home; got home={self.home!r}")
        if not elsewhere and self.action is Action.OFFLOAD:
            raise ValueError("offload moves bytes away from the device: home must be 'host' or 'file'")

    @classmethod
    def keep(cls, why: str = "") -> Choice:
        """Leave the tensor to autograd, exactly as it is."""
        return cls(Action.KEEP, why=why)

    @classmethod
    def store(cls, codec: Codec, home: str = "device", why: str = "") -> Choice:
        """Keep what ``codec`` makes of the tensor, in ``home``."""
        return cls(Action.STORE, codec, home, why)

    @classmethod
    def rebuild(cls, why: str = "") -> Choice:
        """Store nothing, and make the tensor again from those it is a function of."""
        return cls(Action.REBUILD, why=why)

    @classmethod
    def offload(cls, home: str = "host", why: str = "") -> Choice:
        """Move the exact bytes to ``home``."""
        return cls(Action.OFFLOAD, home=home, why=why)

    def with_codec(self, codec: Codec) -> Choice:
        """The same choice with another codec."""
        return self if codec == self.codec else dataclasses.replace(self, codec=codec)

    @property
    def exact(self) -> bool:
        """Does backward read the very values that the forward had? A rebuilt tensor has the noise of its sources."""
        return self.action is not Action.REBUILD if self.codec is None else self.codec.exact

    def nbytes(self, meta: TensorMeta) -> int:
        """Bytes that this choice spends on a tensor, wherever they lie."""
        if self.codec is not None:
            return self.codec.packed_nbytes(meta)
        return 0 if self.action is Action.REBUILD else meta.nbytes

    def to_config(self) -> dict[str, Any]:
        """Plain data that :meth:`from_config` turns back into an equal choice."""
        config: dict[str, Any] = {"action": self.action.value}
        if self.codec is not None:
            config["codec"] = self.codec.to_config()
        if self.home != "device":
            config["home"] = self.home
        if self.why:
            config["why"] = self.why
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Choice:
        """The choice that a config describes."""
        if not isinstance(config, Mapping) or "action" not in config:
            raise ValueError(f"a choice is a mapping with an 'action'; got {config!r}")
        unknown = sorted(set(config) - {"action", "codec", "home", "why"})
        if unknown:
            raise ValueError(f"a choice has action, codec, home and why; got also {', '.join(unknown)}")
        actions = [action.value for action in Action]
        if config["action"] not in actions:
            raise ValueError(f"action must be one of {', '.join(actions)}; got {config['action']!r}")
        if not isinstance(config.get("why", ""), str):
            raise ValueError(f"why must be text; got {config['why']!r}")
        codec = from_config(config["codec"]) if "codec" in config else None
        return cls(Action(config["action"]), codec, config.get("home", "device"), config.get("why", ""))

    def __str__(self) -> str:
        """As a report names it."""
        what = str(self.codec or self.action.shown)
        return what if self.home == "device" else f"{what} in {self.home}"
