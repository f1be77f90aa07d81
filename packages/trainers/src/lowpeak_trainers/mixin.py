"""What all trainers of lowpeak share, and `enabled()` for the trainers of TRL."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowpeak.config import MemoryConfig

from .compatibility import SEAM_MODULES
from .fused_forward import HeadFromConfig
from .seam import heads_from, seam_modules_of


class LowpeakMixin:
    """Gives the TRL trainer that follows it in the bases the memory techniques of lowpeak.

    `class Mine(LowpeakMixin, MyGRPOTrainer)` needs nothing else. Settings come from the trainer's
    `args` when these are a MemoryConfig (SFTConfig, DPOConfig and GRPOConfig of lowpeak are), and
    are the defaults otherwise. Raises TypeError when the class is defined with the mixin behind
    the trainer, and at construction when no supported TRL trainer is among its bases.
    """

    args: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        order = cls.__mro__
        for trainer in order[: order.index(LowpeakMixin)]:
            if (
                trainer is not cls
                and seam_modules_of(trainer)
                and LowpeakMixin not in trainer.__mro__
            ):
                raise TypeError(
                    f"{cls.__name__} lists {trainer.__name__} before LowpeakMixin, so TRL would "
                    f"build its own head. Write class {cls.__name__}(LowpeakMixin, "
                    f"{trainer.__name__})."
                )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        modules = seam_modules_of(type(self))
        if not modules:
            raise TypeError(
                f"{type(self).__name__} has no supported TRL trainer among its bases. Supported "
                f"are the trainers of {', '.join(SEAM_MODULES)}."
            )
        with heads_from(HeadFromConfig(type(self).__name__, self._memory_config), modules):
            super().__init__(*args, **kwargs)

    def _memory_config(self) -> MemoryConfig:
        return self.args if isinstance(self.args, MemoryConfig) else MemoryConfig()


@contextmanager
def enabled(config: MemoryConfig | None = None) -> Iterator[None]:
    """Let stock SFT, DPO and GRPO trainers of TRL that are built inside use lowpeak.

    `with lowpeak_trainers.enabled(): trainer = trl.DPOTrainer(...)`; training may happen outside.
    `config` holds the settings of them all.
    Trainers that have LowpeakMixin keep their own settings. Threads started inside are not
    affected.
    """
    settings = MemoryConfig() if config is None else config
    with heads_from(HeadFromConfig("enabled()", lambda: settings)):
        yield
