"""Compile every Triton kernel of lowpeak ahead of time, for GPUs that need not be there.

A tool of the repository, not of a distribution: users compile at the first launch. Each module of
kernels/ that has kernels lists the variants in use in a constant

    AOT_VARIANTS: list[tuple[str, dict[str, str], dict[str, object], int]] = [
        # name of the kernel, types of the run-time arguments, constexpr arguments, num_warps
        ("fold_kernel", {"logits": "*bf16", "rows": "i32"}, {"BLOCK": 1024, "SOFTCAP": False}, 8),
    ]

with Triton's type names (``*bf16``, ``i64``, ``fp32``), and, where its kernels are launched on some
targets only, names these in a constant AOT_TARGETS. An argument in neither dict is an error,
and so is a kernel without a variant, unless another kernel calls it. Pointers count as 16-byte
aligned, as those of torch's allocators are.
"""

import argparse
import ast
import importlib
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

KIB = 1024
# Target: (backend, architecture, lanes of a warp, bytes of shared memory that one block may use).
# Limits: CUDA programming guide, "compute capabilities"; AMD CDNA2 and CDNA3 ISA guides, LDS.
TARGETS: dict[str, tuple[str, int | str, int, int]] = {
    "sm_75": ("cuda", 75, 32, 64 * KIB),
    "sm_80": ("cuda", 80, 32, 163 * KIB),
    "sm_90": ("cuda", 90, 32, 227 * KIB),
    "sm_100": ("cuda", 100, 32, 227 * KIB),
    "sm_120": ("cuda", 120, 32, 99 * KIB),
    "gfx90a": ("hip", "gfx90a", 64, 64 * KIB),
    "gfx942": ("hip", "gfx942", 64, 64 * KIB),
}


@dataclass(frozen=True)
class Variant:
    """One kernel with one choice of types, constants and warps, for one target."""

    module: str
    kernel: str
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    targets: tuple[str, ...] = tuple(TARGETS)
    target: str = ""


@dataclass(frozen=True)
class Result:
    """What became of a variant: its shared memory in bytes, or why it failed."""

    variant: Variant
    shared: int = 0
    error: str = ""


def kernel_modules(package: str) -> list[str]:
    """Names of all modules of the package, in order."""
    path = importlib.import_module(package).__path__
    return sorted(info.name for info in pkgutil.walk_packages(path, prefix=f"{package}."))


def jit_functions(source: str) -> dict[str, set[str]]:
    """Functions decorated with ``jit`` in a source text, each with the names it uses."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        decorators = (d.func if isinstance(d, ast.Call) else d for d in node.decorator_list)
        if any(ast.unparse(d).split(".")[-1] == "jit" for d in decorators):
            found[node.name] = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return found


def listed_variants(modules: Iterable[str]) -> Iterator[Variant]:
    """The variants that the modules list, without a target."""
    for name in modules:
        module = vars(importlib.import_module(name))
        targets = module.get("AOT_TARGETS", tuple(TARGETS))
        for kernel, signature, constexprs, warps in module.get("AOT_VARIANTS", []):
            yield Variant(name, kernel, signature, constexprs, warps, targets)


def forgotten_kernels(modules: Iterable[str]) -> list[str]:
    """Kernels that no variant reaches, neither by name nor through a kernel that calls them."""
    modules = list(modules)
    uses: dict[str, set[str]] = {}
    for name in modules:
        file = importlib.import_module(name).__file__
        assert file is not None
        uses |= jit_functions(Path(file).read_text(encoding="utf-8"))
    reached: set[str] = set()
    waiting = [variant.kernel for variant in listed_variants(modules)]
    while waiting:
        kernel = waiting.pop()
        if kernel in uses and kernel not in reached:
            reached.add(kernel)
            waiting += uses[kernel]
    return sorted(uses.keys() - reached)


def compile_variant(variant: Variant) -> Result:
    """Compile one variant down to the target's binary."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    backend, architecture, lanes, shared_limit = TARGETS[variant.target]
    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    missing = set(kernel.arg_names) - variant.signature.keys() - variant.constexprs.keys()
    if missing:
        return Result(variant, error=f"AOT_VARIANTS leaves out the arguments {sorted(missing)}")
    types = {**variant.signature, **dict.fromkeys(variant.constexprs, "constexpr")}
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        constexprs=variant.constexprs,
        attrs={
            (index,): [["tt.divisibility", 16]]
            for index, name in enumerate(kernel.arg_names)
            if types[name].startswith("*")
        },
    )
    try:
        compiled = triton.compile(
            source,
            target=GPUTarget(backend, architecture, lanes),
            options={"num_warps": variant.num_warps},
        )
    except Exception as error:  # whatever the compiler raises is the result to report
        return Result(variant, error=f"{type(error).__name__}: {error}")
    shared = compiled.metadata.shared
    if shared > shared_limit:
        return Result(variant, shared, f"{shared} bytes of shared memory, {shared_limit} allowed")
    return Result(variant, shared)


def compile_all(variants: list[Variant], targets: Iterable[str], processes: int) -> list[Result]:
    """Compile all variants for all targets; results in the order of variants, then targets."""
    jobs = [
        replace(variant, target=target)
        for variant in variants
        for target in targets
        if target in variant.targets
    ]
    # spawn: LLVM's global state does not survive a fork.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return list(pool.imap(compile_variant, jobs, chunksize=4))


def table(results: list[Result], targets: list[str]) -> str:
    """One line a kernel: variants compiled of variants tried, for each target."""
    kernels = list(dict.fromkeys(result.variant.kernel for result in results))
    width = max(len("kernel"), *map(len, kernels)) if kernels else len("kernel")
    lines = ["  ".join(["kernel".ljust(width), *(target.rjust(8) for target in targets)])]
    for kernel in kernels:
        cells = []
        for target in targets:
            mine = [r for r in results if (r.variant.kernel, r.variant.target) == (kernel, target)]
            compiled = sum(not result.error for result in mine)
            cells.append(f"{compiled}/{len(mine)}".rjust(8))
        lines.append("  ".join([kernel.ljust(width), *cells]))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Compile, print the table and what failed; 0 when every variant compiled."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--package", default="lowpeak.kernels", help="package that is searched")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        parser.error("TRITON_INTERPRET=1 is set: interpreted kernels cannot be compiled; unset it")

    modules = kernel_modules(options.package)
    variants = list(listed_variants(modules))
    forgotten = forgotten_kernels(modules)
    results = compile_all(variants, options.targets, options.processes)
    print(table(results, options.targets))
    failed = [result for result in results if result.error]
    for result in failed:
        print(f"\nFAILED {result.variant}\n{result.error}")
    for kernel in forgotten:
        print(f"\nFORGOTTEN {kernel}: no AOT_VARIANTS entry reaches it")
    print(f"\n{len(results) - len(failed)} compiled, {len(failed)} failed")
    if not variants:
        print(f"no kernels found in {options.package}")
    return 1 if failed or forgotten or not variants else 0


if __name__ == "__main__":
    sys.exit(main())
