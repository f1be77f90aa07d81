"""The optional native extension: is it there, and how was it built?"""

from importlib.util import find_spec

__all__ = ["native_available", "native_summary"]


def native_available() -> bool:
    """Whether ``lowpeak._native`` was built into this install.

    Only its absence counts as "no": an extension that is there and does not load raises its own
    error when it is used.
    """
    return find_spec("lowpeak._native") is not None


def native_summary() -> str:
    """One line: version, compiler, C++ standard and build type, or that it was not built."""
    if not native_available():
        return "not built (optional; plain PyTorch serves. It needs a C++17 compiler at install)"
    from lowpeak._native import build_info

    info = build_info()
    sanitizers = f", sanitizers {info['sanitizers']}" if info["sanitizers"] else ""
    return (
        f"{info['version']} ({info['compiler']}, C++ {info['cxx_standard']}, "
        f"{info['build_type']}{sanitizers})"
    )
