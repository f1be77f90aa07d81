"""Tokens per second of packed SFT; see benchmarks/README.md."""

from lowpeak_bench.packing import main

if __name__ == "__main__":
    raise SystemExit(main())
