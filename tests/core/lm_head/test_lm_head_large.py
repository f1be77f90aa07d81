"""Tensors of more than 2^31 elements: no place in them is computed in 32 bits.

What is large needs a GPU. The same comparison in small, anywhere, shows that it can be met.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lowpeak import LogitTransform, fused_divergence, fused_lm_head

GiB = 1 << 30
LIMIT = 1 << 31
LOGITS_AT_ONCE = 1 << 26


@dataclass(frozen=True)
class Large:
    """A head's shape, and how it is called. What has over 2^31 elements: `crossing`."""

    crossing: str
    rows: int
    vocabulary: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    softcap: float | None = None
    expected: bool = False
    frozen: bool = False
    scratch_bytes: int | None = None

    def elements(self) -> int:
        """Of what crosses."""
        first, second = {
            "logits": (self.rows, self.vocabulary),
            "weight": (self.vocabulary, self.width),
            "hidden": (self.rows, self.width),
        }[self.crossing]
        return first * second

    def in_small(self) -> Large:
        """The same call with a few rows, tokens and features."""
        return replace(self, rows=67, vocabulary=131, width=16)


LOGITS = Large("logits", 8320, 262144, 64, scratch_bytes=20 * GiB)
CASES = {
    "kept logits": LOGITS,
    "kept float32 logits": replace(LOGITS, dtype=torch.float32),
    "one pass": replace(LOGITS, expected=True),
    "one pass, frozen": replace(LOGITS, frozen=True),
    "soft cap": replace(LOGITS, softcap=20.0),
    "soft cap, one pass": replace(LOGITS, softcap=20.0, expected=True),
    "weight": Large("weight", 256, 262144, 8320),
    "weight, one pass": Large("weight", 256, 262144, 8320, expected=True),
    "hidden": Large("hidden", 2_100_000, 512, 1032),
    "hidden, one pass": Large("hidden", 2_100_000, 512, 1032, expected=True),
}
SIZES = ["small", pytest.param("large", marks=pytest.mark.cuda)]


def factors(rows: int, vocabulary: int, width: int, dtype: torch.dtype, device: torch.device):
    generator = torch.Generator(device).manual_seed(0)
    options = {"generator": generator, "dtype": dtype, "device": device}
    hidden = torch.randn(rows, width, **options)
    weight = torch.randn(vocabulary, width, **options).mul_(2.0 / width**0.5)
    return hidden, weight


@dataclass
class Errors:
    """The largest, against float32: of a value, of a row of hidden's gradient; and the weight's."""

    value: float
    hidden_row: float
    weight_gradient: Tensor


def errors_of(
    value_of: Callable[[slice, Tensor, Tensor], Tensor],
    hidden: Tensor,
    weight: Tensor,
    values: Tensor,
    gradient: Tensor,
) -> Errors:
    """Compare with autograd through some rows at a time of values whose mean is the loss.

    value_of: from some rows, their hidden states and the whole weight in float32.
    """
    whole = weight.detach().float().requires_grad_()
    value = hidden_row = 0.0
    count = max(1, LOGITS_AT_ONCE // weight.size(0))
    for first in range(0, hidden.size(0), count):
        rows = slice(first, first + count)
        part = hidden.detach()[rows].float().requires_grad_()
        expected = value_of(rows, part, whole)
        (expected.sum() / hidden.size(0)).backward()
        assert part.grad is not None
        value = max(value, float((values.detach()[rows] - expected.detach()).abs().max()))
        hidden_row = max(hidden_row, worst_row(gradient[rows], part.grad))
    assert whole.grad is not None
    return Errors(value, hidden_row, whole.grad)


def worst_row(ours: Tensor, theirs: Tensor) -> float:
    """The largest relative error of a row."""
    error = (ours.float() - theirs).norm(dim=1)
    return float((error / theirs.norm(dim=1).clamp(min=1e-30)).max())


@pytest.fixture(autouse=True)
def _free() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", SIZES)
def test_head_beyond_2_31_elements(name: str, size: str, device: torch.device) -> None:
    case = CASES[name]
    assert case.elements() > LIMIT
    if size == "small":
        case = case.in_small()
    hidden, weight = factors(case.rows, case.vocabulary, case.width, case.dtype, device)
    # many targets among the last tokens, whose places are the largest
    back = torch.arange(case.rows, device=device) * 3 % case.vocabulary
    targets = case.vocabulary - 1 - back
    hidden.requires_grad_()
    weight.requires_grad_(not case.frozen)
    upstream = torch.full((case.rows,), 1 / case.rows, device=device)
    options = {"expected_grads": {"log_probs": upstream}} if case.expected else {}
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    log_probs = fused_lm_head(
        hidden,
        weight,
        targets,
        transform=LogitTransform(softcap=case.softcap),
        scratch_bytes=case.scratch_bytes,
        **options,
    ).log_probs
    wanted = [hidden] if case.frozen else [hidden, weight]
    gradients = torch.autograd.grad(log_probs, wanted, upstream)
    if size == "large" and case.crossing == "logits":
        tile = case.rows * case.vocabulary * case.dtype.itemsize
        assert torch.cuda.max_memory_allocated() - before > tile, "the logits were in pieces"

    def value_of(rows: slice, part: Tensor, whole: Tensor) -> Tensor:
        z = part @ whole.t()
        if case.softcap is not None:
            z = case.softcap * torch.tanh(z / case.softcap)
        return torch.log_softmax(z, 1).gather(1, targets[rows].unsqueeze(1)).squeeze(1)

    half = case.dtype.itemsize < 4
    errors = errors_of(value_of, hidden, weight, log_probs, gradients[0])
    assert errors.value < (0.1 if half else 1e-3)
    assert errors.hidden_row < (5e-2 if half else 1e-3)
    if not case.frozen:
        assert worst_row(gradients[1], errors.weight_gradient) < (5e-2 if half else 1e-3)


@pytest.mark.parametrize("expected", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_divergence_beyond_2_31_elements(size: str, expected: bool, device: torch.device) -> None:
    rows, vocabulary, width = (8320, 262144, 64) if size == "large" else (67, 131, 16)
    hidden, weight = factors(rows, vocabulary, width, torch.bfloat16, device)
    teacher_hidden = hidden + 0.5 * torch.randn_like(hidden)
    teacher_weight = weight.clone()
    hidden.requires_grad_()
    weight.requires_grad_()
    upstream = torch.full((rows,), 1 / rows, device=device)
    divergence = fused_divergence(
        hidden,
        weight,
        teacher_hidden,
        teacher_weight,
        beta=0.0,
        expected_grads=upstream if expected else None,
        scratch_bytes=48 * GiB,
    ).divergence
    gradients = torch.autograd.grad(divergence, [hidden, weight], upstream)
    teacher = teacher_weight.float()

    def value_of(rows: slice, part: Tensor, whole: Tensor) -> Tensor:
        log_q = torch.log_softmax(part @ whole.t(), 1)
        log_p = torch.log_softmax(teacher_hidden[rows].float() @ teacher.t(), 1)
        return (log_p.exp() * (log_p - log_q)).sum(1)

    errors = errors_of(value_of, hidden, weight, divergence, gradients[0])
    assert errors.value < 5e-2
    assert errors.hidden_row < 5e-2
    # of tokens that both heads find improbable nothing but rounding is left
    norms = errors.weight_gradient.norm(dim=1)
    often = norms > norms.mean()
    assert worst_row(gradients[1][often], errors.weight_gradient[often]) < 0.1
