"""torch.compile(fullgraph=True) of the single pass, and torch's own checks of its operators."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lm_head_checks import Case, backward, call, error, largest, make_case, truth, upstream_for
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lowpeak import fused_lm_head
from lowpeak.lm_head import expectation_counts

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
    ),
]

NAMES = ("log_probs", "entropy")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def expecting_head(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    log_probs: Tensor,
    entropy: Tensor,
) -> Any:
    expected = {"log_probs": log_probs, "entropy": entropy}
    return fused_lm_head(hidden, weight, targets, bias=bias, outputs=NAMES, expected_grads=expected)


def case_and_upstream(device: torch.device) -> tuple[Case, dict[str, Tensor]]:
    case = make_case(20, 60, 12, device=device, ignored=0.3)
    upstream = upstream_for(case, NAMES)
    for value in upstream.values():
        value[3:6] = 0
    return case, upstream


@pytest.mark.parametrize("factor", [2.5, 0.0])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=str)
def test_expected_gradients(
    frozen: tuple[str, ...], dynamic: bool, factor: float, device: torch.device
) -> None:
    """Right up to a factor, and all zero, which is wrong: the same graph serves both."""
    compiled = torch.compile(expecting_head, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    case, upstream = case_and_upstream(device)
    leaves = case.leaves(frozen)
    hint = [factor * upstream[name] for name in NAMES]
    result = compiled(leaves["hidden"], leaves["weight"], leaves["bias"], case.targets, *hint)
    backward(result, upstream)
    exact = truth(case, upstream).gradients
    for name, leaf in leaves.items():
        if leaf.requires_grad:
            assert error(leaf.grad, exact[name]) <= 1e-5 * max(1, largest(exact[name])), name
    counts = expectation_counts()["fused_lm_head"]
    assert (counts.held, counts.missed) == ((1, 0) if factor else (0, 1))


def test_a_function_cannot_be_compiled(device: torch.device) -> None:
    case, upstream = case_and_upstream(device)

    def head(hidden: Tensor) -> Any:
        return fused_lm_head(
            hidden, case.weight, case.targets,
            expected_grads=lambda _, index: {"log_probs": upstream["log_probs"][index]},
        )  # fmt: skip

    compiled = torch.compile(head, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="expected_grads is a function"):
        compiled(case.hidden.clone().requires_grad_())


def test_opcheck(device: torch.device) -> None:
    seen: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace.startswith("lowpeak"):
                seen[func, len(seen)] = (args, kwargs or {})
            return func(*args, **(kwargs or {}))

    case, upstream = case_and_upstream(device)
    outputs = (*NAMES, "log_normalizer")
    with Recorder():
        backward(call(case, case.leaves(), NAMES, expected_grads=upstream), upstream)
        only = {"log_probs": upstream["log_probs"], "log_normalizer": upstream["entropy"]}
        backward(call(case, case.leaves(("weight", "bias")), outputs), only)
    names = {str(operator) for operator, _ in seen}
    assert len(seen) == 4
    assert len(names) == 3, names
    for (operator, _), (args, kwargs) in seen.items():
        torch.library.opcheck(operator, args, kwargs, test_utils=("test_schema", "test_faketensor"))
