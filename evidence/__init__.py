"""What the methods cost in quality, measured on real data. Run from the repository: ``python -m evidence.fidelity``."""
