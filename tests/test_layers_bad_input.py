"""What the all-layers commits refuse: the message names the layer, and no layer has been written."""

from dataclasses import replace

import pytest
import torch
from layers_cases import LAYERS, make_conv_layers, make_layers, verify_all

import recoverssm_ops as rs


class Step:
    """Everything one call takes; tests spoil one thing."""

    def __init__(self, device):
        self.device = device
        self.slots = torch.tensor([5, 6, 7], device=device)
        self.n = torch.tensor([3, 0, 2], device=device)
        self.pools, self.windows = make_layers(device)
        self.convs, self.xs, _ = make_conv_layers(device)
        self.records = verify_all(self.pools, self.windows, self.slots)
        self.states = [pool.state for pool in self.pools]
        self.conv_states = [pool.state for pool in self.convs]

    def commit(self):
        rs.kda_commit_layers(self.states, self.records, self.n, self.slots)

    def conv_commit(self):
        rs.causal_conv1d_commit_layers(self.conv_states, self.xs, self.n, self.slots)

    def other_window(self, **kind):
        """A record of the last layer's pool of another kind."""
        window = make_layers(self.device, **kind)[1][-1]
        return rs.kda_verify(*window.inputs, self.states[-1], None, **window.options)[1]

    def check_unwritten(self):
        for pool in self.pools + self.convs:
            pool.check_unchanged()


def set_last(values: str, make):
    def spoil(step):
        getattr(step, values)[-1] = make(step)

    return spoil


def spoil_committed(step):
    step.records[-1].committed = True


SPOILT = {
    "another shape": (
        set_last("states", lambda s: s.states[-1][:9].clone()),
        ValueError,
        r"states\[2\] .*shape = \(23,",
    ),
    "another dtype": (
        set_last("states", lambda s: s.states[-1].half()),
        ValueError,
        r"states\[2\] .*dtype = torch.float32",
    ),
    "other strides": (set_last("states", lambda s: s.states[-1].clone()), ValueError, r"states\[2\] .*strides"),
    "no state of the record": (
        set_last("states", lambda s: s.states[-1][:, :1]),
        ValueError,
        "layer 2: state should have",
    ),
    "no tensor": (set_last("states", lambda s: "pool"), TypeError, "layer 2: state should be a tensor"),
    "a pool twice": (set_last("states", lambda s: s.states[0]), ValueError, "states should hold .* twice"),
    "a record twice": (set_last("records", lambda s: s.records[0]), ValueError, "records should hold .* twice"),
    "no record": (set_last("records", lambda s: s.records[0].u), TypeError, "layer 2: record should be a Record"),
    "committed": (spoil_committed, RuntimeError, "layer 2: record was committed already"),
    "another window": (
        set_last("records", lambda s: s.other_window(window=3)),
        ValueError,
        r"records\[2\] .*like layer 0",
    ),
    "another gate": (
        set_last("records", lambda s: s.other_window(gate="unbounded")),
        ValueError,
        r"records\[2\] should have lower_bound = -5.0 like layer 0, but had None",
    ),
    "another gate parameter": (
        set_last("records", lambda s: replace(s.records[-1], dt_bias=None)),
        ValueError,
        r"records\[2\] should have a dt_bias = True like layer 0, but had False",
    ),
    "another packing": (
        set_last("records", lambda s: s.other_window(lengths=[4, 4, 4])),
        ValueError,
        r"records\[2\] should have .*like layer 0",
    ),
    "fewer records": (lambda s: s.records.pop(), ValueError, "records should have 3 layers like states, but had 2"),
    "one pool": (lambda s: setattr(s, "states", s.states[0]), TypeError, "states should be a list or tuple"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_recurrent_states(device, name):
    spoil, error, message = SPOILT[name]
    step = Step(device)
    spoil(step)
    with pytest.raises(error, match=message):
        step.commit()
    step.check_unwritten()
    assert not any(getattr(record, "committed", False) for record in step.records[: LAYERS - 1])


def test_packed_layers_share_their_boundaries(device):
    pools, windows = make_layers(device, lengths=[4, 0, 2])
    windows[1].options["cu_seqlens"] = windows[1].options["cu_seqlens"].clone()
    records = verify_all(pools, windows, None)
    with pytest.raises(ValueError, match=r"records\[1\] should have the cu_seqlens tensor of records\[0\]"):
        rs.kda_commit_layers([pool.state for pool in pools], records, torch.tensor([1, 0, 1], device=device))
    for pool in pools:
        pool.check_unchanged()


CONV_SPOILT = {
    "another shape": (
        set_last("conv_states", lambda s: s.conv_states[-1][:9].clone()),
        ValueError,
        r"conv_states\[2\] .*shape = \(23,",
    ),
    "other strides": (
        set_last("conv_states", lambda s: s.conv_states[-1].clone()),
        ValueError,
        r"conv_states\[2\] .*strid",
    ),
    "another width": (
        set_last("conv_states", lambda s: s.conv_states[-1][..., 1:]),
        ValueError,
        r"conv_states\[2\] .*shape",
    ),
    "a pool twice": (
        set_last("conv_states", lambda s: s.conv_states[0]),
        ValueError,
        "conv_states should hold .* twice",
    ),
    "another window": (
        set_last("xs", lambda s: s.xs[-1][:, :2]),
        ValueError,
        r"xs\[2\] should have shape = \(3, 4, 40\)",
    ),
    "other channels": (set_last("xs", lambda s: s.xs[-1][..., :7]), ValueError, "layer 2: x should have shape"),
    "another dtype": (
        set_last("xs", lambda s: s.xs[-1].half()),
        ValueError,
        r"xs\[2\] should have dtype = torch.float32",
    ),
    "no float": (set_last("xs", lambda s: s.xs[-1].int()), TypeError, "layer 2: x should have dtype"),
    "fewer windows": (lambda s: s.xs.pop(), ValueError, "xs should have 3 layers like conv_states, but had 2"),
}


@pytest.mark.parametrize("name", CONV_SPOILT)
def test_histories(device, name):
    spoil, error, message = CONV_SPOILT[name]
    step = Step(device)
    spoil(step)
    with pytest.raises(error, match=message):
        step.conv_commit()
    step.check_unwritten()


def test_the_plan_is_checked(device):
    step = Step(device)
    step.n = step.n[:2]
    for call in (step.commit, step.conv_commit):
        with pytest.raises(ValueError, match="num_accepted should have shape"):
            call()
    step.check_unwritten()
    with pytest.raises(ValueError, match="num_accepted should be a tensor"):
        rs.kda_commit_layers(step.states, step.records, None)


def test_b16_records_are_consumed_once(device):
    step = Step(device)
    step.commit()
    for pool in step.pools:
        pool.remember()
    with pytest.raises(RuntimeError, match="layer 0: record was committed already"):
        step.commit()
    with pytest.raises(RuntimeError, match="record was committed already"):
        rs.kda_commit(step.states[1], step.records[1], step.n, step.slots)
    step.check_unwritten()
