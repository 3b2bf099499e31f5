"""Kernels: ``ops`` is the switch, ``reference`` the definition; ``cpu`` and ``gpu`` launch the fast forms."""

from .backends import is_fast, like_torch, prepare, served, status

__all__ = ["is_fast", "like_torch", "prepare", "served", "status"]
