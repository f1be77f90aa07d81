"""Datasets as TRL's trainers prepare them: packed by lowpeak, and what truncation takes counted."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from datasets import Dataset, IterableDataset

from lowpeak.config import DISABLE_VARIABLE, disabled_techniques

from .compatibility import PREPARE_NAME, PREPARING_MODULES, REWARD_MODULE, TRAINER_CLASSES
from .packing import pack_dataset
from .packing.labels import KeptLabels, kept_labels
from .seam import datasets_packed_by, trl_modules_of

if TYPE_CHECKING:
    from transformers import Trainer
else:
    Trainer = object  # the trainer follows in the bases of the class that mixes this in

logger = logging.getLogger("lowpeak.trainers")

SFT_MODULE = "trl.trainer.sft_trainer"
REMEDIES = {
    SFT_MODULE: "Raise max_length, set it to None, or shorten what comes before the first label",
    REWARD_MODULE: "Raise max_length, set it to None, or shorten the rows",
}
REMEDY = "Raise max_length, set it to None, or shorten the prompts"


class PreparesDatasets(Trainer):
    """Mixin: datasets are prepared as in `prepared`, given to `__init__` or to `evaluate`."""

    def _prepare_dataset(self, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()  # not every trainer has the method, but then nobody calls it
        return prepared(self, stock._prepare_dataset, args, kwargs)


@contextmanager
def preparing(trainer: Any) -> Iterator[None]:
    """The same for `trainer`, of TRL's own class, in this context."""
    if _module_of(trainer) is None:
        yield
        return
    stock = getattr(trainer, PREPARE_NAME)
    setattr(trainer, PREPARE_NAME, lambda *args, **kwargs: prepared(trainer, stock, args, kwargs))
    try:
        yield
    finally:
        delattr(trainer, PREPARE_NAME)


def prepared(
    trainer: Any, stock: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What `stock`, TRL's `_prepare_dataset` of `trainer`, makes of a dataset.

    `packing=True` is lowpeak's `pack_dataset` there. Rows that TRL drops since truncation leaves
    them nothing to learn are counted in a warning; raises ValueError where no row is left.
    """
    module = _module_of(trainer)
    if module is None:
        return stock(*args, **kwargs)
    task = _task(trainer, module, args, kwargs)
    task.warn_of_options()
    labels: list[KeptLabels] = []

    def pack(
        dataset: Any,
        seq_length: int,
        strategy: Any = "bfd",
        map_kwargs: dict[str, Any] | None = None,
    ) -> Any:
        cuts = strategy == "bfd" and isinstance(dataset, Dataset)
        if cuts and "labels" in dataset.column_names:
            labels.append(kept_labels(dataset, seq_length))
        return pack_dataset(dataset, seq_length, strategy, map_kwargs)

    with ExitStack() as stack:
        if task.packs():
            stack.enter_context(datasets_packed_by(pack))
        result = stock(*args, **kwargs)
    # Raised here, not where TRL has the main process go first: the others would wait for it.
    for found in labels:
        task.report_labels(found)
    task.report_rows(result)
    return result


class _Task(NamedTuple):
    """One dataset to prepare."""

    owner: str
    module: str
    dataset: Dataset | IterableDataset
    name: str
    max_length: int | None
    truncation_mode: Literal["keep_start", "keep_end"]
    strategy: str | None
    """That of packing; None without."""

    def packs(self) -> bool:
        """Whether lowpeak packs it."""
        if self.strategy is None:
            return False
        if "packing" in disabled_techniques():
            logger.info("packing: TRL's own in %s, by %s=packing", self.owner, DISABLE_VARIABLE)
            return False
        return True

    def warn_of_options(self) -> None:
        if self.strategy is not None and self.truncation_mode == "keep_end":
            logger.warning(
                "truncation_mode='keep_end' is ignored in %s with packing: %s",
                self.owner,
                "'bfd' keeps the first max_length tokens of a row"
                if self.strategy == "bfd"
                else f"{self.strategy!r} keeps all tokens",
            )
        if self.max_length == 1 and self.module != REWARD_MODULE:
            logger.warning(
                "max_length=1 leaves no token of the %s dataset to predict from another one: "
                "nothing is learnt from it in %s",
                self.name,
                self.owner,
            )

    def report_labels(self, labels: KeptLabels) -> None:
        """Rows that packing cut off before their first label; TRL keeps them as context."""
        if labels.lost == 0:
            return
        if labels.kept == 0:
            raise ValueError(
                f"none of the {len(self._sized())} rows of the {self.name} dataset has a label "
                f"left: packing strategy 'bfd' keeps the first max_length={self.max_length} "
                f"tokens of a row. {REMEDIES[SFT_MODULE]}, or pack with 'bfd_split'"
            )
        logger.warning(
            "%d of %d rows of the %s dataset have no label left in %s: packing strategy 'bfd' "
            "keeps the first max_length=%d tokens of a row",
            labels.lost,
            len(self._sized()),
            self.name,
            self.owner,
            self.max_length,
        )

    def report_rows(self, result: Dataset | IterableDataset) -> None:
        """Raise ValueError where no row is left; warn of rows that are gone."""
        if isinstance(result, IterableDataset):
            # Packed, its first row may be thousands of rows away; unpacked, TRL reads one as well.
            if self._truncates() and next(iter(result), None) is None:
                raise ValueError(
                    f"the {self.name} dataset, a stream, has no rows left: {self._reason()}. "
                    f"{REMEDIES.get(self.module, REMEDY)}"
                )
            return
        rows = len(self._sized())
        if rows > 0 and len(result) == 0:
            raise ValueError(
                f"the {self.name} dataset has no rows left of {rows}: {self._reason()}. "
                f"{REMEDIES.get(self.module, REMEDY)}"
            )
        if self._truncates() and len(result) < rows:
            logger.warning(
                "%d of %d rows of the %s dataset are dropped in %s: %s",
                rows - len(result),
                rows,
                self.name,
                self.owner,
                self._reason(),
            )

    def _truncates(self) -> bool:
        return self.strategy is None and self.max_length is not None

    def _reason(self) -> str:
        if self.strategy is not None:
            return "all are empty"
        if self.module == REWARD_MODULE:
            return f"'chosen' or 'rejected' is longer than max_length={self.max_length} tokens"
        if self.module == SFT_MODULE:
            return (
                f"max_length={self.max_length} leaves them no label "
                f"(truncation_mode={self.truncation_mode!r})"
            )
        return f"their prompts alone fill max_length={self.max_length} tokens"

    def _sized(self) -> Dataset:
        assert isinstance(self.dataset, Dataset), "a prepared stream is a stream"
        return self.dataset


def _module_of(trainer: Any) -> str | None:
    return next((name for name in trl_modules_of(type(trainer)) if name in PREPARING_MODULES), None)


def _task(trainer: Any, module: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Task:
    method = getattr(vars(import_module(module))[TRAINER_CLASSES[module]], PREPARE_NAME)
    call = inspect.signature(method).bind(trainer, *args, **kwargs).arguments
    config = call["args"]
    return _Task(
        owner=type(trainer).__name__,
        module=module,
        dataset=call["dataset"],
        name=call["dataset_name"],
        max_length=config.max_length,
        # KTO has no such option and keeps the start; reward models are given whole rows.
        truncation_mode=vars(config).get("truncation_mode", "keep_start"),
        strategy=config.packing_strategy if call.get("packing") else None,
    )
