"""Time and memory of distillation losses between two heads; see benchmarks/README.md."""

from lowpeak_bench.divergence import main

if __name__ == "__main__":
    raise SystemExit(main())
