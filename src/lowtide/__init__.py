"""Lowtide: train with compressed activations. The forward is exact, the memory small.

``compress`` and ``attach`` make autograd keep compressed copies of what backward needs;
``methods`` lists the ways to do it; a session's ``report`` tells what was kept, and how, and why;
``check`` compares the gradients with exact ones.
"""

from . import codecs
from .attachment import Attachment, attach, compress
from .codecs import Codec
from .graph.capture import Site
from .policy.methods import Method, methods
from .policy.plan import Plan
from .report import Report
from .session import Session
from .tools.malloc import tune_cpu_allocator
from .verify.check import CheckResult, check
from .verify.guard import Guard

__version__ = "0.1.0.dev0"

__all__ = [
    "Attachment",
    "CheckResult",
    "Codec",
    "Guard",
    "Method",
    "Plan",
    "Report",
    "Session",
    "Site",
    "__version__",
    "attach",
    "check",
    "codecs",
    "compress",
    "methods",
    "tune_cpu_allocator",
]
