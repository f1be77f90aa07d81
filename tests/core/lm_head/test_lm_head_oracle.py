"""The oracle itself, against formulas written another way."""

import math

import torch
from lm_head_oracle import Transform, evaluate, statistics, transformed_logits


def test_statistics_against_torch_distributions() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 11, dtype=torch.float64) * 3
    targets = torch.tensor([0, 10, 4, -100, 7])
    values = statistics(logits, targets, -100)
    categorical = torch.distributions.Categorical(logits=logits)
    keep = targets != -100
    assert torch.allclose(
        values["log_probs"][keep], categorical.log_prob(targets.clamp(min=0))[keep]
    )
    assert torch.allclose(values["entropy"][keep], categorical.entropy()[keep])
    squares = categorical.probs.square().sum(-1).log()
    assert torch.allclose(values["log_sum_sq_probs"][keep], squares[keep])
    assert torch.allclose(values["log_normalizer"][keep], logits.exp().sum(-1).log()[keep])
    assert all(float(values[name][3]) == 0 for name in values)


def test_transform_by_hand() -> None:
    hidden = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    weight = torch.tensor([[3.0, -1.0], [0.5, 0.25]], dtype=torch.float64)
    bias = torch.tensor([0.5, float("-inf")], dtype=torch.float64)
    transform = Transform(scale=2.0, softcap=10.0, temperature=torch.tensor([0.5]))
    logits = transformed_logits(hidden, weight, bias, transform, torch.float64)
    assert math.isclose(float(logits[0, 0]), 10 * math.tanh(2 * 1.5 / 10) / 0.5)
    assert logits[0, 1] == float("-inf")


def test_masked_column_has_no_gradient_and_a_tie_goes_to_the_first() -> None:
    hidden = torch.ones(2, 2)
    weight = torch.tensor([[1.0, 1.0], [1.0, 1.0], [5.0, 5.0]])
    bias = torch.tensor([0.0, 0.0, float("-inf")])
    upstream = {"entropy": torch.ones(2), "mean_logits": torch.ones(2)}
    result = evaluate(hidden, weight, torch.tensor([0, 1]), bias, upstream=upstream)
    assert result.outputs["is_top1"].tolist() == [True, False]
    assert torch.allclose(result.outputs["entropy"], torch.tensor(math.log(2)).double())
    gradient = result.gradients["weight"]
    assert gradient is not None
    assert torch.isfinite(gradient).all()
    assert (gradient[2] == 0).all()
