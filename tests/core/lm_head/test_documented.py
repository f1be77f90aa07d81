"""The examples of docs/lm-head.md, distillation.md and metrics.md run, and give what they say."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lowpeak import LogitTransform, fused_divergence

DOCS = Path(__file__).parents[3] / "docs"


def run_page(name: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a page's examples in order; what each of them leaves behind."""
    text = (DOCS / name).read_text(encoding="utf-8")
    states = []
    for example in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        if "lowpeak_trainers" in example:  # tests/trainers/test_tile_metrics.py runs it
            continue
        exec(compile(example, name, "exec"), names)
        states.append(dict(names))
    return states


def test_distillation() -> None:
    torch.manual_seed(0)
    student_hidden = torch.randn(2, 9, 8, requires_grad=True)
    student_weight = torch.randn(90, 8, requires_grad=True)
    names = {
        "student_hidden": student_hidden,
        "student_weight": student_weight,
        "teacher_hidden": torch.randn(2, 9, 12),
        "teacher_weight": torch.randn(90, 12),
        "mask": torch.rand(2, 9) < 0.7,
        "num_items": 20,
    }
    first, second = run_page("distillation.md", names)
    gradient = student_weight.grad.clone()
    assert torch.isfinite(gradient).all()
    at_two = LogitTransform(temperature=2.0)
    forward_kl = fused_divergence(
        student_hidden, student_weight, names["teacher_hidden"], names["teacher_weight"],
        beta=0.0, mask=names["mask"], student_transform=at_two, teacher_transform=at_two,
    ).divergence.sum() / 20  # fmt: skip
    assert 0 < second["loss"].item() <= forward_kl.item() + 1e-6
    assert second["loss"].item() == pytest.approx(forward_kl.item(), rel=0.1)
    assert first["loss"].item() != second["loss"].item()


def test_metrics() -> None:
    torch.manual_seed(0)
    targets = torch.randint(60, (2, 9))
    targets[0, :3] = -100
    hidden = torch.randn(2, 9, 8, requires_grad=True)
    weight = torch.randn(60, 8, requires_grad=True)
    smoothing, z_weight = 0.1, 1e-3
    names = {
        "hidden": hidden,
        "weight": weight,
        "targets": targets,
        "candidates": torch.tensor([3, 7, 11]),
        "smoothing": smoothing,
        "z_weight": z_weight,
    }
    first, second, third = run_page("metrics.md", names)

    logits = (hidden @ weight.t()).detach()
    scored = targets != -100
    log_p = logits.log_softmax(-1)
    best = logits.argmax(-1)
    assert first["accuracy"].item() == pytest.approx(
        (best == targets)[scored].float().mean().item()
    )
    place = (logits.argsort(-1, descending=True) == targets[..., None]).int().argmax(-1)[scored]
    assert first["top_5_accuracy"].item() == pytest.approx((place < 5).float().mean().item())
    assert first["mean_reciprocal_rank"].item() == pytest.approx((1 / (1 + place)).mean().item())
    nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert first["perplexity"].item() == pytest.approx(nll.exp().item(), rel=1e-5)
    assert torch.equal(first["answer"][scored], logits[..., [3, 7, 11]].argmax(-1)[scored])

    leaves = [x.detach().requires_grad_() for x in (hidden, weight)]
    plain = (leaves[0] @ leaves[1].t()).flatten(0, 1)
    expected = (
        torch.nn.functional.cross_entropy(plain, targets.flatten(), label_smoothing=smoothing)
        + z_weight * plain.logsumexp(-1)[scored.flatten()].square().mean()
    )
    expected.backward()
    assert second["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    for ours, theirs in zip((hidden, weight), leaves, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6)

    entropy = -(log_p.exp() * log_p).sum(-1, keepdim=True)
    varentropy = (log_p.exp() * (log_p + entropy).square()).sum(-1)
    torch.testing.assert_close(third["varentropy"], varentropy.flatten(), rtol=1e-5, atol=1e-6)


def test_head() -> None:
    """Each example's gradients beside those of plain torch."""
    torch.manual_seed(0)
    leaves = {
        name: torch.randn(*shape).requires_grad_()
        for name, shape in (
            ("hidden", (9, 8)), ("weight", (90, 8)), ("lora_a", (4, 8)), ("lora_b", (90, 4)),
        )
    }  # fmt: skip
    targets = torch.randint(90, (9,))
    targets[4] = -100
    run_page("lm-head.md", {**leaves, "targets": targets, "alpha": 6, "rank": 4})
    hidden, weight, a, b = (x.detach().clone().requires_grad_() for x in leaves.values())
    for whole in (weight, weight + 1.5 * b @ a):
        torch.nn.functional.cross_entropy(hidden @ whole.t(), targets).backward()
    for name, twin in zip(leaves, (hidden, weight, a, b), strict=True):
        torch.testing.assert_close(leaves[name].grad, twin.grad, rtol=1e-5, atol=1e-6)
