"""Time and memory of whole training steps; see benchmarks/README.md."""

from lowpeak_bench.training_step import main

if __name__ == "__main__":
    raise SystemExit(main())
