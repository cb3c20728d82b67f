"""Cases of the Triton kernels' tests, shared by the interpreter (CPU) and the GPU: inputs, oracle, checks."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from budget import EPS32, assert_within_budget, verify_slack
from torch import Tensor

from recoverssm_ops.reference import recurrence
from recoverssm_ops.triton import launch

GUARD = 7.0


@dataclass(frozen=True)
class Case:
    """One shape and setting. ``lengths`` makes it a packed batch; ``padding`` names rows without a slot."""

    name: str
    T: int
    K: int = 32
    V: int = 32
    H: int = 1
    HV: int = 1
    batch: int = 2
    # bounded, unbounded, strong (about -200 a token), floor (every gate at -5); raw: none, no decay, resets (some -inf), grows
    gate: str = "bounded"
    scalar_gate: bool = False
    l2norm: bool = True
    beta: str = "sigmoid"  # sigmoid, doubled, two (exactly 2), plain
    lengths: tuple[int, ...] = ()
    tail: int = 0
    padding: tuple[int, ...] = ()
    pad_slot_id: int = -1
    strided: bool = False
    slots: str = "permuted"  # permuted, none
    index_dtype: torch.dtype = torch.int32
    same_keys: bool = False

    @property
    def rows(self) -> int:
        return len(self.lengths) or self.batch

    def row_length(self, row: int) -> int:
        return self.lengths[row] if self.lengths else self.T


CASES = [
    *(Case(f"window_{T}", T, gate="bounded" if T % 2 else "unbounded") for T in range(1, 17)),
    *(Case(f"bounded_{T}", T) for T in (2, 4, 6, 8, 16)),
    Case("window_128", 8, K=128, V=128, H=1, HV=2),
    Case("bounded_64_packed", 7, K=64, V=64, H=2, HV=4, lengths=(7, 0, 3, 1), tail=5, padding=(2,)),
    Case("bounded_96", 8, K=96, V=96),
    Case("bounded_112_160", 5, K=112, V=160, padding=(0,)),
    Case("unbounded_128", 8, K=128, V=128, gate="unbounded"),
    Case("odd_24_40", 5, K=24, V=40),
    Case("odd_40_24", 5, K=40, V=24, gate="unbounded"),
    Case("odd_96_200", 3, K=96, V=200),
    Case("odd_200_96", 8, K=200, V=96, gate="unbounded"),
    Case("size_256", 4, K=256, V=256, batch=1),
    Case("size_256_window_16", 16, K=256, V=72, batch=1),
    Case("size_1", 4, K=1, V=1, gate="none"),
    Case("size_3_5", 4, K=3, V=5),
    Case("heads_2_6", 6, H=2, HV=6),
    Case("heads_packed", 4, H=2, HV=4, lengths=(4, 1, 3), gate="unbounded"),
    Case("scalar", 8, H=2, HV=4, scalar_gate=True, gate="unbounded"),
    Case("scalar_bounded", 6, scalar_gate=True),
    Case("scalar_raw", 8, scalar_gate=True, gate="none"),
    Case("raw_decay", 8, gate="none"),
    Case("strong", 8, gate="strong"),
    Case("resets", 8, gate="resets"),
    Case("resets_scalar", 8, gate="resets", scalar_gate=True),
    Case("grows", 8, gate="grows"),
    Case("strong_16", 16, gate="strong", K=40),
    Case("strong_scalar", 8, gate="strong", scalar_gate=True),
    Case("floor_16", 16, gate="floor"),
    Case("repeated_keys", 16, gate="no decay", same_keys=True, beta="two"),
    Case("repeated_keys_bounded", 16, same_keys=True, beta="doubled"),
    Case("no_norm", 8, l2norm=False),
    Case("plain_beta", 8, beta="plain", gate="none"),
    Case("neg_eigval", 8, beta="doubled"),
    Case("ragged", 8, lengths=(3, 0, 8, 1, 5), tail=4),
    Case("ragged_scalar", 5, lengths=(5, 0, 0, 2), tail=21, scalar_gate=True, index_dtype=torch.int64),
    Case("all_empty", 4, lengths=(0, 0), tail=3),
    Case("padding", 8, batch=4, padding=(0, 2)),
    Case("padding_null_block", 3, batch=3, padding=(1,), pad_slot_id=0, strided=True, gate="unbounded"),
    Case("padding_packed", 4, lengths=(4, 2, 3), padding=(1,), tail=2, pad_slot_id=0),
    Case("all_padding", 4, padding=(0, 1)),
    Case("strided", 8, H=1, HV=2, strided=True, index_dtype=torch.int64),
    Case("strided_odd", 3, K=40, V=24, HV=2, strided=True, gate="unbounded"),
    Case("no_slots", 8, slots="none", batch=3),
]


def by_name(*cases: Case) -> dict[str, Case]:
    names = {case.name: case for case in cases}
    if len(names) < len(cases):
        raise ValueError("two cases have one name, so one of them would not run")
    return names


@dataclass
class Inputs:
    """Arguments of the raw operators for one case, on one device."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor
    storage: Tensor
    slots: Tensor | None
    slot_list: list[int]
    cu_seqlens: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float
    scale: float
    flags: dict[str, bool] = field(default_factory=dict)

    def verify(self, **changed) -> tuple[Tensor, Tensor]:
        x = {**self.__dict__, **changed}
        return launch.verify(
            x["q"], x["k"], x["v"], x["g"], x["beta"], x["state"], x["slots"], *self.layout(), self.scale,
            self.case.l2norm, self.flags["gate"], self.flags["sigmoid"], self.flags["doubled"], self.case.pad_slot_id,
        )  # fmt: skip

    def layout(self) -> tuple:
        return self.cu_seqlens, self.case.T, self.A_log, self.dt_bias, self.lower_bound

    def record(self, u: Tensor, **changed) -> tuple:
        x = {**self.__dict__, **changed}
        return (u, x["k"], x["g"])

    def commit(self, u: Tensor, source: Tensor, dest: Tensor, length: Tensor, **changed) -> None:
        launch.commit(
            changed.pop("state", self.state), *self.record(u, **changed), source, dest, length, *self.layout(),
            self.case.l2norm, self.flags["gate"], self.case.pad_slot_id,
        )  # fmt: skip

    def recover(self, initial_state: Tensor, u: Tensor, num_accepted: Tensor, **changed) -> Tensor:
        return launch.recover(
            initial_state,
            *self.record(u, **changed),
            num_accepted,
            *self.layout(),
            self.case.l2norm,
            self.flags["gate"],
        )

    def tokens(self, row: int) -> tuple:
        """Index of a row's tokens in the data tensors."""
        if self.case.lengths:
            start = sum(self.case.lengths[:row])
            return 0, slice(start, start + self.case.lengths[row])
        return row, slice(None)

    def source(self) -> Tensor:
        if self.slots is not None:
            return self.slots
        return torch.arange(self.case.rows, device=self.k.device)

    def oracle(self, row: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        if self.case.row_length(row) == 0:
            nothing = torch.zeros(0, self.case.HV, self.case.V, dtype=dtype)
            return nothing, nothing, self.state[self.slot_list[row]].cpu().to(dtype)[None]
        index = self.tokens(row)
        data = (x[index].cpu() for x in (self.q, self.k, self.v, self.g, self.beta))
        return recurrence(
            *data,
            self.state[self.slot_list[row]].cpu(),
            A_log=None if self.A_log is None else self.A_log.cpu(),
            dt_bias=None if self.dt_bias is None else self.dt_bias.cpu(),
            lower_bound=self.lower_bound or None,
            scale=self.scale,
            use_qk_l2norm_in_kernel=self.case.l2norm,
            use_gate_in_kernel=self.flags["gate"],
            use_beta_sigmoid_in_kernel=self.flags["sigmoid"],
            allow_neg_eigval=self.flags["doubled"],
            dtype=dtype,
        )


def build(case: Case, device: str, data: torch.dtype, pool: torch.dtype, seed: int = 0) -> Inputs:
    """Seeded inputs. Rows without a slot and tokens without a row hold NaN, and so does every slot no row names."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    rows, T = case.rows, case.T
    lead = (1, sum(case.lengths) + case.tail) if case.lengths else (rows, T)
    q, k = normal(*lead, case.H, case.K), normal(*lead, case.H, case.K)
    if case.same_keys:
        k = normal(case.H, case.K).expand(*lead, case.H, case.K).clone()
    if not case.l2norm:
        q, k = q * case.K**-0.5, k * case.K**-0.5
    v, beta = normal(*lead, case.HV, case.V), normal(*lead, case.HV)
    if case.beta == "plain":
        beta = beta.sigmoid()
    if case.beta == "two":
        beta = torch.full_like(beta, 2.0)
    gates = (case.HV,) if case.scalar_gate else (case.HV, case.K)
    g = normal(*lead, *gates)
    use_gate, A_log, dt_bias, lower_bound = True, 0.5 * normal(case.HV), 0.5 * normal(*gates), 0.0
    if case.gate in ("bounded", "floor"):
        lower_bound = -5.0
        if case.gate == "floor":
            g = g + 60.0
    elif case.gate == "strong":
        A_log = torch.full((case.HV,), 3.0)
        g = 10.0 * g
    elif case.gate in ("none", "no decay", "resets", "grows"):
        use_gate, A_log, dt_bias = False, None, None
        g = 0.3 * g if case.gate == "grows" else torch.zeros_like(g) if case.gate == "no decay" else -g.abs()
        if case.gate == "resets":
            g[:, 1::3] = float("-inf")

    slot_count = rows + 3
    shape = (slot_count, case.HV, case.V, case.K)
    if case.strided:
        stride_v = case.K + 5
        stride_head = case.V * stride_v + 7
        stride_slot = case.HV * stride_head + 32
        storage = torch.full((slot_count * stride_slot + 64,), GUARD, dtype=pool)
        state = storage.as_strided(shape, (stride_slot, stride_head, stride_v, 1), 16)
        state.copy_(normal(*shape))
    else:
        storage = state = normal(*shape).to(pool)
    if case.slots == "none":
        slot_list = list(range(rows))
    else:
        order = torch.randperm(slot_count - 1, generator=rng)[:rows] + 1  # slot 0 may be the null block
        slot_list = [case.pad_slot_id if row in case.padding else int(order[row]) for row in range(rows)]
    for slot in set(range(slot_count)) - {s for s in slot_list if s > case.pad_slot_id}:
        state[slot] = float("nan")

    inputs = Inputs(
        case, *(x.to(data) for x in (q, k, v, g, beta)), state, storage,
        None if case.slots == "none" else torch.tensor(slot_list, dtype=case.index_dtype), slot_list,
        torch.tensor([0, *itertools.accumulate(case.lengths)], dtype=case.index_dtype) if case.lengths else None,
        A_log, dt_bias, lower_bound, case.K**-0.5,
        {"gate": use_gate, "sigmoid": case.beta in ("sigmoid", "doubled"), "doubled": case.beta == "doubled"},
    )  # fmt: skip
    for x in (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta):
        for row in case.padding:
            x[inputs.tokens(row)] = float("nan")
        if case.lengths:
            x[:, sum(case.lengths) :] = float("nan")
    for name, x in vars(inputs).items():
        if isinstance(x, Tensor) and name not in ("state", "storage"):
            setattr(inputs, name, x.to(device))
    inputs.storage = storage.to(device)
    inputs.state = inputs.storage.as_strided(state.shape, state.stride(), state.storage_offset())
    return inputs


def bits(x: Tensor) -> Tensor:
    """The bit patterns of a tensor, comparable where it holds NaN."""
    return x.contiguous().view({4: torch.int32, 2: torch.int16}[x.element_size()])


def check_verify(inputs: Inputs) -> Tensor:
    """Outputs and record within the error budget, zeros elsewhere, no bit of the pool changed. Returns u."""
    case, before = inputs.case, bits(inputs.storage).clone()
    o, u = inputs.verify()
    assert torch.equal(bits(inputs.storage), before), "verify wrote to the pool"
    assert o.dtype == inputs.v.dtype and u.dtype == torch.float32
    assert o.is_contiguous() and u.is_contiguous() and o.shape == u.shape == inputs.v.shape
    expected = {dtype: expected_outputs(inputs, dtype) for dtype in (torch.float64, torch.float32)}
    for name, actual, at in (("o", o, 0), ("u", u, 1)):
        oracle, low = expected[torch.float64][at], expected[torch.float32][at]
        written = expected[torch.float64][2]
        assert torch.equal(actual.cpu()[~written].float(), torch.zeros_like(low[~written])), (
            f"{name}: padding is not zero"
        )
        if written.any():
            slack = verify_slack(inputs.state)
            label = f"{case.name} {name}"
            assert_within_budget(actual.cpu()[written], oracle[written], low[written], name=label, slack=slack)
    return u


def expected_outputs(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """By the oracle: outputs, corrections, and where there are any."""
    o = torch.zeros(inputs.v.shape, dtype=dtype)
    u, written = o.clone(), torch.zeros(inputs.v.shape, dtype=torch.bool)
    for row in range(inputs.case.rows):
        if row not in inputs.case.padding and inputs.case.row_length(row):
            index = inputs.tokens(row)
            o[index], u[index], _ = inputs.oracle(row, dtype)
            written[index] = True
    return o, u, written


def cancellation(states: Tensor, accepted: int) -> float:
    """Slack of a state of one number: it may be a small difference of large ones, and then has the rounding of these."""
    if states[accepted].numel() > 1 or states[accepted] == 0:
        return 0.0
    return 4 * EPS32 * (states[: accepted + 1].abs().max() / states[accepted].abs()).item()


def check_states(inputs: Inputs, u: Tensor, num_accepted: list[int], rows: Iterable[int] | None = None) -> None:
    """Commit in place and recover: states (of ``rows``, or all) within the budget, the rest of the pool bit-identical."""
    case = inputs.case
    before = inputs.storage.clone()
    old = before.as_strided(inputs.state.shape, inputs.state.stride(), inputs.state.storage_offset())
    states = {
        row: [inputs.oracle(row, d)[2] for d in (torch.float64, torch.float32)]
        for row in (range(case.rows) if rows is None else rows)
        if row not in case.padding
    }
    n = torch.tensor(num_accepted, dtype=case.index_dtype, device=u.device)
    source = inputs.source()
    if not case.padding:
        recovered = inputs.recover(old[source.long()], u, n)
        assert recovered.dtype == torch.float32 and recovered.is_contiguous()
    inputs.commit(u, source, source[:, None], n[:, None])
    for row, (oracle, low) in states.items():
        accepted = max(0, min(num_accepted[row], case.row_length(row)))
        slot = inputs.slot_list[row]
        new = inputs.state[slot].cpu()
        if accepted == 0:
            assert torch.equal(bits(new), bits(old[slot].cpu())), f"row {row}: nothing accepted, yet the slot changed"
        else:
            slack = cancellation(oracle, accepted)
            assert_within_budget(new, oracle[accepted], low[accepted], name=f"{case.name} state {row}", slack=slack)
        if not case.padding:
            # The sums that make a state may cancel, and so amplify the record's error.
            label = f"{case.name} recovered {row}"
            slack = 4 * verify_slack(inputs.state) + cancellation(oracle, accepted)
            assert_within_budget(recovered[row].cpu(), oracle[accepted], low[accepted], name=label, slack=slack)
    for slot in (s for s in inputs.slot_list if s > case.pad_slot_id):
        inputs.state[slot] = old[slot]
    assert torch.equal(bits(inputs.storage), bits(before)), "commit wrote outside the listed slots"
