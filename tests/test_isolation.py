"""What a test leaves behind does not reach the next one."""

import os

import pytest
import torch


@pytest.mark.parametrize("order", ["first", "second"])
def test_no_global_state_is_inherited(order: str) -> None:
    """Each of the two spoils everything, and finds it in order."""
    assert torch.get_float32_matmul_precision() == "highest"
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert "ACCELERATE_DYNAMO_BACKEND" not in os.environ
    torch.backends.fp32_precision = "tf32"
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    os.environ["ACCELERATE_DYNAMO_BACKEND"] = "eager"


@pytest.mark.cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("order", ["first", "second"])
def test_no_synchronisation_mode_is_inherited(order: str) -> None:
    assert torch.cuda.get_sync_debug_mode() == 0
    assert torch.ones(2, device="cuda").tolist() == [1.0, 1.0]
    torch.cuda.set_sync_debug_mode("error")
