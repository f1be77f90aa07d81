from typing import TypedDict

class _BuildInfo(TypedDict):
    version: str
    compiler: str
    cxx_standard: int
    build_type: str
    sanitized: bool

def build_info() -> _BuildInfo: ...
