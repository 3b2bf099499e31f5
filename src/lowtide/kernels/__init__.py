"""Kernels: ``ops`` is the switch, ``reference`` the definition; ``cpu`` and ``gpu`` launch the fast forms."""

from .backends import prepare, served, status

__all__ = ["prepare", "served", "status"]
