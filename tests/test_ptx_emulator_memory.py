"""The emulator's memory: bounds, races between warps, copies on their way, matrices; that it sees what it says it sees."""

import re

import pytest
import torch
from ptx_emulator import PTXError
from ptx_programs import LANES, mine, run, shared_address


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
