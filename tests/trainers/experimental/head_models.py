"""Tiny models whose logits are more than a product with the head."""

from __future__ import annotations

import tiny
import torch
from torch import nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)


def small(family, config, **overrides):
    torch.manual_seed(3)
    settings = {
        "vocab_size": tiny.VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
        "pad_token_id": tiny.PAD,
        "bos_token_id": tiny.BOS,
        "eos_token_id": tiny.EOS,
        **overrides,
    }
    return family(config(**settings))


class Halved(LlamaForCausalLM):
    """Does to its logits what no config declares."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 2
        return output


def soft_capped():
    return small(Gemma2ForCausalLM, Gemma2Config, head_dim=8, final_logit_softcapping=3.0)


def scaled():
    return small(CohereForCausalLM, CohereConfig, logit_scale=0.25)


def biased():
    model = small(PhiForCausalLM, PhiConfig)
    nn.init.normal_(model.lm_head.bias)
    return model


def experts():
    model = tiny.mixtral()
    model.config.output_router_logits = True
    return model


def halved():
    return small(Halved, LlamaConfig)


MODELS = {
    "soft_capped": soft_capped,
    "scaled": scaled,
    "biased": biased,
    "experts": experts,
    "own_modules": halved,
}
