"""Kernels: ``ops`` is the switch, ``reference`` the definition, ``cpu`` and ``compiled`` the fast form."""

from .backends import prepare, served, status

__all__ = ["prepare", "served", "status"]
