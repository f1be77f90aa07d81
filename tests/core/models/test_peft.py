"""Adapters around a model with a fused forward."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, TaskType, get_peft_model
from test_families import assert_same_gradients, own_scores
from tiny_models import tiny_model, token_batch

from lowpeak import reduce_memory
from lowpeak.models import install_fused_forward

# peft reads a property that transformers 5.24 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")

ATTENTION = ["q_proj", "v_proj"]


def shake(model: torch.nn.Module, part: str) -> None:
    """Random values where PEFT starts from zeros or from a copy."""
    for name, parameter in model.named_parameters():
        if part in name and parameter.requires_grad:
            parameter.data.add_(torch.randn_like(parameter) * 0.3)


def test_lora_on_attention() -> None:
    base = tiny_model("llama")
    install_fused_forward(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=ATTENTION))
    shake(model, "lora_")
    batch = token_batch()
    fused, own = model(**batch, fused_lm_head=True), own_scores(model, batch)
    torch.testing.assert_close(fused.loss, own["loss"], check_dtype=False, rtol=1e-6, atol=1e-6)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    found = {n: g for n, g in gradients_of_trained(model, fused.loss).items() if n in trained}
    assert found.keys() == trained
    assert_same_gradients(found, gradients_of_trained(model, own["loss"]))


def gradients_of_trained(model: torch.nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients by name of the parameters that are trained."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    found = torch.autograd.grad(loss, [p for _, p in named])
    return {name: gradient for (name, _), gradient in zip(named, found, strict=True)}


def test_b3_saved_head_trains_and_the_reference_keeps_the_original() -> None:
    base = tiny_model("phi")  # with a bias
    install_fused_forward(base)
    batch = token_batch()
    reference = own_scores(base, batch)["loss"].item()
    model = get_peft_model(
        base, LoraConfig(r=4, target_modules=ATTENTION, modules_to_save=["lm_head"])
    )
    shake(model, "modules_to_save")
    fused, own = model(**batch, fused_lm_head=True), own_scores(model, batch)
    torch.testing.assert_close(fused.loss, own["loss"], check_dtype=False, rtol=1e-6, atol=1e-6)
    assert abs(fused.loss.item() - reference) > 1e-2
    assert_same_gradients(
        gradients_of_trained(model, fused.loss), gradients_of_trained(model, own["loss"])
    )
    with model.disable_adapter(), torch.no_grad():
        disabled = model(**batch, fused_lm_head=True)
    assert disabled.loss.item() == pytest.approx(reference, abs=1e-5)


def test_prompt_tuning_pads_the_labels() -> None:
    base = tiny_model("llama")
    install_fused_forward(base)
    config = PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=3)
    model = get_peft_model(base, config)
    batch = token_batch()
    own = model(**batch)
    fused = model(**batch, fused_lm_head=True)
    assert fused.log_probs.shape == (2, 12 + 3 - 1)
    torch.testing.assert_close(fused.loss, own.loss, rtol=1e-6, atol=1e-6)
    z = own.logits[:, 3:-1].log_softmax(-1)
    labels = batch["labels"][:, 1:]
    expected = z.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    torch.testing.assert_close(
        fused.log_probs[:, -11:], expected.masked_fill(labels == -100, 0), rtol=1e-5, atol=1e-5
    )
    assert_same_gradients(
        gradients_of_trained(model, fused.loss), gradients_of_trained(model, own.loss)
    )


def test_reduce_memory_takes_a_peft_model() -> None:
    base = tiny_model("llama")
    model = get_peft_model(base, LoraConfig(r=4, target_modules=ATTENTION))
    shake(model, "lora_")
    model.train()
    batch = token_batch()
    own = model(**batch).loss
    handle = reduce_memory(model)
    output = model(**batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, own, rtol=1e-6, atol=1e-6)
    handle.remove()
    assert model(**batch).logits is not None
