"""Does a run with lowpeak follow the same run with stock TRL? Every trainer, loss and option.

`python -m lowpeak_bench.parity` makes the table of docs/parity.md.
"""
