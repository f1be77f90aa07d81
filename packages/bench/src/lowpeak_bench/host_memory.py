"""How fast host memory is pinned, and how fast a GPU copies from and to it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from lowpeak.offload import PinnedPool
from lowpeak_bench import table
from lowpeak_bench.environment import environment
from lowpeak_bench.failures import reason
from lowpeak_bench.table import GIB, MIB

SEGMENT = 256 * MIB
ANY_DEVICE = "plain memory"
TORCH = "torch pin_memory=True"
REGISTER = "cudaHostRegister"


@dataclass(frozen=True)
class Rate:
    """GiB a second of one kind of memory: pinning it, or copying out, in, or both ways at once.

    seconds is the median of as many repeats as the command line says; pinning is done once.
    """

    what: str
    memory: str
    nbytes: int
    seconds: float | None = None
    rate: float | None = None
    huge_pages: bool | None = None
    failure: str | None = None


def rate(what: str, memory: str, nbytes: int, seconds: float, **more: Any) -> Rate:
    """A rate from bytes and seconds."""
    return Rate(what, memory, nbytes, seconds, nbytes / GIB / seconds, **more)


def pool_name(threads: int) -> str:
    """The row of a pool."""
    return f"PinnedPool, {threads} thread{'' if threads == 1 else 's'}"


def pin_by_pool(nbytes: int, threads: int, backend: Any) -> Rate:
    """Segments of a fresh pool, by its own clock: mapped, faulted in and registered."""
    segment = min(SEGMENT, nbytes)
    with PinnedPool(backend=backend, pin_threads=threads, segment_bytes=segment) as pool:
        blocks = [pool.allocate(segment) for _ in range(nbytes // segment)]
        stats = pool.stats()
        del blocks
    name = pool_name(threads) if stats.pinned else ANY_DEVICE
    huge = stats.small_page_segments == 0
    return rate("pin", name, stats.reserved_bytes, stats.pin_seconds, huge_pages=huge)


def pin_by_torch(nbytes: int) -> Rate:
    """Tensors of 256 MiB, a power of two, as torch would round up to."""
    start = time.perf_counter()
    tensors = [torch.empty(SEGMENT, dtype=torch.uint8, pin_memory=True) for _ in parts(nbytes)]
    seconds = time.perf_counter() - start
    del tensors
    torch._C._host_emptyCache()
    return rate("pin", TORCH, nbytes, seconds)


def pin_by_register(nbytes: int) -> Rate:
    """Untouched memory, whose pages the driver faults in."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    tensors = [torch.empty(SEGMENT, dtype=torch.uint8) for _ in parts(nbytes)]
    start = time.perf_counter()
    for tensor in tensors:
        torch.cuda.check_error(cudart.cudaHostRegister(tensor.data_ptr(), SEGMENT, 0))
    seconds = time.perf_counter() - start
    for tensor in tensors:
        torch.cuda.check_error(cudart.cudaHostUnregister(tensor.data_ptr()))
    return rate("pin", REGISTER, nbytes, seconds)


def parts(nbytes: int) -> range:
    """A number for each 256 MiB."""
    return range(nbytes // SEGMENT)


def copies(nbytes: int, repeats: int) -> Iterator[Rate]:
    """Out, in and both at once, of torch's pinned memory, a pool's and plain memory."""
    there, back = (torch.empty(nbytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    with PinnedPool(segment_bytes=max(SEGMENT, nbytes)) as pool:
        kinds: dict[str, Callable[[], Tensor]] = {
            TORCH: lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
            "PinnedPool": lambda: torch.frombuffer(pool.allocate(nbytes), dtype=torch.uint8),
            ANY_DEVICE: lambda: torch.zeros(nbytes, dtype=torch.uint8),
        }
        for memory, make in kinds.items():
            out, into = make(), make()
            for what, pairs in (
                ("copy out", [(out, there)]),
                ("copy in", [(back, into)]),
                ("copy both ways", [(out, there), (back, into)]),
            ):
                copy_seconds(pairs)
                seconds = statistics.median(copy_seconds(pairs) for _ in range(repeats))
                yield rate(what, memory, nbytes * len(pairs), seconds)
            del out, into


def copy_seconds(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Until all are there; each pair on a stream of its own."""
    new_stream: Any = torch.cuda.Stream
    streams = [new_stream() for _ in pairs]
    torch.cuda.synchronize()
    start = time.perf_counter()
    for stream, (target, source) in zip(streams, pairs, strict=True):
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def run(options: argparse.Namespace) -> Iterator[Rate]:
    """All rates; an error of one is a result."""
    pins: list[tuple[str, Callable[[], Rate]]] = [
        (pool_name(n), lambda n=n: pin_by_pool(options.bytes, n, options.backend))  # type: ignore[misc]
        for n in options.threads
    ]
    if options.device == "cuda":
        pins += [
            (TORCH, lambda: pin_by_torch(options.bytes)),
            (REGISTER, lambda: pin_by_register(options.bytes)),
        ]
    for name, pin in pins:
        try:
            yield pin()
        except RuntimeError as error:  # too little memory is a result; the table shows it
            yield Rate("pin", name, options.bytes, failure=reason(error))
    if options.device == "cuda":
        yield from copies(options.copy_bytes, options.repeats)


def render_rates(rates: Sequence[Rate]) -> str:
    """A line a rate, and below the table why some failed."""
    headers = ["what", "memory", "GiB", "s", "GiB/s", "huge pages"]
    huge = {None: "-", True: "yes", False: "no"}
    rows = [
        [
            one.what,
            one.memory,
            table.gibibytes(one.nbytes),
            "failed" if one.failure else table.number(one.seconds, 4),
            table.number(one.rate, 2),
            huge[one.huge_pages],
        ]
        for one in rates
    ]
    notes = "".join(f"- {one.memory}: {one.failure}\n" for one in rates if one.failure)
    return table.render(headers, rows) + ("\n" + notes if notes else "")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="host_memory.py", description=__doc__)
    on_cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--bytes", type=table.parse_bytes, default=4 * GIB if on_cuda else SEGMENT, help="to pin")
    add("--copy-bytes", type=table.parse_bytes, default=GIB, help="of a copy")
    add("--threads", type=int, nargs="+", default=[1, 4, 8], help="that fault pages in")
    add("--repeats", type=int, default=9, help="of a copy; the median counts")
    add("--backend", choices=("auto", "cuda", "hip", "null"), default="auto", help="of the pool")
    add("--device", choices=("cuda", "cpu"), default="cuda" if on_cuda else "cpu")
    add("--json", type=Path, help="write rates and environment here")
    return parser


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Measure and print one table; 1 when a pool failed."""
    options = parser().parse_args(arguments)
    rates = list(run(options))
    stream.write(render_rates(rates))
    if options.json is not None:
        document = {
            "benchmark": "host_memory",
            "environment": environment(),
            "results": [dataclasses.asdict(one) for one in rates],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    return int(any(one.failure and one.memory.startswith("PinnedPool") for one in rates))
