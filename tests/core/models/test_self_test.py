"""The self-test notices what a configuration does not say, and leaves no trace of itself."""

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import tiny_models
import torch
from test_families import assert_same_gradients, gradients, own_scores
from tiny_models import tiny_model, token_batch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaPreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from lowpeak.models import install_fused_forward, reduce_memory

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


class ChangedLogits(LlamaForCausalLM):
    """A Llama that does to its logits what no name in its configuration says."""

    def change(self, logits: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
        return output


class PerTokenFactor(ChangedLogits):
    """Logits times a learned factor per vocabulary entry."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.factor = nn.Parameter(torch.linspace(0.5, 1.5, config.vocab_size))

    def change(self, logits: Tensor) -> Tensor:
        return logits * self.factor


class BiasBuffer(ChangedLogits):
    """Logits plus a buffer, of -inf for one token."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        bias = torch.zeros(config.vocab_size)
        bias[127] = -float("inf")
        self.register_buffer("logit_bias", bias)

    def change(self, logits: Tensor) -> Tensor:
        return logits + self.logit_bias


class UnnamedSoftcap(ChangedLogits):
    """A soft cap under a name of its own; with small logits it is nearly the identity."""

    def change(self, logits: Tensor) -> Tensor:
        return 30 * torch.tanh(logits / 30)


class FactorOfOne(ChangedLogits):
    """A learned factor per vocabulary entry that is one until it is trained (as Dory's)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.factor = nn.Parameter(torch.ones(config.vocab_size))

    def change(self, logits: Tensor) -> Tensor:
        return logits * self.factor


class NeedsMoreThanHiddenStates(ChangedLogits):
    """Logits made of something else that the backbone returns (as ProphetNet's)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.model(*args, **kwargs, output_hidden_states=True)
        return CausalLMOutput(logits=self.lm_head(output.hidden_states[-2]))


class LessThanLargest(ChangedLogits):
    """Logits minus the largest of them: the same probabilities, another mean."""

    def change(self, logits: Tensor) -> Tensor:
        return logits - logits.amax(-1, keepdim=True)


class DependsOnLength(ChangedLogits):
    """Logits that a tile of tokens cannot reproduce."""

    def change(self, logits: Tensor) -> Tensor:
        return logits * torch.arange(1, logits.size(1) + 1, device=logits.device).unsqueeze(-1)


def changed_llama(model_class: type[ChangedLogits], head_scale: float = 20.0) -> ChangedLogits:
    config = tiny_model("llama").config
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(head_scale)
    return model.to(tiny_models.DEVICE)


@pytest.mark.parametrize(
    "model_class", [PerTokenFactor, BiasBuffer, UnnamedSoftcap, LessThanLargest]
)
@pytest.mark.parametrize("scratch_bytes", [None, 10_000])
def test_unknown_post_processing_goes_through_the_models_own_head(
    model_class: type[ChangedLogits],
    scratch_bytes: int | None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = changed_llama(model_class)
    batch = token_batch()
    temperature = 0.7
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        install_fused_forward(
            model, temperature=temperature, outputs=OUTPUTS, scratch_bytes=scratch_bytes
        )
        fused = model(**batch, fused_lm_head=True)
        model(**batch, fused_lm_head=True)
    (message,) = caplog.messages
    assert "the model's own head runs on a tile of tokens" in message
    own = own_scores(model, batch, temperature)
    for name in ("log_probs", "mean_logits", "log_sum_sq_probs", "is_top1", "loss"):
        torch.testing.assert_close(fused[name], own[name], check_dtype=False, rtol=1e-5, atol=2e-5)
    if model_class is not BiasBuffer:  # where Categorical is no oracle: 0 * -inf
        torch.testing.assert_close(
            fused.entropy, own["entropy"], check_dtype=False, rtol=1e-5, atol=2e-5
        )
        assert_same_gradients(
            gradients(model, fused.loss + fused.entropy.sum()),
            gradients(model, own["loss"] + own["entropy"].sum()),
        )
    else:
        assert_same_gradients(gradients(model, fused.loss), gradients(model, own["loss"]))
        assert fused.entropy.isfinite().all()
        for gradient in gradients(model, model(**batch, fused_lm_head=True).entropy.sum()).values():
            assert gradient.isfinite().all()


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_factor_that_is_still_one_is_trained(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = changed_llama(FactorOfOne)
    batch = token_batch()
    install_fused_forward(model)
    with mode(), caplog.at_level(logging.INFO, "lowpeak.models"):  # the self-test runs here
        model(**batch, fused_lm_head=True)
    assert "it has more to train: factor" in caplog.text
    fused, own = model(**batch, fused_lm_head=True), own_scores(model, batch)
    found = gradients(model, fused.loss)
    assert_same_gradients(found, gradients(model, own["loss"]))
    assert found["factor"].abs().max() > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_may_come_first(mode: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    batch = token_batch()
    install_fused_forward(model)
    with mode(), caplog.at_level(logging.INFO, "lowpeak.models"):
        model(**batch, fused_lm_head=True)
        assert not torch.is_grad_enabled()
    assert "fused LM head on" in caplog.text
    fused, own = model(**batch, fused_lm_head=True), own_scores(model, batch)
    assert_same_gradients(gradients(model, fused.loss), gradients(model, own["loss"]))


def test_logits_of_more_than_the_hidden_states_are_refused() -> None:
    model = changed_llama(NeedsMoreThanHiddenStates)
    install_fused_forward(model)
    with pytest.raises(ValueError, match=r"neither do its own modules .*TypeError"):
        model(**token_batch(), fused_lm_head=True)


class LlamaInside(LlamaPreTrainedModel):
    """Embeddings and head in one child, as in Llama4ForConditionalGeneration."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.language_model = LlamaForCausalLM(config)

    def get_input_embeddings(self) -> nn.Module:
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self) -> nn.Module:
        return self.language_model.get_output_embeddings()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.language_model(*args, **kwargs)


def test_a_head_in_the_child_with_the_embeddings_is_refused() -> None:
    model = LlamaInside(tiny_model("llama").config).to(tiny_models.DEVICE)
    install_fused_forward(model)
    with pytest.raises(ValueError, match="pass the language model inside it"):
        model(**token_batch(), fused_lm_head=True)
    model = model.language_model
    install_fused_forward(model)
    fused, own = model(**token_batch(), fused_lm_head=True), own_scores(model, token_batch())
    torch.testing.assert_close(fused.loss, own["loss"], check_dtype=False, rtol=1e-5, atol=1e-5)


def test_several_heads_are_refused() -> None:
    model = tiny_model("llama")
    model.lm_head = nn.ModuleList([model.lm_head])
    with pytest.raises(ValueError, match="no single language model head"):
        install_fused_forward(model)


def test_softcap_shows_while_the_logits_are_small(caplog: pytest.LogCaptureFixture) -> None:
    model = changed_llama(UnnamedSoftcap, head_scale=2.0)
    assert model(token_batch()["input_ids"]).logits.abs().max() < 2
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        install_fused_forward(model.to(torch.bfloat16))
        model(**token_batch(), fused_lm_head=True)
    assert "the model's own head runs" in caplog.text


def test_a_constant_the_model_ignores_is_not_applied(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    model.config.final_logit_softcapping = 5.0
    model.config.logit_scale = 3.0
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        install_fused_forward(model)
        fused = model(**token_batch(), fused_lm_head=True)
    assert "scale 1, soft cap None" in caplog.text
    own = own_scores(model, token_batch())
    torch.testing.assert_close(fused.loss, own["loss"], check_dtype=False, rtol=1e-5, atol=1e-5)


def test_logits_no_tile_reproduces_are_refused() -> None:
    model = changed_llama(DependsOnLength)
    original = model.model
    install_fused_forward(model)
    with pytest.raises(ValueError, match="neither do its own modules"):
        # 8 hidden states and the same magnified, in the order of the self-test
        _with_unrepeatable_logits(model)(**token_batch(), fused_lm_head=True)
    assert model.model is original


def _with_unrepeatable_logits(model: ChangedLogits) -> ChangedLogits:
    """Each forward returns other logits than the one before."""
    calls = 0

    def change(logits: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return logits * (1 + calls)

    model.change = change
    return model


def test_bart_trains_on_its_own_loss_only() -> None:
    model = tiny_model("bart_decoder")
    reduce_memory(model)
    model.train()
    with pytest.raises(ValueError, match="loss of its own"):
        model(**token_batch())


def test_self_test_leaves_no_trace() -> None:
    model = tiny_model("gpt2", attn_pdrop=0.3, resid_pdrop=0.3, embd_pdrop=0.3)
    model.train()
    model.transformer.h[0].eval()  # a module kept in eval mode stays there
    modes = {name: module.training for name, module in model.named_modules()}
    install_fused_forward(model)
    torch.manual_seed(3)
    first = model(**token_batch(), fused_lm_head=True)
    torch.manual_seed(3)
    second = model(**token_batch(), fused_lm_head=True)
    torch.testing.assert_close(first.log_probs, second.log_probs, rtol=0, atol=0)
    assert modes == {name: module.training for name, module in model.named_modules()}
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_self_test_casts_no_weight_for_the_step_that_follows() -> None:
    model = tiny_model("llama")
    install_fused_forward(model)
    with torch.autocast(model.device.type, torch.bfloat16):
        loss = model(**token_batch(), fused_lm_head=True).loss
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_self_test_without_any_label(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("cohere")
    install_fused_forward(model)
    batch = token_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        assert model(**batch, fused_lm_head=True).loss.item() == 0
    assert "scale 0.0625" in caplog.text


def test_head_is_tested_again_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    install_fused_forward(model)
    batch = token_batch()
    with caplog.at_level(logging.INFO, "lowpeak.models"):
        model(**batch, fused_lm_head=True)
        model(**batch, fused_lm_head=True)
        assert len(caplog.messages) == 1
        model.lm_head = nn.Linear(32, 131, device=model.device)  # with a bias
        fused = model(**batch, fused_lm_head=True)
        assert len(caplog.messages) == 2
    torch.testing.assert_close(fused.loss, model(**batch).loss, rtol=1e-5, atol=1e-5)
