"""fused_top_k_divergence against all logits joined into buckets in float64."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from divergence_checks import (
    BETAS,
    Pair,
    PairEvaluation,
    assert_gradients,
    divergence_of,
    make_pair,
    run,
    upstream_for,
)
from lm_head_checks import ALL_TRANSFORMS, Transform, error, largest, public_transform
from lm_head_memory import measure
from lm_head_oracle import transformed_logits
from lm_head_tolerances import ALL_DTYPES, statistics_dtype, value_tolerance
from torch import Tensor

from lowpeak import TopKLogProbs, fused_top_k_divergence, top_k_log_probs

MiB = 1 << 20


def table_of(pair: Pair, k: int) -> TopKLogProbs:
    """The teacher's k likeliest tokens, from all logits in float64."""
    log_p = logits_of(pair.teacher, torch.float64, torch.float64).log_softmax(-1)
    ids = log_p.topk(k).indices
    rest = log_p.scatter(-1, ids, -math.inf).logsumexp(-1)
    return TopKLogProbs(ids, log_p.gather(-1, ids), rest)


def logits_of(case: Any, logits_dtype: torch.dtype, dtype: torch.dtype) -> Tensor:
    case = case.to(logits_dtype)
    return transformed_logits(case.hidden, case.weight, case.bias, case.transform, dtype)


def buckets(logits: Tensor, ids: Tensor) -> Tensor:
    """log-probabilities [..., k + 1] of the tokens `ids` (empty: -inf) and of all others."""
    log_q, empty = logits.log_softmax(-1), ids < 0
    inside = torch.zeros_like(log_q, dtype=torch.bool)
    rows = ids.clamp(min=0)
    inside = inside.scatter_add(-1, rows, ~empty)
    picked = log_q.gather(-1, rows).masked_fill(empty, -math.inf)
    return torch.cat([picked, log_q.masked_fill(inside, -math.inf).logsumexp(-1, keepdim=True)], -1)


def call(pair: Pair, leaves: dict[str, Tensor], table: TopKLogProbs, **options: Any) -> Any:
    return fused_top_k_divergence(
        leaves["hidden"],
        leaves["weight"],
        table,
        beta=pair.beta,
        student_bias=leaves.get("bias"),
        student_transform=public_transform(pair.student.transform),
        **{"mask": pair.mask, **options},
    )


def evaluate(
    pair: Pair,
    table: TopKLogProbs,
    upstream: Tensor | None,
    logits_dtype: torch.dtype = torch.float64,
    dtype: torch.dtype = torch.float64,
) -> PairEvaluation:
    """The oracle: all logits, joined, then divergence_of over the buckets."""
    leaves = {name: x.detach() for name, x in pair.student.leaves().items()}
    leaves = {name: x.to(logits_dtype).requires_grad_() for name, x in leaves.items()}
    logits = transformed_logits(
        leaves["hidden"], leaves["weight"], leaves.get("bias"), pair.student.transform, dtype
    )
    log_q = buckets(logits, table.ids)
    log_p = torch.cat([table.log_probs, table.tail_log_prob[..., None]], -1).to(dtype)
    divergence = divergence_of(log_q, log_p, pair.beta).where(
        pair.mask, torch.zeros((), dtype=dtype)
    )
    full = logits.detach().log_softmax(-1)
    entropy = -(full.exp() * full.masked_fill(torch.isneginf(full), 0.0)).sum(-1)
    if upstream is not None:
        divergence.backward(upstream.to(dtype))
    finite = logits.detach()[torch.isfinite(logits)]
    return PairEvaluation(
        divergence.detach(),
        entropy.where(pair.mask, torch.zeros_like(entropy)),
        {"bias": None, **{name: leaf.grad for name, leaf in leaves.items()}},
        largest(finite),
    )


def assert_exact(
    pair: Pair, table: TopKLogProbs, frozen: Iterable[str] = (), **options: Any
) -> PairEvaluation:
    """Values and gradients lie within the tolerances of the oracle."""
    dtype = pair.student.hidden.dtype
    wide, upstream = statistics_dtype(dtype), upstream_for(pair)
    leaves = pair.student.leaves(frozen)
    result = call(pair, leaves, table, **options)
    result.divergence.backward(upstream)
    ours = PairEvaluation(
        result.divergence.detach(),
        result.student_entropy,
        {"bias": None, **{name: leaf.grad for name, leaf in leaves.items()}},
    )
    true, plain = evaluate(pair, table, upstream), evaluate(pair, table, None, wide, wide)
    for name in ("divergence", "entropy"):
        found, expected = getattr(ours, name), getattr(true, name)
        assert found.shape == pair.mask.shape
        assert found.dtype == wide
        assert (found >= 0).all()
        allowed = value_tolerance(error(getattr(plain, name), expected), true.largest_logit, wide)
        assert error(found, expected) <= allowed, (name, error(found, expected), allowed)
    half = evaluate(pair, table, upstream, dtype, wide)
    assert_gradients(pair, ours, true, half, upstream, frozen, dtype)
    return ours


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("k", [1, 6, 130])
def test_betas_dtypes_sizes(k: int, beta: float, dtype: torch.dtype, device: torch.device) -> None:
    pair = make_pair((3, 7), 130, beta, dtype, device)
    assert_exact(pair, table_of(pair, k))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("transform", ALL_TRANSFORMS)
@pytest.mark.parametrize("bias", [True, False])
def test_transforms_and_tiles(
    bias: bool, transform: str, beta: float, device: torch.device
) -> None:
    """Entries in many tiles, none in others; under a cap a logit of -inf needs a bias to stay."""
    pair = make_pair(
        9, 1000, beta, device=device, student_transform=ALL_TRANSFORMS[transform], bias=bias
    )
    for row_selection in ("valid", "all"):
        assert_exact(pair, table_of(pair, 20), scratch_bytes=1 << 18, row_selection=row_selection)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("frozen", [("hidden",), ("weight", "bias"), ("bias",)], ids=str)
def test_frozen_and_temperature_per_token(
    frozen: tuple[str, ...], beta: float, device: torch.device
) -> None:
    temperature = (torch.rand(12) + 0.5).to(device)
    pair = make_pair(12, 60, beta, torch.bfloat16, device,
                     student_transform=Transform(softcap=9.0, temperature=temperature))  # fmt: skip
    assert_exact(pair, table_of(pair, 5), frozen)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_all_tokens_in_the_table_give_the_divergence_itself(
    beta: float, device: torch.device
) -> None:
    """And fewer never give more: joining tokens cannot increase a divergence."""
    pair = make_pair(12, 60, beta, device=device)
    upstream = torch.ones(12, device=device)
    full = run(pair, upstream)
    before = torch.full_like(full.divergence, math.inf)
    for k in (60, 59, 20, 5, 1):
        leaves = pair.student.leaves()
        found = call(pair, leaves, table_of(pair, k)).divergence
        assert (found.detach() <= before + 1e-6).all()
        before = found.detach()
        if k == 60:
            found.backward(upstream)
            assert error(found, full.divergence) <= 1e-5
            for name, gradient in full.gradients.items():
                assert error(leaves[name].grad, gradient) <= 1e-5 * max(1.0, largest(gradient))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_own_table_of_a_teacher(beta: float, device: torch.device) -> None:
    """top_k_log_probs of the teacher's head, in any order, with and without the tail's mass."""
    pair = make_pair((3, 5), 130, beta, device=device, teacher_transform=Transform(softcap=5.0))
    teacher = pair.teacher
    table = top_k_log_probs(
        teacher.hidden, teacher.weight, 9, bias=teacher.bias, mask=pair.mask,
        transform=public_transform(teacher.transform),
    )  # fmt: skip
    found = call(pair, pair.student.leaves(), table)
    expected = evaluate(pair, table_of(pair, 9), None)
    assert error(found.divergence, expected.divergence) <= 1e-5
    turned = TopKLogProbs(table.ids.flip(-1), table.log_probs.flip(-1))
    assert error(call(pair, pair.student.leaves(), turned).divergence, expected.divergence) <= 1e-5


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_empty_entries_and_half_precision_tables(beta: float, device: torch.device) -> None:
    """An API that returns fewer tokens for some rows; a table stored in half precision."""
    pair = make_pair(8, 60, beta, device=device)
    table = table_of(pair, 5)
    ids, log_probs = table.ids.clone(), table.log_probs.clone()
    ids[::2, 2:] = -1
    log_probs[::2, 2:] = math.nan
    tail = 1 - log_probs.where(ids >= 0, -math.inf).exp().sum(-1)
    full = TopKLogProbs(ids, log_probs.where(ids >= 0, -math.inf), tail.log())
    given = TopKLogProbs(ids, log_probs)
    upstream = torch.ones(8, device=device)
    expected = evaluate(pair, full, upstream)
    leaves = pair.student.leaves()
    found = call(pair, leaves, given).divergence
    found.backward(upstream)
    assert error(found, expected.divergence) <= 1e-5
    for name in ("hidden", "weight", "bias"):
        assert error(leaves[name].grad, expected.gradients[name]) <= 1e-4
    rounded = TopKLogProbs(ids, log_probs.bfloat16())
    near = call(pair, pair.student.leaves(), rounded).divergence
    assert error(near, expected.divergence) <= 0.05
    assert torch.isfinite(near).all()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_table_that_holds_all_the_mass(beta: float, device: torch.device) -> None:
    """What rounded probabilities leave of 1 is taken as 2^-23, so that KL(q || p) is finite."""
    pair = make_pair(6, 60, beta, device=device, ignored=0.0)
    ids = torch.arange(3, device=device).expand(6, 3)
    certain = TopKLogProbs(ids, torch.tensor([0.0, -math.inf, -200.0], device=device).expand(6, 3))
    if beta == 1.0:
        with pytest.raises(ValueError, match="infinite"):
            call(pair, pair.student.leaves(), certain)
        certain = certain._replace(log_probs=certain.log_probs.clamp(min=-100.0))
    leaves = pair.student.leaves()
    found = call(pair, leaves, certain).divergence
    found.sum().backward()
    assert torch.isfinite(found).all()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves.values())
    full = TopKLogProbs(ids, certain.log_probs, torch.full((6,), math.log(2.0**-23), device=device))
    assert error(found, evaluate(pair, full, None).divergence) <= 1e-4


def test_a7_masked_tokens_of_the_student(device: torch.device) -> None:
    pair = make_pair(9, 300, 0.5, device=device)
    bias = pair.student.bias.clone()
    bias[100:] = -math.inf
    pair = replace(pair, student=replace(pair.student, bias=bias))
    for beta in (0.5, 1.0):
        ours = assert_exact(replace(pair, beta=beta), table_of(pair, 9), scratch_bytes=1 << 18)
        assert (ours.gradients["bias"][100:] == 0).all()
    with pytest.raises(ValueError, match=r"student_bias.*infinite"):
        call(replace(pair, beta=0.0), pair.student.leaves(), table_of(pair, 9))


def test_float16_gradients_of_any_size(device: torch.device) -> None:
    pair = make_pair(12, 60, 0.5, torch.float16, device, logit_std=8.0)
    upstream, table = upstream_for(pair), table_of(pair, 7)
    gradients = []
    for scale in (1.0, 2.0**-20):
        leaves = pair.student.leaves()
        call(pair, leaves, table).divergence.backward(upstream * scale)
        gradients.append(leaves["weight"].grad.double() / scale)
    unit = max(2.0**-11 * largest(gradients[0]), 2.0**-24 * 2**20)
    assert error(*gradients) <= 2 * unit


def test_peak_without_logits(device: torch.device) -> None:
    """N=256, V=4096: the logits are 4 MiB in float32, allowed are 2.5."""
    pair = make_pair(256, 4096, 0.5, torch.bfloat16, device, width=64, ignored=0.0)
    leaves = pair.student.leaves()
    table, upstream = table_of(pair, 8), torch.ones(256, device=device)

    def step() -> object:
        divergence = call(pair, leaves, table, scratch_bytes=MiB).divergence
        return divergence, torch.autograd.grad(divergence, list(leaves.values()), upstream)

    found = measure(step, device)
    student = pair.student
    results = student.weight.numel() * 2 + student.hidden.numel() * 6
    allowed = MiB + results + 256 * (240 + 9 * 4 * 20) + 16 * 4096 + MiB // 16
    assert found.peak <= allowed, f"{found.peak / MiB:.2f} MiB, allowed {allowed / MiB:.2f}"


@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
)
def test_fullgraph(device: torch.device) -> None:
    def loss(pair: Pair, leaves: dict[str, Tensor], mask: Tensor, table: TopKLogProbs) -> Tensor:
        return call(pair, leaves, table, mask=mask).divergence.sum()

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    pair = make_pair(12, 60, 0.5, device=device)
    results = []
    for function in (compiled, loss):
        leaves = pair.student.leaves()
        value = function(pair, leaves, pair.mask, table_of(pair, 5))
        value.backward()
        results.append((value.detach(), *(leaf.grad for leaf in leaves.values())))
    torch._dynamo.reset()
    for found, expected in zip(*results, strict=True):
        assert error(found, expected) <= 1e-6 * max(1.0, largest(expected))


def test_retained_graph_and_no_double_backward(device: torch.device) -> None:
    pair = make_pair(5, 30, 0.5, device=device)
    leaves = pair.student.leaves()
    total = call(pair, leaves, table_of(pair, 4)).divergence.sum()
    first, second = (
        torch.autograd.grad(total, list(leaves.values()), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    (gradient,) = torch.autograd.grad(total, leaves["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="fused_top_k_divergence has no double backward"):
        gradient.sum().backward()


def test_empty_batches_give_zero_gradients(device: torch.device) -> None:
    for rows, ignored in ((0, 0.0), (4, 1.1)):
        pair = make_pair(rows, 30, 0.5, device=device, ignored=ignored)
        leaves = pair.student.leaves()
        result = call(pair, leaves, table_of(pair, 4))
        result.divergence.sum().backward()
        assert (result.divergence == 0).all()
        assert all((leaf.grad == 0).all() for leaf in leaves.values())


def test_errors_name_the_argument(device: torch.device) -> None:
    pair = make_pair(5, 30, 0.5, device=device, ignored=0.0)
    leaves, table = pair.student.leaves(), table_of(pair, 4)
    twice = table.ids.clone()
    twice[2, 1] = twice[2, 0]
    wrong: list[tuple[Any, type[Exception], str]] = [
        (tuple(table), TypeError, "TopKLogProbs"),
        (table._replace(ids=table.ids.int()), TypeError, "teacher.ids"),
        (table._replace(ids=table.ids[:4]), ValueError, "teacher.ids"),
        (table._replace(ids=table.ids + 30), ValueError, "teacher.ids"),
        (table._replace(ids=twice), ValueError, "twice"),
        (table._replace(log_probs=table.log_probs.long()), TypeError, "teacher.log_probs"),
        (table._replace(log_probs=table.log_probs[:, :3]), ValueError, "teacher.log_probs"),
        (table._replace(tail_log_prob=table.log_probs), ValueError, "teacher.tail_log_prob"),
        (table._replace(log_probs=table.log_probs * 0), ValueError, "more than 1"),
    ]
    for bad, kind, name in wrong:
        with pytest.raises(kind, match=name):
            call(pair, leaves, bad)
    with pytest.raises(ValueError, match="beta"):
        call(replace(pair, beta=2.0), leaves, table)
    with pytest.raises(TypeError, match="mask"):
        call(pair, leaves, table, mask=torch.ones(5, device=device))
