"""Metrics of an evaluation that are summed up from tiles of logits.

A `TileMetrics` passed as `compute_metrics` takes the place of a function of the logits of the whole
set. It is stateless: what a tile adds is a dictionary of sums, which the trainer adds up over
tiles, batches and processes, so that results depend on neither. One that is a ratio of sums over
tokens does not depend on the batch size either.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import EvalPrediction

from lowpeak.models import LogitTile

Sums = Mapping[str, Tensor]

_IGNORE_INDEX = -100


class TileMetrics(ABC):
    """Metrics of logits, a few tokens at a time; pass an instance as `compute_metrics`.

    `SFTTrainer` of lowpeak_trainers feeds it tiles from the forward that computes the loss, with
    the memory of an evaluation of the loss alone. Any other Trainer can call it as well: with the
    logits of the whole set, like any `compute_metrics`, `batch_eval_metrics` among it.
    """

    # Of the batches so far, where a Trainer calls it batch by batch.
    _running: TileSums | None = None

    @abstractmethod
    def sums(self, tile: LogitTile) -> Sums:
        """What a tile adds to each sum: tensors of one shape for all tiles, by name."""

    @abstractmethod
    def results(self, sums: Sums) -> dict[str, float]:
        """The metrics of the sums over all tokens: float64 tensors on the CPU, by name.

        The trainer puts its prefix, "eval" and an underscore, before the names.
        """

    def __call__(self, prediction: EvalPrediction, compute_result: bool = True) -> dict[str, float]:
        """As a function of full logits [rows, length, V] and labels [rows, length].

        A token's position is its column: padding on the left cannot be told from here.

        Raises:
            ValueError: for predictions that are something else.
        """
        running = TileSums(self) if self._running is None else self._running
        for logits, labels in _batches(prediction):
            for tile in _rows(torch.as_tensor(logits), torch.as_tensor(labels)):
                running.add(tile)
        self._running = None if compute_result else running
        return running.results() if compute_result else {}


class TileSums:
    """The sums of one evaluation; `add` is what watches the logits."""

    def __init__(self, metrics: TileMetrics) -> None:
        self._metrics = metrics
        self.totals: dict[str, Tensor] = {}

    def add(self, tile: LogitTile) -> None:
        """Add a tile.

        Raises:
            ValueError: for a sum that has another shape than those before.
        """
        self.merge(self._metrics.sums(tile))

    def merge(self, sums: Sums) -> None:
        """Add sums, of a tile or of another process."""
        for name, value in sums.items():
            added = torch.as_tensor(value).detach().to("cpu", torch.float64)
            total = self.totals.get(name)
            if total is not None and total.shape != added.shape:
                raise ValueError(
                    f"{type(self._metrics).__name__}.sums: {name!r} has shape "
                    f"{tuple(added.shape)} here and {tuple(total.shape)} before: return sums over "
                    "the tokens of the tile"
                )
            self.totals[name] = added if total is None else total + added

    def results(self) -> dict[str, float]:
        """The metrics, none where no token had a target."""
        return self._metrics.results(self.totals) if self.totals else {}


def _batches(prediction: EvalPrediction) -> Iterable[tuple[Any, Any]]:
    logits: Any = prediction.predictions
    labels: Any = prediction.label_ids
    if isinstance(logits, list) and isinstance(labels, list):  # eval_do_concat_batches=False
        return zip(logits, labels, strict=True)
    return [(logits, labels)]


def _rows(logits: Tensor, labels: Tensor) -> Iterator[LogitTile]:
    """A tile for each row that has a target."""
    if logits.dim() != 3 or labels.shape != logits.shape[:2]:
        raise ValueError(
            f"predictions have shape {tuple(logits.shape)} and label_ids {tuple(labels.shape)}: a "
            "TileMetrics takes logits [rows, length, V] and labels [rows, length]"
        )
    for row, label in zip(logits, labels, strict=True):
        targets = label[1:]
        (positions,) = torch.nonzero(targets != _IGNORE_INDEX, as_tuple=True)
        if positions.numel():
            z = row[positions]
            wide = z if z.dtype == torch.float64 else z.float()
            yield LogitTile(wide, targets[positions], positions)


class TileMetricsList(TileMetrics):
    """Several metrics of the same tiles."""

    def __init__(self, *metrics: TileMetrics) -> None:
        self._metrics = metrics

    def sums(self, tile: LogitTile) -> Sums:
        """Those of all, each behind its number."""
        return {
            f"{number}.{name}": value
            for number, metrics in enumerate(self._metrics)
            for name, value in metrics.sums(tile).items()
        }

    def results(self, sums: Sums) -> dict[str, float]:
        """Those of all; of the same name the last counts."""
        found: dict[str, float] = {}
        for number, metrics in enumerate(self._metrics):
            start = f"{number}."
            own = {n.removeprefix(start): x for n, x in sums.items() if n.startswith(start)}
            found |= metrics.results(own)
        return found


class _TokenMean(TileMetrics):
    """Mean over the tokens of a number that each has."""

    _name: str

    def sums(self, tile: LogitTile) -> Sums:
        """The sum of the numbers, and their count."""
        count = torch.tensor(tile.targets.numel())
        return {"sum": self._values(tile).sum(dtype=torch.float64), "count": count}

    def results(self, sums: Sums) -> dict[str, float]:
        """The mean."""
        return {self._name: float(sums["sum"] / sums["count"])}

    @abstractmethod
    def _values(self, tile: LogitTile) -> Tensor:
        """[n], for n tokens."""


class TopKAccuracy(_TokenMean):
    """`top_<k>_accuracy`: how often the target is one of the k likeliest tokens.

    With k = 1 it is called `token_accuracy`. Among equal logits the smaller id comes first.
    """

    def __init__(self, k: int = 1) -> None:
        if k < 1:
            raise ValueError(f"k={k}: pass 1 or more")
        self._k = k
        self._name = "token_accuracy" if k == 1 else f"top_{k}_accuracy"

    def _values(self, tile: LogitTile) -> Tensor:
        return tile.target_ranks < self._k


class MeanRank(_TokenMean):
    """`mean_rank`: the mean rank of the target, 0 where it is the likeliest token."""

    _name = "mean_rank"

    def _values(self, tile: LogitTile) -> Tensor:
        return tile.target_ranks


class Perplexity(_TokenMean):
    """`perplexity`: exp of the mean negative log-probability of the targets."""

    _name = "perplexity"

    def _values(self, tile: LogitTile) -> Tensor:
        return -tile.target_log_probs

    def results(self, sums: Sums) -> dict[str, float]:
        """Infinity where a target is impossible, or the exponential overflows."""
        mean = sums["sum"] / sums["count"]
        return {self._name: float(mean.exp())}


class CalibrationError(TileMetrics):
    """`calibration_error`: by how much the likeliest token's probability misses its accuracy.

    The expected calibration error of Guo et al. 2017 (arXiv:1706.04599, equation 3): tokens fall by
    that probability into `bins` equal intervals, open on the left; the mean over the tokens of
    the distance between accuracy and mean probability of their interval.
    """

    def __init__(self, bins: int = 15) -> None:
        if bins < 1:
            raise ValueError(f"bins={bins}: pass 1 or more")
        self._bins = bins

    def sums(self, tile: LogitTile) -> Sums:
        """Number of tokens, probabilities and hits, each [bins]."""
        confidence = tile.top_log_probs.exp().to("cpu", torch.float64).clamp(max=1.0)
        hits = (tile.target_ranks == 0).to("cpu", torch.float64)
        places = ((confidence * self._bins).ceil().long() - 1).clamp(0, self._bins - 1)

        def binned(values: Tensor) -> Tensor:
            empty = torch.zeros(self._bins, dtype=torch.float64)
            return empty.index_add_(0, places, values)

        return {
            "tokens": binned(torch.ones_like(hits)),
            "confidence": binned(confidence),
            "hits": binned(hits),
        }

    def results(self, sums: Sums) -> dict[str, float]:
        """The expected calibration error, between 0 and 1."""
        gap = (sums["hits"] - sums["confidence"]).abs().sum()
        return {"calibration_error": float(gap / sums["tokens"].sum())}
