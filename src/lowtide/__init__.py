"""Lowtide: train with compressed activations."""

__version__ = "0.1.0.dev0"
