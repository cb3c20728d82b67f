"""The window's triangular system in the registers of a warp, in Gluon: ``N = (I - C)^-1`` and ``D N`` by substitution.

A power series of the nilpotent part would need fewer steps, and cancels every digit for repeated keys. Every warp computes all
of it. Matrices are blocks of ``[8, 8]`` as the matrix unit leaves them: a row is four threads, of two columns each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def in_every_warp(warps):
    """``[32, 16]`` as four tiles of the matrix unit, the same in each of ``warps``."""
    warp = [[0, 0]] * (warps.bit_length() - 1)
    lane = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [8, 0], [0, 8], [16, 0]], lane, warp, [], [32, 16])


@gluon.jit
def above_and_below(x):
    """``[2 N, M]`` as two ``[N, M]``."""
    return gl.split(gl.permute(gl.reshape(x, [2, x.shape[0] // 2, x.shape[1]]), (1, 2, 0)))


@gluon.jit
def left_and_right(x):
    """``[N, 2 M]`` as two ``[N, M]``."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def even_and_odd(x):
    """Columns 0, 2, ... and 1, 3, ...: the two that a thread holds."""
    return gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@gluon.jit
def from_lane(x, lane):
    """What lane ``lane`` of the warp holds in the same register."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, lane], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def coupled(A, N, t, i):
    """``A N`` of ``[8, 8]`` matrices, both as even and odd columns."""
    even, odd = gl.zeros_like(N[0]), gl.zeros_like(N[0])
    for j in gl.static_range(8):
        a = from_lane(A[j % 2], 4 * t + j // 2)
        even += a * from_lane(N[0], 4 * j + i // 2)
        odd += a * from_lane(N[1], 4 * j + i // 2)
    return even, odd


@gluon.jit
def substitute(C, D, N, DN, t, i, T: gl.constexpr):
    """``N`` becomes ``(I - C)^-1 N``, to which ``DN`` adds ``D`` times that; for as many columns as the tuples have.

    Element t, i of a matrix is in lane 4 t + i / 2; ``t`` and ``i`` are row and column of the even ones. Only what is below C's
    and on or below D's diagonal counts: what is masked is not multiplied by zero (``verify.py``).
    """
    for j in gl.static_range(T):
        c, d = from_lane(C[j % 2], 4 * t + j // 2), from_lane(D[j % 2], 4 * t + j // 2)
        next_N, next_DN = (), ()
        for column in gl.static_range(len(N)):
            row = from_lane(N[column], 4 * j + i // 2)
            next_N = next_N + (gl.where(t > j, N[column] + c * row, N[column]),)
            next_DN = next_DN + (gl.where(t >= j, DN[column] + d * row, DN[column]),)
        N, DN = next_N, next_DN
    return N, DN


@gluon.jit
def joined(columns):
    """Even and odd columns as ``[8, 8]``."""
    return gl.reshape(gl.join(columns[0], columns[1]), [8, 8])


@gluon.jit
def eliminate(C, D, t, i, T: gl.constexpr):
    """``N = (I - C)^-1`` and ``D N`` for windows of up to 8 tokens; ``t`` and ``i`` are row and column of every element."""
    t, i = even_and_odd(t)[0], even_and_odd(i)[0]
    one = gl.where(t == i, 1.0, 0.0), gl.where(t == i + 1, 1.0, 0.0)
    zero = gl.zeros_like(one[0]), gl.zeros_like(one[0])
    N, DN = substitute(even_and_odd(C), even_and_odd(D), one, zero, t, i, T)
    return joined(N), joined(DN)


@gluon.jit
def quarters(x):
    """``[16, 16]`` as ``[8, 8]``: the upper left, the lower left, the lower right."""
    upper, lower = above_and_below(x)
    return left_and_right(upper)[0], left_and_right(lower)[0], left_and_right(lower)[1]


@gluon.jit
def from_quarters(upper_left, lower_left, lower_right):
    """``[16, 16]`` with zeros at the upper right."""
    upper = gl.permute(gl.join(upper_left, gl.zeros_like(upper_left)), (0, 2, 1))
    lower = gl.permute(gl.join(lower_left, lower_right), (0, 2, 1))
    upper, lower = gl.reshape(upper, [8, 16]), gl.reshape(lower, [8, 16])
    return gl.reshape(gl.permute(gl.join(upper, lower), (2, 0, 1)), [16, 16])


@gluon.jit
def eliminate_16(C, D, t, i, T: gl.constexpr):
    """The same for windows of 9 to 16 tokens.

    The first eight rows are those of :func:`eliminate`; they enter the others as a right-hand side, then the last eight are
    substituted among themselves, in the order in which a walk down the rows would add.
    """
    t, i = quarters(t)[0], quarters(i)[0]
    t, i = even_and_odd(t)[0], even_and_odd(i)[0]
    C_first, C_between, C_last = quarters(C)
    D_first, D_between, D_last = quarters(D)
    one = gl.where(t == i, 1.0, 0.0), gl.where(t == i + 1, 1.0, 0.0)
    zero = gl.zeros_like(one[0]), gl.zeros_like(one[0])
    N, DN = substitute(even_and_odd(C_first), even_and_odd(D_first), one, zero, t, i, 8)
    carried, seen = coupled(even_and_odd(C_between), N, t, i), coupled(even_and_odd(D_between), N, t, i)
    N_last, DN_last = substitute(even_and_odd(C_last), even_and_odd(D_last), carried + one, seen + zero, t, i, T - 8)
    return (
        from_quarters(joined(N), joined(N_last), joined((N_last[2], N_last[3]))),
        from_quarters(joined(DN), joined(DN_last), joined((DN_last[2], DN_last[3]))),
    )
