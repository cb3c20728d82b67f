"""A spelling's step as two functions, for the tests of split steps."""

from __future__ import annotations

import torch
from spellings import Spelling, _read, _select, _stack, _window
from torch import Tensor

from compile_passes.splitting.recorded_states import RecordedStates


def window(s: Spelling, layer: dict[str, Tensor], v: Tensor, S: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """Outputs and states of every position."""
    queries, states = _window(s, layer, v, S, compute)
    o = torch.stack([_read(s, state, q) for state, q in zip(states[1:], queries, strict=True)], 1)
    return o, _stack(s, states)


def halves(s: Spelling, compute: torch.dtype = torch.float32):
    """The step of a spelling as two functions."""

    def verify(states, layers, slots):
        o, kept = None, []
        for state, layer in zip(states, layers, strict=True):
            S = (state[slots] if s.checkpoint == "pool" else state).to(compute)
            o, window_states = window(s, layer, layer["v"].to(compute) if o is None else o, S, compute)
            kept.append(window_states)
        return o, kept

    def commit(kept, num_accepted, states, slots):
        new_states = []
        for state, window_states in zip(states, kept, strict=True):
            selected = _select(s, window_states, num_accepted)
            if s.checkpoint == "pool":
                state[slots] = selected.to(state.dtype)
            else:
                new_states.append(selected)
        return new_states

    return verify, commit


def crossing(states: list[RecordedStates]) -> list[Tensor]:
    return [x for x in states[0].handover.values.values() if isinstance(x, Tensor)]
