"""The self-test leaves quantised layers as they are: some rewrite their weight in eval mode."""

from __future__ import annotations

import tiny_models
import torch
from torch import nn

from lowpeak.models import install_fused_forward


class PackedInEval(nn.Module):
    """A linear layer with an int8 weight that does what bitsandbytes does to 4 bits on a CPU."""

    def __init__(self, linear):
        super().__init__()
        self.scale = nn.Parameter(linear.weight.abs().max() / 127, requires_grad=False)
        whole = (linear.weight / self.scale).round().to(torch.int8)
        self.weight = nn.Parameter(whole, requires_grad=False)

    def forward(self, hidden):
        if not self.training and not hidden.requires_grad:
            self.scale.mul_(1.5)
        return nn.functional.linear(hidden, self.weight.to(hidden.dtype) * self.scale)


def test_self_test_runs_quantised_layers_in_their_own_mode(device):
    model = tiny_models.tiny_model("llama").to(device).train()
    layer = model.model.layers[0].mlp
    layer.up_proj = PackedInEval(layer.up_proj)
    scale = layer.up_proj.scale.clone()
    install_fused_forward(model)
    batch = {name: value.to(device) for name, value in tiny_models.token_batch().items()}
    wanted = model(**batch).loss
    output = model(**batch, fused_lm_head=True)
    assert torch.equal(layer.up_proj.scale, scale)
    torch.testing.assert_close(output.loss, wanted, rtol=1e-5, atol=1e-5)
    assert layer.up_proj.training
