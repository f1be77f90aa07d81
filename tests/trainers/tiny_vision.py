"""A tiny random vision-language model with its processor, and data of random pictures."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from datasets import Dataset
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
IMAGE = tiny.VOCABULARY
SIDE, PATCH = 16, 8
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }} "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %} <eos>"
    "{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)


def processor() -> LlavaProcessor:
    """The word-level tokenizer with an image token, 4 of which stand for a picture."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    assert tokenizer.convert_tokens_to_ids("<image>") == IMAGE
    tokenizer.chat_template = CHAT_TEMPLATE
    size = {"height": SIDE, "width": SIDE}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, which "default" drops
        chat_template=CHAT_TEMPLATE,
        image_token="<image>",
    )


def llava(seed: int = 0) -> LlavaForConditionalGeneration:
    """A picture encoder of 2 layers before the Llama of `tiny.llama()`."""
    torch.manual_seed(seed)
    return LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                image_size=SIDE,
                patch_size=PATCH,
                projection_dim=16,
            ),
            text_config=LlamaConfig(
                **{**tiny.llama().config.to_dict(), "vocab_size": IMAGE + 8},
            ),
            image_token_index=IMAGE,
            image_seq_length=(SIDE // PATCH) ** 2,
        )
    )


def picture(seed: int) -> object:
    """Random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _turn(role: str, length: int, seed: int) -> list[dict[str, str]]:
    return [{"role": role, "content": tiny.words(tiny.random_ids(length, seed))}]


def pictures_with(lengths: list[tuple[int, ...]], names: tuple[str, ...]) -> Dataset:
    """Conversations about one picture each; `names` are the columns of assistant turns."""
    return Dataset.from_list(
        [
            {
                "images": [picture(row)],
                "prompt": _turn("user", prompt, 100 * row),
                **{
                    name: _turn("assistant", length, 100 * row + 1 + index)
                    for index, (name, length) in enumerate(zip(names, rest, strict=True))
                },
            }
            for row, (prompt, *rest) in enumerate(lengths)
        ]
    )
