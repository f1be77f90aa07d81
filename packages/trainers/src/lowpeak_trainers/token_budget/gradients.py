"""Groups of a batch differentiated one after another, given the gradients of their outputs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

from lowpeak.models import ExpectedLoss, FusedCausalLMOutput

from .rows import Fields

# A prediction holds where no gradient differs by more than this part of the largest.
TOLERANCE = 1e-6
# After so many failures in a row nothing is predicted any more.
MOST_MISSES = 3


class Repeatable:
    """A forward of one group that can be run a second time as it was the first time.

    Args:
        run: computes the outputs, told what their loss is expected to be.
        device: where the model draws its random numbers.
    """

    def __init__(self, run: Callable[[ExpectedLoss | None], Fields], device: Any) -> None:
        self._run = run
        self._device = torch.device(device)
        kind = self._device.type
        self._autocast = (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        self._random: list[Tensor] = []

    def first(self, expected: ExpectedLoss | None = None) -> Fields:
        """The outputs; with a graph if gradients are enabled."""
        self._random = [torch.get_rng_state()]
        if self._device.type != "cpu":
            self._random.append(torch.get_device_module(self._device).get_rng_state(self._device))
        return self._run(expected)

    def again(self, expected: ExpectedLoss | None) -> Fields:
        """The same outputs with a graph."""
        enabled, dtype = self._autocast
        with (
            _random_numbers(self._device, self._random),
            torch.enable_grad(),
            torch.autocast(self._device.type, dtype=dtype, enabled=enabled),
        ):
            return self._run(expected)


@contextmanager
def _random_numbers(device: torch.device, states: Sequence[Tensor]) -> Iterator[None]:
    on_host = device.type == "cpu"
    with torch.random.fork_rng([] if on_host else [device], device_type=device.type):
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.get_device_module(device).set_rng_state(state, device)
        yield


class Forecast(Protocol):
    """What gradients the outputs of groups will receive, up to one factor of the whole batch."""

    def expected(self, index: int) -> ExpectedLoss | None:
        """What the model's head is told for a group."""
        ...

    def gradients(self, index: int, outputs: Fields) -> Fields:
        """Gradients of the outputs of a group, which are without a graph."""
        ...


class Factor:
    """The factor of forecasts, which is that of the batch before."""

    def __init__(self) -> None:
        self._value: float | None = None
        self._misses = 0

    @property
    def value(self) -> float | None:
        """None where none is known or too many have been wrong."""
        return self._value if self._misses < MOST_MISSES else None

    def learn(self, found: Sequence[Fields], forecast: Sequence[Fields]) -> None:
        """Take it, by least squares, from gradients and their forecasts."""
        pairs = [(g[name], h[name]) for g, h in zip(found, forecast, strict=True) for name in h]
        products = [(g.double() * h).sum() for g, h in pairs]
        squares = [(h.double() * h).sum() for _, h in pairs]
        sums = [torch.stack(terms).sum() for terms in (products, squares)]
        product, square = torch.stack(sums).tolist()
        if square > 0:
            self._value = product / square

    def count(self, missed: bool) -> None:
        """Note whether the forecast of a batch failed."""
        self._misses = self._misses + 1 if missed else 0


class GroupedGradients:
    """Outputs of groups as leaves, and later the model's gradients from those of the leaves.

    Args:
        parts: the groups.
        unsynchronized: entered around the passes in which the processes do not add up gradients.
        forecast: what the gradients will be, None where the loss alone says it.
        factor: that of the forecast, kept from batch to batch.
        alone: whether there is no other process.
    """

    def __init__(
        self,
        parts: Sequence[Repeatable],
        unsynchronized: Callable[[], AbstractContextManager[Any]],
        forecast: Forecast | None = None,
        factor: Factor | None = None,
        alone: bool = True,
    ) -> None:
        self._parts = parts
        self._unsynchronized = unsynchronized
        self._forecast, self._factor = forecast, factor or Factor()
        self._scale = self._factor.value if forecast is not None else None
        self._kept: dict[int, Fields] = {}
        self._applied: dict[int, Fields] = {}
        self._names: list[str] = []
        last = len(parts) - 1
        outputs = [self._early(index) for index in range(last)]
        if self._scale is None or alone:
            with unsynchronized():
                self._kept[last] = parts[last].first(self._told(last))
            outputs.append(self._note_names(self._kept[last]))
        else:  # its second forward and backward are those in which the processes communicate
            with torch.no_grad():
                outputs.append(parts[last].first())
        self.leaves: list[Fields] = [
            {name: x.detach().requires_grad_(name in self._names) for name, x in fields.items()}
            for fields in outputs
        ]

    def _told(self, index: int) -> ExpectedLoss | None:
        return None if self._forecast is None else self._forecast.expected(index)

    def _note_names(self, outputs: Fields) -> Fields:
        self._names = [name for name, x in outputs.items() if x.requires_grad]
        return outputs

    def _early(self, index: int) -> Fields:
        """The outputs of a group; where its gradients are forecast, they are used."""
        if self._scale is None or self._forecast is None:
            with torch.no_grad():
                return self._parts[index].first()
        with self._unsynchronized():
            outputs = self._note_names(self._parts[index].first(self._told(index)))
            detached = {name: x.detach() for name, x in outputs.items()}
            found = self._forecast.gradients(index, detached)
            self._applied[index] = {name: self._scale * x for name, x in found.items()}
            _backward(outputs, self._applied[index])
        return detached

    def backward(self, synchronize: bool) -> None:
        """Add the gradients of all groups up in the parameters.

        Args:
            synchronize: over the processes, in the last pass.
        """
        due = [self._gradients(index) for index in range(len(self._parts))]
        order = [index for index in self._kept]
        order += [index for index in range(len(self._parts)) if index not in self._kept]
        if self._forecast is not None:
            wrong = self._compare(due)
            order = [index for index in order if wrong or index not in self._applied]
        for index in order:
            quiet = index != order[-1] or not synchronize
            with self._unsynchronized() if quiet else contextlib.nullcontext():
                gradients = _less(due[index], self._applied.get(index, {}))
                outputs = self._kept.pop(index, None)
                if outputs is None:
                    outputs = self._parts[index].again(along(gradients))
                _backward(outputs, gradients)

    def _compare(self, due: Sequence[Fields]) -> bool:
        """Learn the factor; whether what was used already is not what was due."""
        assert self._forecast is not None
        forecast = []
        for index, leaves in enumerate(self.leaves):
            outputs = {name: x.detach() for name, x in leaves.items()}
            forecast.append(self._forecast.gradients(index, outputs))
        self._factor.learn(due, forecast)
        if not self._applied:
            return False
        lacking = [_less(due[index], used) for index, used in self._applied.items()]
        error = torch.stack([x.abs().max() for fields in lacking for x in fields.values()]).max()
        largest = torch.stack([x.abs().max() for fields in due for x in fields.values()]).max()
        missed = not bool(error <= TOLERANCE * largest)
        self._factor.count(missed)
        return missed

    def _gradients(self, index: int) -> Fields:
        found = {}
        for name in self._names:
            leaf = self.leaves[index][name]
            found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        return found


def _less(due: Fields, used: Fields) -> Fields:
    return {name: x - used[name] if name in used else x for name, x in due.items()}


def _backward(outputs: Fields, gradients: Fields) -> None:
    names = list(gradients)
    torch.autograd.backward([outputs[name] for name in names], [gradients[n] for n in names])


def along(gradients: Fields) -> ExpectedLoss | None:
    """A loss whose gradients are these, [rows, length], of outputs that may be shorter."""
    if "log_probs" not in gradients:
        return None

    def loss(output: FusedCausalLMOutput) -> Tensor:
        terms = []
        for name, gradient in gradients.items():
            values: Tensor = getattr(output, name)
            terms.append((values * gradient[:, : values.size(1)]).sum())
        return torch.stack(terms).sum()

    names = ("log_probs", *(name for name in gradients if name != "log_probs"))
    return ExpectedLoss(loss, names)
