"""What the Gluon kernels (``..._async.py``) share: copies of state tiles to shared memory, matrices in pieces there."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def copy_tile(tile, source, columns, K: gl.constexpr):
    """Begin to copy; columns past K become zeros."""
    if tile.shape[1] == K:
        async_copy.async_copy_global_to_shared(tile, source)
    else:
        async_copy.async_copy_global_to_shared(tile, source, mask=(columns < K)[None, :])
    async_copy.commit_group()


@gluon.jit
def store(pieces, shared, start: gl.constexpr):
    """Rows ``start``, ``start + 1``, ... of the matrix that ``shared`` holds in pieces."""
    for i in gl.static_range(len(pieces)):
        shared[i].slice(start, pieces[i].shape[0], 0).store(pieces[i])
