"""Measurements; ``python -m benchmarks.step`` and so on, from a checkout."""
