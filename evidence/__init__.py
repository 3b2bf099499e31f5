"""What the methods cost in quality, measured on real data, and what they store beside published figures.

Run from the repository: ``python -m evidence.fidelity``, ``python -m evidence.memory``.
"""
