"""The quickstart: a real model trained by SFT, DPO and GRPO, stock TRL beside lowpeak.

`python -m lowpeak_bench.quickstart` runs it and writes a report.
"""
