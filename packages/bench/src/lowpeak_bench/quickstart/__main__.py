"""`python -m lowpeak_bench.quickstart`."""

import sys

from lowpeak_bench.quickstart.cli import main

if __name__ == "__main__":
    sys.exit(main())
