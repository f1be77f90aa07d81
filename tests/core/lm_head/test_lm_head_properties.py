"""Random shapes, layouts, dtypes and flags against the oracle."""

from dataclasses import replace

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_head_checks import (
    DIFFERENTIABLE,
    OUTPUTS,
    Case,
    Transform,
    assert_exact,
    make_case,
    upstream_for,
)
from lm_head_tolerances import ALL_DTYPES

NUMBERS = st.floats(0.25, 4.0, allow_nan=False)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Rows of rank 1..3, any layout of hidden and weight, any transform."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    temperature: float | torch.Tensor = draw(NUMBERS)
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
        temperature = torch.rand(shape, generator=generator) + 0.3
    transform = Transform(
        scale=draw(NUMBERS) * draw(st.sampled_from([1, -1])),
        softcap=draw(st.none() | st.floats(1.0, 50.0)),
        temperature=temperature,
    )
    case = make_case(
        shape,
        draw(st.sampled_from([1, 2, 15, 16, 17, 129, 300])),
        draw(st.sampled_from([1, 2, 15, 16, 17, 33])),
        draw(st.sampled_from(ALL_DTYPES)),
        bias=draw(st.booleans()),
        ignored=draw(st.sampled_from([0.0, 0.3, 0.9, 1.1])),
        ignore_index=draw(st.sampled_from([-100, -1, 0])),
        transform=transform,
        logit_std=draw(st.sampled_from([0.1, 3.0, 20.0])),
        seed=draw(st.integers(0, 2**16)),
    )
    if draw(st.booleans()):
        case = replace(case, weight=case.weight.T.contiguous().T)
    if draw(st.booleans()):
        case = replace(case, hidden=torch.stack([case.hidden, case.hidden], -1)[..., 0])
    return case


@settings(max_examples=60, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    case=cases(),
    names=st.lists(st.sampled_from(DIFFERENTIABLE), min_size=1, unique=True),
    row_selection=st.sampled_from(["valid", "all"]),
    scratch=st.sampled_from([None, 1 << 18, 1 << 20]),
    frozen=st.sampled_from([(), ("weight",), ("hidden",), ("weight", "bias")]),
)
def test_any_call_matches_the_oracle(
    case: Case,
    names: list[str],
    row_selection: str,
    scratch: int | None,
    frozen: tuple[str, ...],
) -> None:
    if case.bias is None:
        frozen = tuple(name for name in frozen if name != "bias")
    assert_exact(
        case,
        OUTPUTS,
        upstream=upstream_for(case, names),
        frozen=frozen,
        row_selection=row_selection,
        scratch_bytes=scratch,
    )
