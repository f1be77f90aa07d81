"""Measure memory: what a block of code allocates, on CPU and on accelerators."""

from lowpeak.memory.tracker import MemoryPoint, MemoryReport, track_memory

__all__ = ["MemoryPoint", "MemoryReport", "track_memory"]
