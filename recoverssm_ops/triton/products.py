"""Products at float32 quality on the matrix unit, whose operands are bf16 or tf32.

An operand is cut into pieces of 8 (bf16) or 11 (tf32) significant bits by clearing low bits, which is exact: the next
piece is the difference. Clearing is one integer instruction; a lone rounding to bf16 runs at a fraction of that rate.
"""

import triton
import triton.language as tl


@triton.jit
def leading_bits(x, MASK: tl.constexpr):
    return (x.to(tl.int32, bitcast=True) & MASK).to(tl.float32, bitcast=True)


@triton.jit
def nearest_tf32(x):
    """``x`` rounded to tf32. What is left is half as large as after clearing the bits, and of either sign."""
    return ((x.to(tl.int32, bitcast=True) + 4096) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def bf16_pieces(x):
    """Three bf16 tensors whose sum is exactly the float32 ``x``."""
    high = leading_bits(x, -65536)
    rest = x - high
    middle = leading_bits(rest, -65536)
    return high.to(tl.bfloat16), middle.to(tl.bfloat16), (rest - middle).to(tl.bfloat16)


@triton.jit
def product_exact_bf16(a, b):
    """``a`` float32 times ``b`` bf16: three products, small pieces first."""
    high, middle, low = bf16_pieces(a)
    result = tl.dot(low, b)
    result = tl.dot(middle, b, result)
    return tl.dot(high, b, result)


@triton.jit
def product_bf16(a, b):
    """Both float32, as six products of bf16 pieces; the three that are left out are below 2^-24."""
    a_high, a_middle, a_low = bf16_pieces(a)
    b_high, b_middle, b_low = bf16_pieces(b)
    result = tl.dot(a_low, b_high)
    result = tl.dot(a_middle, b_middle, result)
    result = tl.dot(a_high, b_low, result)
    result = tl.dot(a_middle, b_high, result)
    result = tl.dot(a_high, b_middle, result)
    return tl.dot(a_high, b_high, result)


@triton.jit
def product_tf32(a, b):
    """Both float32, as three tf32 products; or ``b`` float16, which is exact in tf32, as two."""
    a_high = nearest_tf32(a)
    a_low = a - a_high
    if b.dtype == tl.float16:
        b_high = b.to(tl.float32)
        result = tl.dot(a_low, b_high, input_precision="tf32")
    else:
        b_high = nearest_tf32(b)
        result = tl.dot(a_low, b_high, input_precision="tf32")
        result = tl.dot(a_high, b - b_high, result, input_precision="tf32")
    return tl.dot(a_high, b_high, result, input_precision="tf32")
