"""Overhead and peak of activation offload; see benchmarks/README.md."""

from lowpeak_bench.offload import main

if __name__ == "__main__":
    raise SystemExit(main())
