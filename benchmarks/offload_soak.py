"""Minutes of random lengths under activation offload; see benchmarks/README.md."""

from lowpeak_bench.offload_soak import main

if __name__ == "__main__":
    raise SystemExit(main())
