"""Couplings of tokens where every channel has a gate of its own, in Gluon: decays are parts of the operands.

Where the gate's bound proves both finite, ``(keys exp(G)) (keys exp(-G))^T`` (``couplings_factored`` of ``verify.py``). For any
other gate, products of halves of the window, whose decays are factored at the token between them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recoverssm_ops.triton import gates, products
from recoverssm_ops.triton.elimination import above_and_below
from recoverssm_ops.triton.tiles import inner_products, rows_of, shared_pieces, store

exp, reciprocal, cut = gluon.jit(gates.exp.fn), gluon.jit(gates.reciprocal.fn), gluon.jit(products.cut.fn)


@gluon.jit
def multiply(a, b):
    return a * b


@gluon.jit
def factored_couplings(
    keys, queries, gate, SHIFT: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr, SPAN: gl.constexpr,
    tokens: gl.constexpr, ACCUMULATORS: gl.constexpr,
):  # fmt: skip
    """``[2 TP, TP]``: those of keys, then those of queries; and their left operand in pieces, in shared memory.

    ``gate`` is log decays. ``SHIFT`` moves the range of ``exp(G)`` up and that of ``exp(-G)`` down, so that the small pieces of
    neither are lost.
    """
    EXACT: gl.constexpr = PIECES == 0
    TP: gl.constexpr = keys.shape[0]
    BK: gl.constexpr = keys.shape[1]
    shrinking = gl.associative_scan(exp(gate, EXACT), 0, multiply)
    if SHIFT:
        shrinking *= 2.0**SHIFT
    decayed = shared_pieces(2, PIECE, 2 * TP, BK)
    store(cut(keys * shrinking, PIECES), decayed, 0)
    store(cut(queries * shrinking, PIECES), decayed, TP)
    pieces = cut(keys * reciprocal(shrinking, EXACT), PIECES)
    if EXACT and TP * BK > 2048:
        # Both pieces in turn, or a program would not fit the 99 KiB of the smaller GPUs.
        earlier = shared_pieces(1, PIECE, TP, BK)
        store((pieces[0],), earlier, 0)
        couplings = inner_products(decayed, earlier, SPAN, tokens, ACCUMULATORS)
        store((pieces[1],), earlier, 0)
        couplings += inner_products((decayed[0],), earlier, SPAN, tokens, ACCUMULATORS)
    else:
        earlier = shared_pieces(2, PIECE, TP, BK)
        store(pieces, earlier, 0)
        couplings = inner_products(decayed, earlier, SPAN, tokens, ACCUMULATORS)
    return couplings, decayed


@gluon.constexpr_function
def halvings(n):
    """How often ``n``, a power of two, can be halved."""
    return n.bit_length() - 1


@gluon.jit
def rows_apart(x):
    """Rows of ``[N, M]``, N a power of two, each as ``[1, M]``."""
    rows = (x,)
    for _ in gl.static_range(halvings(x.shape[0])):
        halves = ()
        for half in gl.static_range(len(rows)):
            halves = halves + above_and_below(rows[half])
        rows = halves
    return rows


@gluon.jit
def rows_together(rows):
    """The inverse of :func:`rows_apart`."""
    for _ in gl.static_range(halvings(len(rows))):
        pairs = ()
        for pair in gl.static_range(len(rows) // 2):
            x = gl.permute(gl.join(rows[2 * pair], rows[2 * pair + 1]), (2, 0, 1))
            pairs = pairs + (gl.reshape(x, [2 * x.shape[1], x.shape[2]]),)
        rows = pairs
    return rows[0]


@gluon.jit
def decayed_since(x, decay, BLOCK: gl.constexpr):
    """Rows, each times the decays from the first token of its block of ``BLOCK`` up to its own."""
    result = ()
    for t in gl.static_range(len(x)):
        since = decay[t] if t % BLOCK == 0 else since * decay[t]  # noqa: F821 - of the token before
        result = result + (x[t] * since,)
    return result


@gluon.jit
def decayed_until(x, decay, BLOCK: gl.constexpr):
    """Rows, each times the decays after its own token, to the end of its block of ``BLOCK``."""
    result = ()
    for back in gl.static_range(1, len(x) + 1):
        until = gl.full_like(x[0], 1.0) if back % BLOCK == 1 % BLOCK else until * decay[len(x) + 1 - back]  # noqa: F821
        result = (x[len(x) - back] * until,) + result
    return result


@gluon.jit
def halved_couplings(
    keys, queries, gate, key_products, r, i, PIECES: gl.constexpr, PIECE: gl.constexpr, SPAN: gl.constexpr,
    tokens: gl.constexpr, everywhere: gl.constexpr,
):  # fmt: skip
    """The same for any gate: ``exp(G_t - G_i)`` is ``exp(G_t - G_m) exp(G_m - G_i)``, with m between i and t neither overflows.

    Blocks of one token, then of two, ... are joined in pairs: m is the last token of the first block, the rows are the
    second's, decayed since m, the columns the first's, decayed up to m. ``key_products`` has what decays over no token. Rows
    are ``r``, columns ``i``. The left operand returned is decayed since the window began.
    """
    EXACT: gl.constexpr = PIECES == 0
    TP: gl.constexpr = keys.shape[0]
    decay, keys, queries = rows_apart(exp(gate, EXACT)), rows_apart(keys), rows_apart(queries)
    operands = shared_pieces(2, PIECE, 2 * TP, gate.shape[1])
    couplings = gl.where(r[:, None] == i[None, :] + TP, key_products, 0.0)
    token = r % TP
    for level in gl.static_range(halvings(TP)):
        later_keys, later_queries = decayed_since(keys, decay, 1 << level), decayed_since(queries, decay, 1 << level)
        earlier_keys = decayed_until(keys, decay, 1 << level)
        key_rows, query_rows = (), ()
        for t in gl.static_range(TP):
            second = (t >> level) % 2 == 1
            key_rows = key_rows + ((later_keys[t] if second else earlier_keys[t]),)
            query_rows = query_rows + ((later_queries[t] if second else queries[t]),)
        store(cut(rows_together(key_rows), PIECES), operands, 0)
        store(cut(rows_together(query_rows), PIECES), operands, TP)
        # Three accumulators on bf16, too: here two of them spill more.
        across = inner_products(operands, rows_of(operands, 0, TP), SPAN, tokens, 3 if TP == 8 else 2)
        across = gl.convert_layout(across, everywhere)
        joined = (token >> (level + 1))[:, None] == (i >> (level + 1))[None, :]
        between = ((token >> level) % 2 == 1)[:, None] & ((i >> level) % 2 == 0)[None, :]
        couplings = gl.where(joined & between, across, couplings)
    store(cut(rows_together(decayed_since(keys, decay, TP)), PIECES), operands, 0)
    store(cut(rows_together(decayed_since(queries, decay, TP)), PIECES), operands, TP)
    return couplings, operands
