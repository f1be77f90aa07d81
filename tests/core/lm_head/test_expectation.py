"""The test that accepts expected gradients, and the counter behind it."""

import logging

import pytest
import torch
from torch import Tensor

from lowpeak.lm_head import expectation_counts, reset_expectations
from lowpeak.lm_head.expectation import expectation_counter, judge


def gradients(device: torch.device, scale: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(500, generator=generator, dtype=torch.float64).to(device) * scale
        for name in ("log_probs", "entropy")
    }


@pytest.mark.parametrize("size", [1.0, 1e-30, 1e30])
@pytest.mark.parametrize("factor", [1.0, -3.7, 65536.0, 0.0])
def test_any_factor_holds(factor: float, size: float, device: torch.device) -> None:
    expected = gradients(device, size)
    verdict = judge(expected, {name: factor * x for name, x in expected.items()})
    assert verdict.held
    assert verdict.counts
    assert verdict.factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("noise", [0.9e-6, 1.1e-6])
def test_noise_around_the_tolerance(noise: float, device: torch.device) -> None:
    expected = gradients(device)
    upstream = {name: 2.5 * x for name, x in expected.items()}
    largest = max(float(x.abs().max()) for x in upstream.values())
    upstream["entropy"][7] += noise * largest
    assert judge(expected, upstream).held == (noise < 1e-6)


def test_one_factor_for_all_outputs(device: torch.device) -> None:
    expected = gradients(device)
    upstream = {"log_probs": 2 * expected["log_probs"], "entropy": 3 * expected["entropy"]}
    assert not judge(expected, upstream).held


def test_a_missing_output_is_zero(device: torch.device) -> None:
    expected = gradients(device)
    only = {"log_probs": expected["log_probs"]}
    assert not judge(expected, only).held
    assert not judge(only, expected).held
    assert judge(only, {**only, "entropy": torch.zeros_like(only["log_probs"])}).held
    nothing = {"log_probs": torch.zeros_like(only["log_probs"])}
    assert not judge(nothing, only).held
    assert judge(nothing, nothing).held


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_overflow_neither_holds_nor_counts(value: float, device: torch.device) -> None:
    expected = gradients(device)
    upstream = {name: x.clone() for name, x in expected.items()}
    upstream["log_probs"][3] = value
    verdict = judge(expected, upstream)
    assert not verdict.held
    assert not verdict.counts


def test_three_misses_in_a_row_end_it(caplog: pytest.LogCaptureFixture) -> None:
    counter = expectation_counter("a test's function")
    with caplog.at_level(logging.INFO, logger="lowpeak"):
        for held in (False, False, True, False, False):
            counter.record(held)
            assert counter.worth_trying
        assert not caplog.records
        for _ in range(2):
            counter.record(False)
            assert not counter.worth_trying
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert "a test's function" in caplog.text
    counts = expectation_counts()["a test's function"]
    assert (counts.held, counts.missed, counts.misses_in_a_row) == (1, 6, 4)
    reset_expectations()
    assert counter.worth_trying
    assert expectation_counts()["a test's function"].missed == 0
