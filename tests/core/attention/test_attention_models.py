"""Models with "lowpeak" attention: packed rows, padding, caches, against each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_oracle import (
    MODELS,
    VOCABULARY,
    alone,
    assert_near,
    assert_same_gradients,
    documents,
    gradients,
    packed_row,
    tiny,
    twin,
    weighted,
)
from lm_head_memory import measure
from torch import Tensor
from transformers import PreTrainedModel

from lowpeak.attention import forward, pattern, register_attention
from lowpeak.attention.kernels import document_attention

LENGTHS = [[7, 5, 9], [6, 6], [1, 8, 1], [1]]
# Rotary embeddings and eager's softmax are float32 in every dtype.
TOLERANCE = 1e-5


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    register_attention()


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The window of each call of attention that goes without a mask."""
    calls: list[int | None] = []

    def spy(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["window"])
        return document_attention(*args, **kwargs)

    monkeypatch.setattr(forward, "document_attention", spy)
    return calls


@pytest.fixture
def dense_masks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of each mask that is made."""
    shapes: list[tuple[int, ...]] = []
    original = pattern.sdpa_mask

    def spy(*args: Any, **kwargs: Any) -> Tensor | None:
        mask = original(*args, **kwargs)
        if mask is not None:
            shapes.append(tuple(mask.shape))
        return mask

    monkeypatch.setattr(pattern, "sdpa_mask", spy)
    return shapes


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_packed_row_is_its_documents(name: str, lengths: list[int], device: torch.device) -> None:
    eager = tiny(name, "eager", device)
    if name not in ("mixtral", "deepseek_v3"):  # the products of experts have no float64
        eager = eager.double()
    lowpeak = twin(eager, "lowpeak")
    parts = documents(lengths, device)
    wanted = alone(eager, parts)
    wanted_gradients = gradients(eager, lambda: weighted(alone(eager, parts)))
    for marks in (True, False):
        row = packed_row(parts, marks=marks)
        assert_near(lowpeak(**row).logits, wanted, TOLERANCE)
        found = gradients(lowpeak, lambda row=row: weighted(lowpeak(**row).logits))
        assert_same_gradients(found, wanted_gradients, 5 * TOLERANCE)


def test_packed_rows_go_without_masks(
    kernel_calls: list[int | None], dense_masks: list[tuple[int, ...]], device: torch.device
) -> None:
    model = tiny("gemma3_window_4", "lowpeak", device)
    parts = documents([7, 5, 9], device)
    for marks in (True, False):
        kernel_calls.clear()
        model(**packed_row(parts, marks=marks))
        assert kernel_calls == [4, None]
    assert dense_masks == []


def test_packed_rows_in_a_batch(device: torch.device) -> None:
    model = tiny("gemma3_window_4", "lowpeak", device)
    rows = [documents(lengths, device) for lengths in ([7, 5], [3, 9])]
    packed = [packed_row(parts, marks=False) for parts in rows]
    batch = {
        name: torch.cat([row[name] for row in packed]) for name in ("input_ids", "position_ids")
    }
    found = model(**batch, use_cache=False).logits
    for row, parts in zip(found, rows, strict=True):
        assert_near(row.unsqueeze(0), alone(twin(model, "eager"), parts), TOLERANCE)


@pytest.mark.parametrize("attention_mask", [None, "ones"])
@pytest.mark.parametrize("name", ["llama", "mistral_window_4", "gemma3_window_4"])
def test_batch_without_padding_needs_no_mask(
    name: str,
    attention_mask: str | None,
    kernel_calls: list[int | None],
    dense_masks: list[tuple[int, ...]],
    device: torch.device,
) -> None:
    lowpeak = tiny(name, "lowpeak", device)
    ids = torch.cat(documents([20, 20], device))
    mask = None if attention_mask is None else torch.ones_like(ids)
    found = lowpeak(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert_near(found, twin(lowpeak, "eager")(input_ids=ids).logits, TOLERANCE)
    assert dense_masks == []
    windows = {"llama": [], "mistral_window_4": [4, 4], "gemma3_window_4": [4]}
    assert kernel_calls == windows[name]  # full layers go to sdpa's own causal kernel


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma3_window_4"])
def test_padded_batch_is_that_of_sdpa(name: str, side: str, device: torch.device) -> None:
    sdpa = tiny(name, "sdpa", device)
    ids = torch.cat(documents([20, 20], device))
    mask = torch.ones_like(ids)
    mask[0, : 5 if side == "left" else 20] = 0
    if side == "right":
        mask[0, :14] = 1
    found = twin(sdpa, "lowpeak")(input_ids=ids, attention_mask=mask, use_cache=False).logits
    wanted = sdpa(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("name", ["llama", "gemma3_window_4"])
def test_generation_is_that_of_sdpa(
    name: str, padding: int, cache: str | None, device: torch.device
) -> None:
    sdpa = tiny(name, "sdpa", device).eval()
    ids = torch.cat(documents([20, 20], device))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    arguments: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "min_new_tokens": 8}
    arguments |= {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    results = []
    for model in (twin(sdpa, "lowpeak"), sdpa):
        model.generation_config.disable_compile = True
        given = {} if cache is None else {"cache_implementation": cache}
        results.append(model.generate(ids, **arguments, **given))
    found, wanted = results
    assert torch.equal(found.sequences, wanted.sequences)
    for step, right in zip(found.logits, wanted.logits, strict=True):
        assert_near(step, right, TOLERANCE)


def test_steps_with_a_cache_are_those_of_the_whole_row(device: torch.device) -> None:
    model = tiny("gemma3_window_4", "lowpeak", device).eval()
    (ids,) = documents([20], device)
    whole = model(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        first = model(input_ids=ids[:, :13], use_cache=True)
        # transformers 5.24 renamed the argument and the output
        name = "cache" if "cache" in first else "past_key_values"
        rest = model(input_ids=ids[:, 13:], **{name: first[name]})
    assert_near(torch.cat([first.logits, rest.logits], dim=1), whole, TOLERANCE)


# transformers 5.24 renamed the method, 5.17 has not the new one
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool, device: torch.device) -> None:
    model = tiny("gemma3_window_4", "lowpeak", device).train()
    row = packed_row(documents([7, 5, 9], device))
    wanted = gradients(model, lambda: weighted(model(**row).logits))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, lambda: weighted(model(**row).logits))
    assert_same_gradients(found, wanted, 1e-6)


def test_autocast_is_that_of_sdpa(device: torch.device) -> None:
    model = tiny("mistral_window_4", "lowpeak", device)
    row = packed_row(documents([7, 5, 9], device), marks=False)
    with torch.autocast(device.type, torch.bfloat16):
        found = model(**row).logits
        wanted = twin(model, "sdpa")(**row).logits
    assert found.dtype == wanted.dtype
    # both round scores and sums at other places, in two layers
    assert_near(found, wanted, 8 * torch.finfo(torch.bfloat16).eps)


# dynamo looks at every tensor it is given
@pytest.mark.filterwarnings("ignore:.*grad attribute of a Tensor.*:UserWarning")
@pytest.mark.parametrize("marks", [True, False])
def test_compiled_layers_and_models(marks: bool, device: torch.device) -> None:
    model = tiny("gemma3_window_4", "lowpeak", device)
    row = packed_row(documents([7, 5, 9], device), marks=marks)
    wanted = model(**row).logits
    torch.compiler.reset()
    assert_near(torch.compile(model, backend="aot_eager")(**row).logits, wanted, 1e-6)
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="aot_eager", fullgraph=True)
    compiled = gradients(model, lambda: weighted(model(**row).logits))
    assert len(compiled) > 10


def test_peak_without_masks(device: torch.device) -> None:
    tokens = 4096
    overrides = {"max_position_embeddings": tokens, "sliding_window": 64}
    model = tiny("gemma3_window_4", "lowpeak", device, **overrides).requires_grad_(False)
    ids = torch.randint(3, VOCABULARY, (1, tokens), device=device)
    mask = torch.ones_like(ids)

    def largest(model: PreTrainedModel) -> int:
        def forward() -> object:
            return model.model(input_ids=ids, attention_mask=mask, use_cache=False)

        return measure(forward, device).largest

    # bytes; a mask of bools takes tokens**2. On a GPU the peak of all tensors is what is known.
    bound = tokens**2 // 3 if device.type == "cpu" else tokens**2
    assert largest(model) < bound
    if device.type == "cpu":
        assert largest(twin(model, "sdpa")) >= tokens**2
    packed = packed_row(documents([3000, 1096], device))

    def step() -> object:
        return model.model(**packed)

    assert measure(step, device).largest < bound


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["llama", "mistral_window_4", "gemma3_window_4", "gpt_neox"])
def test_varlen_in_models(name: str, kernel_calls: list[int | None], device: torch.device) -> None:
    eager = tiny(name, "eager", device).to(torch.bfloat16)
    model = twin(eager, "lowpeak")
    parts = documents([7, 5, 9], device)
    wanted = alone(eager.float(), parts)
    found = model(**packed_row(parts)).logits
    assert kernel_calls
    # a row of random logits in bfloat16, after two layers
    assert_near(found, wanted, 0.06)
    with torch.autocast("cuda", torch.bfloat16):
        assert_near(model.float()(**packed_row(parts)).logits, wanted, 0.06)
