"""Check what no linter knows: symlinks, versions, ASCII, module length, imports and includes."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINKS = {
    "packages/core/cpp": "../../cpp",
    "packages/core/src/lowpeak/kernels": "../../../../kernels",
    **{
        f"packages/{name}/{file}": f"../../{file}"
        for name in ("core", "trainers", "bench")
        for file in ("VERSION", "LICENSE")
    },
}
LONGEST_MODULE = 400
# Folder: top-level packages it must never import. Upwards is wrong, whoever is above.
FORBIDDEN = {
    "kernels": {"lowpeak", "lowpeak_trainers", "lowpeak_bench", "transformers", "trl", "peft"},
    "packages/core/src": {"lowpeak_trainers", "lowpeak_bench", "trl"},
    "packages/trainers/src": {"lowpeak_bench"},
}
# A static libstdc++, as in portable wheels, and the one that torch loaded mix up the locale facets
# of their streams: numbers are misread, or the process dies.
STREAMS = re.compile(r"#include <(fstream|iomanip|iostream|istream|ostream|regex|sstream)>")
NATIVE = ("cpp/bindings", "cpp/include", "cpp/src")
SOURCES = ("benchmarks", "cpp", "docs", "kernels", "packages", "tests", "tools")
SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".md", ".toml", ".txt"}
BUILT = {"build", "_build", "__pycache__"}


def source_files() -> Iterator[Path]:
    """Every source file once: through its real folder, not through a symlink."""
    yield from (path for path in sorted(ROOT.iterdir()) if path.suffix in SUFFIXES)
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and not BUILT & set(path.parts):
                yield path


def wrong_links() -> Iterator[str]:
    """Symlinks that a checkout or an archive turned into files, or that lead elsewhere."""
    for link, target in LINKS.items():
        path = ROOT / link
        if not path.is_symlink():
            yield f"{link} is no symlink; check out with core.symlinks=true"
        elif str(path.readlink()) != target or not path.exists():
            yield f"{link} leads to {path.readlink()}, not to {target}"


def wrong_versions() -> Iterator[str]:
    """Files that name another version than VERSION does."""
    version = (ROOT / "VERSION").read_text(encoding="utf-8").strip()
    for file, text in (
        ("CITATION.cff", f"\nversion: {version}\n"),
        ("CHANGELOG.md", f"\n## [{version}]"),
    ):
        if text not in (ROOT / file).read_text(encoding="utf-8"):
            yield f"{file} lacks {text.strip()!r}; set versions by `nox -s bump`"


def wrong_texts() -> Iterator[str]:
    """Sources that are not ASCII, and modules that are too long."""
    for path in source_files():
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        for number, line in enumerate(text.splitlines(), 1):
            if not line.isascii():
                yield f"{name}:{number}: not ASCII"
        lines = text.count("\n")
        if path.suffix == ".py" and lines > LONGEST_MODULE:
            yield f"{name} has {lines} lines; split what is over {LONGEST_MODULE}"


def imported_packages(source: str) -> Iterator[tuple[int, str]]:
    """Line and top-level package of every absolute import of a source text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.split(".")[0]


def wrong_imports() -> Iterator[str]:
    """Imports that go upwards."""
    for path in source_files():
        name = path.relative_to(ROOT).as_posix()
        forbidden = next(
            (f for folder, f in FORBIDDEN.items() if name.startswith(f"{folder}/")), None
        )
        if forbidden is None or path.suffix != ".py":
            continue
        for line, package in imported_packages(path.read_text(encoding="utf-8")):
            if package in forbidden:
                yield f"{name}:{line}: must not import {package}"


def wrong_includes() -> Iterator[str]:
    """Standard streams in what is linked into the extension."""
    for path in source_files():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith(NATIVE):
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if STREAMS.match(line):
                    yield f"{name}:{number}: no standard streams in the extension"


def main() -> int:
    """Print every finding; 0 when there is none."""
    checks = (wrong_links, wrong_versions, wrong_texts, wrong_imports, wrong_includes)
    findings = [finding for check in checks for finding in check()]
    print("\n".join(findings) if findings else "tree: all checks are fine")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
