"""Behaviours 10, 11 and 15: one captured graph per batch size replays whatever is staged. (On the CPU: one call on the
views of its capture.)"""

import random
from dataclasses import dataclass

import pytest
import torch
from budget import assert_within_budget
from pools import GuardedPool, guarded_pool, make_window, oracle
from torch import Tensor

import recoverssm_ops as rs

T, BLOCK_SIZE, SIZES = 5, 3, (1, 2, 4)


@dataclass
class Static:
    """Memory that the graph of one batch size reads."""

    inputs: list[Tensor]
    options: dict
    pad_slot_id: int
    accepted: Tensor


def packed_step(metadata, static, state):
    layout = {"cu_seqlens": metadata.cu_seqlens, "max_seqlen": T, "pad_slot_id": static.pad_slot_id}
    _, record = rs.kda_verify(*static.inputs, state, metadata.slots, **static.options, **layout)
    rs.kda_commit(state, record, static.accepted, metadata.slots, pad_slot_id=static.pad_slot_id)


def aligned_step(metadata, static, state):
    cu_seqlens, pad_slot_id = metadata.cu_seqlens, static.pad_slot_id
    layout = {"cu_seqlens": cu_seqlens, "max_seqlen": T, "pad_slot_id": pad_slot_id}
    where = metadata.num_computed, metadata.block_table, BLOCK_SIZE
    source = rs.CommitPlan.aligned_source(*where)
    _, record = rs.kda_verify(*static.inputs, state, source, **static.options, **layout)
    plan = rs.CommitPlan.aligned(static.accepted, *where, T, cu_seqlens=cu_seqlens)
    rs.kda_commit(state, record, None, plan=plan, pad_slot_id=pad_slot_id)


def capture(step, metadata, static, pool: GuardedPool):
    """Warm up and record one step of padding, which must write nothing."""

    def run():
        step(metadata, static, pool.state)

    run()
    pool.check_unchanged()
    if pool.state.device.type != "cuda":
        return run
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    pool.check_unchanged()
    return graph.replay


def tensors_of(window) -> list[Tensor]:
    return [*window.inputs, window.options["A_log"], window.options["dt_bias"]]


def static_for(size: int, pad_slot_id: int, device) -> Static:
    window = make_window(size, T, lengths=[0] * size, tail=size * T, device=device)
    options = {name: x for name, x in window.options.items() if name not in ("cu_seqlens", "max_seqlen")}
    return Static(list(window.inputs), options, pad_slot_id, torch.zeros(size, dtype=torch.int64, device=device))


def random_row(rng, free: list[int], aligned: bool):
    computed = rng.randrange(0, 8)
    blocks = []
    if aligned:  # enough for the whole window, or (a request that ends) fewer
        wanted = max(1, -(-computed // BLOCK_SIZE), -(-(computed + rng.choice([T, T, 0])) // BLOCK_SIZE))
        blocks = [free.pop() for _ in range(wanted)]
    slot = blocks[max(computed - 1, 0) // BLOCK_SIZE] if aligned else free.pop()
    kind = rng.choice(["prefill", "decode", "verify"])
    if kind == "decode":
        return rs.StepRow.decode(slot, computed, blocks)
    if kind == "prefill":
        return rs.StepRow.prefill(slot, computed, rng.randint(1, T), blocks)
    return rs.StepRow.verify(slot, computed, rng.randint(0, T - 1), blocks)


def expected_writes(row, accepted: int, aligned: bool) -> dict[int, int]:
    """Slot to length."""
    n = min(accepted, row.num_tokens)
    if not aligned:
        return {row.slot: n} if n else {}
    writes = {}
    for length in range(1, n + 1):
        block, rest = divmod(row.num_computed + length, BLOCK_SIZE)
        block -= rest == 0
        if (rest == 0 or length == n) and block < len(row.block_slots):
            writes[row.block_slots[block]] = length
    return writes


@pytest.mark.parametrize("aligned", [False, True], ids=["in place", "aligned"])
@pytest.mark.parametrize("pad_slot_id", [-1, 0])
def test_b11_one_graph_replays_any_rows(device, aligned, pad_slot_id):
    """Any lengths, acceptance, slots and number of padding rows; small batches after large ones; slot 0 full of NaN."""
    rng = random.Random(pad_slot_id)
    table = {"block_size": BLOCK_SIZE, "max_blocks": 5} if aligned else {}
    buffers = rs.StepBuffers(SIZES, T, device=device, pad_slot_id=pad_slot_id, **table)
    pool = guarded_pool(24, 2, 6, 8, device=device)
    pool.state[0] = float("nan")
    pool.remember()
    statics = {size: static_for(size, pad_slot_id, device) for size in SIZES}
    step = aligned_step if aligned else packed_step
    replays = {s: capture(step, buffers.stage_dummy(s), statics[s], pool) for s in SIZES}
    for seed in range(30):
        free = list(range(1, 24))
        rng.shuffle(free)
        rows = [random_row(rng, free, aligned) for _ in range((4, 1, 3, 0, 2)[seed % 5])]
        metadata = buffers.stage(rows)
        B = metadata.batch_size
        lengths = [row.num_tokens for row in rows] + [0] * (B - len(rows))
        window = make_window(B, T, lengths=lengths, tail=B * T - sum(lengths), device=device, seed=seed)
        static = statics[B]
        accepted = [rng.randint(0, T) for _ in range(B)]
        static.accepted.copy_(torch.tensor(accepted))
        reads = [*static.inputs, static.options["A_log"], static.options["dt_bias"]]
        for buffer, value in zip(reads, tensors_of(window), strict=True):
            buffer.copy_(value)
        pool.state[1:] = torch.randn(23, 2, 6, 8, generator=torch.Generator().manual_seed(seed))
        pool.remember()
        answer = oracle(window, [pool.state[row.slot] for row in rows] + [torch.zeros(2, 6, 8)] * (B - len(rows)))
        replays[B]()
        writes = {
            slot: (b, n) for b, row in enumerate(rows) for slot, n in expected_writes(row, accepted[b], aligned).items()
        }
        for slot, (b, n) in writes.items():
            states = answer.rows64[b][2][n], answer.rows32[b][2][n]
            assert_within_budget(pool.state[slot].cpu(), *states, name=f"step {seed}, row {b}, slot {slot}")
        pool.check_only_written(writes)
