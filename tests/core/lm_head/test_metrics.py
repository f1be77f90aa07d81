"""lm_head_metrics, top_k_log_probs and logit_tiles against all logits in float64."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from lm_head_checks import ALL_TRANSFORMS, Case, Transform, error, make_case, public_transform
from lm_head_memory import measure
from lm_head_oracle import transformed_logits
from lm_head_tolerances import ALL_DTYPES, statistics_dtype, value_tolerance
from torch import Tensor

from lowpeak import (
    LMHeadMetrics,
    lm_head_metrics,
    logit_tiles,
    top_k_log_probs,
)

MiB = 1 << 20


def metrics(case: Case, **options: object) -> LMHeadMetrics:
    return lm_head_metrics(
        case.hidden,
        case.weight,
        case.targets,
        bias=case.bias,
        transform=public_transform(case.transform),
        **options,
    )


def logits_of(case: Case, dtype: torch.dtype = torch.float64) -> Tensor:
    """z [..., V]: products and all that follows in `dtype`."""
    wide = case.to(dtype)
    return transformed_logits(wide.hidden, wide.weight, wide.bias, case.transform, dtype)


def exact_case(
    rows: tuple[int, ...], vocabulary: int, device: torch.device, **options: object
) -> Case:
    """Small integers, whose logits are exact in float32 and often equal."""
    case = make_case(rows, vocabulary, 8, device=device, **options)
    hidden = (case.hidden * 2).round()
    bias = None if case.bias is None else (case.bias * 2).round()
    return replace(case, hidden=hidden, weight=case.weight.round(), bias=bias)


def ranks(z: Tensor, targets: Tensor) -> Tensor:
    """Place of the target in a stable sort by falling logit; -1 where it is ignored."""
    order = z.sort(dim=-1, descending=True, stable=True).indices
    place = (order == targets.unsqueeze(-1)).int().argmax(-1)
    return place.masked_fill(targets < 0, -1)


@pytest.mark.parametrize("scratch", [None, 1 << 16], ids=["one tile", "tiles"])
@pytest.mark.parametrize("transform", ALL_TRANSFORMS)
def test_ids_and_ranks_with_ties(transform: str, scratch: int | None, device: torch.device) -> None:
    """Among equal logits the smallest id is first: argmax, ranks and hits of a stable sort."""
    chosen = Transform() if transform == "all" else ALL_TRANSFORMS[transform]
    case = exact_case((5, 9), 1000, device, logit_std=1.0)
    case = replace(case, transform=chosen)
    z = logits_of(case, torch.float32)
    found = metrics(case, rank=True, top_k=7, scratch_bytes=scratch)
    valid = case.targets != -100
    expected = ranks(z, case.targets)
    if transform != "softcap":  # tanh in another order of roundings makes other ties
        assert torch.equal(found.target_rank, expected)
    first = (z == z.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(found.argmax, first.masked_fill(~valid, -1))
    assert torch.equal(found.is_correct, (first == case.targets) & valid)
    assert (
        found.top_k_hit[valid] == (found.top_k.ids == case.targets.unsqueeze(-1)).any(-1)[valid]
    ).all()
    assert not found.top_k_hit[~valid].any()
    ids = found.top_k.ids[valid]
    assert torch.equal(z[valid].gather(-1, ids), z[valid].topk(7).values)
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert (found.top_k.ids[~valid] == -1).all()


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("transform", ["plain", "all"])
@pytest.mark.parametrize("scratch", [None, 1 << 18], ids=["one tile", "tiles"])
def test_log_probs(
    scratch: int | None, transform: str, dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case((4, 5), 1000, 24, dtype, device, transform=ALL_TRANSFORMS[transform])
    candidates = torch.tensor([3, 999, 0, 3], device=device)
    found = metrics(case, top_k=5, candidates=candidates, scratch_bytes=scratch)
    z = logits_of(case)
    log_p, valid = z.log_softmax(-1), case.targets != -100
    wide = statistics_dtype(dtype)
    reference = error(logits_of(case, wide).log_softmax(-1), log_p)
    allowed = value_tolerance(reference, float(z.abs().max()), wide)
    expected = {
        "candidates": (found.candidate_log_probs, log_p[..., candidates]),
        "target": (
            found.log_probs[..., None],
            log_p.gather(-1, case.targets.clamp(min=0)[..., None]),
        ),
        "top": (found.top_k.log_probs, log_p.topk(5).values),
        "top ids": (found.top_k.log_probs, log_p.gather(-1, found.top_k.ids.clamp(min=0))),
    }
    for name, (ours, true) in expected.items():
        assert ours.dtype == wide, name
        assert error(ours[valid], true[valid]) <= allowed, name
        assert (ours[~valid] == 0).all(), name
    per_row = torch.randint(1000, (4, 5, 3), device=device)
    ours = metrics(case, candidates=per_row, scratch_bytes=scratch).candidate_log_probs
    assert error(ours[valid], log_p.gather(-1, per_row)[valid]) <= allowed


@pytest.mark.parametrize("k", [1, 5, 60])
@pytest.mark.parametrize("peaked", [1.0, 30.0])
@pytest.mark.parametrize("scratch", [None, 36000], ids=["one tile", "tiles"])
def test_tail_of_a_table(scratch: int | None, peaked: float, k: int, device: torch.device) -> None:
    """The mass outside the table keeps its digits where the table holds nearly everything."""
    case = make_case(11, 60, 8, device=device, logit_std=peaked)
    table = top_k_log_probs(
        case.hidden,
        case.weight,
        k,
        bias=case.bias,
        mask=case.targets != -100,
        scratch_bytes=scratch,
    )
    valid = case.targets != -100
    ordered = logits_of(case).log_softmax(-1).sort(-1, descending=True).values[valid]
    tail = ordered[:, k:].logsumexp(-1)
    assert error(table.tail_log_prob[valid], tail) <= 2e-5 * max(1.0, peaked)
    assert error(table.log_probs[valid], ordered[:, :k]) <= 2e-5 * max(1.0, peaked)
    assert (table.ids[~valid] == -1).all()
    if k < 60 and peaked == 30.0:
        assert (tail < -16).any(), "no row whose tail vanishes in 1 - sum"


def test_masked_tokens(device: torch.device) -> None:
    """A bias of -inf: never among the best, log-probability -inf, last in rank; whole tiles too."""
    case = exact_case((7,), 1000, device, ignored=0.0)
    case.bias[:700] = -math.inf
    case = replace(case, targets=torch.full_like(case.targets, 5))
    for transform in (Transform(), Transform(scale=-1.0, softcap=9.0)):
        for scratch in (None, 1 << 18):
            found = metrics(
                replace(case, transform=transform), rank=True, top_k=300,
                candidates=torch.tensor([5], device=device), scratch_bytes=scratch,
            )  # fmt: skip
            assert (found.argmax >= 700).all()
            assert (found.top_k.ids >= 700).all()
            assert (found.top_k.tail_log_prob == -math.inf).all()
            assert torch.allclose(found.top_k.log_probs.exp().sum(-1), torch.ones(7, device=device))
            assert (found.log_probs == -math.inf).all()
            assert (found.candidate_log_probs == -math.inf).all()
            assert (found.target_rank == 305).all()


@pytest.mark.parametrize("shape", [(0,), (1,), (2, 0)], ids=str)
def test_few_rows(shape: tuple[int, ...], device: torch.device) -> None:
    case = make_case(shape, 1, 3, device=device, ignored=0.0)
    found = metrics(
        case, rank=True, top_k=1, candidates=torch.zeros(2, dtype=torch.int64).to(device)
    )
    assert found.argmax.shape == found.target_rank.shape == found.is_correct.shape == shape
    assert found.is_correct.all()
    assert (found.target_rank == 0).all()
    assert found.candidate_log_probs.shape == (*shape, 2)
    assert (found.top_k.log_probs == 0).all()


def test_every_target_ignored(device: torch.device) -> None:
    case = make_case(4, 30, 3, device=device, ignored=1.1)
    found = metrics(case, rank=True, top_k=2)
    assert (found.argmax == -1).all()
    assert (found.target_rank == -1).all()
    assert not found.is_correct.any()
    assert (found.log_probs == 0).all()
    assert found.candidate_log_probs is None
    assert not found.log_probs.requires_grad


def test_temperature_per_token_and_autocast(device: torch.device) -> None:
    temperature = (torch.rand(4, 5) + 0.5).to(device)
    case = make_case((4, 5), 300, 16, device=device, transform=Transform(temperature=temperature))
    valid = case.targets != -100
    log_p = logits_of(case).log_softmax(-1).gather(-1, case.targets.clamp(min=0)[..., None])[..., 0]
    assert error(metrics(case).log_probs[valid], log_p[valid]) <= 1e-5
    with torch.autocast(device.type, torch.bfloat16):
        cast = metrics(case)
    rounded = replace(case, hidden=case.hidden.bfloat16(), weight=case.weight.bfloat16())
    assert torch.equal(cast.log_probs, metrics(rounded).log_probs)


def test_errors_name_the_argument(device: torch.device) -> None:
    case = make_case(4, 30, 3, device=device)
    wrong: list[tuple[dict[str, object], type[Exception], str]] = [
        (dict(top_k=0), ValueError, "top_k"),
        (dict(top_k=31), ValueError, "top_k"),
        (dict(candidates=[1]), TypeError, "candidates"),
        (dict(candidates=torch.ones(2, device=device)), TypeError, "candidates"),
        (dict(candidates=torch.tensor([30], device=device)), IndexError, "candidates"),
        (dict(candidates=torch.ones(3, 2, dtype=torch.int64, device=device)), ValueError, "cand"),
        (dict(scratch_bytes=10), ValueError, "scratch_bytes"),
    ]
    for options, kind, name in wrong:
        with pytest.raises(kind, match=name):
            metrics(case, **options)
    with pytest.raises(IndexError, match="targets"):
        metrics(replace(case, targets=case.targets + 30))
    with pytest.raises(TypeError, match="mask"):
        top_k_log_probs(case.hidden, case.weight, 3, mask=case.targets.double())


def test_peak_within_the_budget(device: torch.device) -> None:
    """N=256, V=4096: the logits are 4 MiB in float32, 1 MiB of scratch is enough."""
    case = make_case(256, 4096, 32, torch.bfloat16, device, ignored=0.0)
    candidates = torch.arange(4, device=device)
    found = measure(
        lambda: metrics(case, rank=True, top_k=8, candidates=candidates, scratch_bytes=MiB), device
    )
    results = 256 * (4 + 8 + 5) * 24
    assert found.peak <= MiB + 256 * 600 + 16 * 4096 + results, f"{found.peak / MiB:.2f} MiB"


def test_tiles_are_the_logits(device: torch.device) -> None:
    """Whole rows in order, each a tensor of its own, with cap and temperature."""
    case = make_case((4, 7), 130, 16, torch.bfloat16, device, transform=ALL_TRANSFORMS["all"])
    tiles = logit_tiles(
        case.hidden, case.weight, bias=case.bias, transform=public_transform(case.transform),
        scratch_bytes=2 * 4 * 130 * 5,
    )  # fmt: skip
    assert isinstance(tiles, Iterator)
    found = list(tiles)
    assert [(rows.start, rows.stop) for rows, _ in found] == [
        (i, min(i + 5, 28)) for i in range(0, 28, 5)
    ]
    joined = torch.cat([z for _, z in found])
    assert joined.dtype == torch.float32
    true, plain = logits_of(case), logits_of(case, torch.float32)
    allowed = value_tolerance(error(plain, true), float(true.abs().max()), torch.float32)
    assert error(joined, true.flatten(0, 1)) <= allowed
    assert list(logit_tiles(case.hidden[:0], case.weight)) == []
