"""torch.compile(fullgraph=True): forward and backward equal eager."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lm_head_checks import DIFFERENTIABLE, Case, backward, error, largest, make_case, upstream_for
from torch import Tensor

from lowpeak import LogitTransform, fused_lm_head

# What torch 2.13's own tracer and Inductor do; our settings make warnings errors.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
    ),
]

TRANSFORM = LogitTransform(scale=0.5, softcap=7.0, temperature=0.9)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def default_head(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Any:
    return fused_lm_head(hidden, weight, targets, bias=bias)


def full_head(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Any:
    return fused_lm_head(
        hidden * 2, weight, targets, bias=bias, transform=TRANSFORM, outputs=DIFFERENTIABLE
    )


def all_rows_head(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Any:
    return fused_lm_head(hidden, weight, targets, bias=bias, row_selection="all")


def gradients(head: Callable[..., Any], case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    leaves = case.leaves()
    result = head(leaves["hidden"], leaves["weight"], leaves["bias"], case.targets)
    names = [name for name in DIFFERENTIABLE if getattr(result, name) is not None]
    backward(result, upstream_for(case, names))
    values = {name: getattr(result, name).detach() for name in names}
    return values, {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def assert_same(compiled: Callable[..., Any], head: Callable[..., Any], case: Case) -> None:
    values, grads = gradients(compiled, case)
    expected_values, expected_grads = gradients(head, case)
    assert values.keys() == expected_values.keys()
    assert grads.keys() == expected_grads.keys()
    for found, expected in ((values, expected_values), (grads, expected_grads)):
        for name, value in found.items():
            assert value.dtype == expected[name].dtype
            assert error(value, expected[name]) <= 1e-6 * max(1, largest(expected[name])), name


@pytest.mark.parametrize("head", [default_head, full_head, all_rows_head])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_fullgraph_aot_eager(head: Callable[..., Any], dynamic: bool, device: torch.device) -> None:
    """Ignored rows included: their number depends on the data, the graph must not break on it."""
    compiled = torch.compile(head, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows, ignored in ((12, 0.3), (12, 0.6), (12, 1.1)):
        case = make_case(rows, 60, 12, device=device, ignored=ignored, seed=rows)
        assert_same(compiled, head, case)


def test_fullgraph_with_changing_row_count(device: torch.device) -> None:
    """Dynamic N: three lengths, at most two compilations."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(default_head, fullgraph=True, backend=counter)
    for rows in (8, 13, 30, 57):
        assert_same(compiled, default_head, make_case(rows, 60, 12, device=device, seed=rows))
    assert counter.frame_count <= 2


def test_fullgraph_frozen_weight_and_shapes(device: torch.device) -> None:
    case = make_case((3, 5), 60, 12, torch.bfloat16, device)

    def head(hidden: Tensor) -> Tensor:
        result = fused_lm_head(hidden, case.weight, case.targets, bias=case.bias)
        assert result.log_probs is not None
        return result.log_probs

    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    found, expected = (case.hidden.clone().requires_grad_() for _ in range(2))
    ours, eager = compiled(found), head(expected)
    ours.sum().backward()
    eager.sum().backward()
    assert torch.equal(ours, eager)
    assert torch.equal(found.grad, expected.grad)


def test_fullgraph_with_autocast_and_a_temperature_per_token(device: torch.device) -> None:
    case = make_case(12, 60, 12, device=device)
    temperature = torch.rand(12, device=device) + 0.5

    def head(hidden: Tensor, weight: Tensor, temperature: Tensor) -> Tensor:
        transform = LogitTransform(softcap=4.0, temperature=temperature)
        with torch.autocast(hidden.device.type, torch.bfloat16):
            result = fused_lm_head(hidden, weight, case.targets, transform=transform)
        return result.log_probs

    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    leaves, others = case.leaves(), case.leaves()
    ours = compiled(leaves["hidden"], leaves["weight"], temperature)
    eager = head(others["hidden"], others["weight"], temperature)
    ours.sum().backward()
    eager.sum().backward()
    assert torch.equal(ours, eager)
    for name in ("hidden", "weight"):
        assert torch.equal(leaves[name].grad, others[name].grad), name


def test_compiled_index_error_still_raises(device: torch.device) -> None:
    compiled = torch.compile(default_head, fullgraph=True, backend="aot_eager")
    case = make_case(12, 60, 12, device=device)
    case.targets[3] = 60
    with pytest.raises(IndexError, match="60"):
        compiled(case.hidden, case.weight, case.bias, case.targets)


def test_a19_backend_eager_module(device: torch.device) -> None:
    """A module whose forward calls the head compiles with backend "eager"."""

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(12, 60)

        def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
            result = fused_lm_head(hidden, self.linear.weight, targets, bias=self.linear.bias)
            assert result.log_probs is not None
            return -result.log_probs.sum()

    module = Head().to(device)
    case = make_case(12, 60, 12, device=device)
    expected = module(case.hidden, case.targets)
    module.compile(fullgraph=True, backend="eager")
    assert torch.equal(module(case.hidden, case.targets), expected)


@pytest.mark.slow
@pytest.mark.parametrize("head", [default_head, full_head])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_fullgraph_inductor(head: Callable[..., Any], dynamic: bool, device: torch.device) -> None:
    compiled = torch.compile(head, fullgraph=True, backend="inductor", dynamic=dynamic)
    assert_same(compiled, head, make_case(12, 60, 12, device=device))


def test_opcheck_of_every_operator(device: torch.device) -> None:
    """Schema, fake implementation and autograd registration of each lowpeak operator that a
    forward and backward dispatch, by torch's own checks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace.startswith("lowpeak"):
                seen.setdefault(func, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    with Recorder():
        gradients(full_head, make_case(12, 60, 12, device=device))
    assert seen, "no operator of the namespace lowpeak was dispatched"
    for operator, (args, kwargs) in seen.items():
        torch.library.opcheck(operator, args, kwargs, test_utils=("test_schema", "test_faketensor"))
