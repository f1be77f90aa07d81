"""What the inner operators answer to a second differentiation."""

from __future__ import annotations

from collections.abc import Callable


def double_backward_error(function: str) -> Callable[..., None]:
    """A backward for the backward operator of `function`: it raises and names a remedy."""

    def refuse(ctx: object, *gradients: object) -> None:
        raise RuntimeError(
            f"{function} has no double backward: its gradients cannot be differentiated again. "
            "Compute this loss from full logits, or keep create_graph=True away from it"
        )

    return refuse
