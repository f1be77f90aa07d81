"""What lowpeak does to a trainer of TRL while that is built, and right after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from lowpeak.config import MemoryConfig
from lowpeak.pretrained import pretrained_model

from .attention import choose_trainer_attention
from .compatibility import REWARD_MODULE
from .fused_forward import HeadFromConfig, report_no_head, why_head_is_off
from .packed_scores import PackedScores
from .padding_free import PaddingFree
from .padding_free_switch import hidden_from_trl, switch_padding_free
from .removed_options import TrainerConfig
from .seam import SEAMS, heads_from, trl_modules_of


@contextmanager
def equipped(
    trainer: Any,
    layout: PaddingFree,
    settings: Callable[[], MemoryConfig],
    padding_free: Callable[[], bool | None],
    given: tuple[Sequence[Any], Mapping[str, Any]],
) -> Iterator[None]:
    """Around `__init__` of `trainer`: heads from lowpeak, then its attention and its layout.

    Args:
        trainer: an instance of a class for which `trl_modules_of` finds something.
        layout: that of the batches of the model it trains, and of its reference model.
        settings: asked for once the trainer has its arguments.
        padding_free: likewise.
        given: the arguments of `__init__`.
    """
    modules, owner = trl_modules_of(type(trainer)), type(trainer).__name__
    installer = HeadFromConfig(owner, settings, layout)
    with (
        heads_from(installer, [name for name in modules if name in SEAMS]),
        hidden_from_trl(*given),
    ):
        yield
    config = settings()
    scores = REWARD_MODULE in modules
    if scores:
        report_no_head(owner, config)
    choice = choose_trainer_attention(trainer, config)
    unable = _scoring(trainer, layout) if scores else (lambda: why_head_forbids_packing(config))
    switch_padding_free(layout, owner, trainer.args, padding_free(), choice, unable)


def why_head_forbids_packing(config: MemoryConfig) -> str | None:
    """What switched lowpeak's head off, which alone takes packed rows; None when it is on."""
    off = why_head_is_off(config)
    return None if off is None else f"{off}, since TRL's own head takes padded batches only"


def padding_free_of(args: Any) -> bool | None:
    """The option of lowpeak; TRL's of the same name means another thing."""
    return args.padding_free if isinstance(args, TrainerConfig) else None


def _scoring(trainer: Any, layout: PaddingFree) -> Callable[[], str | None]:
    model = pretrained_model(trainer.accelerator.unwrap_model(trainer.model))
    scores = PackedScores(model, layout)

    def refusal() -> str | None:
        with trainer.accelerator.autocast():
            return scores.refusal()

    return refusal
