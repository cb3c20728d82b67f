"""The emulator of compiled kernels: each instruction's meaning, and that it sees what it says it sees."""

import itertools
import os
import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import kernel_cases
import triton
import triton.language as tl
from ptx_emulator import GlobalMemory, Machine, Program, PTXError, machine
from ptx_emulator.launches import emulated

from recoverssm_ops.triton import configs

LANES = torch.arange(32, dtype=torch.int32)


def run(body: str, *tensors: torch.Tensor, threads: int = 32, shared: int = 0) -> None:
    """A kernel of one block. The address of ``tensors[i]`` is in ``%rd{i}``, the thread's number in ``%r0``."""
    names = [f"kernel_param_{i}" for i in range(len(tensors))]
    loads = "".join(f"ld.param.b64 %rd{i}, [{name}];\n" for i, name in enumerate(names))
    ptx = f""".visible .entry kernel({", ".join(f".param .u64 {name}" for name in names)})
    .reqntid {threads}
    {{
    .reg .pred %p<9>; .reg .b16 %rs<20>; .reg .b32 %r<40>; .reg .b64 %rd<20>;
    {loads} mov.u32 %r0, %tid.x;
    {body}
    ret;
    }}"""
    Machine(Program.parse(ptx), shared).run(1, [x.data_ptr() for x in tensors], GlobalMemory(tensors))


def mine(tensor: int, register: str = "%rd9") -> str:
    """``register``: the address of the thread's own 32-bit element of a tensor."""
    return f"mad.wide.u32 {register}, %r0, 4, %rd{tensor};\n"


def shared_address(register: str = "%r9", scale: int = 4) -> str:
    return f"mov.b32 %r8, global_smem; mad.lo.s32 {register}, %r0, {scale}, %r8;\n"


def computed(statements: str, *operands: int) -> int:
    """The bits that ``statements`` leave in ``%r1``, for operands in ``%r2``, ``%r3``, ..."""
    out = torch.zeros(32, dtype=torch.int32)
    moves = "".join(f"mov.b32 %r{i}, {x};\n" for i, x in enumerate(operands, 2))
    run(f"{moves} {statements}; {mine(0)} st.global.b32 [%rd9], %r1;", out)
    assert (out == out[0]).all()
    return int(out[0]) % (1 << 32)


def bits(x: float) -> int:
    return int(np.float32(x).view(np.uint32))


M = (1 << 32) - 1
ARITHMETIC = [
    ("add.s32 %r1, %r2, %r3", (M, 3), 2),
    ("sub.s32 %r1, %r2, %r3", (1, 3), M - 1),
    ("mul.lo.s32 %r1, %r2, %r3", (1 << 20, 1 << 13), 0),
    ("mul.hi.u32 %r1, %r2, %r3", (M, M), M - 1),
    ("mul.hi.s32 %r1, %r2, %r3", (M, 5), M),
    ("mad.lo.s32 %r1, %r2, %r3, %r4", (M, 5, 7), 2),
    ("div.s32 %r1, %r2, %r3", (M - 6, 2), M - 2),
    ("rem.s32 %r1, %r2, %r3", (M - 6, 2), M),
    ("div.u32 %r1, %r2, %r3", (M, 16), M >> 4),
    ("shr.s32 %r1, %r2, %r3", (M - 1, 40), M),
    ("shr.u32 %r1, %r2, %r3", (M, 31), 1),
    ("shr.u32 %r1, %r2, %r3", (M, 32), 0),
    ("shl.b32 %r1, %r2, %r3", (3, 31), 1 << 31),
    ("bfe.u32 %r1, %r2, 4, 8", (0xABCD,), 0xBC),
    ("bfe.s32 %r1, %r2, 4, 8", (0xABCD,), 0xFFFFFFBC),
    ("bfe.u32 %r1, %r2, 28, 8", (0xF0000000,), 0xF),
    ("prmt.b32 %r1, %r2, %r3, 0x5410", (0x11223344, 0xAABBCCDD), 0xCCDD3344),
    ("prmt.b32 %r1, %r2, %r3, 0x000C", (0x11223344, 0x80), 0x444444FF),
    ("and.b32 %r1, %r2, %r3", (12, 10), 8),
    ("xor.b32 %r1, %r2, %r3", (12, 10), 6),
    ("not.b32 %r1, %r2", (0,), M),
    ("min.s32 %r1, %r2, %r3", (M, 1), M),
    ("min.u32 %r1, %r2, %r3", (M, 1), 1),
    ("neg.s32 %r1, %r2", (1,), M),
    ("add.f32 %r1, %r2, %r3", (bits(1.0), bits(2.0**-24)), bits(1.0)),
    ("fma.rn.f32 %r1, %r2, %r3, %r4", (bits(1 + 2.0**-12), bits(1 + 2.0**-12), bits(-1 - 2.0**-11)), bits(2.0**-24)),
    ("mov.b32 {%rs1, %rs2}, %r2; add.rn.f32.bf16 %r1, %rs2, %r3", (bits(1.5), bits(2.0)), bits(3.5)),
    (
        "mov.b64 %rd5, {%r2, %r3}; fma.rn.f32x2 %rd5, %rd5, %rd5, %rd5; mov.b64 {%r4, %r5}, %rd5; sub.f32 %r1, %r5, %r4",
        (bits(1.0), bits(3.0)),
        bits(10.0),
    ),
    ("neg.f32 %r1, %r2", (bits(0.0),), bits(-0.0)),
    ("abs.f32 %r1, %r2", (bits(-3.0),), bits(3.0)),
    ("max.f32 %r1, %r2, %r3", (bits(float("nan")), bits(-1.0)), bits(-1.0)),
    ("max.NaN.f32 %r1, %r2, %r3", (bits(float("nan")), bits(-1.0)), bits(float("nan"))),
    ("min.f32 %r1, %r2, %r3", (bits(0.0), bits(-0.0)), bits(-0.0)),
    ("max.f32 %r1, %r2, %r3", (bits(-0.0), bits(0.0)), bits(0.0)),
    ("ex2.approx.ftz.f32 %r1, %r2", (bits(-3.0),), bits(0.125)),
    ("ex2.approx.ftz.f32 %r1, %r2", (bits(-130.0),), bits(0.0)),
    ("rsqrt.approx.ftz.f32 %r1, %r2", (bits(16.0),), bits(0.25)),
    ("rsqrt.approx.ftz.f32 %r1, %r2", (1,), bits(float("inf"))),
    ("cvt.rn.bf16x2.f32 %r1, %r2, %r3", (bits(1.0), bits(-2.0)), 0x3F80C000),
    ("cvt.rn.f16x2.f32 %r1, %r2, %r3", (bits(1.0), bits(-2.0)), 0x3C00C000),
    ("setp.lt.f32 %p1, %r2, %r3; selp.b32 %r1, 7, 9, %p1", (bits(float("nan")), bits(1.0)), 9),
    ("setp.geu.f32 %p1, %r2, %r3; selp.b32 %r1, 7, 9, %p1", (bits(float("nan")), bits(1.0)), 7),
    ("setp.ne.f32 %p1, %r2, %r2; selp.b32 %r1, 7, 9, %p1", (bits(float("nan")),), 9),
    ("setp.num.f32 %p1, %r2, %r2; selp.b32 %r1, 7, 9, %p1", (bits(float("nan")),), 9),
    ("setp.gt.s32 %p1, %r2, %r3; selp.b32 %r1, 7, 9, %p1", (M, 1), 9),
    ("setp.gt.u32 %p1, %r2, %r3; selp.b32 %r1, 7, 9, %p1", (M, 1), 7),
    ("setp.gt.u32 %p1, %r2, %r3; not.pred %p1, %p1; selp.b32 %r1, 7, 9, %p1", (M, 1), 9),
    ("mov.b32 {%rs1, %rs2}, %r2; mov.b32 %r1, {%rs2, %rs1}", (0x12345678,), 0x56781234),
    ("mov.b32 {_, %rs1}, %r2; cvt.u32.u16 %r1, %rs1", (0x12345678,), 0x1234),
    ("cvt.s64.s32 %rd5, %r2; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r1, %rd5", (M,), M),
    ("cvt.u64.u32 %rd5, %r2; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r1, %rd5", (M,), 0),
    ("mul.wide.s32 %rd5, %r2, %r3; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r1, %rd5", (M, 3), M),
    ("mad.wide.u32 %rd5, %r2, %r3, 1; shr.u64 %rd5, %rd5, 32; cvt.u32.u64 %r1, %rd5", (M, M), M - 1),
    ("{ .reg .b32 own; mov.b32 own, %r2; add.s32 %r1, own, 1; }", (4,), 5),
]


@pytest.mark.parametrize(
    ("statement", "operands", "expected"), ARITHMETIC, ids=lambda x: x if isinstance(x, str) else ""
)
def test_arithmetic(statement, operands, expected):
    assert hex(computed(statement, *operands)) == hex(expected)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
def test_conversions_round_as_torch_does(dtype):
    kind = {torch.bfloat16: "bf16", torch.float16: "f16"}[dtype]
    special = [
        0.0,
        -0.0,
        float("inf"),
        1e-8,
        65520.0,
        3.4e38,
        1 + 2.0**-8,
        1 + 3 * 2.0**-8,
        1 + 2.0**-11,
        1 + 3 * 2.0**-11,
    ]
    x = torch.cat([torch.tensor(special), torch.randn(22, generator=torch.Generator().manual_seed(0)) * 100])
    rounded, back = torch.zeros(32, dtype=dtype), torch.zeros(32)
    run(
        f"""{mine(0)} ld.global.b32 %r1, [%rd9]; cvt.rn.{kind}.f32 %rs1, %r1; mad.wide.u32 %rd8, %r0, 2, %rd1;
        st.global.b16 [%rd8], %rs1; cvt.f32.{kind} %r2, %rs1; {mine(2)} st.global.b32 [%rd9], %r2;""",
        x, rounded, back,
    )  # fmt: skip
    assert torch.equal(rounded.view(torch.int16), x.to(dtype).view(torch.int16))
    assert torch.equal(back, x.to(dtype).float())


def test_an_unknown_instruction_is_named():
    with pytest.raises(PTXError, match=r"add\.sat\.s32 is not known\s+in add\.sat\.s32 %r1, %r0, 1"):
        run("add.sat.s32 %r1, %r0, 1;")


def test_operands_that_are_nothing_are_named():
    with pytest.raises(PTXError, match="nowhere is neither"):
        run("add.s32 %r1, %r0, nowhere;")
    with pytest.raises(PTXError, match="no label"):
        run("bra away;")
    with pytest.raises(PTXError, match="fewer bits"):
        run("add.s32 %r1, %r0, %rs1;")


def test_an_unset_register_is_named_and_its_place():
    body = """
    .loc 1 42 7
    add.s32 %r1, %r0, %r7;
    """
    with pytest.raises(PTXError, match=r"%r7 is read(?s:.*)in add\.s32 %r1, %r0, %r7  \(\?:42\), block 0 of kernel"):
        run(body)


def test_a_register_that_only_other_threads_wrote_is_unset():
    write = "setp.lt.u32 %p1, %r0, 4; @%p1 mov.b32 %r1, 5;"
    out = torch.zeros(32, dtype=torch.int32)
    with pytest.raises(PTXError, match="in any thread that reads it"):
        run(f"{write} @%p1 bra end; add.s32 %r2, %r1, 1; end:")
    # A reduction's last step: all lanes take part, what the others hold is dropped.
    run(f"{write} shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1; {mine(0)} @%p1 st.global.b32 [%rd9], %r2;", out)
    assert out.tolist() == [5] * 4 + [0] * 28


@pytest.mark.parametrize(
    "access", ("ld.global.b32 %r1, [%rd9+4]", "st.global.b32 [%rd9+4], %r0"), ids=("load", "store")
)
def test_an_access_outside_of_every_tensor_is_named(access):
    x = torch.arange(64, dtype=torch.int32)[:32]
    with pytest.raises(PTXError, match=r"outside of every tensor(?s:.*)\[%rd9\+4\]"):
        run(f"{mine(0)} {access};", x)
    run(f"{mine(0)} setp.lt.u32 %p1, %r0, 31; @%p1 {access};", x)


def test_tensors_are_spans_not_storages():
    x = torch.arange(100, dtype=torch.int32)[10:].as_strided((4, 8), (16, 1), 10)
    run(f"{mine(0)} ld.global.b32 %r1, [%rd9+96];", x)
    with pytest.raises(PTXError, match="outside"):
        run(f"{mine(0)} ld.global.b32 %r1, [%rd9+-4];", x)


def test_one_load_from_two_tensors():
    x, y, out = LANES.clone(), LANES + 100, torch.zeros(32, dtype=torch.int32)
    run(
        f"""and.b32 %r1, %r0, 1; setp.eq.b32 %p1, %r1, 0; selp.b64 %rd3, %rd0, %rd1, %p1;
        mad.wide.u32 %rd4, %r0, 4, %rd3; ld.global.b32 %r2, [%rd4]; {mine(2)} st.global.b32 [%rd9], %r2;""",
        x, y, out,
    )  # fmt: skip
    assert torch.equal(out, torch.where(LANES % 2 == 0, x, y))


def test_a_misaligned_access_is_named():
    with pytest.raises(PTXError, match=r"8 bytes(?s:.*)misaligned(?s:.*)v2"):
        run(f"{mine(0)} ld.global.v2.b32 {{%r1, %r2}}, [%rd9];", LANES.clone())


def test_vectors_and_widths():
    x, out = torch.arange(256, dtype=torch.int16), torch.zeros(256, dtype=torch.int16)
    run(
        """mad.wide.u32 %rd2, %r0, 16, %rd0; mad.wide.u32 %rd3, %r0, 16, %rd1;
        ld.global.v4.b16 {%rs1, %rs2, %rs3, %rs4}, [%rd2]; ld.global.v2.b32 {%r1, %r2}, [%rd2+8];
        st.global.v2.b32 [%rd3], {%r1, %r2}; st.global.v4.b16 [%rd3+8], {%rs4, %rs3, %rs2, %rs1};""",
        x, out,
    )  # fmt: skip
    expected = torch.cat([x.view(32, 8)[:, 4:], x.view(32, 8)[:, :4].flip(1)], 1).reshape(-1)
    assert torch.equal(out, expected)


def test_threads_diverge_and_meet_again():
    """A loop of as many turns as the thread's number, in two branches; then an exchange of the whole warp."""
    out = torch.zeros(32, dtype=torch.int32)
    run(
        f"""mov.b32 %r1, 0; mov.b32 %r2, 0; and.b32 %r3, %r0, 1; setp.eq.b32 %p1, %r3, 1; @%p1 bra odd;
        even: setp.ge.u32 %p2, %r1, %r0; @%p2 bra join; add.s32 %r1, %r1, 1; add.s32 %r2, %r2, 10; bra.uni even;
        odd: setp.ge.u32 %p2, %r1, %r0; @%p2 bra join; add.s32 %r1, %r1, 1; add.s32 %r2, %r2, 1; bra.uni odd;
        join: shfl.sync.bfly.b32 %r4, %r2, 1, 31, -1; {mine(0)} st.global.b32 [%rd9], %r4;""",
        out,
    )
    turns = torch.where(LANES % 2 == 0, 10 * LANES, LANES)
    assert torch.equal(out, turns[LANES ^ 1])


@pytest.mark.parametrize(
    ("mode", "by", "clamp", "lane"),
    (
        ("idx", 3, 31, lambda l: 3 + 0 * l),
        ("bfly", 5, 31, lambda l: l ^ 5),
        ("up", 4, 0, lambda l: torch.where(l >= 4, l - 4, l)),
        ("down", 4, 31, lambda l: torch.where(l < 28, l + 4, l)),
    ),
)
def test_exchanges(mode, by, clamp, lane):
    out = torch.zeros(64, dtype=torch.int32)
    run(f"shfl.sync.{mode}.b32 %r1, %r0, {by}, {clamp}, -1; {mine(0)} st.global.b32 [%rd9], %r1;", out, threads=64)
    assert torch.equal(out, torch.cat([lane(LANES), 32 + lane(LANES)]).int())


def test_part_of_a_warp_cannot_exchange():
    with pytest.raises(PTXError, match="part of a warp"):
        run("setp.lt.u32 %p1, %r0, 4; @%p1 shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1;")


def test_a_kernel_that_does_not_end(monkeypatch):
    monkeypatch.setattr(machine, "MOST_STATEMENTS", 1000)
    with pytest.raises(PTXError, match="does not end"):
        run("again: bra.uni again;")


REVERSED = "xor.b32 %r7, %r0, 63; mad.lo.s32 %r7, %r7, 4, %r8;"


def test_a_barrier_orders_warps():
    out = torch.zeros(64, dtype=torch.int32)
    run(
        f"""{shared_address()} {REVERSED} st.shared.b32 [%r9], %r0; bar.sync 0; ld.shared.b32 %r1, [%r7];
        {mine(0)} st.global.b32 [%rd9], %r1;""",
        out, threads=64, shared=256,
    )  # fmt: skip
    assert torch.equal(out, torch.arange(63, -1, -1, dtype=torch.int32))


RACES = {
    "read after write": "st.shared.b32 [%r9], %r0; ld.shared.b32 %r1, [%r7];",
    "write after read": "st.shared.b32 [%r9], %r0; bar.sync 0; ld.shared.b32 %r1, [%r9]; st.shared.b32 [%r7], %r0;",
    "write after write": "st.shared.b32 [%r9], %r0; st.shared.b32 [%r7], %r0;",
}


def test_a_copy_over_what_another_warp_has_written_is_a_race():
    x = torch.zeros(256, dtype=torch.int32)
    copy = f"{shared_address(scale=16)} xor.b32 %r7, %r9, 512; st.shared.b32 [%r9], 0; {{}} mad.wide.u32 %rd9, %r0, 16, %rd0;"
    copy += "cp.async.cg.shared.global [%r7], [%rd9], 0x10, 0x10;"
    with pytest.raises(PTXError, match=r"a race(?s:.*)by st\.shared(?s:.*)in cp\.async"):
        run(copy.format(""), x, threads=64, shared=1024)
    run(copy.format("bar.sync 0;"), x, threads=64, shared=1024)


@pytest.mark.parametrize("accesses", RACES.values(), ids=RACES)
def test_a_race_of_two_warps_is_named(accesses):
    first, second = [a.strip() for a in accesses.split(";") if ".shared" in a][-2:]
    message = f"a race(?s:.*)by {re.escape(first)}(?s:.*)in {re.escape(second)}"
    with pytest.raises(PTXError, match=message):
        run(f"{shared_address()} {REVERSED} {accesses}", threads=64, shared=256)
    # Within a warp, statements have an order.
    accesses = accesses.replace("[%r7]", "[%r9]")
    run(f"{shared_address()} {accesses}", threads=64, shared=256)


def test_warps_may_store_the_same():
    run("mov.b32 %r9, global_smem; st.shared.b32 [%r9], 5;", threads=64, shared=16)
    with pytest.raises(PTXError, match="different values in the same place"):
        run("mov.b32 %r9, global_smem; st.shared.b32 [%r9], %r0;", threads=64, shared=16)


def test_shared_memory_has_bounds_and_nothing_in_it():
    with pytest.raises(PTXError, match=r"outside of the block's 124 bytes"):
        run(f"{shared_address()} st.shared.b32 [%r9], %r0;", shared=124)
    with pytest.raises(PTXError, match="nothing has written"):
        run(f"{shared_address()} ld.shared.b32 %r1, [%r9];", shared=128)
    with pytest.raises(PTXError, match="outside"):
        run("mov.b32 %r1, 0; ld.shared.b32 %r2, [%r1];", shared=128)


def test_some_wait_at_a_barrier_and_the_others_have_ended():
    with pytest.raises(PTXError, match="the others have ended"):
        run("setp.lt.u32 %p1, %r0, 4; @%p1 ret; bar.sync 0;", threads=64)


COPY = shared_address(scale=16) + "mad.wide.u32 %rd9, %r0, 16, %rd0;\n"
BEGIN = "cp.async.cg.shared.global [%r9], [%rd9], 0x10, {size}; cp.async.commit_group;"
USE = "ld.shared.b32 %r1, [%r9+4]; mad.wide.u32 %rd8, %r0, 4, %rd1; st.global.b32 [%rd8], %r1;"


def copied(*statements: str, size="0x10", threads=32) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.arange(8 * threads, dtype=torch.int32), torch.zeros(threads, dtype=torch.int32)
    run(f"{COPY} {BEGIN.format(size=size)} {' '.join(statements)}", x, out, threads=threads, shared=32 * threads)
    return x[: 4 * threads].view(-1, 4)[:, 1], out


@pytest.mark.parametrize("wait", ("cp.async.wait_group 0;", "cp.async.wait_all;"))
def test_a_copy_that_is_waited_for(wait):
    expected, out = copied(wait, USE)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("wait", ("", "cp.async.wait_group 1;"))
@pytest.mark.parametrize("use", ("ld.shared.b32 %r1, [%r9];", "st.shared.b32 [%r9], %r0;"), ids=("read", "write"))
def test_a_copy_that_is_not_waited_for(wait, use):
    with pytest.raises(PTXError, match=r"waited for(?s:.*)by cp\.async\.cg(?s:.*)in (ld|st)\.shared"):
        copied(wait, use)


def test_the_last_of_two_groups_may_be_on_its_way():
    second = "add.s32 %r9, %r9, 512; add.s64 %rd9, %rd9, 512;" + BEGIN.format(size="0x10")
    back = "sub.s32 %r9, %r9, 512;"
    expected, out = copied(second, "cp.async.wait_group 1;", back, USE)
    assert torch.equal(out, expected)
    with pytest.raises(PTXError, match="waited for"):
        copied(second, "cp.async.wait_group 1;", USE)


def test_a_copy_of_nothing_is_zeros():
    expected, out = copied("cp.async.wait_group 0;", USE, size="0")
    assert out.count_nonzero() == 0 and expected.count_nonzero() > 0


def test_who_waits_for_a_copy_waits_for_its_own():
    """Another warp's data are there after a barrier."""
    other = "xor.b32 %r9, %r9, 512;"
    expected, out = copied("cp.async.wait_group 0; bar.sync 0;", other, USE, threads=64)
    assert torch.equal(out, expected.roll(32))
    with pytest.raises(PTXError, match="a race"):
        copied("cp.async.wait_group 0;", other, USE, threads=64)


def fragment(matrix: torch.Tensor, transposed: bool) -> torch.Tensor:
    """What each of 32 lanes gets of an 8 x 8 matrix, two elements side by side, after PTX's manual."""
    matrix = matrix.t() if transposed else matrix
    return torch.stack([matrix[l // 4, 2 * (l % 4) : 2 * (l % 4) + 2] for l in range(32)])


@pytest.mark.parametrize("transposed", (False, True), ids=("rows", "columns"))
@pytest.mark.parametrize("count", (1, 2, 4))
def test_matrices_to_and_from_shared_memory(count, transposed):
    """Rows of 16 bytes, in the order of the lanes that give their addresses."""
    x = torch.arange(64 * count, dtype=torch.int16)
    out, back = torch.zeros(count, 32, 2, dtype=torch.int16), torch.zeros_like(x)
    registers = "{" + ", ".join(f"%r{20 + i}" for i in range(count)) + "}"
    form = f"sync.aligned.m8n8.x{count}{'.trans' if transposed else ''}.shared.b16"
    stores = "".join(f"st.global.b32 [%rd9+{128 * i}], %r{20 + i};" for i in range(count))
    copy = "".join(f"ld.global.b32 %r1, [%rd8+{128 * i}]; st.shared.b32 [%r9+{128 * i}], %r1;" for i in range(count))
    copy_back = "".join(
        f"ld.shared.b32 %r1, [%r9+{512 + 128 * i}]; st.global.b32 [%rd7+{128 * i}], %r1;" for i in range(count)
    )
    run(
        f"""{shared_address()} {mine(0, "%rd8")} {mine(1)} {mine(2, "%rd7")} {copy} and.b32 %r2, %r0, {8 * count - 1};
        mad.lo.s32 %r2, %r2, 16, %r8; ldmatrix.{form} {registers}, [%r2]; {stores}
        stmatrix.{form} [%r2+512], {registers}; {copy_back}""",
        x, out, back, shared=1024,
    )  # fmt: skip
    assert torch.equal(out, torch.stack([fragment(matrix, transposed) for matrix in x.view(count, 8, 8)]))
    assert torch.equal(back, x)


@triton.jit
def dot_kernel(
    a, b, c, out, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, B_ROW: tl.constexpr, B_COLUMN: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x = tl.load(a + m[:, None] * K + k[None, :])
    y = tl.load(b + k[:, None] * B_ROW + n[None, :] * B_COLUMN)
    z = tl.load(c + m[:, None] * N + n[None, :])
    tl.store(out + m[:, None] * N + n[None, :], tl.dot(x, y, z, input_precision="tf32"))


@pytest.mark.parametrize("columns_first", (False, True), ids=("rows", "columns"))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_products_of_matrices(dtype, columns_first):
    """The compiler's layouts and the emulator's fragments are of the same manual. Integers, so that nothing is rounded."""
    rng = torch.Generator().manual_seed(0)
    a, b, c = (torch.randint(-8, 8, shape, generator=rng).float() for shape in ((32, 32), (32, 16), (32, 16)))
    out = torch.zeros_like(c)
    x, y = a.to(dtype), b.to(dtype)
    y = y.t().contiguous().t() if columns_first else y
    with emulated(80) as emulator:
        dot_kernel[(1,)](x, y, c, out, 32, 16, 32, *y.stride(), num_warps=2)
    kind = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "tf32"}[dtype]
    assert f".row.col.f32.{kind}.{kind}.f32" in emulator.compiled[0].ptx
    assert torch.equal(out, a @ b + c)


def test_tf32_has_ten_bits():
    x = torch.zeros(32, 32)
    x[0, 0] = 1 + 2.0**-10 + 2.0**-11
    y, c, out = torch.eye(32)[:, :16].contiguous(), torch.zeros(32, 16), torch.zeros(32, 16)
    with emulated(80):
        dot_kernel[(1,)](x, y, c, out, 32, 16, 32, *y.stride(), num_warps=2)
    assert out[0, 0] == 1 + 2.0**-10


@triton.jit
def normalise_kernel(x, out, scale, N, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    row = tl.load(x + tl.program_id(0) * N + at, mask=at < N, other=float("-inf")) * scale
    exponentials = tl.exp2(row - tl.max(row, 0))
    tl.store(out + tl.program_id(0) * N + at, tl.cumsum(exponentials / tl.sum(exponentials, 0), 0), mask=at < N)


def test_a_kernel_of_several_warps_programs_and_masks():
    """Reductions and a scan across warps: exchanges, shared memory, barriers, what only some threads do."""
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))
    out = torch.full_like(x, float("nan"))
    with emulated() as emulator:
        normalise_kernel[(3,)](x, out, 2.5, 200, 256, num_warps=4)
        normalise_kernel[(3,)](x, out, 2.5, 200, 256, num_warps=4)
    assert emulator.kernels == ["normalise_kernel"] * 2 and emulator.compiled[0] is emulator.compiled[1]
    expected = (x.double() * 2.5 * np.log(2)).softmax(1).cumsum(1)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


def test_a_dropped_mask_is_outside():
    x = torch.randn(3, 200)
    with (
        emulated(change=lambda ptx: re.sub(r"@%p\d+ (ld\.global)", r"\1", ptx)),
        pytest.raises(PTXError, match="outside"),
    ):
        normalise_kernel[(3,)](x, torch.empty_like(x), 2.5, 200, 256, num_warps=4)


PACKED = next(case for case in kernel_cases.CASES if case.name == "bounded_64_packed")


WAIT, BARRIER = r"(cp\.async\.wait_group\s+)(\d+)", r"bar\.sync\s+0;"


OLD_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)


def weaker(wait: re.Match) -> str:
    """Lets one copy more be on its way."""
    return f"{wait[1]}{int(wait[2]) + 1}"


def weaker_waits(ptx: str) -> str:
    return re.sub(WAIT, weaker, ptx)


def no_barriers(ptx: str) -> str:
    return re.sub(BARRIER, "", ptx)


def unmasked_stores(ptx: str) -> str:
    return re.sub(r"@%p\d+ (st\.global)", r"\1", ptx)


def unmasked_loads(ptx: str) -> str:
    return re.sub(r"@%p\d+ (ld\.global)", r"\1", ptx)


def same(ptx: str) -> str:
    return f"{ptx}\n"


BROKEN = {
    weaker_waits: r"waited for(?s:.*)by cp\.async(?s:.*)verify_async\.py",
    unmasked_stores: r"outside of every tensor(?s:.*)st\.global(?s:.*)verify_async\.py",
    unmasked_loads: r"outside of every tensor(?s:.*)ld\.global(?s:.*)verify_async\.py",
}


def changed_once(pattern: str, change, number: int):
    """Changes the match with that number, and no other."""
    numbers = itertools.count()
    return lambda ptx: re.sub(pattern, lambda match: change(match) if next(numbers) == number else match[0], ptx)


@pytest.mark.parametrize(
    ("pattern", "change", "message"),
    (
        (WAIT, weaker, r"waited for(?s:.*)by cp\.async(?s:.*)tiles\.py"),
        pytest.param(
            *(BARRIER, lambda _: "", r"a race(?s:.*)by (st|ld|cp)(?s:.*)in (st|ld|cp)"),
            marks=pytest.mark.skipif(
                OLD_TRITON, reason="Triton 3.6 places barriers between stores to different places"
            ),
        ),
    ),
    ids=("wait", "barrier"),
)
def test_every_wait_and_every_barrier_of_verify_is_needed(pattern, change, message, monkeypatch):
    """Any one that is missing is noticed."""
    monkeypatch.setattr(configs, "FEW_PROGRAMS", 0)
    inputs = kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16)
    with emulated() as emulator:
        inputs.verify()
        count = len(re.findall(pattern, emulator.compiled[0].ptx))
        for number in range(count):
            emulator.change = changed_once(pattern, change, number)
            with pytest.raises(PTXError, match=message):
                inputs.verify()
    assert count > 1


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
def test_a_broken_verify_is_caught(change, monkeypatch):
    monkeypatch.setattr(configs, "FEW_PROGRAMS", 0)
    monkeypatch.setattr(kernel_cases, "verify_slack", lambda state: 2.0**-15)
    with emulated(change=change), pytest.raises(PTXError, match=BROKEN[change]):
        kernel_cases.check_verify(kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16))
    with emulated(change=same):
        kernel_cases.check_verify(kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"), ((weaker_waits, "waited for"), (no_barriers, "a race")), ids=("weaker_waits", "no_barriers")
)
def test_a_broken_commit_is_caught(change, message, monkeypatch):
    monkeypatch.setattr(configs, "FEW_PROGRAMS", 0)
    x = kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16)
    arguments = (torch.randn(x.v.shape), x.slots, x.slots[:, None], torch.full((4, 1), 3))
    with emulated(change=change) as emulator:
        with pytest.raises(PTXError, match=message):
            x.commit(*arguments)
        assert emulator.kernels == ["commit_async_kernel"]
        emulator.change = None
        x.commit(*arguments)


def test_a_wrong_number_is_not_within_the_budget(monkeypatch):
    """The kernel's last product of matrices left out."""
    monkeypatch.setattr(configs, "FEW_PROGRAMS", 0)
    monkeypatch.setattr(kernel_cases, "verify_slack", lambda state: 2.0**-15)

    def without_the_last_product(ptx: str) -> str:
        last = ptx.rindex("mma.sync")
        end = ptx.index(";", last)
        result, _, _, c = re.findall(r"\{[^}]*\}", ptx[last:end])
        moves = (
            f"mov.b32 {x}, {y}" for x, y in zip(re.findall(r"%r\d+", result), re.findall(r"%r\d+", c), strict=True)
        )
        return ptx[:last] + "; ".join(moves) + ptx[end:]

    with emulated(change=without_the_last_product), pytest.raises(AssertionError, match="exceeds"):
        kernel_cases.check_verify(kernel_cases.build(PACKED, "cpu", torch.bfloat16, torch.bfloat16))
