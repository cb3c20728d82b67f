"""Products at float32 quality on the matrix unit, whose operands are bf16 or tf32.

An operand is cut into pieces of 8 (bf16) or 11 (tf32) significant bits, which is exact: the next piece is the difference.
Bits are cleared or rounded by integer instructions; a lone rounding to bf16 runs at a fraction of that rate.

``PIECES`` says how fine: 2 for two bf16 pieces, 16 of a float32's 24 bits; 0 for two tf32 pieces, 22 bits. A tensor that the
matrix unit takes exactly (a bf16 state beside bf16 pieces, a float16 one beside tf32 pieces) is its own only piece.
"""

import triton
import triton.language as tl


@triton.jit
def leading_bits(x):
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def nearest_tf32(x):
    """``x`` rounded to tf32. What is left is half as large as after clearing the bits, and of either sign."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def cut(x, PIECES: tl.constexpr, ROUND: tl.constexpr = True):
    """A tuple of tensors, the largest first, whose sum is ``x`` up to the bits that ``PIECES`` leaves out.

    The matrix unit ignores bits beyond tf32, so without ``ROUND`` the last one is cut off rather than rounded.
    """
    if (x.dtype == tl.bfloat16 and PIECES > 0) or (x.dtype == tl.float16 and PIECES == 0):
        return (x.to(tl.float32) if PIECES == 0 else x,)
    elif PIECES == 0:
        x = x.to(tl.float32)
        high = nearest_tf32(x)
        if ROUND:
            high = tl.where(x == x, high, x)  # rounding a NaN's bits may make a number of it
            return high, nearest_tf32(x - high)
        else:
            return high, x - high
    else:
        high = leading_bits(x)
        return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def rounded_product(x, y):
    """``x y``, element by element, rounded before anything is added.

    The compiler may fuse a product with the first addition between threads. Each of the two then rounds otherwise, and where a
    layout repeats data, both may write the sum that other warps read.
    """
    return tl.fma(x, y, 0.0)


@triton.jit
def transposed(pieces):
    if len(pieces) == 1:
        return (tl.trans(pieces[0]),)
    else:
        return tl.trans(pieces[0]), tl.trans(pieces[1])


@triton.jit
def product(a, b):
    """Product of two cut matrices, the small terms first; those below the last piece's place are left out."""
    LAST: tl.constexpr = max(len(a), len(b)) - 1
    result = tl.zeros((a[0].shape[0], b[0].shape[1]), dtype=tl.float32)
    for back in tl.static_range(LAST + 1):
        for i in tl.static_range(len(a)):
            if LAST - back - i >= 0 and LAST - back - i < len(b):
                result = tl.dot(a[i], b[LAST - back - i], result, input_precision="tf32")
    return result


@triton.jit
def concatenate(a, b):
    """``[N, C]`` and ``[N, C]`` as ``[N, 2 C]``."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def twice(x):
    """``[C, N]`` above itself, ``[2 C, N]``."""
    return tl.reshape(tl.broadcast_to(x[None, :, :], (2, x.shape[0], x.shape[1])), (2 * x.shape[0], x.shape[1]))


@triton.jit
def thin_product(a, b, sum):
    """``sum + a b`` for ``a [N, C]`` and ``b [C, R]`` cut in two, C small.

    Two pieces side by side fill the matrix unit's contraction.
    """
    left = concatenate(a[0], a[1])
    sum = tl.dot(left, twice(b[1]), sum, input_precision="tf32")
    return tl.dot(left, twice(b[0]), sum, input_precision="tf32")
