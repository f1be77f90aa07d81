"""Rates of pinning host memory and of copies from and to it; see benchmarks/README.md."""

from lowpeak_bench.host_memory import main

if __name__ == "__main__":
    raise SystemExit(main())
