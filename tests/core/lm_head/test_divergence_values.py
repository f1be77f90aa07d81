"""fused_divergence against all logits in float64: values and gradients over its options."""

from dataclasses import replace

import pytest
import torch
from divergence_checks import BETAS, assert_exact, call, evaluate, make_pair, run, upstream_for
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lm_head_checks import ALL_TRANSFORMS, Transform, error, largest
from lm_head_tolerances import ALL_DTYPES, TILES_FACTOR

from lowpeak import fused_divergence
from lowpeak.lm_head import expectation_counts, reset_expectations


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("shape", [(0, 7), (1, 1), (33, 127), ((2, 3, 5), 60)], ids=str)
def test_betas_dtypes_shapes(
    shape: tuple[int | tuple[int, ...], int], beta: float, dtype: torch.dtype, device: torch.device
) -> None:
    assert_exact(make_pair(*shape, beta, dtype, device))


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("student", ALL_TRANSFORMS)
def test_transforms(student: str, beta: float, device: torch.device) -> None:
    """Each head has a transform of its own."""
    for teacher in ("plain", "all"):
        pair = make_pair(
            12, 60, beta, device=device,
            student_transform=ALL_TRANSFORMS[student], teacher_transform=ALL_TRANSFORMS[teacher],
        )  # fmt: skip
        assert_exact(pair)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("row_selection", ["valid", "all"])
def test_temperature_per_token(beta: float, row_selection: str, device: torch.device) -> None:
    temperature = (torch.rand(3, 4) + 0.5).to(device)
    transforms = [Transform(softcap=9.0, temperature=t) for t in (temperature, temperature * 2)]
    pair = make_pair((3, 4), 60, beta, device=device,
                     student_transform=transforms[0], teacher_transform=transforms[1])  # fmt: skip
    assert_exact(pair, row_selection=row_selection)


@pytest.mark.parametrize("beta", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_tiles(dtype: torch.dtype, beta: float, device: torch.device) -> None:
    """The error does not grow with the number of tiles; the same call gives the same bits."""
    pair = make_pair(33, 1000, beta, dtype, device)
    upstream = upstream_for(pair)
    tiles = assert_exact(pair, upstream=upstream, scratch_bytes=1 << 18)
    again = run(pair, upstream, scratch_bytes=1 << 18)
    one = run(pair, upstream, scratch_bytes=1 << 26)
    true = evaluate(pair, upstream)
    assert torch.equal(tiles.divergence, again.divergence)
    floor = 1e-6 * max(1.0, largest(true.divergence))
    allowed = TILES_FACTOR * error(one.divergence, true.divergence) + floor
    assert error(tiles.divergence, true.divergence) <= allowed
    for name, gradient in tiles.gradients.items():
        assert torch.equal(gradient, again.gradients[name]), name
        expected = true.gradients[name]
        floor = (torch.finfo(dtype).eps + 1e-6) * largest(expected)
        allowed = TILES_FACTOR * error(one.gradients[name], expected) + floor
        assert error(gradient, expected) <= allowed, name


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind", ["bool", "integer", "none", "nothing"])
@pytest.mark.parametrize("row_selection", ["valid", "all"])
def test_masks(row_selection: str, kind: str, beta: float, device: torch.device) -> None:
    pair = make_pair(
        (3, 5), 60, beta, device=device, ignored={"none": 0.0, "nothing": 1.1}.get(kind, 0.4)
    )
    mask = {"bool": pair.mask, "integer": pair.mask.int() * 3, "none": None, "nothing": pair.mask}[
        kind
    ]
    ours = assert_exact(pair, mask=mask, row_selection=row_selection)
    assert (ours.divergence[~pair.mask] == 0).all()
    assert (ours.entropy[~pair.mask] == 0).all()
    assert (ours.gradients["hidden"][~pair.mask] == 0).all()


def test_masked_rows_are_not_computed(device: torch.device) -> None:
    """What a masked row holds does not matter, not even NaN."""
    pair = make_pair(9, 60, 0.5, device=device)
    assert not pair.mask.all()
    expected = run(pair, upstream_for(pair))
    for case in (pair.student, pair.teacher):
        case.hidden[~pair.mask] = float("nan")
    found = run(pair, upstream_for(pair))
    assert torch.equal(found.divergence, expected.divergence)
    for name, gradient in found.gradients.items():
        assert torch.equal(gradient, expected.gradients[name]), name


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("bias",), ("weight", "bias"),
                                    ("hidden", "weight")], ids=str)  # fmt: skip
def test_frozen(frozen: tuple[str, ...], beta: float, device: torch.device) -> None:
    assert_exact(make_pair(12, 60, beta, torch.bfloat16, device), frozen=frozen)


def test_gradient_flows_into_the_student_only(device: torch.device) -> None:
    pair = make_pair(6, 30, 0.5, device=device)
    teacher = pair.teacher.leaves()
    result = fused_divergence(
        pair.student.hidden.clone().requires_grad_(), pair.student.weight,
        teacher["hidden"], teacher["weight"], teacher_bias=teacher["bias"], beta=0.5,
    )  # fmt: skip
    assert not result.student_entropy.requires_grad
    result.divergence.sum().backward()
    assert all(leaf.grad is None for leaf in teacher.values())
    frozen = pair.student.leaves(("hidden", "weight", "bias"))
    assert not call(pair, frozen).divergence.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_autocast_and_mixed_dtypes(beta: float, dtype: torch.dtype, device: torch.device) -> None:
    """Autocast decides for both heads; without it each head takes its wider dtype."""
    pair = make_pair(12, 60, beta, device=device)
    rounded = replace(pair, student=pair.student.to(dtype), teacher=pair.teacher.to(dtype))
    with torch.autocast(device.type, dtype):
        ours = run(pair, bias := upstream_for(pair))
    assert bias.dtype == torch.float32
    biases = {"student": pair.student.bias, "teacher": pair.teacher.bias}
    rounded = replace(
        rounded,
        student=replace(rounded.student, bias=biases["student"]),
        teacher=replace(rounded.teacher, bias=biases["teacher"]),
    )
    expected = run(rounded, upstream_for(pair))
    assert torch.equal(ours.divergence, expected.divergence)
    for name, gradient in ours.gradients.items():
        assert gradient.dtype == torch.float32
        assert error(gradient, expected.gradients[name]) <= torch.finfo(dtype).eps * largest(
            gradient
        )
    mixed = replace(pair, teacher=pair.teacher.to(dtype))
    assert_exact(mixed)


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**12])
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_float16_gradients_of_any_size(beta: float, scale: float, device: torch.device) -> None:
    """The mean over a million tokens does not underflow, the sum does not overflow."""
    pair = make_pair(12, 60, beta, torch.float16, device, logit_std=8.0)
    upstream = upstream_for(pair)
    ones, scaled = run(pair, upstream), run(pair, upstream * scale)
    for name, gradient in scaled.gradients.items():
        expected = ones.gradients[name].double() * scale
        unit = max(2.0**-11 * largest(expected), 2.0**-24)
        assert error(gradient, expected.to(torch.float16)) <= 2 * unit, name


def test_strides(device: torch.device) -> None:
    pair = make_pair((3, 4), 60, 0.5, device=device)
    expected = run(pair, upstream_for(pair))
    teacher = pair.teacher
    strided = replace(
        teacher,
        hidden=torch.stack([teacher.hidden, teacher.hidden], -1)[..., 0],
        weight=teacher.weight.T.contiguous().T,
        bias=torch.stack([teacher.bias, teacher.bias], -1)[..., 0],
    )
    found = run(replace(pair, teacher=strided), upstream_for(pair))
    assert error(found.divergence, expected.divergence) <= 1e-6
    leaves = pair.student.leaves()
    call(pair, leaves).divergence.sum().backward()  # an expanded upstream gradient
    ones = run(pair, torch.ones(3, 4, device=device))
    assert torch.equal(leaves["hidden"].grad, ones.gradients["hidden"])


@settings(max_examples=40, deadline=None, derandomize=True,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(
    shape=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    vocabulary=st.sampled_from([1, 2, 17, 129, 300]),
    beta=st.sampled_from(BETAS) | st.floats(0.01, 0.99),
    dtype=st.sampled_from(ALL_DTYPES),
    widths=st.tuples(st.sampled_from([1, 8, 33]), st.sampled_from([1, 9, 16])),
    names=st.tuples(st.sampled_from(list(ALL_TRANSFORMS)), st.sampled_from(list(ALL_TRANSFORMS))),
    bias=st.booleans(),
    logit_std=st.sampled_from([0.1, 3.0, 20.0]),
    row_selection=st.sampled_from(["valid", "all"]),
    scratch=st.sampled_from([None, 1 << 18]),
    seed=st.integers(0, 999),
)
def test_any_call_matches_the_oracle(
    shape: list[int],
    vocabulary: int,
    beta: float,
    dtype: torch.dtype,
    widths: tuple[int, int],
    names: tuple[str, str],
    bias: bool,
    logit_std: float,
    row_selection: str,
    scratch: int | None,
    seed: int,
) -> None:
    pair = make_pair(
        tuple(shape), vocabulary, beta, dtype, width=widths[0], teacher_width=widths[1],
        student_transform=ALL_TRANSFORMS[names[0]], teacher_transform=ALL_TRANSFORMS[names[1]],
        bias=bias, logit_std=logit_std, seed=seed,
    )  # fmt: skip
    assert_exact(pair, row_selection=row_selection, scratch_bytes=scratch)


@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_micro_batches_over_all_items_are_one_batch(
    beta: float, frozen: tuple[str, ...], device: torch.device
) -> None:
    """The sum over each micro-batch by the items of all of them, as a gradient scaler sends it."""
    pair = make_pair((4, 7), 130, beta, device=device)
    items, scale = pair.mask.sum(), 2.0**16
    reset_expectations()
    whole = run(pair, pair.mask.float() / items, frozen)
    leaves = pair.student.leaves(frozen)
    for rows in (slice(0, 1), slice(1, 4)):
        micro = replace(
            pair,
            student=replace(pair.student, targets=pair.student.targets[rows]),
            teacher=replace(pair.teacher, hidden=pair.teacher.hidden[rows]),
        )
        part = leaves | {"hidden": leaves["hidden"][rows]}
        result = call(micro, part, expected_grads=micro.mask.float())
        (result.divergence.sum() / items * scale).backward()
    for name, leaf in leaves.items():
        if name not in frozen:
            assert error(leaf.grad / scale, whole.gradients[name]) <= 1e-6, name
    counts = expectation_counts()["fused_divergence"]
    assert (counts.held, counts.missed) == (0 if frozen else 2, 0)
