"""What adapters on the head cost, what is refused, and torch.compile."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lm_head_checks import Case, make_case, upstream_for
from lm_head_counting import counted
from lm_head_memory import measure
from test_low_rank import adapters, backward, full_logits, leaves_of, run
from torch import Tensor

from lowpeak import LogitTransform, LowRank, fused_lm_head
from lowpeak.lm_head import expectation_counts, reset_expectations, single_pass_serves

KiB, MiB = 1 << 10, 1 << 20
FROZEN = ("weight", "bias")


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    reset_expectations()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(("expected", "frozen", "wide", "narrow"), [
    (False, FROZEN, 6, 8), (True, FROZEN, 4, 6), (False, (), 8, 8), (True, (), 6, 6),
    (False, (*FROZEN, "hidden", "a0"), 4, 6),
], ids=str)  # fmt: skip
def test_products(
    expected: bool, frozen: tuple[str, ...], wide: int, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units of N V H, and of N V R: nothing is multiplied for the gradient of a frozen weight."""
    rows, vocabulary, width, rank = 48, 96, 16, 8
    case = make_case(rows, vocabulary, width, torch.float64, ignored=0.0, bias=False)
    upstream, low_rank = upstream_for(case, ("log_probs",)), adapters(case, (rank,))
    with counted(monkeypatch, rows * vocabulary) as products:
        run(case, low_rank, upstream, frozen, expected)
    assert products.nvh == wide * width + narrow * rank


@pytest.mark.parametrize("expected", [False, True], ids=["plain", "expected"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_frozen_weight_has_no_copy_and_no_gradient(dtype: torch.dtype, expected: bool) -> None:
    """A training step takes less than the scratch and half the weight, whose logits do not fit."""
    rows, vocabulary, width, scratch = 64, 8192, 512, 2 * MiB
    case = make_case(rows, vocabulary, width, dtype, ignored=0.0, bias=False)
    low_rank = adapters(case, (4,))
    upstream = upstream_for(case, ("log_probs",))
    leaves = leaves_of(case, low_rank, ("weight",), None)
    added = LowRank(leaves["a0"], leaves["b0"])
    hint = upstream if expected else None
    if expected:  # a chunk of all the vocabulary
        scratch = 16 * MiB if dtype == torch.bfloat16 else 8 * MiB

    def step() -> object:
        result = fused_lm_head(
            leaves["hidden"], leaves["weight"], case.targets, low_rank=added,
            scratch_bytes=scratch, expected_grads=hint,
        )  # fmt: skip
        backward({"log_probs": result.log_probs}, upstream, leaves)
        gradients = [leaf.grad for leaf in leaves.values()]
        for leaf in leaves.values():
            leaf.grad = None
        return gradients

    found = measure(step, torch.device("cpu"))
    of_weight = vocabulary * width * dtype.itemsize
    of_rows, of_adapters = 4 * rows * width, 4 * (width + vocabulary) * 4
    assert found.peak <= scratch + 6 * of_rows + 4 * of_adapters + 128 * KiB
    # CPU products of bfloat16 go through a float32 copy of a factor, within an explicit scratch
    if dtype == torch.float32 or not expected:
        assert found.largest <= of_weight // 4
    assert found.peak >= 16 * vocabulary * 4, "the measurement misses the tiles"
    if expected:
        assert expectation_counts()["fused_lm_head"].missed == 0
        assert expectation_counts()["fused_lm_head"].held > 0


def test_whether_an_expectation_would_be_used(device: torch.device) -> None:
    case = make_case(8, 60, 12, device=device)
    (adapter,) = adapters(case, (3,))
    trained = LowRank(adapter.a.requires_grad_(), adapter.b.requires_grad_())
    assert not single_pass_serves(case.hidden, case.weight)
    assert single_pass_serves(case.hidden, case.weight, low_rank=trained)
    assert single_pass_serves(case.hidden, case.weight, low_rank=[trained, trained])
    assert not single_pass_serves(case.hidden, case.weight, low_rank=trained, scratch_bytes=64)


def head(
    hidden: Tensor, weight: Tensor, targets: Tensor, a: Tensor, b: Tensor, log_probs: Tensor
) -> Any:
    return fused_lm_head(
        hidden, weight, targets, low_rank=[LowRank(a, b, 0.5)],
        expected_grads={"log_probs": log_probs},
    )  # fmt: skip


@pytest.mark.parametrize(("factor", "frozen", "dynamic"), [
    (2.0, ("weight",), True), (0.0, (), False),
], ids=str)  # fmt: skip
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
)
def test_compiled(
    factor: float, frozen: tuple[str, ...], dynamic: bool, device: torch.device
) -> None:
    """One graph, whether the expectation holds (2.0) or not (0.0)."""
    case = make_case(20, 60, 12, device=device, bias=False)
    low_rank = adapters(case, (4,))
    upstream = upstream_for(case, ("log_probs",))
    leaves = leaves_of(case, low_rank, frozen, None)
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    result = compiled(
        leaves["hidden"], leaves["weight"], case.targets, leaves["a0"], leaves["b0"],
        factor * upstream["log_probs"],
    )  # fmt: skip
    found = backward({"log_probs": result.log_probs}, upstream, leaves)
    true = full_logits(case, low_rank, upstream, frozen)
    assert (result.log_probs - true.outputs["log_probs"]).abs().max() <= 1e-5
    for name, gradient in true.gradients.items():
        if name not in frozen:
            assert gradient is not None
            distance = (found[name] - gradient).abs().max()
            assert distance <= 1e-5 * max(1.0, float(gradient.abs().max())), name


def test_double_backward_is_refused(device: torch.device) -> None:
    case = make_case(5, 20, 6, device=device)
    leaves = leaves_of(case, adapters(case, (2,)), FROZEN, None)
    added = LowRank(leaves["a0"], leaves["b0"])
    result = fused_lm_head(leaves["hidden"], leaves["weight"], case.targets, low_rank=added)
    (gradient,) = torch.autograd.grad(result.log_probs.sum(), leaves["b0"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"(?is)fused_lm_head.*double backward"):
        gradient.square().sum().backward()


def wrong(case: Case, name: str) -> tuple[type[Exception], str, Any]:
    a, b = case.weight.new_zeros(2, 6), case.weight.new_zeros(20, 2)
    return {
        "not an adapter": (TypeError, "low_rank holds a tuple: pass a LowRank", [(a, b)]),
        "width": (ValueError, r"low_rank: a .*\(20, 6\)", LowRank(a[:, :5], b)),
        "vocabulary": (ValueError, r"low_rank: a .*\(20, 6\)", LowRank(a, b[:19])),
    }[name]


@pytest.mark.parametrize("name", ["not an adapter", "width", "vocabulary"])
def test_wrong_adapters_of_a_head(name: str, device: torch.device) -> None:
    case = make_case(5, 20, 6, device=device)
    kind, message, value = wrong(case, name)
    with pytest.raises(kind, match=message):
        fused_lm_head(case.hidden, case.weight, case.targets, low_rank=value)


def test_wrong_adapters() -> None:
    a, b = torch.zeros(2, 6), torch.zeros(20, 2)
    with pytest.raises(TypeError, match="a is None"):
        LowRank(None, b)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"b has dtype torch\.int64"):
        LowRank(a, b.long())
    with pytest.raises(ValueError, match="pass a matrix"):
        LowRank(a[0], b)
    with pytest.raises(ValueError, match="same rank"):
        LowRank(a, b[:, :1])
    with pytest.raises(ValueError, match="scale=inf"):
        LowRank(a, b, float("inf"))


def test_no_adapters_is_the_plain_head(device: torch.device) -> None:
    case = make_case(5, 20, 6, device=device)
    plain = fused_lm_head(case.hidden, case.weight, case.targets, transform=LogitTransform(2.0))
    same = fused_lm_head(
        case.hidden, case.weight, case.targets, transform=LogitTransform(2.0), low_rank=()
    )
    assert torch.equal(plain.log_probs, same.log_probs)
