"""fused_divergence with backend="triton": the whole route, against the torch tests' oracle."""

from dataclasses import replace

import pytest
import torch
from divergence_checks import BETAS, assert_exact, make_pair, run, upstream_for
from lm_head_checks import Transform, error, largest
from sync_debug import synchronisations

from lowpeak import LogitTransform, TopKLogProbs, fused_top_k_divergence
from lowpeak.lm_head import expectation_counts, reset_expectations

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_betas_and_dtypes(beta: float, dtype: torch.dtype, device: torch.device) -> None:
    for shape in ((0, 7), (1, 1), (7, 130)):
        assert_exact(make_pair(*shape, beta, dtype, device), backend="triton")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_many_tiles_and_every_option(beta: float, dtype: torch.dtype, device: torch.device) -> None:
    temperature = (torch.rand(6) + 0.5).to(device)
    pair = make_pair(
        6, 1000, beta, dtype, device,
        student_transform=Transform(scale=0.5, softcap=6.0, temperature=temperature),
        teacher_transform=Transform(softcap=9.0, temperature=0.8),
    )  # fmt: skip
    assert_exact(pair, backend="triton", scratch_bytes=1 << 15)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_one_pass(beta: float, dtype: torch.dtype, device: torch.device) -> None:
    """Frozen heads, and expected gradients (not in float16): several blocks of all logits."""
    pair = make_pair(
        6, 5000, beta, dtype, device,
        student_transform=Transform(scale=0.5, softcap=6.0, temperature=0.9),
    )  # fmt: skip
    upstream = upstream_for(pair)
    options = {"backend": "triton", "scratch_bytes": 1 << 19}
    assert_exact(pair, frozen=("weight", "bias"), **options)
    assert_exact(pair, expected_grads=upstream * 2, upstream=upstream, **options)


@pytest.mark.parametrize("softcap", [None, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_top_k_table(dtype: torch.dtype, softcap: float | None, device: torch.device) -> None:
    """Entries leave the tiles as logits of -inf, which a cap keeps only beside a bias."""
    pair = make_pair(5, 1000, 0.3, dtype, device, bias=False)
    ids = torch.rand(5, 1000).to(device).argsort(-1)[:, :6]
    table = TopKLogProbs(ids, torch.full((5, 6), -2.5, device=device))
    results = []
    for backend in ("triton", "torch"):
        leaves = pair.student.leaves()
        divergence, entropy = fused_top_k_divergence(
            leaves["hidden"], leaves["weight"], table, beta=0.3,
            student_transform=LogitTransform(softcap=softcap, temperature=0.8),
            backend=backend, scratch_bytes=1 << 18,
        )  # fmt: skip
        divergence.backward(torch.linspace(-1, 1, 5, device=device))
        results.append((divergence.detach(), entropy, *(leaf.grad for leaf in leaves.values())))
    unit = 1e-5 if dtype == torch.float32 else 2e-3
    for ours, theirs in zip(*results, strict=True):
        assert error(ours, theirs) <= unit * max(1.0, largest(theirs))


@pytest.mark.parametrize("beta", BETAS)
def test_a7_masked_columns(beta: float, device: torch.device) -> None:
    pair = make_pair(5, 1000, beta, device=device)
    for case in (pair.student, pair.teacher):
        case.bias[100:] = float("-inf")
    assert_exact(pair, backend="triton", scratch_bytes=1 << 15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
def test_equal_heads_give_exactly_nothing(
    beta: float, dtype: torch.dtype, device: torch.device
) -> None:
    pair = make_pair(4, 300, beta, dtype, device)
    ours = run(replace(pair, teacher=pair.student), upstream_for(pair), backend="triton")
    assert (ours.divergence == 0).all()
    assert all((gradient == 0).all() for gradient in ours.gradients.values())


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_equals_the_torch_backend(beta: float, device: torch.device) -> None:
    """Same tiles, same formula: the backends differ by roundoff only. Repeats are bitwise equal."""
    pair = make_pair(5, 300, beta, device=device)
    upstream = upstream_for(pair)
    first, again, plain = (
        run(pair, upstream, backend=backend) for backend in ("triton", "triton", "torch")
    )
    assert torch.equal(first.divergence, again.divergence)
    assert error(first.divergence, plain.divergence) <= 1e-5
    assert error(first.entropy, plain.entropy) <= 1e-5
    for name, gradient in first.gradients.items():
        assert torch.equal(gradient, again.gradients[name])
        assert error(gradient, plain.gradients[name]) <= 1e-5 * max(1.0, largest(gradient))


def test_float64_of_either_head_is_refused_in_words(device: torch.device) -> None:
    pair = make_pair(3, 7, 0.5, device=device)
    for head in ("student", "teacher"):
        wide = replace(pair, **{head: getattr(pair, head).to(torch.float64)})
        with pytest.raises(ValueError, match=r"(?s)backend.*float64"):
            run(wide, backend="triton")


@pytest.mark.cuda
@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_realistic_shape(beta: float, backend: str, device: torch.device) -> None:
    transform = Transform(softcap=30.0, temperature=0.8)
    pair = make_pair(2048, 32003, beta, torch.bfloat16, device, width=256, teacher_width=512,
                     student_transform=transform)  # fmt: skip
    assert_exact(pair, backend=backend, scratch_bytes=1 << 26)


@pytest.mark.cuda
@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_one_pass_of_a_realistic_shape(
    beta: float, frozen: tuple[str, ...], device: torch.device
) -> None:
    """Several groups of tokens: 512 MiB hold 2048 x 32003 logits of both heads, 320 not."""
    pair = make_pair(2048, 32003, beta, torch.bfloat16, device, width=256, teacher_width=512,
                     student_transform=Transform(softcap=30.0, temperature=0.8))  # fmt: skip
    upstream = upstream_for(pair)
    reset_expectations()
    for scratch in (320 << 20, 640 << 20):
        assert_exact(
            pair, upstream=upstream, frozen=frozen, expected_grads=upstream, scratch_bytes=scratch
        )
    counts = expectation_counts()["fused_divergence"]
    assert (counts.held, counts.missed) == (0 if frozen else 2, 0)


@pytest.mark.cuda
def test_rows_synchronise_once_or_never(device: torch.device) -> None:
    pair = make_pair(64, 500, 0.5, torch.float16, device)
    upstream = upstream_for(pair)
    run(pair, upstream)
    run(pair, upstream, row_selection="all")
    torch.cuda.synchronize()
    frozen = ("weight", "bias")
    run(pair, upstream, frozen, row_selection="all")
    torch.cuda.synchronize()
    with synchronisations("error"):
        run(pair, upstream, row_selection="all", mask=pair.mask)
        run(pair, upstream, frozen, row_selection="all", mask=pair.mask)
    with pytest.warns(UserWarning, match="synchroniz") as caught, synchronisations("warn"):
        run(pair, upstream, mask=pair.mask)
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1
