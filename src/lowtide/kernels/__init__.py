"""Kernels: ``ops`` is the switch, ``reference`` the definition; ``cpu`` and ``gpu`` launch the fast forms."""

from .backends import is_fast, prepare, served, status

__all__ = ["is_fast", "prepare", "served", "status"]
