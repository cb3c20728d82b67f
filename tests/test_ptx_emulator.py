"""The emulator of compiled kernels: each instruction's meaning, and what it says of those that it cannot execute."""

import numpy as np
import pytest
import torch
from ptx_emulator import PTXError, machine
from ptx_programs import LANES, mine, run


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
    ("add.s16x2 %r1, %r2, %r3", (0x0001FFFF, 0x00010001), 0x00020000),
    ("min.s16x2 %r1, %r2, %r3", (0x0001FFFF, 0x00020001), 0x0001FFFF),
    ("max.u16x2 %r1, %r2, %r3", (0x0001FFFF, 0x00020001), 0x0002FFFF),
    ("max.NaN.f16x2 %r1, %r2, %r3", (0x3C00C000, 0x4000BC00), 0x4000BC00),
    ("min.NaN.bf16x2 %r1, %r2, %r3", (0x3F80C000, 0x4000BF80), 0x3F80C000),
    (
        "setp.num.f16x2 %p1|%p2, %r2, %r3; selp.b32 %r1, 1, 0, %p1; selp.b32 %r4, 2, 0, %p2; add.s32 %r1, %r1, %r4",
        (0x7E003C00, 0),
        1,
    ),
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
