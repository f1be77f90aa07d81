"""What all trainers of lowpeak share, and `enabled()` for the trainers of TRL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from lowpeak.config import MemoryConfig

from .attention import choose_trainer_attention
from .compatibility import DISTILLATION_MODULE, REWARD_MODULE, SEAM_MODULES
from .evaluation import TokenWeightedEvaluation
from .fused_forward import HeadFromConfig, report_no_head, why_head_is_off
from .padding_free import PaddingFree
from .padding_free_switch import hidden_from_trl, switch_padding_free
from .seam import SEAMS, heads_from, trl_modules_of
from .use_cache import KeepsUseCache


class LowpeakMixin(KeepsUseCache, TokenWeightedEvaluation):
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
        layout = PaddingFree()
        installer = HeadFromConfig(type(self).__name__, self._memory_config, layout)
        with (
            heads_from(installer, [name for name in modules if name in SEAMS]),
            hidden_from_trl(args, kwargs),
        ):
            super().__init__(*args, **kwargs)
        if REWARD_MODULE in modules:
            report_no_head(type(self).__name__, self._memory_config())
        choice = choose_trainer_attention(self, self._memory_config())
        if any(name in SEAMS for name in modules):
            head_off = why_head_is_off(self._memory_config())
            switch_padding_free(layout, type(self).__name__, self.args, choice, head_off)

    def _memory_config(self) -> MemoryConfig:
        return self.args if isinstance(self.args, MemoryConfig) else MemoryConfig()


@contextmanager
def enabled(config: MemoryConfig | None = None) -> Iterator[None]:
    """Let stock SFT, DPO, KTO, GRPO and RLOO trainers of TRL that are built inside use lowpeak.

    `with lowpeak_trainers.enabled(): trainer = trl.DPOTrainer(...)`; training may happen outside.
    `config` holds the settings of them all.
    Trainers that have LowpeakMixin keep their own settings. Threads started inside are not
    affected. DistillationTrainer, whose loss a subclass overrides, keeps that of TRL.
    """
    settings = MemoryConfig() if config is None else config
    with heads_from(HeadFromConfig("enabled()", lambda: settings)):
        yield
