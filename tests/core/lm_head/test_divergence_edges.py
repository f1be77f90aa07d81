"""Rows and arguments on which a careless divergence breaks."""

import math
from dataclasses import replace

import pytest
import torch
from divergence_checks import (
    BETAS,
    Pair,
    assert_exact,
    call,
    evaluate,
    make_pair,
    run,
    upstream_for,
)
from lm_head_checks import Case, Transform, error
from torch import Tensor

from lowpeak import LogitTransform, fused_divergence

MINUS_INFINITY = float("-inf")


def pair_of_logits(student: Tensor, teacher: Tensor, beta: float, device: torch.device) -> Pair:
    """A pair with these very logits [N, V]: hidden is the identity."""
    targets = torch.zeros(student.size(0), dtype=torch.int64, device=device)
    eye = torch.eye(student.size(0), device=device)
    heads = [
        Case(eye, logits.T.contiguous().to(device), targets, torch.zeros(logits.size(1)).to(device))
        for logits in (student, teacher)
    ]
    return Pair(*heads, beta)


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equal_heads_give_exactly_nothing(
    dtype: torch.dtype, beta: float, device: torch.device
) -> None:
    """Teacher == student: divergence and gradients are 0 to the last bit, over many tiles too."""
    pair = make_pair(33, 1000, beta, dtype, device)
    pair = replace(pair, teacher=pair.student)
    ours = run(pair, upstream_for(pair), scratch_bytes=1 << 18)
    assert (ours.divergence == 0).all()
    assert all((gradient == 0).all() for gradient in ours.gradients.values())


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("size", [1e-3, 1e-1])
def test_nearly_equal_heads(size: float, beta: float, device: torch.device) -> None:
    """A small divergence is a difference of large sums."""
    pair = make_pair(20, 129, beta, device=device, width=16)
    noise = torch.randn_like(pair.student.weight) * size
    teacher = replace(pair.student, weight=pair.student.weight + noise)
    assert_exact(replace(pair, teacher=teacher))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("gap", [16.0, 30.0, 104.0, 1000.0])
@pytest.mark.parametrize("where", [(0, 0), (0, 129), (64, 0)], ids=str)
def test_certain_distributions(
    where: tuple[int, int], gap: float, beta: float, device: torch.device
) -> None:
    """p -> 1, on the same token and on different ones."""
    logits = [torch.zeros(1, 130) for _ in where]
    for one, token in zip(logits, where, strict=True):
        one[0, token] = gap
    ours = assert_exact(pair_of_logits(*logits, beta, device))
    if where[0] != where[1] and gap >= 104.0 and 0 < beta < 1:
        entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert abs(float(ours.divergence) - entropy) < 1e-6


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_disjoint_supports(beta: float, device: torch.device) -> None:
    """Biases that mask complementary halves: a mixture is the entropy of a coin, exactly."""
    pair = make_pair(9, 60, beta, device=device)
    biases = [case.bias.clone() for case in (pair.student, pair.teacher)]
    biases[0][:20] = biases[1][20:] = MINUS_INFINITY
    pair = replace(
        pair,
        student=replace(pair.student, bias=biases[0]),
        teacher=replace(pair.teacher, bias=biases[1]),
    )
    for scratch in (None, 1 << 17):
        ours = assert_exact(pair, scratch_bytes=scratch)
        coin = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert error(ours.divergence[pair.mask], torch.full((), coin)) < 1e-6
        assert (ours.gradients["bias"][:20] == 0).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("transform", [Transform(), Transform(softcap=5.0, scale=-0.5)], ids=str)
@pytest.mark.parametrize("columns", [slice(0, 40), slice(300, 1000), slice(0, 999)], ids=str)
def test_a7_tokens_masked_in_both_heads(
    columns: slice, transform: Transform, beta: float, device: torch.device
) -> None:
    """Whole tiles masked, the first ones too; the student may mask more for beta 1, less for 0."""
    pair = make_pair(9, 1000, beta, device=device, student_transform=transform)
    masked = []
    for head, extra in (("student", beta == 1), ("teacher", beta == 0)):
        case = getattr(pair, head)
        bias = case.bias.clone()
        bias[columns] = MINUS_INFINITY
        if extra and columns.start > 0:
            bias[100:200] = MINUS_INFINITY
        masked.append(replace(case, bias=bias))
    pair = Pair(*masked, beta)
    ours = assert_exact(pair, scratch_bytes=1 << 18)
    assert (ours.gradients["weight"][columns] == 0).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("offsets", [(1000.0, -1000.0), (-3000.0, -3000.0)], ids=str)
def test_common_offsets_cancel(
    offsets: tuple[float, float], beta: float, device: torch.device
) -> None:
    """logits + offset change nothing but the rounding of the logits themselves."""
    generator = torch.Generator().manual_seed(0)
    logits = [torch.randint(-8, 8, (4, 130), generator=generator) / 4 for _ in offsets]
    base = run(pair_of_logits(*logits, beta, device))
    moved = [one + offset for one, offset in zip(logits, offsets, strict=True)]
    found = run(pair_of_logits(*moved, beta, device))
    assert error(found.divergence, base.divergence) <= 1e-6
    assert error(found.entropy, base.entropy) <= 2e-6


@pytest.mark.parametrize("row_selection", ["valid", "all"])
@pytest.mark.parametrize(("beta", "head"), [(0.0, "student"), (1.0, "teacher")])
def test_an_infinite_kl_is_refused(
    beta: float, head: str, row_selection: str, device: torch.device
) -> None:
    """One head masks a token that the other allows; a mixture of the two is finite."""
    if row_selection == "all" and device.type != "cpu":
        pytest.skip("a failed assertion on the device ends the process's CUDA context")
    pair = make_pair(5, 30, beta, device=device)
    case = getattr(pair, head)
    bias = case.bias.clone()
    bias[7] = MINUS_INFINITY
    pair = replace(pair, **{head: replace(case, bias=bias)})
    with pytest.raises((ValueError, RuntimeError), match=rf"{head}_bias.*infinite"):
        run(pair, row_selection=row_selection)
    unbiased = replace(pair.teacher if head == "student" else pair.student, bias=None)
    other = "teacher" if head == "student" else "student"
    with pytest.raises((ValueError, RuntimeError), match=rf"{head}_bias.*infinite"):
        run(replace(pair, **{other: unbiased}), row_selection=row_selection)
    assert_exact(replace(pair, beta=0.5), row_selection=row_selection)
    assert_exact(replace(pair, beta=1.0 - beta), row_selection=row_selection)


def test_a_head_without_a_finite_logit_is_refused(device: torch.device) -> None:
    pair = make_pair(5, 30, 0.5, device=device)
    for head in ("student", "teacher"):
        case = getattr(pair, head)
        masked = replace(case, bias=torch.full_like(case.bias, MINUS_INFINITY))
        with pytest.raises(ValueError, match=f"{head}_bias"):
            run(replace(pair, **{head: masked}))
        cold = replace(case, transform=Transform(temperature=torch.zeros(5, device=device)))
        with pytest.raises(ValueError, match=f"{head}_temperature"):
            run(replace(pair, **{head: cold}))


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("sizes", [(128, 136), (136, 128)], ids=str)
def test_g5_vocabularies_of_different_sizes(
    sizes: tuple[int, int], beta: float, device: torch.device
) -> None:
    """Refused with both sizes, or compared over the shared tokens, both renormalised over them."""
    pair = make_pair(9, 136, beta, device=device)

    def cut(case: Case, size: int) -> Case:
        return replace(case, weight=case.weight[:size], bias=case.bias[:size])

    different = Pair(cut(pair.student, sizes[0]), cut(pair.teacher, sizes[1]), beta)
    with pytest.raises(ValueError, match=rf"{sizes[0]}.*{sizes[1]}.*vocabulary='shared'"):
        run(different)
    upstream = upstream_for(pair)
    true = evaluate(Pair(cut(pair.student, 128), cut(pair.teacher, 128), beta), upstream)
    for expected in (None, upstream):  # logits twice, and once
        ours = run(different, upstream, vocabulary="shared", expected_grads=expected)
        assert error(ours.divergence, true.divergence) <= 1e-5
        for name in ("weight", "bias"):
            gradient = ours.gradients[name]
            assert gradient.size(0) == sizes[0]
            assert error(gradient[:128], true.gradients[name]) <= 1e-4
            assert (gradient[128:] == 0).all()
    same = run(pair, upstream)
    assert torch.equal(run(pair, upstream, vocabulary="shared").divergence, same.divergence)


def test_errors_name_the_argument(device: torch.device) -> None:
    pair = make_pair(5, 30, 0.5, device=device, ignored=0.0)
    hidden, weight = pair.student.hidden, pair.student.weight
    teacher = (pair.teacher.hidden, pair.teacher.weight)
    wrong = [
        (dict(beta=-0.1), ValueError, "beta"),
        (dict(beta=1.5), ValueError, "beta"),
        (dict(beta=float("nan")), ValueError, "beta"),
        (dict(beta="0.5"), TypeError, "beta"),
        (dict(beta=0.5, mask=torch.ones(4, dtype=torch.bool, device=device)), ValueError, "mask"),
        (dict(beta=0.5, mask=torch.ones(5, device=device)), TypeError, "mask"),
        (dict(beta=0.5, mask=[True] * 5), TypeError, "mask"),
        (dict(beta=0.5, vocabulary="some"), ValueError, "vocabulary"),
        (dict(beta=0.5, row_selection="some"), ValueError, "row_selection"),
        (dict(beta=0.5, backend="some"), ValueError, "backend"),
        (dict(beta=0.5, scratch_bytes=100), ValueError, "scratch_bytes"),
        (dict(beta=0.5, teacher_bias=torch.zeros(3)), ValueError, "teacher_bias"),
        (dict(beta=0.5, student_bias=weight.int()), TypeError, "student_bias"),
        (dict(beta=0.5, teacher_transform=2.0), TypeError, "teacher_transform"),
        (
            dict(beta=0.5, student_transform=LogitTransform(temperature=torch.ones(3))),
            ValueError,
            "student_temperature",
        ),
    ]
    for options, kind, name in wrong:
        with pytest.raises(kind, match=name):
            fused_divergence(hidden, weight, *teacher, **options)
    with pytest.raises(ValueError, match="teacher_hidden"):
        fused_divergence(hidden, weight, teacher[0][:4], teacher[1], beta=0.5)
    with pytest.raises(ValueError, match="teacher_hidden"):
        fused_divergence(hidden, weight, teacher[0], weight, beta=0.5)
    with pytest.raises(TypeError, match="teacher_weight"):
        fused_divergence(hidden, weight, teacher[0], None, beta=0.5)  # type: ignore[arg-type]


def test_double_backward_is_refused_in_words(device: torch.device) -> None:
    pair = make_pair(5, 30, 0.5, device=device)
    leaves = pair.student.leaves()
    divergence = call(pair, leaves).divergence.sum()
    (gradient,) = torch.autograd.grad(divergence, leaves["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="fused_divergence has no double backward"):
        gradient.sum().backward()


def test_retained_graph_gives_the_same_twice(device: torch.device) -> None:
    pair = make_pair(5, 30, 0.5, torch.bfloat16, device)
    leaves = pair.student.leaves()
    total = call(pair, leaves).divergence.sum()
    first, second = (
        torch.autograd.grad(total, list(leaves.values()), retain_graph=True) for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
