"""Soak of activation offload: random lengths for minutes, and whether memory stays flat."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowpeak.offload import OffloadActivations
from lowpeak.offload.native_engine import NativeEngine, NativeSimEngine
from lowpeak_bench import table
from lowpeak_bench.environment import environment
from lowpeak_bench.timing import synchronize
from lowpeak_bench.training_cases import CONFIGS

# What a window may be above the second, in which everything has been warm for a while.
TOLERANCE = 1.02
FEWEST_WINDOWS = 3
BACKENDS = ("native", "torch", "none", "sim")
# Without cuDNN, which makes a plan of many MB for the multiples of 512 among the lengths.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass
class Window:
    """The most bytes of a stretch of time.

    host_live and host_reserved are the pool's, and with torch's engine host_reserved is its pinned
    memory; None where there is none. device_reserved is what torch's allocator holds; rss is the
    process's.
    """

    steps: int = 0
    tokens: int = 0
    host_live: int | None = None
    host_reserved: int | None = None
    device_reserved: int | None = None
    rss: int = 0

    def see(self, tokens: int, **amounts: int | None) -> None:
        """A step was run, and this much was held in it."""
        self.steps += 1
        self.tokens += tokens
        for name, amount in amounts.items():
            known = getattr(self, name)
            if amount is not None:
                setattr(self, name, amount if known is None else max(known, amount))


class Soak:
    """Checkpointed layers under offload, and what they hold."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = torch.device(options.device)
        self.engine = make_engine(options.backend)
        self.context: AbstractContextManager[object] = nullcontext()
        if options.backend != "none":
            self.context = OffloadActivations(
                "checkpoint_inputs",
                device_backend=self.engine if self.engine is not None else "torch",
                min_bytes=0,
                window_bytes=options.window_bytes,
            )
        self._body = build_layers(options, self.device)
        self._generator = torch.Generator().manual_seed(0)

    def length(self, shortest: int, longest: int) -> int:
        """A random number of tokens, log-uniform."""
        share = float(torch.rand((), generator=self._generator))
        return round(shortest * math.exp(share * math.log(longest / shortest)))

    def step(self, tokens: int) -> dict[str, int | None]:
        """Forward and backward; what was held between the two."""
        self._body.zero_grad(set_to_none=True)
        ids = torch.randint(self._body.config.vocab_size, (1, tokens), generator=self._generator)
        with self.context:
            hidden = self._body(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
        held = self.held()
        torch.autograd.backward(hidden, torch.ones_like(hidden))
        synchronize(self.device)
        return held

    def held(self) -> dict[str, int | None]:
        """Host, device and process, in bytes, now."""
        live: int | None = None
        reserved: int | None = None
        if self.engine is not None:
            device = self.engine.current_device()
            pool, copies = self.engine.pool(device).stats(), self.engine.copy_stats(device)
            live = pool.live_bytes + copies["plain_live_bytes"]
            reserved = pool.reserved_bytes + copies["plain_reserved_bytes"]
        elif self.device.type == "cuda":
            # What is in use of it, torch 2.11 only ever adds to.
            reserved = int(torch.cuda.host_memory_stats()["allocated_bytes.current"])
        on_cuda = self.device.type == "cuda"
        return {
            "host_live": live,
            "host_reserved": reserved,
            "device_reserved": torch.cuda.memory_reserved(self.device) if on_cuda else None,
            "rss": resident_bytes(),
        }


def make_engine(backend: str) -> NativeEngine | None:
    """The engine of a backend's name; None for torch's, which keeps no pool, and for none."""
    if backend == "native":
        return NativeEngine()
    return NativeSimEngine(mode="random") if backend == "sim" else None


def build_layers(options: argparse.Namespace, device: torch.device) -> Any:
    """The first layers of a Gemma 3 model, checkpointed, random weights, no head."""
    from transformers import AutoModel, Gemma3TextConfig

    from lowpeak.attention import register_attention

    register_attention()
    config = Gemma3TextConfig(**{**CONFIGS[options.config], "num_hidden_layers": options.layers})
    auto_model: Any = AutoModel
    torch.manual_seed(0)
    with device:
        body = auto_model.from_config(
            config, dtype=getattr(torch, options.dtype), attn_implementation="lowpeak"
        )
    body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return body.train()


def resident_bytes() -> int:
    """Memory of the process that is there, pinned memory in it; Linux."""
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def run(options: argparse.Namespace, note: Callable[[list[Window]], None]) -> list[Window]:
    """Steps until the time is over; each window begins with a step of the longest length."""
    soak = Soak(options)
    windows: list[Window] = []
    start = time.monotonic()
    # The last window is a whole one too.
    number = max(FEWEST_WINDOWS, round(60 * options.minutes / options.window_seconds))
    for index in range(number):
        window = Window()
        windows.append(window)
        while window.steps == 0 or time.monotonic() < start + (index + 1) * options.window_seconds:
            first = window.steps == 0
            tokens = options.longest if first else soak.length(options.shortest, options.longest)
            window.see(tokens, **soak.step(tokens))
        note(windows)
    return windows


def grown(windows: Sequence[Window]) -> list[str]:
    """What the last window holds more of than the second allows."""
    second, last = windows[1], windows[-1]
    return [
        name
        for name in ("host_reserved", "device_reserved", "rss")
        if (before := getattr(second, name)) is not None
        and getattr(last, name) > TOLERANCE * before
    ]


def render_windows(windows: Sequence[Window]) -> str:
    """A line a window."""
    headers = ["window", "steps", "tokens", "host live GiB", "host reserved GiB"]
    headers += ["device reserved GiB", "RSS GiB"]
    rows = [
        [
            f"{number}",
            f"{one.steps}",
            f"{one.tokens}",
            table.gibibytes(one.host_live, 3),
            table.gibibytes(one.host_reserved, 3),
            table.gibibytes(one.device_reserved, 3),
            table.gibibytes(one.rss, 3),
        ]
        for number, one in enumerate(windows, 1)
    ]
    return table.render(headers, rows)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="offload_soak.py", description=__doc__)
    on_cuda = torch.cuda.is_available()
    add = parser.add_argument
    add("--minutes", type=float, default=5.0)
    add("--window-seconds", type=float, default=30.0, help="three windows at least are run")
    add("--backend", choices=BACKENDS, default="native" if on_cuda else "sim")
    add("--window-bytes", type=table.parse_bytes, help="in flight, of lowpeak")
    add("--config", choices=tuple(CONFIGS), default="gemma-3-1b" if on_cuda else "tiny")
    add("--layers", type=int, default=6)
    add("--shortest", type=int, default=512, help="tokens")
    add("--longest", type=int, default=32768, help="tokens")
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16" if on_cuda else "float32")
    add("--device", default="cuda" if on_cuda else "cpu")
    add("--json", type=Path, help="write windows and environment here, after each window")
    return parser


def main(arguments: Sequence[str] | None = None, stream: TextIO = sys.stdout) -> int:
    """Run and print the windows; 1 when the last holds over 2 % more than the second."""
    options = parser().parse_args(arguments)
    block = environment()

    def note(windows: list[Window]) -> None:
        if options.json is None:
            return
        given = {name: value for name, value in vars(options).items() if name != "json"}
        document = {
            "benchmark": "offload_soak",
            "environment": block,
            "options": given,
            "windows": [dataclasses.asdict(window) for window in windows],
            "grown": grown(windows) if len(windows) > 1 else [],
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    with sdpa_kernel(ATTENTION):
        windows = run(options, note)
    stream.write(render_windows(windows))
    more = grown(windows)
    stream.write(f"grown: {', '.join(more)}\n" if more else "flat\n")
    return int(bool(more))
