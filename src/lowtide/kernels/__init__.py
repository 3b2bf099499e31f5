"""Kernels: ``ops`` is the switch, ``reference`` the definition, ``cpu`` and ``compiled`` the fast form."""

from .backends import prepare, status

__all__ = ["prepare", "status"]
