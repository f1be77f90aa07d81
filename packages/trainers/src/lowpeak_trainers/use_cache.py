"""Training leaves `config.use_cache` of the model as it was, live and saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the trainer follows in the bases of the class that mixes this in

_ABSENT = object()


class _ModelAttribute:
    """`trainer.model`; sees the model's config before Trainer writes into it."""

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        if "model" not in vars(trainer):
            raise AttributeError(f"{type(trainer).__name__} has no model")
        return vars(trainer)["model"]

    def __set__(self, trainer: Any, model: Any) -> None:
        vars(trainer)["model"] = model
        config = getattr(model, "config", None)  # DistributedDataParallel has none
        if config is not None and config is not trainer._noted_config:
            trainer._noted_config = config
            trainer._noted_use_cache = _read(config)

    def __delete__(self, trainer: Any) -> None:
        del vars(trainer)["model"]


class KeepsUseCache(Trainer):
    """Mixin: `config.use_cache` is `args.use_cache` while training, and its own value otherwise.

    Trainer writes `args.use_cache`, False unless asked for, into the config and leaves it there, so
    that the saved model generates without a cache where the caller relies on its config.
    """

    model = _ModelAttribute()
    _noted_config: Any = None
    _noted_use_cache: Any = _ABSENT

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As `Trainer.train`."""
        _write(self._noted_config, self.args.use_cache)
        try:
            return super().train(*args, **kwargs)
        finally:
            _write(self._noted_config, self._noted_use_cache)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As `Trainer.save_model`."""
        during = _read(self._noted_config)
        _write(self._noted_config, self._noted_use_cache)
        try:
            super().save_model(*args, **kwargs)
        finally:
            _write(self._noted_config, during)


@contextmanager
def kept_use_cache(config: Any) -> Iterator[None]:
    """Whatever is written inside, `config.use_cache` is afterwards what it was."""
    before = _read(config)
    try:
        yield
    finally:
        _write(config, before)


def _read(config: Any) -> Any:
    # Configs of several models in one, as of vision-language models, have no such attribute.
    return vars(config).get("use_cache", _ABSENT) if config is not None else _ABSENT


def _write(config: Any, value: Any) -> None:
    if config is None:
        return
    if value is not _ABSENT:
        config.use_cache = value
    elif "use_cache" in vars(config):
        del config.use_cache
