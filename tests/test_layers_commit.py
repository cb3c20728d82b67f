"""The commits of all layers leave the bits of the loop over the layers, whatever the plan and the layout."""

import pytest
import torch
from layers_cases import LAYERS, assert_same, make_conv_layers, make_layers, make_plan, verify_all
from pools import same_bits

import recoverssm_ops as rs

KINDS = {
    "dense": {},
    "packed": {"lengths": [4, 0, 2]},
    "unbounded": {"gate": "unbounded"},
    "precomputed": {"gate": "precomputed"},
    "scalar gate": {"scalar_gate": True},
    "bf16": {"dtype": torch.bfloat16, "pool_dtype": torch.bfloat16},
    "fp16 with a float32 pool": {"dtype": torch.float16},
    "head first": {"pool_order": "head-first"},
    "one layer": {"layers": 1},
}


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_states_equal_the_loop(device, kind, columns):
    plan = make_plan(device, 3, columns)
    results = []
    for together in (True, False):
        pools, windows = make_layers(device, **KINDS[kind])
        records = verify_all(pools, windows, plan.source)
        if together:
            rs.kda_commit_layers([pool.state for pool in pools], records, None, plan=plan)
        else:
            for pool, record in zip(pools, records, strict=True):
                rs.kda_commit(pool.state, record, None, plan=plan)
        assert all(record.committed for record in records)
        results.append(pools)
    assert_same(*results)
    for pool in results[0]:
        pool.check_guards()
        assert not same_bits(pool.storage, pool.before)


CONV_KINDS = {
    "dense": {},
    "packed": {"lengths": [4, 0, 2], "tail": 2},
    "bf16": {"dtype": torch.bfloat16, "pool_dtype": torch.bfloat16},
    "float32 with a bf16 pool": {"pool_dtype": torch.bfloat16},
    "columns outside channels": {"pool_order": "slot, column, channel", "width": 6},
    "one layer": {"layers": 1},
}


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("kind", CONV_KINDS)
def test_histories_equal_the_loop(device, kind, columns):
    plan = make_plan(device, 3, columns)
    results = []
    for together in (True, False):
        pools, xs, cu_seqlens = make_conv_layers(device, **CONV_KINDS[kind])
        if together:
            states = [pool.state for pool in pools]
            rs.causal_conv1d_commit_layers(states, xs, None, plan=plan, cu_seqlens=cu_seqlens)
        else:
            for pool, x in zip(pools, xs, strict=True):
                rs.causal_conv1d_commit(pool.state, x, None, plan=plan, cu_seqlens=cu_seqlens)
        results.append(pools)
    assert_same(*results)
    for pool in results[0]:
        pool.check_guards()
        assert not same_bits(pool.storage, pool.before)


@pytest.mark.parametrize("pad_slot_id", [-1, 0])
def test_slots_and_accepted_tokens_in_place_of_a_plan(device, pad_slot_id):
    """As the commits of one layer take them; a row of padding."""
    slots = torch.tensor([7, pad_slot_id, 2], device=device)
    n = torch.tensor([3, 2, 1], device=device)
    results, histories = [], []
    for together in (True, False):
        pools, windows = make_layers(device)
        convs, xs, _ = make_conv_layers(device)
        records = verify_all(pools, windows, slots, pad_slot_id)
        states, conv_states = [pool.state for pool in pools], [pool.state for pool in convs]
        if together:
            rs.kda_commit_layers(states, records, n, slots, pad_slot_id=pad_slot_id)
            rs.causal_conv1d_commit_layers(conv_states, xs, n, slots, pad_slot_id=pad_slot_id)
        else:
            for layer in range(LAYERS):
                rs.kda_commit(states[layer], records[layer], n, slots, pad_slot_id=pad_slot_id)
                rs.causal_conv1d_commit(conv_states[layer], xs[layer], n, slots, pad_slot_id=pad_slot_id)
        for pool in pools + convs:
            pool.check_only_written([7, 2])
        results.append(pools)
        histories.append(convs)
    assert_same(*results)
    assert_same(*histories)


def test_slots_by_row_number(device):
    n = torch.tensor([3, 2, 1], device=device)
    pools, windows = make_layers(device)
    rs.kda_commit_layers([pool.state for pool in pools], verify_all(pools, windows, None), n)
    for pool in pools:
        pool.check_only_written(range(3))
        before = pool.before.as_strided(pool.state.shape, pool.state.stride(), pool.state.storage_offset())
        assert all(not same_bits(pool.state[row], before[row]) for row in range(3))


def test_activations_of_other_strides(device):
    """Keys, gates and windows may lie differently from layer to layer."""
    plan = make_plan(device, 3, 1)
    results, histories = [], []
    for spread in (True, False):
        pools, windows = make_layers(device)
        convs, xs, _ = make_conv_layers(device)
        if spread:
            k = torch.stack([windows[1].k, windows[1].k * 2], -1)[..., 0]
            g = windows[2].g.transpose(1, 2).contiguous().transpose(1, 2)
            windows[1], windows[2] = windows[1].with_inputs(k=k), windows[2].with_inputs(g=g)
            xs[1] = xs[1].mT.contiguous().mT
        records = verify_all(pools, windows, plan.source)
        rs.kda_commit_layers([pool.state for pool in pools], records, None, plan=plan)
        rs.causal_conv1d_commit_layers([pool.state for pool in convs], xs, None, plan=plan)
        results.append(pools)
        histories.append(convs)
    assert_same(*results)
    assert_same(*histories)


def test_no_layers_no_rows(device):
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    rs.kda_commit_layers([], [], nothing)
    rs.causal_conv1d_commit_layers((), (), nothing)
    pools, windows = make_layers(device, batch=0)
    records = verify_all(pools, windows, nothing)
    rs.kda_commit_layers([pool.state for pool in pools], records, nothing, nothing)
    convs, xs, _ = make_conv_layers(device, batch=0)
    rs.causal_conv1d_commit_layers([pool.state for pool in convs], xs, nothing, nothing)
    for pool in pools + convs:
        pool.check_unchanged()


def test_autocast_changes_nothing(device):
    plan = make_plan(device, 3, 1)
    results = []
    for enabled in (False, True):
        pools, windows = make_layers(device)
        records = verify_all(pools, windows, plan.source)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            rs.kda_commit_layers([pool.state for pool in pools], records, None, plan=plan)
        results.append(pools)
    assert_same(*results)
