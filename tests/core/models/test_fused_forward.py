"""The protocol of the fused forward: what goes in, what comes out, and how it comes off again."""

import copy
import functools
import inspect
import types

import pytest
import torch
from test_families import assert_same_gradients, gradients, own_scores
from tiny_models import tiny_model, token_batch
from torch import nn

from lowpeak.models import install_fused_forward


def test_without_the_flag_it_is_the_original_forward() -> None:
    model = tiny_model("llama")
    batch = token_batch()
    before = model(**batch)
    install_fused_forward(model)
    after = model(**batch, num_items_in_batch=7)
    assert type(after) is type(before)
    torch.testing.assert_close(after.logits, before.logits, rtol=0, atol=0)
    targets = (batch["labels"][:, 1:] != -100).sum()
    torch.testing.assert_close(after.loss, before.loss * targets / 7)
    assert next(iter(inspect.signature(model.forward).parameters)) == "input_ids"
    ids = batch["input_ids"][:1, :4]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape == (1, 7)


def test_only_the_requested_outputs_are_there() -> None:
    model = tiny_model("llama")
    install_fused_forward(model, outputs=("entropy",))
    output = model(**token_batch(), fused_lm_head=True)
    assert output.log_probs.shape == output.entropy.shape == (2, 11)
    assert output.mean_logits is output.log_sum_sq_probs is output.is_top1 is None
    assert (output.log_probs[~output.label_mask] == 0).all()
    assert (output.entropy[~output.label_mask] == 0).all()


def test_num_items_in_batch_divides_the_sum() -> None:
    model = tiny_model("llama")
    install_fused_forward(model)
    batch = token_batch()
    mean = model(**batch, fused_lm_head=True)
    by_number = model(**batch, fused_lm_head=True, num_items_in_batch=5)
    by_tensor = model(**batch, fused_lm_head=True, num_items_in_batch=torch.tensor(5))
    torch.testing.assert_close(by_number.loss, -mean.log_probs.sum() / 5)
    torch.testing.assert_close(by_tensor.loss, by_number.loss)
    torch.testing.assert_close(mean.loss, -mean.log_probs.sum() / mean.label_mask.sum())


def test_shift_labels_are_scored_where_they_stand() -> None:
    model = tiny_model("llama")
    install_fused_forward(model)
    batch = token_batch()
    labels = batch.pop("labels")
    shifted = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    output = model(**batch, shift_labels=shifted, fused_lm_head=True)
    expected = model(**batch, labels=labels, fused_lm_head=True)
    assert output.log_probs.shape == (2, 12)
    torch.testing.assert_close(output.log_probs[:, :-1], expected.log_probs)
    assert (output.log_probs[:, -1] == 0).all()
    torch.testing.assert_close(output.loss, expected.loss)


def test_inputs_may_be_given_by_position_or_as_embeddings() -> None:
    model = tiny_model("mixtral")  # its router loss reads the attention mask
    install_fused_forward(model)
    batch = token_batch()
    expected = model(**batch, fused_lm_head=True)
    by_position = model(
        batch["input_ids"], batch["attention_mask"], labels=batch["labels"], fused_lm_head=True
    )
    torch.testing.assert_close(by_position.loss, expected.loss)
    embedded = model(
        inputs_embeds=model.get_input_embeddings()(batch["input_ids"]),
        attention_mask=batch["attention_mask"],
        labels=batch["labels"],
        fused_lm_head=True,
    )
    torch.testing.assert_close(embedded.loss, expected.loss)


@pytest.mark.parametrize("family", ["llama", "modernbert_decoder"])  # fused, and tile by tile
def test_batch_without_a_label_has_zero_gradients(family: str) -> None:
    model = tiny_model(family)
    install_fused_forward(model, outputs=("log_probs", "entropy"))
    batch = token_batch()
    reached = gradients(model, model(**batch, fused_lm_head=True).loss).keys()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    output = model(**batch, fused_lm_head=True)
    assert output.loss.item() == 0
    found = gradients(model, output.loss + output.entropy.sum())
    assert found.keys() == reached
    assert all((gradient == 0).all() for gradient in found.values())


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_gradient_checkpointing_changes_nothing() -> None:
    model = tiny_model("llama")
    install_fused_forward(model)
    model.train()
    expected = gradients(model, model(**token_batch(), fused_lm_head=True).loss)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    loss = model(**token_batch(), fused_lm_head=True).loss
    assert_same_gradients(gradients(model, loss), expected, tolerance=1e-7)


def test_eval_without_gradient() -> None:
    model = tiny_model("llama").eval()
    install_fused_forward(model, outputs=("log_probs", "entropy"))
    with torch.no_grad():
        output = model(**token_batch(), fused_lm_head=True)
        own = own_scores(model, token_batch())
    assert not output.log_probs.requires_grad
    torch.testing.assert_close(output.log_probs, own["log_probs"], check_dtype=False)
    assert not model.training


def test_cast_lm_head_to_fp32_leaves_autocast() -> None:
    model = tiny_model("llama").to(torch.bfloat16)
    batch = token_batch()
    install_fused_forward(model, cast_lm_head_to_fp32=True)
    with torch.autocast(model.device.type, torch.bfloat16), torch.no_grad():
        output = model(**batch, fused_lm_head=True)
        hidden = model.model(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    z = hidden[:, :-1].double() @ model.lm_head.weight.double().T
    labels = batch["labels"][:, 1:]
    expected = z.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
    mask = output.label_mask
    torch.testing.assert_close(output.log_probs[mask].double(), expected[mask], rtol=0, atol=1e-4)


# Dynamo instantiates autograd functions and asks any tensor for its gradient while it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated.*:DeprecationWarning")
@pytest.mark.parametrize("family", ["llama", "modernbert_decoder"])
def test_torch_compile(family: str) -> None:
    model = tiny_model(family)
    install_fused_forward(model, outputs=("log_probs", "entropy"))
    batch = token_batch()
    expected = model(**batch, fused_lm_head=True)
    wanted = gradients(model, expected.loss)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        output = compiled(**batch, fused_lm_head=True)
        torch.testing.assert_close(output.log_probs, expected.log_probs)
        assert_same_gradients(gradients(model, output.loss), wanted)


def test_a_deep_copy_scores_with_its_own_weights() -> None:
    model = tiny_model("llama")
    install_fused_forward(model)
    batch = token_batch()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    output = twin(**batch, fused_lm_head=True)
    torch.testing.assert_close(output.loss, twin(**batch).loss, rtol=1e-5, atol=1e-5)
    assert (twin(**batch).loss - model(**batch).loss).abs() > 1e-2
    install_fused_forward(twin, temperature=2.0).remove()
    assert "forward" not in twin.__dict__


def test_remove_restores_the_model() -> None:
    model = tiny_model("llama")
    attributes = set(model.__dict__)
    handle = install_fused_forward(model)
    with pytest.raises(ValueError, match="has a fused forward already"):
        install_fused_forward(model)
    handle.remove()
    handle.remove()
    assert set(model.__dict__) == attributes
    assert model.forward.__func__ is type(model).forward
    install_fused_forward(model).remove()


def test_remove_under_the_wrapper_of_another_library() -> None:
    model = tiny_model("llama")
    handle = install_fused_forward(model)
    inner = model.forward.__func__
    wrapped = functools.wraps(inner)(lambda self, *args, **kwargs: inner(self, *args, **kwargs))
    model.forward = types.MethodType(wrapped, model)  # as accelerate does
    assert "log_probs" in model(**token_batch(), fused_lm_head=True)
    handle.remove()
    assert model.forward.__func__ is wrapped
    assert model(**token_batch()).logits is not None
    assert "log_probs" not in model(**token_batch(), fused_lm_head=True)


def test_errors_name_the_value() -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="outputs names logits"):
        install_fused_forward(model, outputs=("logits",))
    with pytest.raises(ValueError, match=r"temperature=0\.0"):
        install_fused_forward(model, temperature=0.0)
    with pytest.raises(ValueError, match="no language model head"):
        install_fused_forward(model.model)
    install_fused_forward(model)
    with pytest.raises(ValueError, match="needs labels or shift_labels"):
        model(token_batch()["input_ids"], fused_lm_head=True)


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.empty(0), "ZeRO stage 3"),
        (torch.empty(131, 32, device="meta"), "meta device"),
    ],
)
def test_a_head_that_is_elsewhere_is_refused(weight: torch.Tensor, message: str) -> None:
    model = tiny_model("llama")
    model.lm_head.weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match=message):
        install_fused_forward(model)
