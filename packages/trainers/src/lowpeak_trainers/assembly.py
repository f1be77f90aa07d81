"""What lowpeak does to a trainer of TRL while that is built, and right after."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor

from lowpeak.attention import AttentionChoice, why_no_shared_prefixes
from lowpeak.config import MemoryConfig
from lowpeak.models import BatchLayout, Rearranged, SeveralCalls
from lowpeak.pretrained import pretrained_model

from .attention import choose_trainer_attention, reference_attention
from .compatibility import DISTILLATION_MODULE, REWARD_MODULE
from .fused_forward import HeadFromConfig, report_no_head, takes_adapters, why_head_is_off
from .offloading import offloading_hidden_from_trl, switch_offloading, wants_offloading
from .packed_scores import PackedScores
from .padding_free import PaddingFree
from .padding_free_switch import hidden_from_trl, switch_padding_free, why_not_packed
from .removed_options import TrainerConfig
from .seam import SEAMS, heads_from, trl_modules_of
from .split_rows import SplitRows
from .token_budget.budget import TokenBudget
from .token_budget.config import TokenBudgetConfig
from .token_budget.switch import switch_token_budget

logger = logging.getLogger("lowpeak.trainers")


class RowOptions(NamedTuple):
    """How batches become rows; see `TrainerConfig`."""

    padding_free: bool | None = None
    share_prompts: bool = False
    max_tokens_per_batch: int | None = None


@contextmanager
def equipped(
    trainer: Any,
    layout: PaddingFree,
    settings: Callable[[], MemoryConfig],
    wanted: Callable[[], RowOptions],
    given: tuple[Sequence[Any], Mapping[str, Any]],
    budget: TokenBudget | None = None,
    offloading: bool = False,
) -> Iterator[None]:
    """Around `__init__` of `trainer`: heads from lowpeak, then its attention and its layout.

    Args:
        trainer: an instance of a class for which `trl_modules_of` finds something.
        layout: that of the batches of the model it trains, and of its reference model.
        settings: asked for once the trainer has its arguments.
        wanted: likewise.
        given: the arguments of `__init__`.
        budget: that of its batches, None for a trainer that has none.
        offloading: whether its activations are offloaded even if its config does not ask for it.
    """
    modules = trl_modules_of(type(trainer))
    hidden: dict[int, Any] = {}

    def options() -> RowOptions:
        chosen = wanted()
        return chosen._replace(padding_free=hidden.get(id(trainer.args), chosen.padding_free))

    rows = TrainerRows(layout, budget)

    def arrange() -> None:
        chosen = options()
        _arrange(trainer, layout, rows.splitter, settings(), chosen)
        if budget is None:
            _warn_of_no_budget(trainer)
        else:
            tokens, shared = chosen.max_tokens_per_batch, chosen.share_prompts
            switch_token_budget(trainer, budget, tokens, layout.multiple, shared)

    rows.arrange_by(arrange)
    installer = HeadFromConfig(type(trainer).__name__, settings, rows)
    with (
        heads_from(installer, [name for name in modules if name in SEAMS], takes_adapters(*given)),
        hidden_from_trl(*given) as concealed,
        offloading_hidden_from_trl(*given),
    ):
        hidden.update(concealed)
        yield
    rows.arrange()
    if offloading or wants_offloading(trainer.args):
        switch_offloading(trainer)


def _warn_of_no_budget(trainer: Any) -> None:
    tokens = row_options_of(trainer.args).max_tokens_per_batch
    if tokens is not None:
        logger.warning(
            "%s ignores max_tokens_per_batch=%d, which needs a trainer of lowpeak_trainers or a "
            "subclass with its LowpeakMixin",
            type(trainer).__name__,
            tokens,
        )


class TrainerRows:
    """The layout of a trainer's calls, arranged by its first fused call or once it is built.

    TRL precomputes log-probabilities of the reference while it builds a trainer.

    Args:
        padding_free: what packs the padded calls.
        budget: what makes several of calls without gradients.
    """

    def __init__(self, padding_free: PaddingFree, budget: TokenBudget | None = None) -> None:
        self.splitter = SplitRows()
        self._layouts: tuple[BatchLayout, ...] = (self.splitter, padding_free)
        if budget is not None:
            self._layouts = (budget, *self._layouts)
        self._arrange: Callable[[], None] | None = None

    def arrange_by(self, arrange: Callable[[], None]) -> None:
        """Let `arrange` switch the layouts, once."""
        self._arrange = arrange

    def arrange(self) -> None:
        """Do so now, unless it has been done; afterwards nothing here reaches the trainer."""
        arrange, self._arrange = self._arrange, None
        if arrange is not None:
            arrange()

    def __call__(
        self, arguments: dict[str, Any], labels: Tensor
    ) -> Rearranged | SeveralCalls | None:
        """The call in the layout that takes it, or None where it stays as it is."""
        self.arrange()
        found = (layout(arguments, labels) for layout in self._layouts)
        return next((row for row in found if row is not None), None)


def _arrange(
    trainer: Any,
    layout: PaddingFree,
    splitter: SplitRows,
    config: MemoryConfig,
    options: RowOptions,
) -> None:
    owner = type(trainer).__name__
    scores = REWARD_MODULE in trl_modules_of(type(trainer))
    if scores:
        report_no_head(owner, config)
    choice = choose_trainer_attention(trainer, config)
    _keep_documents_apart(trainer, splitter, choice, why_head_is_off(config))
    unable = (
        _scoring(trainer, layout)
        if scores
        else lambda: why_head_forbids_packing(config) or why_reference_cannot_pack(trainer)
    )
    sharing = (lambda: why_prompts_not_shared(trainer)) if options.share_prompts else None
    switch_padding_free(layout, owner, trainer.args, options.padding_free, choice, unable, sharing)


def _keep_documents_apart(
    trainer: Any, splitter: SplitRows, choice: AttentionChoice, head_off: str | None
) -> None:
    """Where the trainer packs documents and the attention mixes them: no packed row for it."""
    if choice.separates_documents or not vars(trainer).get("padding_free"):
        return
    owner = type(trainer).__name__
    if head_off is None:
        splitter.on = True
        logger.warning(
            "packed rows are computed padded in %s, a document a row, since attention %r would let "
            "documents see each other: %s",
            owner,
            choice.name,
            choice.reason,
        )
    else:
        logger.warning(
            "the documents of a packed row may see each other in %s: %s. Train without packing and "
            "padding_free, or with lowpeak's head, which %s switched off",
            owner,
            choice.reason,
            head_off,
        )


def why_reference_cannot_pack(trainer: Any) -> str | None:
    choice = reference_attention(trainer)
    reason = None if choice is None else why_not_packed(choice)
    return None if reason is None else f"{reason}, in the reference model"


def why_head_forbids_packing(config: MemoryConfig) -> str | None:
    """What switched lowpeak's head off, which alone takes packed rows; None when it is on."""
    off = why_head_is_off(config)
    return None if off is None else f"{off}, since TRL's own head takes padded batches only"


def row_options_of(args: Any) -> RowOptions:
    """The options of lowpeak; TRL's padding_free means another thing."""
    if isinstance(args, TrainerConfig):
        tokens = args.max_tokens_per_batch if isinstance(args, TokenBudgetConfig) else None
        return RowOptions(args.padding_free, args.share_prompts, tokens)
    return RowOptions()


def why_prompts_not_shared(trainer: Any) -> str | None:
    """What keeps the models of `trainer` from rows with shared prompts, or None."""
    if DISTILLATION_MODULE in trl_modules_of(type(trainer)):
        return "its batches hold each prompt once"
    if vars(trainer.args).get("packing"):
        return "packing=True has it in packed rows already, which are left as they are"
    unwrap = trainer.accelerator.unwrap_model
    with trainer.accelerator.autocast():
        reason = why_no_shared_prefixes(pretrained_model(unwrap(trainer.model)))
        reference = vars(trainer).get("ref_model")
        if reason is None and reference is not None:
            reason = why_no_shared_prefixes(pretrained_model(unwrap(reference)))
            return None if reason is None else f"in the reference model, {reason}"
    return reason


def _scoring(trainer: Any, layout: PaddingFree) -> Callable[[], str | None]:
    model = pretrained_model(trainer.accelerator.unwrap_model(trainer.model))
    scores = PackedScores(model, layout)

    def refusal() -> str | None:
        with trainer.accelerator.autocast():
            return scores.refusal()

    return refusal
