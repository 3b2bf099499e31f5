"""Kernels: ``reference`` defines them in plain torch, ``cpu`` compiles them with Numba."""
