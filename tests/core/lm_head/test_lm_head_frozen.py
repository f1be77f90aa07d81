"""A frozen weight: one pass, gradients of hidden from what the forward kept."""

import pytest
import torch
from lm_head_checks import (
    ALL_TRANSFORMS,
    OUTPUTS,
    Case,
    Transform,
    assert_exact,
    assert_matches,
    backward,
    call,
    error,
    largest,
    make_case,
    run,
    truth,
    upstream_for,
)
from lm_head_oracle import Evaluation
from lm_head_tolerances import ALL_DTYPES
from torch import Tensor

from lowpeak.kernels.logit_transform import TileTransform
from lowpeak.lm_head.chunks import Keep
from lowpeak.lm_head.planner import TilePlan, override
from lowpeak.lm_head.tiles import HeadInputs

FROZEN = ("weight", "bias")
CHUNKS = TilePlan(16, 1)


@pytest.mark.parametrize("transform", ALL_TRANSFORMS)
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("names", [
    ("log_probs",), ("mean_logits",), ("log_probs", "mean_logits"), ("log_probs", "entropy"),
    ("log_normalizer",), ("log_probs", "log_normalizer", "mean_logits"),
], ids="+".join)  # fmt: skip
def test_gradients_of_hidden(
    names: tuple[str, ...], dtype: torch.dtype, transform: str, device: torch.device
) -> None:
    """Kept, of rank one, or recomputed: always exact, in several chunks."""
    case = make_case(40, 127, 20, dtype, device, transform=ALL_TRANSFORMS[transform])
    with override(plan_frozen=CHUNKS):
        for row_selection in ("valid", "all"):
            assert_exact(
                case, OUTPUTS, upstream=upstream_for(case, names), frozen=FROZEN,
                row_selection=row_selection,
            )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_temperature_of_each_row(dtype: torch.dtype, device: torch.device) -> None:
    temperature = torch.linspace(0.5, 2.0, 40, device=device)
    case = make_case(40, 127, 20, dtype, device, transform=Transform(temperature=temperature))
    with override(plan_frozen=CHUNKS):
        upstream = upstream_for(case, ("log_probs", "mean_logits", "log_normalizer"))
        assert_exact(case, upstream=upstream, frozen=FROZEN)


def test_masked_tokens(device: torch.device) -> None:
    """A bias of -inf: no gradient through those tokens, in none of the outputs."""
    case = make_case(40, 127, 20, device=device, ignored=0.0)
    bias = case.bias.clone()
    bias[50:] = -float("inf")
    case = Case(case.hidden, case.weight, case.targets % 50, bias)
    upstream = upstream_for(case, ("log_probs", "mean_logits"))
    assert_exact(case, upstream=upstream, frozen=FROZEN)


@pytest.mark.parametrize("wide", ["hidden", "weight"])
def test_mixed_dtypes(wide: str, device: torch.device) -> None:
    """Without autocast the products are float32; hidden's gradient has hidden's dtype."""
    case = make_case(40, 127, 20, torch.bfloat16, device)
    tensors = {"hidden": case.hidden, "weight": case.weight, "bias": case.bias}
    tensors[wide] = tensors[wide].float()
    case = Case(**tensors, targets=case.targets)
    assert_exact(
        case, upstream=upstream_for(case, ("log_probs",)), frozen=FROZEN,
        compute_dtype=torch.float32,
    )  # fmt: skip


def test_autocast_with_a_float32_model(device: torch.device) -> None:
    case = make_case(40, 127, 20, torch.bfloat16, device)
    upstream = upstream_for(case, ("log_probs",))
    plain = run(case, ("log_probs",), upstream, FROZEN).gradients["hidden"]
    leaves = case.to(torch.float32).leaves(FROZEN)
    with torch.autocast(device.type, torch.bfloat16):
        result = call(case, leaves, ("log_probs",))
    backward(result, upstream)
    assert leaves["hidden"].grad.dtype == torch.float32
    # What the float32 leaf keeps was rounded to bfloat16 in the other.
    assert error(leaves["hidden"].grad, plain) <= 2**-8 * largest(plain)


@pytest.mark.parametrize("ignored", [0.0, 1.1])
def test_no_rows(ignored: float, device: torch.device) -> None:
    for rows in (0, 5):
        case = make_case(rows, 60, 12, device=device, ignored=ignored)
        assert_exact(case, upstream=upstream_for(case, ("log_probs",)), frozen=FROZEN)


def test_backward_twice_and_one_output_at_a_time(device: torch.device) -> None:
    case = make_case(40, 127, 20, device=device)
    upstream = upstream_for(case, ("log_probs", "mean_logits", "entropy"))
    leaves = case.leaves(FROZEN)
    result = call(case, leaves, OUTPUTS)
    for _ in range(2):
        total = torch.zeros_like(leaves["hidden"])
        for name, value in upstream.items():
            output = getattr(result, name)
            total += torch.autograd.grad(output, leaves["hidden"], value, retain_graph=True)[0]
        ours = Evaluation({}, {"hidden": total, "weight": None, "bias": None}, 0.0)
        assert_matches(case, ours, upstream, FROZEN, torch.float32)


@pytest.mark.parametrize("outputs", [("log_probs",), ("log_probs", "entropy")], ids="+".join)
def test_double_backward_is_refused(outputs: tuple[str, ...], device: torch.device) -> None:
    """Of the kept gradient too, whose second derivative would be silently 0."""
    case = make_case(5, 20, 6, device=device)
    leaves = case.leaves(FROZEN)
    log_probs = call(case, leaves, outputs).log_probs
    (gradient,) = torch.autograd.grad(log_probs.sum(), leaves["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match=r"(?is)fused_lm_head.*double backward"):
        gradient.square().sum().backward()


def test_certain_targets_keep_their_tiny_gradients(device: torch.device) -> None:
    """1 - p = 1e-9: float32(1 - p) would be 0."""
    logits = torch.zeros(1, 130, dtype=torch.float32)
    logits[0, 77] = 25.0
    hidden = torch.ones(1, 1, device=device)
    case = Case(hidden, logits.T.to(device).contiguous(), torch.tensor([77], device=device))
    upstream = {"log_probs": torch.ones(1, device=device)}
    ours = run(case, ("log_probs",), upstream, FROZEN).gradients["hidden"]
    expected = truth(case, upstream).gradients["hidden"]
    assert error(ours, expected) <= 1e-5 * largest(expected)


def test_float16_keeps_gradients_that_float16_would_flush(device: torch.device) -> None:
    """d log_prob / d hidden of 1e-9 times a gradient scaler's 65536."""
    logits = torch.zeros(1, 130)
    logits[0, 77] = 16.0
    hidden = torch.ones(1, 1, device=device, dtype=torch.float16)
    case = Case(hidden, logits.T.to(device, torch.float16), torch.tensor([77], device=device))
    upstream = {"log_probs": torch.full((1,), 65536.0, device=device)}
    ours = run(case, ("log_probs",), upstream, FROZEN).gradients["hidden"]
    expected = truth(case, upstream).gradients["hidden"]
    assert error(ours, expected) <= 2e-3 * largest(expected)


def test_layouts(device: torch.device) -> None:
    case = make_case((4, 10), 127, 20, torch.bfloat16, device)
    leaves = case.leaves(FROZEN)
    strided = leaves["hidden"].detach().mT.contiguous().mT.requires_grad_()
    weight = case.weight.T.contiguous().T
    upstream = upstream_for(case, ("log_probs",))
    expected = run(case, ("log_probs",), upstream, FROZEN).gradients["hidden"]
    transposed = {name: value.mT.contiguous().mT for name, value in upstream.items()}
    result = call(case, {**leaves, "hidden": strided, "weight": weight}, ("log_probs",))
    backward(result, transposed)
    assert error(strided.grad, expected) <= 2**-7 * largest(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_does_not_grow_with_chunks(dtype: torch.dtype, device: torch.device) -> None:
    case = make_case(256, 512, 24, dtype, device, ignored=0.0)
    upstream = upstream_for(case, ("log_probs",))

    def gradient(rows: int) -> Tensor:
        with override(plan_frozen=TilePlan(rows, 1)):
            return run(case, ("log_probs",), upstream, FROZEN).gradients["hidden"]

    one, many = gradient(256), gradient(16)
    assert torch.equal(many, gradient(16))
    # Each row is one product in both: what differs is the order in which a library sums.
    assert error(one, many) <= 4 * torch.finfo(dtype).eps * largest(one)


def test_an_expectation_takes_no_more_memory() -> None:
    """On an accelerator: large chunks pay where each is added to a gradient of the vocabulary."""
    hidden, weight = (torch.empty(n, 1152, device="meta") for n in (8192, 262144))
    inputs = HeadInputs(hidden, weight, None, None, TileTransform(), torch.float32)
    frozen, expected, trained, adapter = (
        keep.plan(inputs, triton=True, scratch_bytes=None).rows
        for keep in (
            Keep("frozen", hidden=True),
            Keep("expected", hidden=True),
            Keep("expected", hidden=True, weight=torch.float32),
            Keep("expected", hidden=True, low_hidden=True, low_weight=True),
        )
    )
    assert frozen == expected < trained == adapter
