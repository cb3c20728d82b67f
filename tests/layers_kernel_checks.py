"""What the all-layers kernels must do, each a function of (device, data dtype, pool dtype), for the interpreter and the GPU.

The bits of the single-layer kernels, whatever the case.
"""

from dataclasses import dataclass, field

import torch
from layers_cases import assert_same, make_conv_layers, make_layers, make_plan
from pools import same_bits

from recoverssm_ops.triton import launch, launch_conv, launch_layers


@dataclass(frozen=True)
class Case:
    """``kind`` as for ``make_layers`` or ``make_conv_layers``."""

    name: str
    columns: int = 1
    layers: int = 3
    batch: int = 3
    pad_slot_id: int = -1
    kind: dict = field(default_factory=dict)


TILED = {"heads": 1, "value_heads": 2, "key_dim": 40, "value_dim": 136}
WHOLE_ROWS = {"sizes": {"heads": 1, "value_heads": 2, "key_dim": 64, "value_dim": 64}, "guard": 0}
CASES = [
    Case("dense"),
    Case("one_layer", layers=1),
    Case("many_layers", layers=11, batch=1),
    Case("columns", columns=3),
    Case("packed", columns=2, kind={"lengths": [4, 0, 2], "tail": 3}),
    Case("null_block", pad_slot_id=0),
    Case("unbounded", kind={"gate": "unbounded"}),
    Case("precomputed", kind={"gate": "precomputed"}),
    Case("scalar_gate", kind={"scalar_gate": True, "gate": "unbounded"}),
    Case("no_norm", kind={"l2norm": False}),
    Case("tiled", columns=2, kind={"sizes": TILED, "guard": 0}),
    Case("head_first", kind={"pool_order": "head-first"}),
    # What commit_rows.py takes: whole rows of 16 bytes.
    Case("whole_rows", kind=WHOLE_ROWS),
    Case("whole_rows_columns", columns=3, kind=WHOLE_ROWS),
]
CONV_CASES = [
    Case("dense"),
    Case("one_layer", layers=1),
    Case("many_layers", layers=11, batch=1),
    Case("columns", columns=3, kind={"width": 6}),
    Case("packed", columns=2, kind={"lengths": [4, 0, 2], "tail": 3}),
    Case("null_block", pad_slot_id=0),
    Case("tiled", kind={"channels": 300, "guard": 0}),
    Case("strided", kind={"pool_order": "channel, column, slot"}),
]


def parity(case: Case, device: str, data: torch.dtype, pool_dtype: torch.dtype) -> None:
    plan = make_plan(device, case.batch, case.columns, case.pad_slot_id)
    where = (plan.source, plan.dest, plan.length)
    results = []
    for together in (True, False):
        pools, windows = make_layers(
            device, layers=case.layers, batch=case.batch, dtype=data, pool_dtype=pool_dtype, **case.kind
        )
        records = [
            record_of(pool, window, plan.source, case.pad_slot_id) for pool, window in zip(pools, windows, strict=True)
        ]
        options = windows[0].options
        gate = [[w.options[name] for w in windows if name in w.options] for name in ("A_log", "dt_bias")]
        layout = (options.get("cu_seqlens"), 4)
        settings = (
            options.get("lower_bound") or 0.0,
            options["use_qk_l2norm_in_kernel"],
            options.get("use_gate_in_kernel", False),
            case.pad_slot_id,
        )
        if together:
            launch_layers.commit(
                [p.state for p in pools], *zip(*records, strict=True), *where, *layout, *gate, *settings
            )
        else:
            for layer, (pool, record) in enumerate(zip(pools, records, strict=True)):
                one = (x[layer] if x else None for x in gate)
                launch.commit(pool.state, *record, *where, *layout, *one, *settings)
        results.append(pools)
    check(results, case)


def record_of(pool, window, slots, pad_slot_id: int) -> tuple:
    """``u``, ``k`` and ``g`` by the kernels' own verify."""
    options = window.options
    _, u = launch.verify(
        *window.inputs, pool.state, slots, options.get("cu_seqlens"), 4, options.get("A_log"), options.get("dt_bias"),
        options.get("lower_bound") or 0.0, 1.0, options["use_qk_l2norm_in_kernel"],
        options.get("use_gate_in_kernel", False), options.get("use_beta_sigmoid_in_kernel", False), False, pad_slot_id,
    )  # fmt: skip
    return u, window.k, window.g


def conv_parity(case: Case, device: str, data: torch.dtype, pool_dtype: torch.dtype) -> None:
    plan = make_plan(device, case.batch, case.columns, case.pad_slot_id)
    where = (plan.source, plan.dest, plan.length)
    results = []
    for together in (True, False):
        pools, xs, cu_seqlens = make_conv_layers(
            device, layers=case.layers, batch=case.batch, dtype=data, pool_dtype=pool_dtype, **case.kind
        )
        if together:
            launch_layers.conv_commit([p.state for p in pools], xs, *where, cu_seqlens, case.pad_slot_id)
        else:
            for pool, x in zip(pools, xs, strict=True):
                launch_conv.commit(pool.state, x, *where, cu_seqlens, case.pad_slot_id)
        results.append(pools)
    check(results, case)


def check(results: list, case: Case) -> None:
    assert len(results[0]) == case.layers
    assert_same(*results)
    for pool in results[0]:
        pool.check_guards()
        assert not same_bits(pool.storage, pool.before)


def unaligned(device: str, data: torch.dtype, pool_dtype: torch.dtype) -> None:
    """One layer's tensors lie off the 16-byte boundaries that the others keep."""
    plan = make_plan(device, 3, 1)
    where = (plan.source, plan.dest, plan.length)
    gate = (-5.0, True, True, -1)
    results = []
    for together in (True, False):
        pools, windows = make_layers(device, dtype=data, pool_dtype=pool_dtype, guard=0)
        convs, xs, _ = make_conv_layers(device, dtype=data, pool_dtype=pool_dtype, guard=0)
        records = [record_of(pool, window, plan.source, -1) for pool, window in zip(pools, windows, strict=True)]
        states, conv_states = [p.state for p in pools], [p.state for p in convs]
        A_log, dt_bias = ([w.options[name] for w in windows] for name in ("A_log", "dt_bias"))
        for tensors in (states, conv_states, xs, A_log, dt_bias):
            tensors[1] = shifted(tensors[1])
            assert tensors[1].data_ptr() % 16 != 0
        records[1] = tuple(shifted(x) for x in records[1])
        if together:
            launch_layers.commit(states, *zip(*records, strict=True), *where, None, 4, A_log, dt_bias, *gate)
            launch_layers.conv_commit(conv_states, xs, *where, None, -1)
        else:
            for layer in range(3):
                parameters = (A_log[layer], dt_bias[layer])
                launch.commit(states[layer], *records[layer], *where, None, 4, *parameters, *gate)
                launch_conv.commit(conv_states[layer], xs[layer], *where, None, -1)
        results.append(states + conv_states)
    assert all(same_bits(x, y) for x, y in zip(*results, strict=True))


def shifted(x: torch.Tensor) -> torch.Tensor:
    """The same tensor, one element further on in memory."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def layers_of_other_strides(device: str, data: torch.dtype, pool_dtype: torch.dtype) -> None:
    """A pool that lies differently cannot be written by one launch: refused."""
    pools, xs, _ = make_conv_layers(device, dtype=data, pool_dtype=pool_dtype)
    plan = make_plan(device, 3, 1)
    states = [p.state for p in pools]
    states[2] = states[2].clone()
    try:
        launch_layers.conv_commit(states, xs, plan.source, plan.dest, plan.length, None, -1)
    except ValueError as error:
        assert "conv_states[2] should have the shape, dtype and strides" in str(error)
    else:
        raise AssertionError("pools of different strides were committed in one launch")
    for pool in pools:
        pool.check_unchanged()


CHECKS = [unaligned, layers_of_other_strides]
