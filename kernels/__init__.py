"""Triton kernels, one op a module, each beside its plain-torch twin."""
