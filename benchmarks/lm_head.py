"""Time and memory of the LM head alone; see benchmarks/README.md."""

from lowpeak_bench.lm_head import main

if __name__ == "__main__":
    raise SystemExit(main())
