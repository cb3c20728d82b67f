"""Two kernels with a mistake each, which ``sanitize.py`` runs beside the kernels' tests: a tool must report its own.

Not collected with the other tests: the first mistake ends the process's use of the GPU under memcheck.
"""

import contextlib

import torch
import triton
import triton.language as tl


@triton.jit
def read_past_the_end(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, tl.load(x + N + at))


@triton.jit
def read_without_a_barrier(out, N: tl.constexpr):
    """Every thread stores its number in shared memory and reads what a thread of another warp may have stored."""
    at = tl.arange(0, N)
    other = tl.inline_asm_elementwise(
        """{
        .shared .align 4 .b8 planted[512];
        .reg .b32 at, mine, others;
        mov.u32 at, planted;
        shl.b32 mine, $1, 2;
        xor.b32 others, mine, 128;
        add.u32 mine, at, mine;
        add.u32 others, at, others;
        st.volatile.shared.b32 [mine], $1;
        ld.volatile.shared.b32 $0, [others];
        }""",
        "=r,r",
        [at],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.store(out + at, other)


def test_memcheck():
    x, out = torch.zeros(128, device="cuda"), torch.zeros(128, device="cuda")
    with contextlib.suppress(RuntimeError):  # under the tool
        read_past_the_end[(1,)](x, out, 128)
        torch.cuda.synchronize()


def test_racecheck():
    read_without_a_barrier[(1,)](torch.zeros(128, dtype=torch.int32, device="cuda"), 128, num_warps=4)
    torch.cuda.synchronize()
