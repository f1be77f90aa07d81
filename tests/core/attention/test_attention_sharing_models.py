"""Models whose packed documents begin with tokens of earlier ones, against each alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attention_oracle import (
    MODELS,
    alone,
    assert_near,
    assert_same_gradients,
    gradients,
    tiny,
    twin,
)
from sharing_oracle import SHORT, own_parts, sequences, shared_row, weighted_parts
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from lowpeak.attention import forward, register_attention, shared_prefixes, why_no_shared_prefixes
from lowpeak.attention.self_test import packing_reason

# Rotary embeddings and eager's softmax are float32 in every dtype.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register_attention()


def loss(model: PreTrainedModel, row: dict[str, Any]) -> Tensor:
    return weighted_parts(SHORT, own_parts(SHORT, model(**row).logits))


def loss_alone(model: PreTrainedModel, whole: list[Tensor]) -> Tensor:
    return weighted_parts(SHORT, [alone(model, [ids]) for ids in whole])


def assert_own_near(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    """The logits of each sequence's own tokens are near."""
    for mine, right, (own, _, _) in zip(found, wanted, SHORT, strict=True):
        assert_near(mine[:, -own:], right[:, -own:], tolerance)


@pytest.mark.parametrize("name", MODELS)
def test_row_is_its_sequences(name: str, device: torch.device) -> None:
    eager = tiny(name, "eager", device)
    if name not in ("mixtral", "deepseek_v3"):  # the products of experts have no float64
        eager = eager.double()
    model = twin(eager, "lowpeak")
    whole = sequences(SHORT, device)
    row = shared_row(SHORT, whole)
    wanted = [alone(eager, [ids]) for ids in whole]
    found = own_parts(SHORT, model(**row).logits)
    assert_own_near(found, wanted, TOLERANCE)
    assert_same_gradients(
        gradients(model, lambda: loss(model, row)),
        gradients(eager, lambda: loss_alone(eager, whole)),
        5 * TOLERANCE,
    )
    assert why_no_shared_prefixes(model) is None


# transformers 5.24 renamed the method, 5.17 has not the new one
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "not reentrant", "offloaded"])
def test_found_out_once_for_all_layers(
    checkpointing: str | None, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    windows: list[int] = []
    build = shared_prefixes._build

    def spy(prefixes: Tensor, window: int, device: torch.device) -> object:
        windows.append(window)
        return build(prefixes, window, device)

    monkeypatch.setattr(shared_prefixes, "_build", spy)
    layers = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model = tiny("gemma3_window_4", "lowpeak", device, **layers).train()
    if checkpointing in ("reentrant", "not reentrant"):
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
        model.enable_input_require_grads()
    row = shared_row(SHORT, sequences(SHORT, device))
    copies = saved_tensors_hooks(Tensor.clone, Tensor.clone)
    with copies if checkpointing == "offloaded" else nullcontext():
        gradients(model, lambda: model(**row).logits.sum())
    assert sorted(windows) == [0, 4]


# transformers 5.24 renamed the method, 5.17 has not the new one
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, device: torch.device) -> None:
    model = tiny("gemma3_window_4", "lowpeak", device).train()
    row = shared_row(SHORT, sequences(SHORT, device))
    wanted = gradients(model, lambda: loss(model, row))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, lambda: loss(model, row))
    assert_same_gradients(found, wanted, 1e-6)


def test_autocast(device: torch.device) -> None:
    model = tiny("mistral_window_4", "lowpeak", device)
    whole = sequences(SHORT, device)
    row = shared_row(SHORT, whole)
    with torch.autocast(device.type, torch.bfloat16):
        found = own_parts(SHORT, model(**row).logits)
        wanted = [alone(model, [ids]) for ids in whole]
        assert why_no_shared_prefixes(model) is None
    # both round scores and sums at other places, in two layers
    assert_own_near(found, wanted, 8 * torch.finfo(torch.bfloat16).eps)


# dynamo looks at every tensor it is given
@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor.*:UserWarning")
def test_compiled_layers(device: torch.device) -> None:
    model = tiny("gemma3_window_4", "lowpeak", device)
    row = shared_row(SHORT, sequences(SHORT, device))
    wanted = gradients(model, lambda: loss(model, row))
    torch.compiler.reset()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = gradients(model, lambda: loss(model, row))
    compiled = {name.replace("_orig_mod.", ""): x for name, x in found.items()}
    assert_same_gradients(compiled, wanted, 1e-5)


@pytest.mark.parametrize(
    "change",
    [
        {"dropout": 0.1},
        {"is_causal": False},
        {"position_bias": torch.zeros(1)},
        {"attention_mask": torch.zeros(1, 1, 5, 5)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_it_cannot_do_is_refused(change: dict[str, Any]) -> None:
    query = torch.zeros(1, 2, 5, 8)
    arguments = {"attention_mask": None, **change}
    with pytest.raises(ValueError, match="none of them goes with share_prompts=True"):
        forward.lowpeak_attention(
            nn.Identity(),
            query,
            query,
            query,
            shared_prefixes=torch.tensor([[3, 0, 0], [2, 0, 1]]),
            **arguments,
        )


class Mixer(nn.Module):
    """Adds to each token half of the one before it in its document, as a convolution might."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        model.model.register_forward_pre_hook(self._remember, with_kwargs=True)
        model.model.layers[0].register_forward_hook(self._mix)

    def _remember(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"]
        self.starts = torch.zeros_like(ids, dtype=torch.bool)
        self.starts[:, 0] = True
        if "position_ids" in kwargs:
            steps = kwargs["position_ids"].diff(dim=1)
            self.starts[:, 1:] = steps != 1

    def _mix(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        before = output.roll(1, dims=1).masked_fill(self.starts.unsqueeze(-1), 0)
        return output + 0.5 * before


def test_a_mixer_that_keeps_documents_apart_cannot_share(device: torch.device) -> None:
    model = tiny("llama", "lowpeak", device)
    Mixer(model)
    assert packing_reason(model, "lowpeak") is None
    reason = why_no_shared_prefixes(model)
    assert reason is not None
    assert "differs by" in reason


def test_an_argument_that_does_not_arrive_is_noticed(device: torch.device) -> None:
    model = tiny("llama", "lowpeak", device)

    def drop(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {name: x for name, x in kwargs.items() if name != "shared_prefixes"}

    model.model.layers[1].register_forward_pre_hook(drop, with_kwargs=True)
    reason = why_no_shared_prefixes(model)
    assert reason is not None
    assert "differs by" in reason


def test_reasons_that_need_no_test(device: torch.device) -> None:
    model = tiny("llama", "sdpa", device)
    assert why_no_shared_prefixes(model) == "attention 'sdpa' cannot share them, 'lowpeak' can"
    model.set_attn_implementation("lowpeak")
    assert why_no_shared_prefixes(model.to("meta")) is not None


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "mistral_window_4", "gemma3_window_4", "gpt_neox"])
def test_varlen_in_models(name: str, device: torch.device) -> None:
    exact = tiny(name, "eager", device)
    model = twin(exact, "lowpeak").to(torch.bfloat16)
    whole = sequences(SHORT, device)
    row = shared_row(SHORT, whole)
    wanted = [alone(exact, [ids]) for ids in whole]
    found = own_parts(SHORT, model(**row).logits)
    # a row of random logits in bfloat16, after two layers
    assert_own_near(found, wanted, 0.06)
    shared_gradients = gradients(model, lambda: loss(model, row))
    apart = gradients(model, lambda: loss_alone(model, whole))
    right_gradients = gradients(exact, lambda: loss_alone(exact, whole))
    scale = max(g.abs().max().item() for g in right_gradients.values())

    def error(x: dict[str, Tensor]) -> float:
        errors = ((x[n].float() - g).abs().max().item() for n, g in right_gradients.items())
        return max(errors) / scale

    assert error(shared_gradients) <= 2 * error(apart) + torch.finfo(torch.bfloat16).eps
