"""B1: adapters on the LM head, beside the logits of PEFT."""

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, TaskType, get_peft_model
from test_families import assert_same_gradients, own_scores
from test_peft import gradients_of_trained, shake
from tiny_models import tiny_model, token_batch

from lowpeak.models import ExpectedLoss, expecting, install_fused_forward
from lowpeak.models.split import SplitCausalLM

pytestmark = [
    # peft reads a property that transformers 5.24 deprecates.
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
    # its adapters on a tied head cannot be merged
    pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True.*:UserWarning"),
]
OUTPUTS = ("log_probs", "entropy", "is_top1", "mean_logits")
TARGETS = ["q_proj", "lm_head"]
FUSED, OWN = "fused LM head on", "fused LM head off, the model's own head"


def adapted(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> PeftModel:
    """A model with a fused forward and random LoRA on its head."""
    base = tiny_model(family).to(dtype)
    install_fused_forward(base, outputs=OUTPUTS)
    torch.manual_seed(5)
    arguments = {"r": 4, "target_modules": TARGETS, **options}
    model = get_peft_model(base, LoraConfig(**arguments))
    shake(model, "lora_")
    return model


def assert_equals_peft(model: PeftModel, tolerance: float = 1e-6) -> dict[str, torch.Tensor]:
    """Log-probabilities, entropy, and the gradients of all that is trained; returns these."""
    batch = token_batch()
    fused, own = model(**batch, fused_lm_head=True), own_scores(model, batch)
    for name in OUTPUTS:
        value = getattr(fused, name)
        torch.testing.assert_close(
            value, own[name], check_dtype=False, rtol=10 * tolerance, atol=10 * tolerance
        )
    losses = [
        -(log_probs.sum() + 0.1 * entropy.sum())
        for log_probs, entropy in (
            (fused.log_probs, fused.entropy), (own["log_probs"], own["entropy"]),
        )
    ]  # fmt: skip
    found, expected = (gradients_of_trained(model, loss) for loss in losses)
    assert_same_gradients(found, expected, 10 * tolerance)
    return found


@pytest.mark.parametrize("options", [
    {}, {"r": 1}, {"use_rslora": True, "lora_alpha": 3},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("family", ["llama", "phi", "gemma2", "llama_tied"])
def test_b1_values_and_gradients(
    family: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With a bias, a soft cap, a tied embedding: no family loses the adapter of its head."""
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        gradients = assert_equals_peft(adapted(family, **options))
    assert FUSED in caplog.text
    of_head = [gradient for name, gradient in gradients.items() if "lm_head" in name]
    assert len(of_head) == 2
    assert all(gradient.abs().max() > 0 for gradient in of_head)


def test_the_bias_of_an_adapter() -> None:
    gradients = assert_equals_peft(adapted("phi", lora_bias=True, target_modules=["lm_head"]))
    assert sum("lm_head" in name for name in gradients) == 3


def test_several_adapters_together_one_by_one_and_none(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted()
    model.add_adapter("second", LoraConfig(r=3, target_modules=["lm_head"], lora_alpha=5))
    model.base_model.set_adapter(["default", "second"])
    shake(model, "lora_")
    losses = set()
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        for names in (["default", "second"], ["second"], ["default"]):
            model.base_model.set_adapter(names)
            assert_equals_peft(model)
            losses.add(model(**token_batch(), fused_lm_head=True).loss.item())
    with model.disable_adapter(), torch.no_grad():
        fused = model(**token_batch(), fused_lm_head=True).loss
        own = own_scores(model, token_batch())["loss"]
        torch.testing.assert_close(fused, own, check_dtype=False, rtol=1e-6, atol=1e-6)
        losses.add(fused.item())
    assert len(losses) == 4
    assert caplog.text.count(FUSED) == 3, "each set of adapters is tested once"


def test_merged_and_unloaded() -> None:
    model = adapted()
    batch = token_batch()
    before = model(**batch, fused_lm_head=True).loss
    model.merge_adapter()
    with torch.no_grad():
        merged = model(**batch, fused_lm_head=True).loss
        torch.testing.assert_close(merged, before, rtol=1e-5, atol=1e-5)
        with model.disable_adapter():  # which makes PEFT unmerge them
            fused = model(**batch, fused_lm_head=True).loss
            own = own_scores(model, batch)["loss"]
        torch.testing.assert_close(fused, own, check_dtype=False, rtol=1e-5, atol=1e-5)
    assert abs(fused - before) > 1e-3


def test_the_base_weight_may_be_trained_too() -> None:
    model = adapted()
    weight = model.get_output_embeddings().weight
    weight.requires_grad_()
    gradients = assert_equals_peft(model)
    assert sum("lm_head" in name for name in gradients) == 3


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_float32_adapters_and_bfloat16_products(autocast: bool, device: torch.device) -> None:
    """PEFT keeps adapters in float32; a trainer adds autocast."""
    model = adapted(dtype=torch.bfloat16)
    assert model.get_output_embeddings().lora_A["default"].weight.dtype == torch.float32
    with torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext():
        batch = token_batch()
        fused, own = model(**batch, fused_lm_head=True), own_scores(model, batch)
    scale = own["log_probs"].abs().max()
    assert (fused.log_probs - own["log_probs"]).abs().max() <= 2**-6 * scale
    found, expected = (gradients_of_trained(model, x) for x in (fused.loss, own["loss"]))
    assert_same_gradients(found, expected, 2**-5)
    assert {x.dtype for x in found.values()} == {torch.float32}


def test_dropout_of_an_adapter_goes_through_its_own_module(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With the numbers that PEFT would draw for the same rows; without dropout fused again."""
    model = adapted(lora_dropout=0.5, target_modules=["lm_head"])
    model.train()
    batch = token_batch()
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        model(**batch, fused_lm_head=True)  # the self-test is behind
    assert OWN in caplog.text
    assert "lora_dropout=0.5" in caplog.text
    torch.manual_seed(7)
    fused = model(**batch, fused_lm_head=True)
    base = model.get_base_model()
    labels = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    hidden = base.model(**inputs).last_hidden_state[labels != -100]
    torch.manual_seed(7)
    log_probs = base.lm_head(hidden.unsqueeze(0)).squeeze(0).log_softmax(-1)
    expected = -log_probs.gather(-1, labels[labels != -100].unsqueeze(-1)).mean()
    torch.testing.assert_close(fused.loss, expected, rtol=1e-6, atol=1e-6)
    found, wanted = (gradients_of_trained(model, loss) for loss in (fused.loss, expected))
    assert_same_gradients(found, wanted)
    model.eval()
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        assert_equals_peft(model)
    assert FUSED in caplog.text


def test_dora_goes_through_its_own_module(caplog: pytest.LogCaptureFixture) -> None:
    model = adapted(use_dora=True)
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        gradients = assert_equals_peft(model)
    assert OWN in caplog.text
    assert "Dora" in caplog.text
    assert sum("lm_head" in name for name in gradients) == 3


def test_other_adapters_go_through_their_own_module(caplog: pytest.LogCaptureFixture) -> None:
    base = tiny_model("llama")
    install_fused_forward(base, outputs=OUTPUTS)
    config = IA3Config(
        task_type=TaskType.CAUSAL_LM, target_modules=["k_proj", "lm_head"], feedforward_modules=[]
    )
    model = get_peft_model(base, config)
    shake(model, "ia3_")
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        gradients = assert_equals_peft(model)
    assert OWN in caplog.text
    assert any("lm_head" in name for name in gradients)
    with model.disable_adapter(), torch.no_grad():
        fused = model(**token_batch(), fused_lm_head=True).loss
        own = own_scores(model, token_batch())["loss"]
    torch.testing.assert_close(fused, own, check_dtype=False, rtol=1e-6, atol=1e-6)


def test_a_reference_first_does_not_decide_for_the_adapter() -> None:
    """The route of the head without adapters is not that of DoRA."""
    model = adapted(use_dora=True)
    with model.disable_adapter(), torch.no_grad():
        model(**token_batch(), fused_lm_head=True)
    assert_equals_peft(model)


def test_expected_gradients_serve_a_frozen_head_with_adapters() -> None:
    from lowpeak.lm_head import expectation_counts, reset_expectations

    model = adapted()
    batch = token_batch()
    reset_expectations()
    with expecting(ExpectedLoss(lambda output: output.log_probs.sum())):
        fused = model(**batch, fused_lm_head=True)
    found = gradients_of_trained(model, fused.loss)
    assert expectation_counts()["fused_lm_head"].held == 1
    own = gradients_of_trained(model, own_scores(model, batch)["loss"])
    assert_same_gradients(found, own)


def test_split_models_leave_an_adapter_to_their_own_module() -> None:
    """And give the plain head where it is disabled."""
    model = adapted()
    split = SplitCausalLM(model.get_base_model())
    batch = token_batch()
    hidden = split.hidden_states(batch["labels"], input_ids=batch["input_ids"])
    assert split.transform is None
    logits = model(input_ids=batch["input_ids"]).logits
    torch.testing.assert_close(split.logits(hidden[0]), logits[0], rtol=1e-5, atol=1e-5)
    with model.disable_adapter():
        split.hidden_states(batch["labels"], input_ids=batch["input_ids"])
        assert split.transform is not None
