"""Gradients of fused_lm_head: mixtures, layouts, frozen inputs, autograd's corner cases."""

import itertools
from collections.abc import Callable

import pytest
import torch
from lm_head_checks import (
    DIFFERENTIABLE,
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
    yardstick,
)
from lm_head_oracle import Evaluation
from lm_head_tolerances import ALL_DTYPES
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lowpeak import LogitTransform, fused_lm_head

SOFTCAPPED = Transform(scale=0.5, softcap=6.0, temperature=1.3)


@pytest.mark.parametrize("transform", [Transform(), SOFTCAPPED], ids=["plain", "transformed"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_each_output_alone(
    name: str, dtype: torch.dtype, transform: Transform, device: torch.device
) -> None:
    case = make_case(33, 127, 20, dtype, device, transform=transform)
    assert_exact(case, OUTPUTS, upstream=upstream_for(case, (name,)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pair", list(itertools.combinations(DIFFERENTIABLE, 2)), ids="+".join)
def test_mixtures(pair: tuple[str, str], dtype: torch.dtype, device: torch.device) -> None:
    case = make_case((5, 7), 60, 12, dtype, device, transform=SOFTCAPPED)
    assert_exact(case, OUTPUTS, upstream=upstream_for(case, pair))


@pytest.mark.parametrize("frozen", [
    (), ("hidden",), ("weight",), ("bias",), ("hidden", "weight"), ("weight", "bias"),
    ("hidden", "bias"), ("hidden", "weight", "bias"),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a15_frozen(frozen: tuple[str, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Frozen inputs get no gradient and change no other gradient."""
    case = make_case((4, 9), 60, 12, dtype, device, transform=SOFTCAPPED)
    upstream = upstream_for(case)
    if len(frozen) == 3:
        leaves = case.leaves(frozen)
        result = call(case, leaves, OUTPUTS)
        assert not any(getattr(result, name).requires_grad for name in OUTPUTS)
        return
    assert_exact(case, OUTPUTS, upstream=upstream, frozen=frozen)


def test_a15_tied_weight(device: torch.device) -> None:
    """The head's weight is also the embedding: one gradient, the sum of both uses."""
    vocabulary, width = 50, 12
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(vocabulary, width, generator=generator).to(device)
    tokens = torch.randint(vocabulary, (3, 9), generator=generator).to(device)
    targets = tokens.roll(-1, 1)

    def loss(weight: Tensor, head: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return -head(torch.nn.functional.embedding(tokens, weight).tanh(), weight).mean()

    def fused(hidden: Tensor, weight: Tensor) -> Tensor:
        log_probs = fused_lm_head(hidden, weight, targets).log_probs
        assert log_probs is not None
        return log_probs

    def full(hidden: Tensor, weight: Tensor) -> Tensor:
        log_p = torch.log_softmax(hidden @ weight.T, -1)
        return log_p.gather(-1, targets.unsqueeze(-1)).squeeze(-1)

    ours = table.clone().requires_grad_()
    loss(ours, fused).backward()
    exact = table.double().requires_grad_()
    loss(exact, full).backward()
    plain = table.clone().requires_grad_()
    loss(plain, full).backward()
    allowed = 2 * error(plain.grad, exact.grad) + 4e-7 * largest(exact.grad)
    assert error(ours.grad, exact.grad) <= allowed


def _expanded(value: Tensor) -> Tensor:
    return value.flatten()[:1].view((1,) * value.ndim).expand_as(value)


def _strided(value: Tensor) -> Tensor:
    return torch.stack([value, value * 7 + 1], -1)[..., 0]


def _transposed(value: Tensor) -> Tensor:
    return value.mT.contiguous().mT


@pytest.mark.parametrize("layout", [_expanded, _strided, _transposed])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layout_of_upstream_gradients(
    layout: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case((4, 6), 60, 12, dtype, device)
    upstream = {name: layout(value) for name, value in upstream_for(case).items()}
    assert not all(value.is_contiguous() for value in upstream.values())
    assert_exact(case, OUTPUTS, upstream=upstream)


def test_upstream_from_sum_mean_and_slices(device: torch.device) -> None:
    """The gradients autograd itself makes: expanded by sum(), sparse rows by a slice."""
    case = make_case((4, 6), 60, 12, device=device)
    leaves = case.leaves()
    result = call(case, leaves, OUTPUTS)
    loss = result.log_probs.sum() + result.entropy[1:, ::2].mean() + 3 * result.log_normalizer[0, 0]
    loss.backward()
    one = torch.ones_like(result.log_probs)
    sliced, single = torch.zeros_like(one), torch.zeros_like(one)
    sliced[1:, ::2] = 1 / 9
    single[0, 0] = 3
    upstream = {"log_probs": one, "entropy": sliced, "log_normalizer": single}
    ours = Evaluation({}, {name: leaf.grad for name, leaf in leaves.items()}, 0.0)
    assert_matches(case, ours, upstream, (), torch.float32)


def _non_contiguous(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor + 1], -1)[..., : tensor.shape[-1]]


def _transposed_storage(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous().mT


def _every_other(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor + 1], -1)[..., 0]


@pytest.mark.parametrize("layout", [_non_contiguous, _transposed_storage, _every_other])
@pytest.mark.parametrize("which", ["hidden", "weight"])
@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_layout_of_inputs(
    which: str, layout: Callable[[Tensor], Tensor], dtype: torch.dtype, device: torch.device
) -> None:
    case = make_case((4, 6), 60, 12, dtype, device)
    upstream = upstream_for(case)
    leaves = case.leaves()
    viewed = dict(leaves)
    viewed[which] = layout(leaves[which])
    assert not viewed[which].is_contiguous()
    result = call(case, viewed, OUTPUTS)
    backward(result, upstream)
    values = {name: getattr(result, name).detach() for name in OUTPUTS}
    ours = Evaluation(values, {name: leaf.grad for name, leaf in leaves.items()}, 0.0)
    assert_matches(case, ours, upstream, (), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_expanded_hidden_bias_and_strided_targets(dtype: torch.dtype, device: torch.device) -> None:
    """One hidden row and one bias value expanded over all rows; every other target."""
    base = make_case((6, 4), 60, 12, dtype, device)
    row, value = base.hidden[0, 0].clone().requires_grad_(), base.bias[:1].clone().requires_grad_()
    weight = base.weight.clone().requires_grad_()
    targets = torch.stack([base.targets, torch.full_like(base.targets, 10**9)], -1)[..., 0]
    upstream = upstream_for(base)
    result = fused_lm_head(
        row.expand(6, 4, 12), weight, targets, bias=value.expand(60), outputs=OUTPUTS
    )
    backward(result, upstream)
    hidden, bias = row.detach().expand(6, 4, 12), value.detach().expand(60)
    case = Case(hidden.contiguous(), weight.detach(), base.targets, bias.contiguous())
    true, plain = truth(case, upstream), yardstick(case, upstream, dtype)
    pairs = {"hidden": row.grad, "weight": weight.grad, "bias": value.grad}
    for name, grad in pairs.items():
        exact, reference = true.gradients[name], plain.gradients[name]
        if name == "hidden":
            exact, reference = exact.sum((0, 1)), reference.double().sum((0, 1))
        if name == "bias":
            exact, reference = exact.sum(0, True), reference.double().sum(0, True)
        assert grad.shape == exact.shape
        # The sum over the expanded axis is autograd's own, in dtype: 24 (60) roundings.
        roundings = torch.finfo(dtype).eps * sum(
            largest(part) for part in (true.gradients[name],) if part is not None
        )
        assert error(grad, exact) <= 2 * error(reference, exact) + 60 * roundings, name


@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("hidden",)], ids=str)
def test_retain_graph_gives_the_same_gradients_twice(
    frozen: tuple[str, ...], device: torch.device
) -> None:
    case = make_case((4, 6), 60, 12, device=device)
    upstream = upstream_for(case)
    leaves = case.leaves(frozen)
    result = call(case, leaves, OUTPUTS)
    backward(result, upstream, retain_graph=True)
    first = {name: leaf.grad for name, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    backward(result, upstream)
    for name, leaf in leaves.items():
        if name in frozen:
            assert leaf.grad is None
            assert first[name] is None
        else:
            assert torch.equal(leaf.grad, first[name]), name


def test_upstream_gradients_are_left_alone_and_gradients_accumulate(device: torch.device) -> None:
    case = make_case((4, 6), 60, 12, device=device)
    upstream = upstream_for(case)
    before = {name: value.clone() for name, value in upstream.items()}
    once = run(case, OUTPUTS, upstream)
    for name, value in upstream.items():
        assert torch.equal(value, before[name]), name
    leaves = case.leaves()
    inputs = {name: leaf.detach().clone() for name, leaf in leaves.items()}
    for _ in range(3):
        backward(call(case, leaves, OUTPUTS), upstream)
    for name, leaf in leaves.items():
        assert torch.equal(leaf.detach(), inputs[name]), name
        expected = once.gradients[name]
        assert error(leaf.grad, 3 * expected) <= 1e-6 * max(1.0, largest(expected) * 3), name


def test_backward_through_one_output_at_a_time(device: torch.device) -> None:
    """autograd.grad of each output alone, from one graph, sums to the gradient of all."""
    case = make_case((4, 6), 60, 12, device=device)
    upstream = upstream_for(case)
    leaves = case.leaves()
    result = call(case, leaves, OUTPUTS)
    names = list(leaves)
    totals = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    for output, gradient in upstream.items():
        parts = torch.autograd.grad(
            getattr(result, output), [leaves[n] for n in names], gradient, retain_graph=True
        )
        for name, part in zip(names, parts, strict=True):
            totals[name] += part
    ours = Evaluation({}, {name: total for name, total in totals.items()}, 0.0)
    assert_matches(case, ours, upstream, (), torch.float32)


def test_autograd_grad_of_hidden_only(device: torch.device) -> None:
    case = make_case(20, 60, 12, device=device)
    leaves = case.leaves()
    result = call(case, leaves, ("log_probs",))
    upstream = upstream_for(case, ("log_probs",))
    (ours,) = torch.autograd.grad(result.log_probs, leaves["hidden"], upstream["log_probs"])
    expected = run(case, ("log_probs",), upstream).gradients["hidden"]
    assert expected is not None
    assert error(ours, expected) <= 1e-6 * largest(expected)


def test_no_grad_and_inference_mode(device: torch.device) -> None:
    case = make_case(20, 60, 12, device=device)
    expected = run(case).outputs
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            result = call(case, case.leaves(), OUTPUTS)
        for name in OUTPUTS:
            value = getattr(result, name)
            assert not value.requires_grad
            assert error(value, expected[name]) <= 2e-6, name


def test_is_top1_carries_no_gradient(device: torch.device) -> None:
    case = make_case(20, 60, 12, device=device)
    result = call(case, case.leaves(), ("log_probs", "is_top1"))
    assert result.log_probs.requires_grad
    assert not result.is_top1.requires_grad


@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), ("hidden",)], ids=str)
def test_double_backward_is_refused_in_our_words(
    frozen: tuple[str, ...], device: torch.device
) -> None:
    case = make_case(5, 20, 6, device=device)
    leaves = case.leaves(frozen)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    result = call(case, leaves, ("log_probs", "entropy"))
    loss = result.log_probs.sum() + result.entropy.sum()
    gradients = torch.autograd.grad(loss, wanted, create_graph=True)
    again = sum(gradient.square().sum() for gradient in gradients)
    with pytest.raises(RuntimeError, match=r"(?is)fused_lm_head.*double backward"):
        again.backward()


@pytest.mark.parametrize("row_selection", ["valid", "all"])
@pytest.mark.parametrize("transform", [
    LogitTransform(),
    LogitTransform(scale=0.7, softcap=3.0, temperature=0.8),
    LogitTransform(temperature=torch.tensor([0.7, 1.0, 1.3, 2.0], dtype=torch.float64)),
], ids=["plain", "transformed", "per_token"])  # fmt: skip
def test_gradcheck(transform: LogitTransform, row_selection: str) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, -100, 2])

    def head(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        result = fused_lm_head(
            hidden, weight, targets, bias=bias, transform=transform, outputs=DIFFERENTIABLE,
            row_selection=row_selection,
        )  # fmt: skip
        return tuple(getattr(result, name) for name in DIFFERENTIABLE)

    assert torch.autograd.gradcheck(head, (hidden, weight, bias))


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_an_activation_checkpoint(reentrant: bool, device: torch.device) -> None:
    case = make_case(20, 60, 12, device=device)
    leaves = case.leaves()

    def head(hidden: Tensor) -> Tensor:
        return call(case, {**leaves, "hidden": hidden}, ("log_probs",)).log_probs

    checkpoint(head, leaves["hidden"], use_reentrant=reentrant).sum().backward()
    upstream = {"log_probs": torch.ones(20, device=device)}
    expected = run(case, ("log_probs",), upstream).gradients
    for name, leaf in leaves.items():
        assert torch.equal(leaf.grad, expected[name]), name


def test_weight_changed_before_the_backward_is_noticed(device: torch.device) -> None:
    """The backward recomputes from the weight: an optimizer step in between would be wrong."""
    case = make_case(20, 60, 12, device=device)
    leaves = case.leaves()
    result = call(case, leaves, ("log_probs",))
    with torch.no_grad():
        leaves["weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.log_probs.sum().backward()


def test_single_token_without_a_row_dimension(device: torch.device) -> None:
    """hidden [H], targets []."""
    for target in (3, -100):
        case = make_case((), 60, 12, device=device, ignored=0.0)
        case.targets.fill_(target)
        assert_exact(case)
