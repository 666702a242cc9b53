"""Benchmarks of epcomm, run from a checkout: `python -m epcomm bench list`."""
