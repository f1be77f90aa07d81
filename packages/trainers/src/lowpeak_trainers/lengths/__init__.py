"""``lowpeak lengths``: how long the rows of a dataset are, and what batches make of that."""

from .advice import Advice, advise
from .measuring import Lengths, measure
from .reading import DatasetError, open_rows
from .summary import AtMaxLength, Buckets, Distribution, Fill, Summary, summarise

__all__ = [
    "Advice",
    "AtMaxLength",
    "Buckets",
    "DatasetError",
    "Distribution",
    "Fill",
    "Lengths",
    "Summary",
    "advise",
    "measure",
    "open_rows",
    "summarise",
]
