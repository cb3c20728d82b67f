"""The delta-rule recurrence over a long sequence, chunk by chunk: differentiable, for training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 16
# exp(80) is finite in float32. A chunk whose summed decays stay inside may factor exp(G_t - G_i) into two exponentials.
FACTORED_RANGE = 80.0


def delta_rule_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    S: Tensor | None = None,
    *,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Same function as :func:`models.recurrence.delta_rule_window`, in parallel over chunks.

    Shapes and dtypes as there; any T. ``lower_bound`` states that every ``g >= lower_bound``, which permits the
    factored exponentials if ``-lower_bound * 16 <= 80``; None makes no such promise. Returns outputs ``[B, T, H, V]``
    and the final state ``[B, H, V, K]``.

    Inside a chunk (WY form): ``(I + diag(beta) strict_lower(c)) U = diag(beta) (V - P)``, ``O = R + lower(d) U`` with
    ``c_ti = <k_t, k_i exp(G_t - G_i)>`` and ``d_ti`` the same for q. U is affine in the state at the chunk's start,
    hence so is the state at its end, and the chunk states follow from a scan of affine maps.
    """
    B, T, H, K = q.shape
    V = v.shape[-1]
    padding = -T % CHUNK
    if padding:
        # A padded token has g = 0, k = 0 and beta = 0: it leaves the state alone.
        q, k, v, g = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (q, k, v, g))
        beta = F.pad(beta, (0, 0, 0, padding))
    # [B, T, H, X] -> [B, H, chunks, CHUNK, X]
    q, k, v, g = (x.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2, 4) for x in (q, k, v, g))
    beta = beta.unflatten(1, (-1, CHUNK)).permute(0, 3, 1, 2)

    G = g.cumsum(-2)
    if lower_bound is not None and -lower_bound * CHUNK <= FACTORED_RANGE:
        c, d = _scores_factored(q, k, G)
    else:
        c, d = _scores_segmented(q, k, g)
    transform = _unit_lower_inverse(beta.unsqueeze(-1) * c) * beta.unsqueeze(-2)

    decay = G.exp()
    # What is left of a token at the chunk's end: the decays of the tokens after it.
    after = F.pad(g[..., 1:, :], (0, 0, 0, 1)).flip(-2).cumsum(-2).flip(-2)
    k_end = (k * after.exp()).transpose(-1, -2)
    W = transform @ (k * decay)
    U = transform @ v
    # The state is held as [K, V] here: end = M @ start + N.
    M = torch.diag_embed(decay[..., -1, :]) - k_end @ W
    N = k_end @ U
    start = q.new_zeros(B, H, K, V) if S is None else S.transpose(-1, -2)
    starts, end = _affine_scan(M, N, start)

    U = U - W @ starts
    o = (q * decay) @ starts + d @ U
    return o.permute(0, 2, 3, 1, 4).flatten(1, 2)[:, :T], end.transpose(-1, -2)


def _scores_factored(q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    # Measured from the middle of the chunk both factors stay within half of the range.
    middle = G[..., CHUNK // 2 : CHUNK // 2 + 1, :]
    left = (G - middle).exp()
    right = (k * (middle - G).exp()).transpose(-1, -2)
    return ((k * left) @ right).tril(-1), ((q * left) @ right).tril()


def _scores_segmented(q: Tensor, k: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    # Decays of any size: each exponent is the sum of the decays between two tokens and no more. The difference of two
    # running sums would lose the weak decays that follow a strong one.
    index = torch.arange(CHUNK, device=g.device)
    later = (index.unsqueeze(-1) > index).unsqueeze(-1)
    segments = torch.where(later, g.unsqueeze(-2), 0.0).cumsum(-3)
    k_decayed = segments.exp() * k.unsqueeze(-3)
    c = (k.unsqueeze(-2) * k_decayed).sum(-1)
    d = (q.unsqueeze(-2) * k_decayed).sum(-1)
    return c.tril(-1), d.tril()


def _unit_lower_inverse(L: Tensor) -> Tensor:
    """``(I + L)^-1`` for strictly lower ``L [..., CHUNK, CHUNK]``, by doubling the inverted diagonal blocks.

    With X the inverse of the diagonal blocks and E the blocks below them in each pair, the pair's inverse is
    ``X - X E X``. It is as stable as substitution, unlike the product of powers of L.
    """
    index = torch.arange(CHUNK, device=L.device)
    X = torch.eye(CHUNK, dtype=L.dtype, device=L.device).expand_as(L)
    size = 1
    while size < CHUNK:
        block, pair = index // size, index // (2 * size)
        joins = (pair.unsqueeze(-1) == pair) & (block.unsqueeze(-1) != block)
        E = torch.where(joins, L, 0.0)
        X = X - (E if size == 1 else X @ E @ X)
        size *= 2
    return X


def _affine_scan(M: Tensor, N: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """States before every chunk and after the last, for ``state <- M_c @ state + N_c``, in logarithmic depth.

    ``M [B, H, C, K, K]``, ``N [B, H, C, K, V]``, ``start [B, H, K, V]`` -> ``[B, H, C, K, V]``, ``[B, H, K, V]``.
    """
    levels = []
    while M.shape[2] > 1:
        odd_count = M.shape[2] % 2
        if odd_count:
            # The partner of an odd last map is only ever composed into a map nobody applies, except at the very top,
            # where the final state is wanted: the identity is the right one.
            identity = torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand(*M.shape[:2], 1, -1, -1)
            M = torch.cat([M, identity], 2)
            N = F.pad(N, (0, 0, 0, 0, 0, 1))
        M_even, M_odd = M[:, :, 0::2], M[:, :, 1::2]
        N_even, N_odd = N[:, :, 0::2], N[:, :, 1::2]
        levels.append((M_even, N_even, odd_count))
        M, N = M_odd @ M_even, M_odd @ N_even + N_odd
    end = M[:, :, 0] @ start + N[:, :, 0]
    starts = start.unsqueeze(2)
    for M_even, N_even, odd_count in reversed(levels):
        middles = M_even @ starts + N_even
        starts = torch.stack([starts, middles], 3).flatten(2, 3)
        if odd_count:
            starts = starts[:, :, :-1]
    return starts, end
