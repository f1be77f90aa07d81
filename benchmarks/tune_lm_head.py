"""Sweep of the tile sizes of lowpeak's LM head; see benchmarks/README.md."""

from lowpeak_bench.tune_lm_head import main

if __name__ == "__main__":
    raise SystemExit(main())
