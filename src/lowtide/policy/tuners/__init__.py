"""Tuners: what adaptive methods learn while training."""
