"""Tiny vision language models and batches of text with one image a row, without a processor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny_models
import torch
import transformers
from family_configs import VOCABULARY, tiny_config
from torch import Tensor
from transformers import PreTrainedModel

IMAGE_ID = VOCABULARY - 1
START_ID = VOCABULARY - 2
# Of one image, after patches are merged.
IMAGE_TOKENS = 4
_QWEN = {"image_token_id": IMAGE_ID, "vision_start_token_id": START_ID, "video_token_id": 127}
_IDEFICS = {"image_token_id": IMAGE_ID, "scale_factor": 1, "pad_token_id": 0}


def _square_image(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 3, 8, 8)}


def _square_image_and_types(rows: int) -> dict[str, Tensor]:
    return {**_square_image(rows), "token_type_ids": _image_places(rows).long()}


def _image_of_patches(rows: int) -> dict[str, Tensor]:
    # 16 patches of 4 x 4 pixels in two frames; 2 x 2 of them make one token
    return {
        "pixel_values": torch.randn(rows * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * rows),
        "mm_token_type_ids": _image_places(rows).long(),
    }


def _images_of_a_row(rows: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(rows, 1, 3, 8, 8)}


def _image_places(rows: int) -> Tensor:
    places = torch.zeros(rows, 16, dtype=torch.bool)
    places[:, 2 : 2 + IMAGE_TOKENS] = True
    return places


# name: (class, its configuration beside the tiny one, images of a batch)
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[int], dict[str, Tensor]]]] = {
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", _QWEN, _image_of_patches),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", _QWEN, _image_of_patches),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", _QWEN, _image_of_patches),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {"image_token_index": IMAGE_ID, "boi_token_index": START_ID, "mm_tokens_per_image": 4},
        _square_image_and_types,
    ),
    "llava": ("LlavaForConditionalGeneration", {"image_token_index": IMAGE_ID}, _square_image),
    "idefics3": ("Idefics3ForConditionalGeneration", _IDEFICS, _images_of_a_row),
    "smolvlm": ("SmolVLMForConditionalGeneration", _IDEFICS, _images_of_a_row),
}


def tiny_vision_model(name: str) -> PreTrainedModel:
    """A model whose logits reach some size."""
    class_name, overrides, _ = MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(tiny_config(model_class.config_class, **overrides))
    with torch.no_grad():
        head = model.get_output_embeddings().weight
        head.mul_(0.5 / head.std())
        for parameter in model.parameters():
            if parameter.dim() == 2 and not parameter.any():  # a projector that starts at zero
                parameter.normal_(std=0.2)
    return model.to(tiny_models.DEVICE)


def image_batch(name: str, rows: int = 2) -> dict[str, Tensor]:
    """Rows of 16 tokens: one, the image's start, the image, text; the image has no labels."""
    torch.manual_seed(1)
    ids = torch.randint(3, 120, (rows, 16))
    ids[:, 1] = START_ID
    places = _image_places(rows)
    ids[places] = IMAGE_ID
    mask = torch.ones_like(ids)
    mask[-1, -3:] = 0
    labels = ids.masked_fill(places | (mask == 0), -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, **MODELS[name][2](rows)}
    return {key: value.to(tiny_models.DEVICE) for key, value in batch.items()}
