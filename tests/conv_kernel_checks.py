"""What the convolution's kernels must do, each a function of (device, data dtype, pool dtype), for the interpreter and the GPU.

They call the launchers; the same launchers serve the operators on a GPU, where every other test of the convolution runs too.
"""

from dataclasses import dataclass

import torch
from budget import assert_within_budget
from conv_cases import check_history, conv_oracle, guarded_conv_pool, make_conv_window
from pools import same_bits

from recoverssm_ops.triton import launch_conv


@dataclass(frozen=True)
class Case:
    """One shape and setting. ``lengths`` makes it a packed batch; ``padding`` names rows without a slot."""

    name: str
    T: int
    W: int = 4
    D: int = 40
    batch: int = 3
    bias: bool = True
    activation: str | None = "silu"
    lengths: tuple[int, ...] = ()
    tail: int = 0
    padding: tuple[int, ...] = ()
    pad_slot_id: int = -1
    order: str = "slot, channel, column"
    guard: int = 0
    columns: int = 1
    index_dtype: torch.dtype = torch.int32

    @property
    def rows(self) -> int:
        return len(self.lengths) or self.batch


CASES = [
    *(Case(f"window_{T}", T) for T in range(1, 17)),
    *(Case(f"width_{W}", 5, W=W, bias=W % 2 == 0) for W in range(2, 9)),
    Case("widest", 16, W=8, D=70, columns=3),
    Case("linear", 6, activation=None),
    Case("no_bias", 6, bias=False),
    Case("one_channel", 4, D=1),
    Case("several_tiles", 3, D=600, batch=2),
    Case("ragged", 8, lengths=(3, 0, 8, 1, 5), tail=4),
    Case("ragged_columns", 5, W=6, lengths=(5, 0, 0, 2), tail=9, columns=2, index_dtype=torch.int64),
    Case("all_empty", 4, lengths=(0, 0), tail=3),
    Case("padding", 8, batch=4, padding=(0, 2), guard=3),
    Case("padding_null_block", 3, padding=(1,), pad_slot_id=0, columns=2),
    Case("padding_packed", 4, lengths=(4, 2, 3), padding=(1,), tail=2, pad_slot_id=0),
    Case("all_padding", 4, batch=2, padding=(0, 1)),
    Case("guards", 6, guard=5, index_dtype=torch.int64),
    Case("columns_outside_channels", 6, order="slot, column, channel", D=130, columns=3),
    Case("slots_innermost", 5, order="channel, column, slot", guard=1, columns=4),
]


def parity(case: Case, device: str, data: torch.dtype, pool_dtype: torch.dtype) -> None:
    """Verify, then commit each column of a plan whose source is among the destinations, lengths beyond the row too."""
    window = make_conv_window(
        case.rows, case.T, channels=case.D, width=case.W, bias=case.bias, activation=case.activation, dtype=data,
        lengths=list(case.lengths) or None, tail=case.tail, index_dtype=case.index_dtype, device=device,
    )  # fmt: skip
    slots = case.rows * (case.columns + 1) + 1
    pool = guarded_conv_pool(slots, case.D, case.W, dtype=pool_dtype, device=device, order=case.order, guard=case.guard)
    order = (torch.randperm(slots - 1, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    source = [case.pad_slot_id if row in case.padding else order.pop() for row in range(case.rows)]
    real = [row for row in range(case.rows) if row not in case.padding]
    for row in case.padding:
        window.rows(window.x)[row].fill_(float("nan"))
    if case.lengths:
        window.x[:, sum(case.lengths) :] = float("nan")
    for slot in set(range(slots)) - set(source):
        pool.state[slot] = float("nan")
    pool.remember()
    answer = conv_oracle(window, pool.state[[max(s, 0) for s in source]])
    index = torch.tensor(source, dtype=case.index_dtype, device=device)
    cu_seqlens = window.options.get("cu_seqlens")

    settings = (cu_seqlens, case.T, case.activation == "silu", case.pad_slot_id)
    y = launch_conv.verify(*window.inputs, pool.state, index, *settings)
    pool.check_unchanged()
    assert y.shape == window.x.shape and y.dtype == data and y.is_contiguous()
    rows = window.rows(y)
    assert all(rows[row].count_nonzero() == 0 for row in case.padding), "padding is not zero"
    assert not case.lengths or y[:, sum(case.lengths) :].count_nonzero() == 0, "tokens in no row are not zero"
    if real:
        assert_within_budget(torch.cat([rows[row] for row in real]).cpu(), *answer.outputs(real), name=case.name)

    dest = [[order.pop() for _ in range(case.columns)] for _ in range(case.rows)]
    length = [
        [(0, case.T, case.T // 2, case.T + 3, -2)[(row + m) % 5] for m in range(case.columns)]
        for row in range(case.rows)
    ]
    for row in range(case.rows):
        if row % 3 != 2:
            dest[row][row % case.columns] = source[row]
    if case.columns > 1:
        dest[0][-1] = case.pad_slot_id
    plan = (torch.tensor(x, dtype=case.index_dtype, device=device) for x in (dest, length))
    launch_conv.commit(pool.state, window.x, index, *plan, cu_seqlens, case.pad_slot_id)
    written = [(row, m) for row in real for m in range(case.columns) if dest[row][m] > case.pad_slot_id]
    for row, m in written:
        check_history(pool.state[dest[row][m]], answer, row, length[row][m])
    pool.check_only_written([dest[row][m] for row, m in written])


def spoiled(device: str, data: torch.dtype, pool_dtype: torch.dtype) -> None:
    """NaN and infinity from token n on: outputs before n and the history after n tokens keep their bits."""
    n = 3
    for garbage in (float("nan"), float("inf")):
        results = []
        for spoil in (False, True):
            window = make_conv_window(2, 6, channels=40, dtype=data, device=device)
            pool = guarded_conv_pool(2, 40, dtype=pool_dtype, device=device)
            if spoil:
                window.x[:, n:] = garbage
            y = launch_conv.verify(*window.inputs, pool.state, None, None, 6, True, -1)
            slots = torch.arange(2, device=device)
            launch_conv.commit(
                pool.state, window.x, slots, slots[:, None], torch.full_like(slots, n)[:, None], None, -1
            )
            results.append((y[:, :n], pool.storage))
            if spoil and garbage != garbage:
                assert y[:, n:].isnan().all()
        assert all(same_bits(x, y) for x, y in zip(*results, strict=True))


def special_values(device: str, data: torch.dtype, pool_dtype: torch.dtype) -> None:
    """History is moved bit by bit: signed zeros, infinities, NaN payloads."""
    kind = torch.int32 if pool_dtype == torch.float32 else torch.int16
    pool = guarded_conv_pool(4, 40, dtype=pool_dtype, device=device, guard=0)
    limits = torch.iinfo(kind)
    pattern = torch.randint(limits.min, limits.max, (4, 40, 3), generator=torch.Generator().manual_seed(1))
    pool.state.view(kind).copy_(pattern.to(kind))
    pool.state[0, :2, 2] = torch.tensor([-0.0, float("inf")], dtype=pool_dtype)
    pool.remember()
    before = pool.state.clone()
    window = make_conv_window(2, 4, channels=40, dtype=data, device=device)
    source, dest = torch.tensor([0, 1], device=device), torch.tensor([[0, 2], [3, 1]], device=device)
    launch_conv.commit(pool.state, window.x, source, dest, torch.zeros_like(dest), None, -1)
    pool.check_only_written([2, 3])
    assert same_bits(pool.state, before[[0, 1, 0, 1]])
    launch_conv.commit(pool.state, window.x, source, source[:, None], torch.tensor([[1], [2]], device=device), None, -1)
    assert same_bits(pool.state[0, :, :2], before[0, :, 1:]) and same_bits(pool.state[1, :, 0], before[1, :, 2])


def any_strides(device: str, data: torch.dtype, pool_dtype: torch.dtype) -> None:
    """x, weight, bias, slots and plan are read where they lie."""
    window = make_conv_window(3, 5, channels=40, dtype=data, device=device)
    pools = [guarded_conv_pool(4, 40, dtype=pool_dtype, device=device) for _ in range(2)]
    table = torch.tensor([[2, 99, 4], [0, 99, 1], [1, 99, 3]], device=device)
    tight = table[:, 0].contiguous()
    expected = launch_conv.verify(*window.inputs, pools[0].state, tight, None, 5, True, -1)
    x = window.x.mT.contiguous().mT
    weight = window.weight.t().contiguous().t()
    bias = torch.stack([window.bias, window.bias * float("nan")], 1)[:, 0]
    assert same_bits(launch_conv.verify(x, weight, bias, pools[1].state, table[:, 0], None, 5, True, -1), expected)
    launch_conv.commit(pools[0].state, window.x, tight, tight[:, None], table[:, 2:].contiguous(), None, -1)
    launch_conv.commit(pools[1].state, x, table[:, 0], table[:, :1], table.int()[:, 2:], None, -1)
    assert same_bits(pools[0].storage, pools[1].storage)


def empty(device: str, data: torch.dtype, pool_dtype: torch.dtype) -> None:
    """No rows: zeros for tokens that nobody owns, and no launch."""
    window = make_conv_window(1, 4, channels=40, dtype=data, device=device)
    pool = guarded_conv_pool(2, 40, dtype=pool_dtype, device=device)
    nobody = torch.zeros(1, dtype=torch.int32, device=device)
    none = torch.empty(0, 1, dtype=torch.int32, device=device)
    y = launch_conv.verify(*window.inputs, pool.state, none[:, 0], nobody, 4, True, -1)
    assert y.shape == window.x.shape and y.count_nonzero() == 0
    launch_conv.commit(pool.state, window.x, none[:, 0], none, none, nobody, -1)
    pool.check_unchanged()


CHECKS = [spoiled, special_values, any_strides, empty]
