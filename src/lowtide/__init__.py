"""Lowtide: train with compressed activations. The forward is exact, the memory small.

``compress`` and ``attach`` make autograd keep compressed copies of what backward needs;
``methods`` lists the ways to do it, and each is also a class, such as ``Auto(bits=3)``. A session's ``report`` tells
what was kept, and how, and why; its ``plan`` can be saved and run again. ``check`` compares the gradients with
exact ones. ``profile`` tells where the memory of a step goes, ``plan`` makes it fit a budget, and ``fit`` finds the
largest batch. ``checkpoint`` runs a block again in backward, from compressed inputs.
"""

import typing

from . import codecs
from .attachment import Attachment, attach, compress
from .codecs import Codec
from .graph.capture import Site
from .graph.rules import Need, register_rule
from .malloc import tune_cpu_allocator
from .planning.fitting import Fit, fit
from .planning.memory_errors import explain_oom
from .planning.planner import BudgetError, BudgetPlan, plan
from .planning.profiling import Profile, profile
from .policy.choice import Choice
from .policy.methods import (
    ActNN,
    Auto,
    Blpa,
    CastAll,
    Division,
    Gact,
    Lossless,
    LowRank,
    Method,
    Pool,
    TinyScript,
    methods,
)
from .policy.plan import Plan
from .report import Report
from .session import Session, checkpoint, forget
from .verify.check import CheckResult, check
from .verify.guard import Guard

if typing.TYPE_CHECKING:
    from .compiling.compiled import Compiled, compile

__version__ = "0.1.0.dev0"

__all__ = [
    "ActNN",
    "Attachment",
    "Auto",
    "Blpa",
    "BudgetError",
    "BudgetPlan",
    "CastAll",
    "CheckResult",
    "Choice",
    "Codec",
    "Compiled",
    "Division",
    "Fit",
    "Gact",
    "Guard",
    "Lossless",
    "LowRank",
    "Method",
    "Need",
    "Plan",
    "Pool",
    "Profile",
    "Report",
    "Session",
    "Site",
    "TinyScript",
    "__version__",
    "attach",
    "check",
    "checkpoint",
    "codecs",
    "compile",
    "compress",
    "explain_oom",
    "fit",
    "forget",
    "methods",
    "plan",
    "profile",
    "register_rule",
    "tune_cpu_allocator",
]


def __getattr__(name: str) -> typing.Any:
    """What compiles, when it is asked for: importing torch's compiler takes longer than importing all the rest."""
    if name not in ("Compiled", "compile"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .compiling.compiled import Compiled, compile

    globals().update(Compiled=Compiled, compile=compile)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
