"""Benchmarks of lowpeak beside its peers."""
