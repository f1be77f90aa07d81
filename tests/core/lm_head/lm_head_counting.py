"""Multiplications of the matrix products that a call runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor


class Products:
    """Multiply-adds of the products so far, in units of `unit`."""

    def __init__(self, unit: int) -> None:
        self._unit = unit
        self._total = 0

    def add(self, a: Tensor, b: Tensor) -> None:
        self._total += a.size(0) * a.size(1) * b.size(1)

    @property
    def nvh(self) -> float:
        """Operations (two a multiply-add) in units of N V H."""
        return 2 * self._total / self._unit


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch, unit: int) -> Iterator[Products]:
    """Count torch.mm and torch.addmm, the functions that lowpeak's products go through.

    A dispatch mode would not see them inside the operators.
    """
    products = Products(unit)
    mm, addmm = torch.mm, torch.addmm

    def counting_mm(a: Tensor, b: Tensor, **options: Any) -> Tensor:
        products.add(a, b)
        return mm(a, b, **options)

    def counting_addmm(c: Tensor, a: Tensor, b: Tensor, **options: Any) -> Tensor:
        products.add(a, b)
        return addmm(c, a, b, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "mm", counting_mm)
        patch.setattr(torch, "addmm", counting_addmm)
        yield products
