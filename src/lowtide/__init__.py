"""Lowtide: train with compressed activations. The forward is exact, the memory small.

``compress`` and ``attach`` make autograd keep compressed copies of what backward needs;
``methods`` lists the ways to do it; a session's ``report`` tells what was kept, and how, and why;
``check`` compares the gradients with exact ones.
"""

from . import codecs
from .allocator import tune_cpu_allocator
from .attachment import Attachment, attach, compress
from .capture import Site
from .check import CheckResult, check
from .codecs import Codec
from .guard import Guard
from .methods import Method, methods
from .planner import Plan
from .report import Report
from .session import Session

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
