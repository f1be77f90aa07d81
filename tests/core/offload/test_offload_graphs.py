"""Random graphs on the simulated device: gradients and errors as of plain autograd, bit by bit.

The device runs copies as late or as early as the rules allow, or at random, and poisons what is
freed, so a missing wait shows as wrong bytes. Afterwards nothing may be left alive.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from offload_graphs import Ledger
from offload_oracle import (
    FAST,
    Scenario,
    assert_same_events,
    collect,
    play,
    play_plain,
    scenarios,
    torch_leaves_alive,
)
from offload_simulated import MODES, assert_nothing_left, simulated

from lowpeak.offload import OffloadActivations

pytestmark = [
    # Inside a reentrant region nothing requires grad, which torch says of each inner region.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
]

SLOW = settings(
    FAST,
    max_examples=int(os.environ.get("LOWPEAK_GRAPHS", "4000")),
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)


@dataclass(frozen=True)
class Setting:
    """How the helper is set up."""

    mode: str
    seed: int
    policy: str
    min_bytes: int
    window_bytes: int | None
    keep_last: int
    keep_bytes: int
    use_streams: bool
    native: bool = False

    def context(self) -> OffloadActivations:
        policy = {
            "every second": _every_second(),
            "small": lambda saved: saved.nbytes < 64,
        }.get(self.policy, self.policy)
        return simulated(
            self.mode,
            self.seed,
            native=self.native,
            policy=policy,
            min_bytes=self.min_bytes,
            window_bytes=self.window_bytes,
            keep_last=self.keep_last,
            keep_bytes=self.keep_bytes,
            use_streams=self.use_streams,
        )


def _every_second() -> object:
    turn = [False]

    def choose(_saved: object) -> bool:
        turn[0] = not turn[0]
        return turn[0]

    return choose


SETTINGS = st.builds(
    Setting,
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 9),
    policy=st.sampled_from(["all", "all", "checkpoint_inputs", "auto", "every second", "small"]),
    min_bytes=st.sampled_from([1, 1, 33, 65]),
    window_bytes=st.sampled_from([None, 1, 64, 200, 1 << 20]),
    keep_last=st.sampled_from([0, 0, 1, 3]),
    keep_bytes=st.sampled_from([0, 0, 64, 200, 1000]),
    use_streams=st.sampled_from([True, True, True, False]),
)


def check(scenario: Scenario, first: Setting, second: Setting) -> None:
    """Same events as plain autograd; then no bytes, no references, and no storage of the graph."""
    plain = play_plain(scenario)
    contexts = (first.context(), second.context())
    ledger = Ledger()
    ours = play(scenario, contexts, ledger)
    assert_same_events(ours, plain)
    del ours
    if torch_leaves_alive(scenario):
        return
    for context in contexts:
        assert_nothing_left(context)
    if ledger.alive():
        collect()
    assert ledger.alive() == 0


@FAST
@given(scenarios(), SETTINGS, SETTINGS)
def test_gradients_are_those_of_plain_autograd(
    scenario: Scenario, first: Setting, second: Setting
) -> None:
    check(scenario, first, second)


@FAST
@given(scenarios(forbidden=True, size=3), SETTINGS, SETTINGS)
def test_edits_of_saved_tensors_raise_as_plain_autograd(
    scenario: Scenario, first: Setting, second: Setting
) -> None:
    check(scenario, first, second)


@pytest.mark.slow
@SLOW
@given(scenarios(forbidden=True, size=10), SETTINGS, SETTINGS)
def test_many_graphs(scenario: Scenario, first: Setting, second: Setting) -> None:
    check(scenario, first, second)


@settings(FAST, max_examples=40)
@given(st.lists(scenarios(size=3), min_size=2, max_size=4), SETTINGS)
def test_one_context_for_many_steps(steps: list[Scenario], setting: Setting) -> None:
    """What an earlier step left - graphs, errors, prefetched tensors - changes no later step."""
    context = setting.context()
    for scenario in steps:
        plain = play_plain(scenario)
        assert_same_events(play(scenario, (context, context), Ledger()), plain)
    if not any(torch_leaves_alive(scenario) for scenario in steps):
        assert_nothing_left(context)


def test_random_states_are_left_alone() -> None:
    """Dropout after the context draws what it draws without it."""
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    with simulated("random"):
        x = torch.ones(4, 4, requires_grad=True)
        x.sin().exp().sum().backward()
    assert torch.equal(torch.rand(3), expected)
    collect()
