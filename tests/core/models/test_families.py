"""Log-probabilities, losses and gradients of many families equal those of their own full logits."""

import pytest
import torch
from tiny_models import FAMILIES, is_known, tiny_gemma3_with_vision, tiny_model, token_batch
from transformers import PreTrainedModel

from lowpeak.models import install_fused_forward
from lowpeak.models.inspection import logit_transform
from lowpeak.models.outputs import FusedCausalLMOutput

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# float32 against float64 of the same float32 logits; logits reach 35.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}

pytestmark = pytest.mark.filterwarnings("ignore:.*tensor.detach.*:UserWarning")


def own_scores(
    model: PreTrainedModel, batch: dict[str, torch.Tensor], temperature: float = 1.0
) -> dict[str, torch.Tensor]:
    """The statistics of the model's own logits in float64, and the mean negative log-likelihood."""
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    z = model(**inputs, use_cache=False).logits[:, :-1].double() / temperature
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    targets = labels.clamp(min=0).unsqueeze(-1)
    log_p = z.log_softmax(-1)
    scores = {
        "log_probs": log_p.gather(-1, targets).squeeze(-1),
        "entropy": torch.distributions.Categorical(logits=z, validate_args=False).entropy(),
        "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
        "mean_logits": z.mean(-1),
    }
    scores = {name: torch.where(mask, value, 0.0) for name, value in scores.items()}
    scores["is_top1"] = (z.argmax(-1) == labels) & mask
    scores["loss"] = -scores["log_probs"].sum() / mask.sum()
    return scores


def gradients(model: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients by parameter name of a loss; those the loss does not reach are left out."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


def assert_same_gradients(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    """Every gradient is there, and all are within `tolerance` of the largest norm of one."""
    assert actual.keys() == expected.keys()
    scale = max(gradient.norm().item() for gradient in expected.values())
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm().item() <= tolerance * scale, name


def assert_equals_own(
    model: PreTrainedModel, temperature: float = 1.0, batch: dict[str, torch.Tensor] | None = None
) -> FusedCausalLMOutput:
    """Values and gradients of log-probabilities and entropy against the model's own logits."""
    batch = token_batch() if batch is None else batch
    model.config.get_text_config().output_router_logits = False
    install_fused_forward(model, temperature=temperature, outputs=OUTPUTS)
    model.train()
    own = own_scores(model, batch, temperature)
    fused = model(**batch, fused_lm_head=True)
    for name, value in own.items():
        torch.testing.assert_close(
            fused[name], value, check_dtype=False, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
    weights = torch.linspace(-1, 1, own["entropy"].numel()).view_as(own["entropy"]).to(model.device)

    def objective(scores: dict[str, torch.Tensor]) -> torch.Tensor:
        return scores["loss"] + (scores["entropy"] * weights).sum()

    assert_same_gradients(gradients(model, objective(fused)), gradients(model, objective(own)))
    assert not fused.mean_logits.requires_grad
    assert not fused.log_sum_sq_probs.requires_grad
    return fused


@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_its_own_logits(family: str) -> None:
    if not is_known(family):
        pytest.skip(f"this transformers has no {family}")
    assert_equals_own(tiny_model(family))


def test_a2_softcap_before_temperature() -> None:
    model = tiny_model("gemma2")
    fused = assert_equals_own(model, temperature=0.7)
    # the cap was at work: without it the scores are others
    model.config.final_logit_softcapping = None
    uncapped = own_scores(model, token_batch(), 0.7)
    assert (fused.log_probs - uncapped["log_probs"]).abs().max() > 0.1


@pytest.mark.parametrize(
    ("family", "scale"),
    [
        ("cohere", 0.0625),
        ("granite", 1 / 8),
        ("hyperclovax", 0.25),
        ("falcon_h1", 0.0625),
        ("mpt", 1.0),
        ("minicpm3", 8.0),
        ("inkling", 0.25),
    ],
)
def test_a3_logit_multipliers(family: str, scale: float) -> None:
    if not is_known(family):
        pytest.skip(f"this transformers has no {family}")
    # MiniCPM3's multiplier alone makes large logits; with the usual head they reach 1266, where one
    # rounding of a float32 logit moves its probability by 6e-5 and every row is one-hot.
    model = tiny_model(family, head_scale=0.5 if family == "minicpm3" else 40.0)
    assert logit_transform(model).scale == scale
    assert_equals_own(model, temperature=1.3)


@pytest.mark.parametrize("family", ["phi", "gptj"])
def test_a4_bias_on_the_head(family: str) -> None:
    model = tiny_model(family)
    bias = model.get_output_embeddings().bias
    with torch.no_grad():
        bias.mul_(3)
    assert_equals_own(model)


def test_a4_gradient_of_the_bias_is_p_minus_onehot() -> None:
    model = tiny_model("phi")
    install_fused_forward(model)
    batch = token_batch()
    logits = model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1].double()
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    onehot = torch.nn.functional.one_hot(labels[mask], logits.size(-1))
    expected = (logits[mask].softmax(-1) - onehot).sum(0)
    model(**batch, fused_lm_head=True, num_items_in_batch=1).loss.backward()
    torch.testing.assert_close(
        model.get_output_embeddings().bias.grad.double(), expected, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_a13_temperature_in_log_probs_and_entropy(temperature: float) -> None:
    assert_equals_own(tiny_model("llama"), temperature=temperature)


def test_a15_frozen_head_gets_no_gradient_and_the_rest_the_same() -> None:
    model = tiny_model("llama")
    model.lm_head.weight.requires_grad_(False)
    install_fused_forward(model)
    batch = token_batch()
    model(**batch, fused_lm_head=True).loss.backward()
    assert model.lm_head.weight.grad is None
    parameters = [p for p in model.parameters() if p.requires_grad]
    own = own_scores(model, batch)["loss"]
    for parameter, expected in zip(parameters, torch.autograd.grad(own, parameters), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-5)


def test_a15_tied_head_sums_both_parts() -> None:
    model = tiny_model("llama_tied", head_scale=10.0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_equals_own(model)


def test_a16_backbone_is_not_found_by_its_prefix() -> None:
    model = tiny_model("llama4_text")
    assert not hasattr(model, model.base_model_prefix)
    assert_equals_own(model)


def test_vision_language_model_scores_text() -> None:
    model = tiny_gemma3_with_vision()
    assert logit_transform(model).softcap == 30.0
    batch = token_batch()
    install_fused_forward(model)
    model.eval()
    own = own_scores(model, batch)
    fused = model(**batch, fused_lm_head=True)
    torch.testing.assert_close(fused.log_probs, own["log_probs"], check_dtype=False, **TOLERANCE)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_router_loss_equals_the_models_own(family: str) -> None:
    model = tiny_model(family)
    install_fused_forward(model)
    batch = token_batch()
    own = model(**batch)
    fused = model(**batch, fused_lm_head=True)
    assert own.aux_loss.item() > 0
    torch.testing.assert_close(fused.aux_loss, own.aux_loss)
    torch.testing.assert_close(fused.loss, own.loss, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(model, fused.loss), gradients(model, own.loss))
    without = model(**batch, fused_lm_head=True, output_router_logits=False)
    assert without.aux_loss is None
    torch.testing.assert_close(without.loss, own.loss - 0.1 * own.aux_loss, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [True, False])
def test_a11_float32_head_behind_bfloat16_hidden_states(autocast: bool) -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    model.lm_head.float()
    install_fused_forward(model)
    batch = token_batch()
    with torch.no_grad():
        hidden = model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        output = model(**batch, fused_lm_head=True)
    z = hidden[:, :-1].double() @ model.lm_head.weight.double().T
    labels = batch["labels"][:, 1:]
    mask = labels != -100
    expected = z.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)[mask]
    assert output.log_probs.dtype == torch.float32
    # under autocast the weight is rounded to bfloat16: logits of 16 are off by up to 0.06
    tolerance = 0.1 if autocast else 1e-4
    torch.testing.assert_close(output.log_probs[mask].double(), expected, rtol=0, atol=tolerance)
    output.loss.backward()
    assert model.lm_head.weight.grad.dtype == torch.float32
    assert all(parameter.grad is not None for parameter in model.parameters())
