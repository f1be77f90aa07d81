"""What all trainers of lowpeak share, and `enabled()` for the trainers of TRL."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from lowpeak.config import MemoryConfig

from .assembly import RowOptions, equipped, row_options_of
from .compatibility import DISTILLATION_MODULE, REWARD_MODULE, SEAM_MODULES
from .evaluation import TokenWeightedEvaluation
from .expecting import ExpectsGradients
from .offloading import OffloadsActivations
from .padding_free import PaddingFree
from .preparation import PreparesDatasets, preparing
from .seam import trainers_from, trl_modules_of
from .token_budget.budget import TokenBudget
from .token_budget.steps import TokenBudgetSteps
from .use_cache import KeepsUseCache


class LowpeakMixin(
    ExpectsGradients,
    OffloadsActivations,
    TokenBudgetSteps,
    KeepsUseCache,
    PreparesDatasets,
    TokenWeightedEvaluation,
):
    """Gives the TRL trainer that follows it in the bases the memory techniques of lowpeak.

    `class Mine(LowpeakMixin, MyGRPOTrainer)` needs nothing else. Settings come from the trainer's
    `args` when these are a MemoryConfig (SFTConfig and the other configs of lowpeak are), and are
    the defaults otherwise. A DistillationTrainer needs DistillationMixin instead. Raises TypeError
    when the class is defined with the mixin behind the trainer, and at construction when no
    supported TRL trainer is among its bases.
    """

    args: Any
    # Whether the class computes the loss of DistillationTrainer itself.
    _distils: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        modules = trl_modules_of(cls)
        if DISTILLATION_MODULE in modules and not cls._distils:
            raise TypeError(
                f"{cls.__name__} is a DistillationTrainer, whose loss LowpeakMixin does not "
                "compute. Put lowpeak_trainers.DistillationMixin in its place."
            )
        order = cls.__mro__
        for trainer in order[: order.index(LowpeakMixin)]:
            if (
                trainer is not cls
                and trl_modules_of(trainer)
                and LowpeakMixin not in trainer.__mro__
            ):
                raise TypeError(
                    f"{cls.__name__} lists {trainer.__name__} before LowpeakMixin, so TRL would "
                    f"build its own head. Write class {cls.__name__}(LowpeakMixin, "
                    f"{trainer.__name__})."
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        modules = trl_modules_of(type(self))
        if not modules:
            raise TypeError(
                f"{type(self).__name__} has no supported TRL trainer among its bases. Supported "
                f"are the trainers of {', '.join((*SEAM_MODULES, REWARD_MODULE))}."
            )
        self._layout = PaddingFree()
        self._budget = TokenBudget(self._layout)
        with equipped(
            self,
            self._layout,
            self._memory_config,
            lambda: row_options_of(self.args),
            (args, kwargs),
            self._budget,
        ):
            super().__init__(*args, **kwargs)

    def _memory_config(self) -> MemoryConfig:
        return self.args if isinstance(self.args, MemoryConfig) else MemoryConfig()


@contextmanager
def enabled(
    config: MemoryConfig | None = None,
    *,
    padding_free: bool | None = None,
    share_prompts: bool = False,
    activation_offloading: bool = False,
) -> Iterator[None]:
    """Let stock SFT, DPO, KTO, GRPO, RLOO and reward trainers of TRL built inside use lowpeak.

    `with lowpeak_trainers.enabled(): trainer = trl.DPOTrainer(...)`; training may happen outside.
    They get the head, the attention, the padding-free batches and the packing that the trainers of
    lowpeak get; a dataset given to `evaluate` is packed by TRL.
    Trainers that have LowpeakMixin keep their own settings. Threads started inside are not
    affected. DistillationTrainer, whose loss a subclass overrides, stays as TRL made it.

    Args:
        config: the settings of them all.
        padding_free: as in `lowpeak_trainers.SFTConfig`, for them all; the option that TRL has of
            this name stays TRL's.
        share_prompts: as there.
        activation_offloading: as there, for them all; a config that has the option may ask for it
            itself.

    Raises:
        ValueError: where a trainer is built that `padding_free=True`, `share_prompts=True` or a
            name in `config` does not serve.
    """
    settings = MemoryConfig() if config is None else config
    options = RowOptions(padding_free, share_prompts)

    def build(trainer: Any, init: Callable[..., None], args: Any, kwargs: dict[str, Any]) -> None:
        if isinstance(trainer, LowpeakMixin):
            init(*args, **kwargs)
            return
        layout = PaddingFree()
        with (
            preparing(trainer),
            equipped(
                trainer,
                layout,
                lambda: settings,
                lambda: options,
                (args, kwargs),
                offloading=activation_offloading,
            ),
        ):
            init(*args, **kwargs)

    with trainers_from(build):
        yield
