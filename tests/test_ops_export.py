"""torch.export, saved programs and fresh processes: what importing the package brings, and what it must not bring."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pools import guarded_pool, make_window, same_bits
from torch.utils import _pytree as pytree

import recoverssm_ops as rs

REPOSITORY = Path(rs.__file__).parents[1]


def fresh_process(code: str) -> subprocess.CompletedProcess:
    """Run ``code`` in a new interpreter that can import this checkout."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=False
    )


class Step(torch.nn.Module):
    """Verify and commit on a pool that is a buffer."""

    def __init__(self, pool: torch.Tensor, **options):
        super().__init__()
        self.register_buffer("pool", pool)
        self.options = options

    def forward(self, q, k, v, g, beta, slots, num_accepted):
        o, record = rs.kda_verify(q, k, v, g, beta, self.pool, slots, **self.options)
        rs.kda_commit(self.pool, record, num_accepted, slots)
        return o, record


def dense_step(device, batch):
    window = make_window(batch, 4, device=device, seed=batch)
    pool = guarded_pool(9, 2, 6, 8, guard=0, device=device).state
    slots = torch.arange(batch, device=device) + 1
    return (*window.inputs, slots, (slots + 1) % 5), pool, window.options


def run_eagerly(arguments, pool, options):
    step = Step(pool.clone(), **options)
    o, record = step(*arguments)
    return o, record.u, step.pool


@pytest.mark.parametrize("decomposed", [False, True], ids=["training IR", "functional"])
def test_exported_step_with_dynamic_batch(device, decomposed):
    arguments, pool, options = dense_step(device, 3)
    batch = torch.export.Dim("batch", min=1, max=8)
    program = torch.export.export(
        Step(pool.clone(), **options), arguments, dynamic_shapes=tuple({0: batch} for _ in arguments)
    )
    if decomposed:
        program = program.run_decompositions()
        assert program.graph_signature.buffers_to_mutate
    for size in (3, 1, 8):
        arguments = dense_step(device, size)[0]
        o, u, after = run_eagerly(arguments, pool, options)
        module = program.module()
        module.pool.copy_(pool)
        exported_o, record = module(*arguments)
        assert isinstance(record, rs.Record) and record.committed
        assert same_bits(exported_o, o) and same_bits(record.u, u) and same_bits(module.pool, after)


def test_exported_packed_rows_with_dynamic_tokens_and_rows(device):
    parameters = {name: x for name, x in make_window(1, 4, device=device).options.items() if name != "cu_seqlens"}
    parameters["max_seqlen"] = 4

    class Packed(torch.nn.Module):
        def forward(self, state, q, k, v, g, beta, cu_seqlens, slots, num_accepted):
            o, record = rs.kda_verify(q, k, v, g, beta, state, slots, cu_seqlens=cu_seqlens, **parameters)
            rs.kda_commit(state, record, num_accepted, slots)
            return o

    def packed(lengths):
        window = make_window(len(lengths), 4, lengths=lengths, device=device, seed=sum(lengths))
        slots = torch.arange(len(lengths), device=device)
        return *window.inputs, window.options["cu_seqlens"], slots, slots % 5

    pool = guarded_pool(9, 2, 6, 8, guard=0, device=device).state
    tokens, rows = torch.export.Dim("tokens", max=64), torch.export.Dim("rows", max=9)
    shapes = (None, *[{1: tokens}] * 5, {0: rows + 1}, {0: rows}, {0: rows})
    program = torch.export.export(Packed(), (pool.clone(), *packed([4, 1, 3])), dynamic_shapes=shapes)
    for lengths in ([4, 1, 3], [2, 0, 4, 4, 1], [3, 2]):
        states = [pool.clone(), pool.clone()]
        exported, eager = program.module()(states[0], *packed(lengths)), Packed()(states[1], *packed(lengths))
        assert same_bits(exported, eager) and same_bits(*states), lengths
        assert not same_bits(states[0], pool)


@pytest.mark.parametrize("strict", [False, True])
def test_records_cross_program_borders(device, strict):
    """One program verifies and returns the record, another one takes it and commits; a consumed one does not fit."""

    class Commit(torch.nn.Module):
        def forward(self, state, record, num_accepted, slots):
            rs.kda_commit(state, record, num_accepted, slots)

    (*inputs, slots, n), pool, options = dense_step(device, 3)
    _, record = rs.kda_verify(*inputs, pool, slots, **options)
    program = torch.export.export(Commit(), (pool.clone(), record, n, slots), strict=strict)
    _, _, expected = run_eagerly((*inputs, slots, n), pool, options)
    state = pool.clone()
    program.module()(state, record, n, slots)
    assert same_bits(state, expected)

    rs.kda_commit(pool, record, n, slots)
    with pytest.raises(ValueError, match="tree spec"):
        program.module()(state, record, n, slots)


def test_record_is_a_pytree(device):
    (*inputs, slots, _), pool, options = dense_step(device, 2)
    _, record = rs.kda_verify(*inputs, pool, slots, **options)
    leaves, spec = pytree.tree_flatten(record)
    assert [x is y for x, y in zip(leaves[:3], (record.u, record.k, record.g), strict=True)] == [True] * 3
    rebuilt = pytree.tree_unflatten(leaves, pytree.treespec_loads(pytree.treespec_dumps(spec)))
    assert isinstance(rebuilt, rs.Record) and rebuilt.u is record.u
    assert (rebuilt.max_seqlen, rebuilt.lower_bound, rebuilt.committed) == (4, -5.0, False)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(record)[0]]
    assert paths == [".u", ".k", ".g", ".A_log", ".dt_bias", ".cu_seqlens"]


def test_record_survives_torch_save(device, tmp_path):
    (*inputs, slots, _), pool, options = dense_step(device, 2)
    _, record = rs.kda_verify(*inputs, pool, slots, **options)
    torch.save(record, tmp_path / "record.pt")
    loaded = torch.load(tmp_path / "record.pt", weights_only=True)
    assert isinstance(loaded, rs.Record) and same_bits(loaded.u, record.u) and loaded.max_seqlen == 4


def test_record_counts_its_bytes():
    window = make_window(2, 4, dtype=torch.bfloat16, gate_dtype=torch.float32)
    _, record = rs.kda_verify(*window.inputs, guarded_pool(2, 2, 6, 8).state, **window.options)
    assert record.nbytes == 2 * 4 * 2 * (6 * 4 + 8 * 2 + 8 * 4)  # u float32, k bf16, g float32


def test_import_brings_neither_triton_nor_tensorrt():
    code = (
        "import json, sys, torch; before = set(sys.modules); import recoverssm_ops; "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; print(json.dumps(sorted(new)))"
    )
    result = fresh_process(code)
    assert result.returncode == 0, result.stderr
    new = set(json.loads(result.stdout))
    assert "recoverssm_ops" in new
    assert not {"triton", "torch_tensorrt", "tensorrt", "compile_passes", "models"} & new


def test_b34_saved_program_needs_the_import_and_says_so(tmp_path):
    """In a process that has not imported the package, loading fails and names the operator; with the import it runs."""
    arguments, pool, options = dense_step("cpu", 3)
    program = torch.export.export(Step(pool.clone(), **options), arguments)
    path, inputs = str(tmp_path / "step.pt2"), str(tmp_path / "inputs.pt")
    torch.export.save(program, path)
    o, u, after = run_eagerly(arguments, pool, options)
    torch.save((arguments, o, u, after), inputs)

    without = fresh_process(f"import torch; torch.export.load({path!r})")
    assert without.returncode != 0
    assert "recoverssm" in without.stderr and "import the custom op" in without.stderr, without.stderr

    code = f"""
import torch, recoverssm_ops
arguments, o, u, after = torch.load({inputs!r})
module = torch.export.load({path!r}).module()
got, record = module(*arguments)
assert torch.equal(got, o) and torch.equal(record.u, u) and torch.equal(module.pool, after)
print("right")
"""
    with_import = fresh_process(code)
    assert with_import.stdout.strip() == "right", with_import.stderr
