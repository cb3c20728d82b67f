"""What the Gluon kernels (``..._async.py``) share: copies of state tiles to shared memory, matrices in pieces there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2


@gluon.jit
def copy_tile(tile, source, columns, K: gl.constexpr):
    """Begin to copy; columns past K become zeros."""
    if tile.shape[1] <= K:
        async_copy.async_copy_global_to_shared(tile, source)
    else:
        async_copy.async_copy_global_to_shared(tile, source, mask=(columns < K)[None, :])
    async_copy.commit_group()


@gluon.jit
def store(pieces, shared, start: gl.constexpr):
    """Rows ``start``, ``start + 1``, ... of the matrix that ``shared`` holds in pieces."""
    for i in gl.static_range(len(pieces)):
        shared[i].slice(start, pieces[i].shape[0], 0).store(pieces[i])


@gluon.jit
def shared_pieces(COUNT: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    layout: gl.constexpr = gl.SwizzledSharedLayout(128 // DTYPE.primitive_bitwidth, 1, 8, [1, 0])
    if COUNT == 1:
        return (gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], layout),)
    else:
        return (
            gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], layout),
            gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], layout),
        )


@gluon.jit
def rows_of(shared, start: gl.constexpr, count: gl.constexpr):
    """Rows ``start``, ``start + 1``, ... of a matrix in pieces."""
    rows = ()
    for i in gl.static_range(len(shared)):
        rows = rows + (shared[i].slice(start, count, 0),)
    return rows


@gluon.jit
def columns_of(shared, start: gl.constexpr, count: gl.constexpr, right: gl.constexpr):
    """Columns ``start``, ``start + 1``, ... as rows of a right operand."""
    return shared.slice(start, count, 1).permute((1, 0)).load(right)


@gluon.jit
def inner_products(a, b, PART: gl.constexpr, acc: gl.constexpr, ACCUMULATORS: gl.constexpr):
    """``a b^T`` of matrices in shared memory, ``PART`` columns at a time, or a warp's registers would not hold the operands.

    A product waits for the one before it in its accumulator: of operands in two pieces there are two of these, or three.
    """
    left: gl.constexpr = gl.DotOperandLayout(0, acc, 32 // a[0].dtype.primitive_bitwidth)
    right: gl.constexpr = gl.DotOperandLayout(1, acc, 32 // a[0].dtype.primitive_bitwidth)
    N: gl.constexpr = a[0].shape[0]
    M: gl.constexpr = b[0].shape[0]
    COLUMNS: gl.constexpr = a[0].shape[1]
    large = gl.zeros([N, M], gl.float32, acc)
    small, cross = large, large
    for part in gl.static_range(COLUMNS // PART):
        x, y = (), ()
        for i in gl.static_range(len(a)):
            x = x + (a[i].slice(part * PART, PART, 1).load(left),)
        for i in gl.static_range(len(b)):
            y = y + (columns_of(b[i], part * PART, PART, right),)
        if len(b) > 1:
            small = mma_v2(x[0], y[1], small, "tf32")
        if len(a) > 1 and ACCUMULATORS > 2:
            cross = mma_v2(x[1], y[0], cross, "tf32")
        elif len(a) > 1:
            small = mma_v2(x[1], y[0], small, "tf32")
        large = mma_v2(x[0], y[0], large, "tf32")
    if len(a) > 1 and ACCUMULATORS > 2:
        small += cross
    return large + small
