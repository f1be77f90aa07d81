"""What the embeddings of a model are given: padded batches, or packed rows."""

from __future__ import annotations

from typing import Any

import torch


def embedded_shapes(model: Any) -> list[tuple[int, ...]]:
    """A list that fills with the shapes of the token ids that `model` embeds from now on."""
    shapes: list[tuple[int, ...]] = []

    def note(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        shapes.append(tuple(output.shape[:-1]))

    model.get_input_embeddings().register_forward_hook(note)
    return shapes
