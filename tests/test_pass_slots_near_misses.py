"""What ``slot_step`` refuses, before anything is run; and what the pass says of such a step."""

from __future__ import annotations

import re

import pytest
import torch
from rewriting import copied
from slot_steps import (
    SLOTS,
    B,
    H,
    K,
    V,
    make_inputs,
    make_step,
    make_table,
    read_index,
    window,
    write_each,
    write_whole,
)

from compile_passes import explain, slot_step


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()


def read_first(pool, table, n):
    return pool[table[:, 0]]


def read_other_table(pool, table, n):
    return pool[(table + 1)[torch.arange(B), n - 1]]


def read_shifted_rows(pool, table, n):
    return pool[table[torch.tensor([1, 2, 0]), n - 1]]


def read_twice(pool, table, n):
    return read_index(pool, table, n) + 0 * pool.sum()


def read_rearranged(pool, table, n):
    return read_index(pool, table, n).transpose(-1, -2).reshape(B, H, V, K)


def write_shifted(pool, table, states):
    pool[table.roll(1, 1)] = torch.stack(states, 1)


def write_backwards(pool, table, states):
    pool[table.flip(1)] = torch.stack(states, 1)


def write_later_positions(pool, table, states):
    pool[table[:, 1:]] = torch.stack(states[1:], 1)


def write_added(pool, table, states):
    pool.index_put_((table,), torch.stack(states, 1), accumulate=True)


def write_rounded(pool, table, states):
    pool[table] = torch.stack(states, 1).bfloat16().float()


def write_changed(pool, table, states):
    pool[table] = torch.stack(states, 1) * 2


def read_again(pool, table, n, *inputs):
    return make_step()(pool, table, n, *inputs) + pool.sum()


def write_twice(pool, table, states):
    pool[table] = torch.stack(states, 1)
    pool[table[:, 0]] = states[1]


def look_alike(S, *inputs):
    o, states = window(S, *inputs)
    return o, [states[0], states[1].tanh(), states[2]]


ONE_LOOKUP, COLUMNS = "not read by one lookup", "columns 0, 1, .."
NEAR_MISSES = [
    (make_step(read_first), ONE_LOOKUP),
    (make_step(read_other_table), "stored_per_position"),
    (make_step(read_shifted_rows), ONE_LOOKUP),
    (make_step(read_twice), ONE_LOOKUP),
    (make_step(read_rearranged), "not laid out"),
    (make_step(write=write_shifted), "stored_per_position"),
    (make_step(write=write_backwards), "stored_per_position"),
    (make_step(write=write_later_positions), COLUMNS),
    (make_step(write=write_added), "stored_per_position"),
    (make_step(write=write_rounded), "rounded to another dtype"),
    (make_step(write=write_changed), "no_selection"),
    (read_again, "read after it was written"),
    (make_step(write=write_twice), "stored_per_position"),
    (make_step(window=look_alike), "no pool"),
]
NAMES = "first table rows twice rearranged shifted backwards later added rounded changed read_after written_twice look_alike"


@pytest.mark.parametrize(("step", "why"), NEAR_MISSES, ids=NAMES.split())
def test_near_misses_are_refused_before_anything_is_run(step, why):
    args = torch.randn(SLOTS, H, V, K), make_table(1), torch.ones(B, dtype=torch.int64), *make_inputs(0)
    before = copied(args)
    with pytest.raises(RuntimeError, match=re.escape("slot_step cannot rewrite this step: ") + ".*" + re.escape(why)):
        slot_step(step, backend=None)(*args)
    assert all(torch.equal(x, y) for x, y in zip(args, before, strict=True))


def test_other_layouts_and_widths_are_refused():
    def key_first(pool, table, n, *inputs):
        o, states = window(read_index(pool, table, n).transpose(-1, -2), *inputs)
        pool[table] = torch.stack(states, 1).transpose(-1, -2)
        return o

    n, inputs = torch.ones(B, dtype=torch.int64), make_inputs(0)
    with pytest.raises(RuntimeError, match="not laid out"):
        slot_step(key_first, backend=None)(torch.randn(SLOTS, H, K, V), make_table(1), n, *inputs)
    new, pool = slot_step(make_step(), backend=None), torch.randn(SLOTS, H, V, K)
    with pytest.raises(RuntimeError, match="width has to be"):
        new(pool, torch.zeros(B, 18, dtype=torch.int64), n, *inputs)
    new(pool, make_table(1), n, *inputs)
    with pytest.raises(RuntimeError, match="tables of the same width"):
        new(pool, make_table(1, W=4), n, *inputs)


@pytest.mark.parametrize("write", [write_whole, write_each], ids=lambda f: f.__name__)
def test_the_pass_alone_refuses_and_names_the_cure(write):
    args = torch.randn(SLOTS, H, V, K), make_table(1), torch.ones(B, dtype=torch.int64), *make_inputs(0)
    report = explain(make_step(write=write), *args, dynamic=False)
    assert [layer.reason for layer in report.layers] == ["stored_per_position"] and "slot_step" in str(report)


def test_a_cache_that_layers_write_in_turn_is_no_window():
    def layers(cache, slots, x, w):
        for layer in range(3):
            x = x + torch.einsum("bhvk,kj->bhvj", torch.tanh(x), w)
            cache[slots[layer]] = x
        return x

    args = torch.zeros(SLOTS, H, V, K), make_table(1).t(), torch.randn(B, H, V, K), torch.randn(K, K)
    assert not explain(layers, *args, dynamic=False).layers
