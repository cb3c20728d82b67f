"""The Gluon kernels' compiled code on the CPU, in every dtype: what Triton's interpreter cannot run (``ptx_emulator``).

The cases, checks and budgets are those of the tests on a GPU. "Few" programs, a "wave" of them (or a
full one), and "many" are launched differently.
"""

import os
from types import SimpleNamespace

import budget
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import kernel_cases
import kernel_checks as checks
from kernel_cases import CASES, Case, build, by_name, check_verify
from programs import LIMITS, launch_as
from ptx_emulator.launches import emulated
from test_triton_cuda import ANY_GATE, DTYPES, LARGE

from benchmarks.compilation import only_launch

PLAIN_BETA = Case("bounded_plain_beta", 8, K=64, V=32, beta="plain", index_dtype=torch.int64)
BY_NAME = by_name(*CASES, *LARGE, *ANY_GATE, PLAIN_BETA)
# Every dtype and every branch of the kernel's constants at least once, as test_the_covering_set_covers checks.
COVERING = [
    ("window_128", "bf16", "many"),
    ("window_128", "fp32", "many"),
    ("bounded_64_packed", "fp16", "many"),
    ("bounded_112_160", "fp32_data_bf16_pool", "many"),
    ("padding_packed", "bf16", "many"),
    ("no_slots", "bf16", "many"),
    ("bounded_plain_beta", "fp16", "many"),
    ("neg_eigval", "bf16_data_fp32_pool", "many"),
    ("size_256_packed", "bf16", "many"),
    ("size_144_160", "bf16_data_fp32_pool", "many"),
    ("window_12_packed", "bf16", "many"),
    ("window_16_floor", "fp16", "many"),
    ("window_16_size_256", "fp32", "many"),
    ("window_128", "fp32", "full wave"),
    ("neg_eigval", "bf16", "wave"),
    ("bounded_64_packed", "bf16", "fewest"),
    ("window_128", "fp32", "fewest"),
    ("window_128", "bf16", "few"),
    ("window_1", "bf16", "fewest"),
    ("size_192", "fp32_data_bf16_pool", "fewest"),
    ("size_256_packed", "bf16", "fewest"),
    ("long_16", "bf16", "fewest"),
    ("window_16_repeated_keys", "fp16", "fewest"),
    ("scalar_128", "bf16", "many"),
    ("scalar_128", "fp32", "fewest"),
    ("scalar_raw", "fp16", "many"),
    ("ragged_scalar", "fp16", "fewest"),
    ("scalar_12_packed", "bf16_data_fp32_pool", "many"),
    ("strong_scalar_16", "bf16", "fewest"),
    ("unbounded_128", "bf16", "many"),
    ("unbounded_128", "fp32", "fewest"),
    ("no_norm_96", "fp16", "many"),
    ("no_norm", "bf16", "many"),
    ("raw_packed", "bf16_data_fp32_pool", "many"),
    ("strong_256", "fp32_data_bf16_pool", "fewest"),
    ("strong_long", "fp32", "many"),
    ("unbounded_12_packed", "bf16", "fewest"),
]


def is_gluon(case: Case) -> bool:
    """By settings and sizes; that the Gluon kernel was launched is asserted where it was expected."""
    return (
        (case.T <= 8 or case.K <= 128 or case.scalar_gate or (case.gate in ("bounded", "floor") and case.l2norm))
        and not case.strided and case.K % 16 == 0 and case.V % 32 == 0 and (case.V % 64 == 0 or case.K <= 128 or case.T <= 8)
    )  # fmt: skip


REST = [
    (name, dtypes, programs)
    for name, case in BY_NAME.items()
    for dtypes in DTYPES
    for programs in LIMITS
    if is_gluon(case) and (name, dtypes, programs) not in COVERING
]


@pytest.fixture(autouse=True)
def budget_of_a_gpu(monkeypatch):
    """The matrix unit's operands are as short here as there."""

    def slack(state):
        return budget.verify_slack(SimpleNamespace(is_cuda=True, dtype=state.dtype, shape=state.shape))

    monkeypatch.setattr(kernel_cases, "verify_slack", slack)


@pytest.fixture
def full_gpu(monkeypatch):
    launch_as("many", monkeypatch)


def parity(name, dtypes, programs, monkeypatch):
    launch_as(programs, monkeypatch)
    case = BY_NAME[name]
    with emulated() as emulator:
        check_verify(build(case, "cpu", *DTYPES[dtypes]))
    assert emulator.kernels == ["verify_async_kernel"]


@pytest.mark.parametrize(("name", "dtypes", "programs"), COVERING)
def test_verify(name, dtypes, programs, monkeypatch):
    parity(name, dtypes, programs, monkeypatch)


def choices(name, dtypes, programs, monkeypatch) -> set[tuple]:
    """What decides which branches of the kernel a launch compiles: name and value of each."""
    launch_as(programs, monkeypatch)
    case = BY_NAME[name]
    x = build(case, "cpu", *DTYPES[dtypes])
    options = only_launch(x.verify).keywords
    K, columns, two_blocks = case.K, options["COLUMNS"], case.T > 8
    tiles = options["SHARE"] // (options["ROWS"] * options["num_warps"]) * -(-K // columns)
    derived = {
        "tokens": two_blocks,
        "shifted": options["SHIFT"] != 0,
        "rows of several tiles": columns < K,
        "rows cut off": K % columns != 0,
        "tiles of several parts": columns > options["PART"],
        "buffers used again": tiles > options["BUFFERS"],
        "padded columns": options["BK"] > K,
        "several programs a head": options["SHARE"] < case.V,
        "both pieces in turn": options["PIECES"] == 0 and two_blocks and options["BK"] > 128,
        "packed": bool(case.lengths),
        "slots": x.slots is not None,
        "shared heads": case.H != case.HV,
        "gate": (case.scalar_gate, options["FACTORED"], options["USE_GATE"], options["LOWER_BOUND"] == 0.0),
        "couplings": (case.scalar_gate, options["FACTORED"], options["PIECES"], two_blocks),
        "dtypes": dtypes,
    }
    named = ("PIECES", "HOLD", "BUFFERS", "AHEAD", "num_warps", "USE_L2NORM", "USE_SIGMOID", "NEG_EIGVAL")
    return {*derived.items(), *((option, options[option]) for option in named)}


def test_the_covering_set_covers(monkeypatch):
    """Whatever branch some case takes, a case of the default set takes it."""
    covered, others = (
        set().union(*(choices(*settings, monkeypatch) for settings in some)) for some in (COVERING, REST)
    )
    assert others - covered == set()


LATER = [pytest.param(arch, marks=pytest.mark.exhaustive) for arch in (100, 120)]


@pytest.mark.parametrize("arch", (80, *LATER))
def test_other_architectures(arch, full_gpu):
    """The compiler has other instructions to choose from: no ``stmatrix`` before sm_90."""
    x = build(BY_NAME["bounded_64_packed"], "cpu", torch.bfloat16, torch.bfloat16)
    with emulated(arch) as emulator:
        u = check_verify(x)
        kernel_cases.check_states(x, u, [7, 0, 2, 1])
    assert emulator.kernels == ["verify_async_kernel", "commit_rows_kernel"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "dtypes", "programs"), REST)
def test_verify_of_everything(name, dtypes, programs, monkeypatch):
    parity(name, dtypes, programs, monkeypatch)


COMMITS = [
    Case("packed_unbounded", 7, K=64, V=64, H=2, HV=4, gate="unbounded", lengths=(7, 0, 3, 1), tail=5, padding=(2,)),
    Case("cut_off_bounded", 5, K=112, V=96, padding=(0,)),
    Case("raw_decay", 8, K=64, V=128, gate="none", l2norm=False),
    Case("scalar", 8, K=64, V=64, H=1, HV=2, scalar_gate=True, gate="unbounded"),
    Case("scalar_packed", 3, K=48, V=32, scalar_gate=True, gate="none", lengths=(3, 0, 2), tail=1),
    Case("window_12", 12, K=64, V=32, gate="strong"),
    Case("wide_cut_off", 2, K=208, V=160, batch=1),
    Case("long_rows", 1, K=32, V=288, batch=1),
]
COMMITS_BY_NAME = {case.name: case for case in COMMITS}
COVERING_COMMITS = [
    ("packed_unbounded", "bf16", "many"),
    ("packed_unbounded", "bf16_data_fp32_pool", "few"),
    ("cut_off_bounded", "bf16_data_fp32_pool", "many"),
    ("raw_decay", "fp32_data_bf16_pool", "few"),
    ("scalar", "bf16", "few"),
    ("scalar_packed", "fp32", "many"),
    ("window_12", "fp16", "many"),
    ("wide_cut_off", "bf16", "many"),
    ("long_rows", "fp16", "many"),
    ("cut_off_bounded", "fp32", "wave"),
]


@pytest.mark.parametrize(("name", "dtypes", "programs"), COVERING_COMMITS)
def test_commit(name, dtypes, programs, monkeypatch):
    commit_parity(name, dtypes, programs, monkeypatch)


def commit_parity(name, dtypes, programs, monkeypatch):
    """Of the oracle's record, and beside what Triton's kernel recovers: the two states have one budget."""
    launch_as(programs, monkeypatch)
    x = build(COMMITS_BY_NAME[name], "cpu", *DTYPES[dtypes])
    u = kernel_cases.expected_outputs(x, torch.float64)[1].float()
    T = x.case.T
    with emulated() as emulator:
        kernel_cases.check_states(x, u, [(T // 2, T, 0, T + 3, -2)[row % 5] for row in range(x.case.rows)])
    assert emulator.kernels.count("commit_rows_kernel") == 1


def columns(name, dtypes, programs, monkeypatch):
    launch_as(programs, monkeypatch)

    def make():
        return build(COMMITS_BY_NAME[name], "cpu", *DTYPES[dtypes])

    with emulated() as emulator:
        checks.check_columns(make, torch.randn(make().v.shape, generator=torch.Generator().manual_seed(1)))
    assert emulator.kernels == ["commit_rows_kernel"] * 4


@pytest.mark.parametrize(
    ("name", "dtypes", "programs"),
    (
        ("packed_unbounded", "bf16", "many"),
        ("packed_unbounded", "fp32", "few"),
        ("scalar", "fp16", "many"),
        ("window_12", "bf16_data_fp32_pool", "many"),
        ("wide_cut_off", "bf16", "wave"),
        ("packed_unbounded", "bf16_data_fp32_pool", "wave"),
    ),
)
def test_commit_of_several_columns(name, dtypes, programs, monkeypatch):
    columns(name, dtypes, programs, monkeypatch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("programs", LIMITS)
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", COMMITS_BY_NAME)
@pytest.mark.parametrize("check", (commit_parity, columns), ids=("parity", "columns"))
def test_commit_of_everything(check, name, dtypes, programs, monkeypatch):
    check(name, dtypes, programs, monkeypatch)


def test_pool_with_gaps(full_gpu):
    """Whole rows, and between heads and slots what is not the pool's."""
    case = Case("gaps", 8, K=64, V=64, HV=2, batch=2)
    x = build(case, "cpu", torch.bfloat16, torch.bfloat16)
    slots, heads, row = len(x.state), case.HV, case.V * case.K
    storage = torch.full((slots * (heads * (row + 32) + 48) + 16,), kernel_cases.GUARD, dtype=torch.bfloat16)
    state = storage.as_strided(x.state.shape, (heads * (row + 32) + 48, row + 32, case.K, 1), 16)
    state.copy_(x.state)
    x.state, x.storage = state, storage
    with emulated() as emulator:
        kernel_cases.check_states(x, check_verify(x), [8, 3])
    assert emulator.kernels == ["verify_async_kernel", "commit_kernel", "commit_rows_kernel"]


@pytest.fixture
def whole_rows(monkeypatch):
    """The checks' window, with heads that the Gluon kernels take."""
    window = checks.window
    sizes = {"K": 64, "V": 64, "HV": 1}
    monkeypatch.setattr(checks, "window", lambda device, pool, **changed: window(device, pool, **{**sizes, **changed}))


COMMIT_CHECKS = [
    checks.several_columns,
    checks.columns_have_the_bits_of_their_own_commits,
    checks.nothing_accepted_keeps_bits,
    checks.in_place_equals_out_of_place,
    checks.rejected_tokens_change_no_bit,
    checks.plan_strides,
]


def test_without_gate_parameters(whole_rows, full_gpu):
    x = checks.window("cpu", torch.bfloat16, gate="bounded")
    x.A_log, x.dt_bias = None, None
    with emulated() as emulator:
        kernel_cases.check_states(x, check_verify(x), [6, 3, 1])
    assert {"verify_async_kernel", "commit_rows_kernel"} <= set(emulator.kernels)


@pytest.mark.parametrize("check", COMMIT_CHECKS, ids=lambda check: check.__name__)
def test_behaviour_of_commit(check, whole_rows, full_gpu):
    with emulated() as emulator:
        check("cpu", torch.bfloat16)
    assert "commit_rows_kernel" in emulator.kernels


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("check", [check for check in checks.CHECKS if check is not checks.input_strides])
def test_behaviour(check, pool, whole_rows, full_gpu):
    with emulated() as emulator:
        check("cpu", pool)
    assert emulator.kernels or check is checks.empty


@pytest.mark.exhaustive
@pytest.mark.parametrize("pool", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
def test_input_strides(pool, whole_rows, full_gpu, monkeypatch):
    """Of verify alone: the Triton kernel that recovers sums in the order that alignment allows, also with these heads."""
    window, recover = checks.window, lambda self, initial, u, length, **_: initial
    monkeypatch.setattr(kernel_cases.Inputs, "recover", recover)
    monkeypatch.setattr(checks, "window", lambda *x: window(*x, gate="bounded"))
    with emulated() as emulator:
        checks.input_strides("cpu", pool)
    assert emulator.kernels == ["verify_async_kernel"] * 4


@pytest.mark.parametrize(
    ("T", "K", "pool", "gate", "scalar_gate"),
    (
        (6, 64, torch.bfloat16, "bounded", False),
        (16, 64, torch.bfloat16, "bounded", False),
        (6, 64, torch.float32, "bounded", False),
        (6, 64, torch.float32, "unbounded", False),
        (16, 64, torch.bfloat16, "unbounded", False),
        (6, 64, torch.float32, "bounded", True),
        (12, 64, torch.bfloat16, "unbounded", True),
        pytest.param(8, 192, torch.float32, "bounded", False, marks=pytest.mark.exhaustive),
        pytest.param(16, 128, torch.float16, "bounded", False, marks=pytest.mark.exhaustive),
        pytest.param(16, 128, torch.float16, "unbounded", True, marks=pytest.mark.exhaustive),
    ),
    ids=str,
)
def test_later_tokens_do_not_reach_earlier_ones(T, K, pool, gate, scalar_gate):
    """Rejected tokens that are not finite: 0 * NaN is NaN, wherever a matrix unit multiplies by a zero."""
    with emulated() as emulator:
        sizes = {"T": T, "K": K, "V": 64, "HV": 1, "batch": 1, "scalar_gate": scalar_gate}
        checks.later_tokens_do_not_reach_earlier_ones("cpu", pool, 3, (gate,), **sizes)
    assert set(emulator.kernels) == {"verify_async_kernel"}
