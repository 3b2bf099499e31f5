"""The lifetime of a compressed forward: what stands for saved tensors, and what is counted."""

from .memory import forget
from .session import MIN_NUMEL, OPENER, Session, attached, new_session

__all__ = ["MIN_NUMEL", "OPENER", "Session", "attached", "forget", "new_session"]
