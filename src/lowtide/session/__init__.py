"""The lifetime of a compressed forward: what stands for saved tensors, and what is counted."""

from .checkpoint import checkpoint
from .memory import forget
from .opening import MIN_NUMEL, OPENER, attached, new_session
from .session import Session

__all__ = ["MIN_NUMEL", "OPENER", "Session", "attached", "checkpoint", "forget", "new_session"]
