"""Benchmarks on this machine: averaging a gradient, training a model, the inner loops."""
