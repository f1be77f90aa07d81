"""Launch shapes and groups of tokens of the divergences; see benchmarks/README.md."""

from lowpeak_bench.tune_divergence import main

if __name__ == "__main__":
    raise SystemExit(main())
