"""Policies: what happens to each saved tensor, and how that is decided."""
