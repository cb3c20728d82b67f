"""Launches of every kernel in every variant that compiles to different code: small tensors, the launchers' own choices.

Each function returns a call that makes exactly one launch; :mod:`benchmarks.compilation` notes what it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from recoverssm_ops.triton import configs, launch, launch_conv, launch_layers

HEADS, SLOTS = 8, 3
# Rows: so many that the GPU is full, as many as run at once, few, and so few that heads are shared out.
BATCH, WAVE_ROWS, FEW_ROWS = configs.ONE_WAVE // HEADS + 1, configs.ONE_WAVE // HEADS, configs.FEW_PROGRAMS // HEADS
FEWEST_ROWS = 2
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

Launching = Callable[[], object]


def _empty(*shape: int, dtype: str = "fp32", aligned: bool = True) -> Tensor:
    """Uninitialised: nothing is computed. Not aligned: one element past a multiple of 16 bytes."""
    if aligned:
        return torch.empty(shape, dtype=TYPES[dtype])
    return torch.empty(torch.Size(shape).numel() + 1, dtype=TYPES[dtype])[1:].view(shape)


def _window(T: int, packed: bool, batch: int = BATCH) -> tuple[tuple[int, int], Tensor | None]:
    """Leading sizes and row boundaries."""
    if not packed:
        return (batch, T), None
    return (1, batch * T), torch.arange(0, batch * T + 1, T, dtype=torch.int32)


def _plan(columns: int, batch: int = BATCH) -> tuple[Tensor, Tensor, Tensor]:
    """Source, destinations and lengths."""
    return tuple(torch.zeros(size, dtype=torch.int32) for size in ((batch,), (batch, columns), (batch, columns)))


def _gate(heads: int, K: int, scalar_gate: bool, bounded: bool, aligned: bool = True) -> tuple[Tensor, Tensor, float]:
    bias = (heads,) if scalar_gate else (heads, K)
    return _empty(heads, aligned=aligned), _empty(*bias, aligned=aligned), -5.0 if bounded else 0.0


def verify(
    pool: str, T: int = 8, K: int = 128, V: int = 128, *, data: str = "bf16", scalar_gate: bool = False,
    bounded: bool = True, packed: bool = False, groups: int = 1, batch: int = BATCH, aligned: bool = True,
) -> Launching:  # fmt: skip
    lead, cu_seqlens = _window(T, packed, batch)
    HV = HEADS * groups
    q, k = _empty(*lead, HEADS, K, dtype=data), _empty(*lead, HEADS, K, dtype=data)
    v, beta = _empty(*lead, HV, V, dtype=data), _empty(*lead, HV, dtype=data)
    g = _empty(*lead, HV, *(() if scalar_gate else (K,)), dtype=data)
    state, slots = _empty(SLOTS, HV, V, K, dtype=pool, aligned=aligned), torch.zeros(batch, dtype=torch.int32)
    gate = _gate(HV, K, scalar_gate, bounded)
    settings = (K**-0.5, True, True, True, False, -1)
    return lambda: launch.verify(q, k, v, g, beta, state, slots, cu_seqlens, T, *gate, *settings)


def _record(
    T: int, K: int, V: int, data: str, scalar_gate: bool, packed: bool, aligned: bool = True, batch: int = BATCH
) -> tuple:  # fmt: skip
    lead, cu_seqlens = _window(T, packed, batch)
    u, k = _empty(*lead, HEADS, V, aligned=aligned), _empty(*lead, HEADS, K, dtype=data, aligned=aligned)
    g = _empty(*lead, HEADS, *(() if scalar_gate else (K,)), dtype=data, aligned=aligned)
    return (u, k, g), (cu_seqlens, T)


def commit(
    pool: str, T: int = 8, K: int = 128, V: int = 128, *, columns: int = 1, data: str = "bf16", scalar_gate: bool = False,
    bounded: bool = True, packed: bool = False, batch: int = BATCH, aligned: bool = True,
) -> Launching:  # fmt: skip
    record, layout = _record(T, K, V, data, scalar_gate, packed, aligned, batch)
    state, gate = _empty(SLOTS, HEADS, V, K, dtype=pool, aligned=aligned), _gate(HEADS, K, scalar_gate, bounded)
    return lambda: launch.commit(state, *record, *_plan(columns, batch), *layout, *gate, True, True, -1)


def recover(pool: str, T: int = 8, K: int = 128, V: int = 128) -> Launching:
    record, layout = _record(T, K, V, "bf16", False, False)
    state, accepted = _empty(BATCH, HEADS, V, K, dtype=pool), torch.zeros(BATCH, dtype=torch.int32)
    return lambda: launch.recover(state, *record, accepted, *layout, *_gate(HEADS, K, False, True), True, True)


def commit_layers(
    pool: str, T: int = 8, K: int = 128, V: int = 128, *, columns: int = 1, data: str = "bf16", scalar_gate: bool = False,
    bounded: bool = True, packed: bool = False, layers: int = 20, aligned: bool = True,
) -> Launching:  # fmt: skip
    records = [_record(T, K, V, data, scalar_gate, packed, aligned) for _ in range(layers)]
    layout = records[0][1]
    states = [_empty(SLOTS, HEADS, V, K, dtype=pool, aligned=aligned) for _ in records]
    u, k, g = (list(x) for x in zip(*(record for record, _ in records), strict=True))
    rate, bias, bound = _gate(HEADS, K, scalar_gate, bounded, aligned)
    gate = ([rate] * layers, [bias] * layers, bound)
    return lambda: launch_layers.commit(states, u, k, g, *_plan(columns), *layout, *gate, True, True, -1)


def _conv_state(state: str, D: int, W: int, pool: str) -> Tensor:
    """``pool``: "dense" ``[slots, D, W-1]``, "channels innermost", or "strided" by multiples of 16."""
    if pool == "dense":
        return _empty(SLOTS, D, W - 1, dtype=state)
    if pool == "channels innermost":
        return _empty(SLOTS, W - 1, D, dtype=state).transpose(1, 2)
    return _empty(SLOTS, W - 1, D, 16, dtype=state)[..., 0].transpose(1, 2)


def conv_verify(
    data: str, T: int = 8, W: int = 4, D: int = 4096, *, state: str = "", weight: str = "", bias: bool = False,
    packed: bool = False, silu: bool = True, pool: str = "dense",
) -> Launching:  # fmt: skip
    lead, cu_seqlens = _window(T, packed)
    x, taps = _empty(*lead, D, dtype=data), _empty(D, W, dtype=weight or data)
    offset = _empty(D, dtype=weight or data) if bias else None
    states, slots = _conv_state(state or data, D, W, pool), torch.zeros(BATCH, dtype=torch.int32)
    return lambda: launch_conv.verify(x, taps, offset, states, slots, cu_seqlens, T, silu, -1)


def conv_commit(
    data: str, T: int = 8, W: int = 4, D: int = 4096, *, state: str = "", columns: int = 1, packed: bool = False,
    pool: str = "dense",
) -> Launching:  # fmt: skip
    lead, cu_seqlens = _window(T, packed)
    x, states = _empty(*lead, D, dtype=data), _conv_state(state or data, D, W, pool)
    return lambda: launch_conv.commit(states, x, *_plan(columns), cu_seqlens, -1)


def conv_commit_layers(
    data: str, T: int = 8, W: int = 4, D: int = 4096, *, state: str = "", columns: int = 1, packed: bool = False,
    layers: int = 20,
) -> Launching:  # fmt: skip
    lead, cu_seqlens = _window(T, packed)
    xs = [_empty(*lead, D, dtype=data) for _ in range(layers)]
    states = [_conv_state(state or data, D, W, "dense") for _ in xs]
    return lambda: launch_layers.conv_commit(states, xs, *_plan(columns), cu_seqlens, -1)


def _all() -> dict[str, tuple[Callable[..., Launching], dict]]:
    variants = {}
    for pool, T in itertools.product(("bf16", "fp32"), (4, 8)):
        variants[f"verify_{pool}_T{T}"] = (verify, {"pool": pool, "T": T})
    for pool in ("bf16", "fp32"):
        variants[f"verify_{pool}_unaligned"] = (verify, {"pool": pool, "aligned": False})
        variants[f"verify_{pool}_packed"] = (verify, {"pool": pool, "packed": True, "groups": 2})
        variants[f"verify_{pool}_fp32_data"] = (verify, {"pool": pool, "data": "fp32"})
        variants[f"verify_{pool}_unbounded"] = (verify, {"pool": pool, "bounded": False})
        variants[f"verify_{pool}_unbounded_T16"] = (verify, {"pool": pool, "bounded": False, "T": 16})
        variants[f"verify_{pool}_unbounded_unaligned"] = (verify, {"pool": pool, "bounded": False, "aligned": False})
        variants[f"verify_{pool}_T16"] = (verify, {"pool": pool, "T": 16})
        variants[f"commit_{pool}"] = (commit, {"pool": pool})
        variants[f"commit_{pool}_unaligned"] = (commit, {"pool": pool, "aligned": False})
        variants[f"commit_{pool}_T16"] = (commit, {"pool": pool, "T": 16, "V": 64})
        variants[f"commit_{pool}_K256"] = (commit, {"pool": pool, "K": 256, "V": 64})
        variants[f"commit_layers_{pool}"] = (commit_layers, {"pool": pool})
        variants[f"verify_{pool}_wave"] = (verify, {"pool": pool, "batch": WAVE_ROWS})
        variants[f"verify_{pool}_few"] = (verify, {"pool": pool, "batch": FEW_ROWS})
        variants[f"verify_{pool}_fewest"] = (verify, {"pool": pool, "batch": FEWEST_ROWS})
        variants[f"commit_{pool}_half_wave"] = (commit, {"pool": pool, "batch": WAVE_ROWS // 2})
        variants[f"commit_{pool}_few"] = (commit, {"pool": pool, "batch": FEW_ROWS})
    half = {"pool": "fp16", "data": "fp16", "T": 4, "bounded": False, "scalar_gate": True}
    columns = {"pool": "bf16", "columns": 3, "bounded": False, "packed": True}
    strided = {"packed": True, "pool": "strided"}
    return variants | {
        "verify_fp16": (verify, {"pool": "fp16", "data": "fp16"}),
        "verify_bf16_D96": (verify, {"pool": "bf16", "K": 96, "V": 96}),
        "verify_bf16_D64_T3": (verify, {"pool": "bf16", "T": 3, "K": 64, "V": 64}),
        "verify_bf16_T1": (verify, {"pool": "bf16", "T": 1}),
        "verify_fp16_scalar_packed": (verify, half | {"packed": True, "groups": 2}),
        "verify_bf16_scalar": (verify, {"pool": "bf16", "bounded": False, "scalar_gate": True, "groups": 2}),
        "verify_fp32_scalar": (verify, {"pool": "fp32", "bounded": False, "scalar_gate": True, "groups": 2}),
        "verify_bf16_scalar_T16": (verify, {"pool": "bf16", "T": 16, "bounded": False, "scalar_gate": True}),
        "verify_bf16_scalar_unaligned": (
            verify,
            {"pool": "bf16", "bounded": False, "scalar_gate": True, "aligned": False},
        ),
        "verify_fp32_D96_40": (verify, {"pool": "fp32", "T": 3, "K": 96, "V": 40, "data": "fp32"}),
        "verify_fp32_half_wave": (verify, {"pool": "fp32", "batch": WAVE_ROWS // 2}),
        "verify_fp32_D96": (verify, {"pool": "fp32", "K": 96, "V": 96}),
        "verify_bf16_D256_T4": (verify, {"pool": "bf16", "T": 4, "K": 256, "V": 256}),
        "verify_bf16_D192_few": (verify, {"pool": "bf16", "K": 192, "V": 192, "batch": FEW_ROWS}),
        "verify_fp32_D192_fewest": (verify, {"pool": "fp32", "K": 192, "V": 192, "batch": FEWEST_ROWS}),
        "verify_fp32_D192": (verify, {"pool": "fp32", "K": 192, "V": 192}),
        "verify_fp32_D256_T16": (verify, {"pool": "fp32", "T": 16, "K": 256, "V": 256, "bounded": False}),
        "verify_fp32_D256_T16_bounded": (verify, {"pool": "fp32", "T": 16, "K": 256, "V": 256}),
        "commit_fp32_T16_K256": (commit, {"pool": "fp32", "T": 16, "K": 256, "V": 64, "data": "fp32"}),
        "commit_fp32_wave": (commit, {"pool": "fp32", "batch": WAVE_ROWS}),
        "commit_columns": (commit, columns),
        "commit_fp32_columns": (commit, columns | {"pool": "fp32"}),
        "commit_columns_half_wave": (commit, columns | {"batch": WAVE_ROWS // 2}),
        "commit_fp32_columns_half_wave": (commit, columns | {"pool": "fp32", "batch": WAVE_ROWS // 2}),
        "commit_columns_few": (commit, columns | {"batch": FEW_ROWS}),
        "commit_columns_unaligned": (commit, columns | {"aligned": False}),
        "commit_fp32_T16_K256_columns": (
            commit,
            columns | {"pool": "fp32", "T": 16, "K": 256, "V": 64, "data": "fp32"},
        ),
        "commit_fp32_T16_K256_columns_few": (
            commit,
            columns | {"pool": "fp32", "T": 16, "K": 256, "V": 64, "batch": FEW_ROWS},
        ),
        "commit_fp16_scalar": (commit, {"pool": "fp16", "scalar_gate": True, "data": "fp16"}),
        "commit_bf16_D64_packed": (commit, {"pool": "bf16", "K": 64, "V": 64, "packed": True}),
        "commit_layers_unaligned": (commit_layers, {"pool": "bf16", "layers": 20, "aligned": False}),
        "recover_bf16": (recover, {"pool": "bf16"}),
        "commit_layers_columns": (commit_layers, columns),
        "conv_verify_bf16": (conv_verify, {"data": "bf16"}),
        "conv_verify_fp32": (conv_verify, {"data": "fp32", "bias": True}),
        "conv_verify_fp16_fp32": (conv_verify, {"data": "fp16", "state": "fp32", "weight": "fp32", "silu": False}),
        "conv_verify_packed": (conv_verify, {"data": "bf16", **strided}),
        "conv_verify_T1": (conv_verify, {"data": "bf16", "T": 1}),
        "conv_verify_widest": (conv_verify, {"data": "fp32", "T": 16, "W": 8, "bias": True, **strided}),
        "conv_verify_narrowest": (conv_verify, {"data": "bf16", "W": 2, "D": 48}),
        "conv_commit_bf16": (conv_commit, {"data": "bf16"}),
        "conv_commit_fp32": (conv_commit, {"data": "fp32", "pool": "channels innermost"}),
        "conv_commit_fp32_bf16": (conv_commit, {"data": "fp32", "state": "bf16"}),
        "conv_commit_columns": (conv_commit, {"data": "bf16", "columns": 3, **strided}),
        "conv_commit_widest": (conv_commit, {"data": "fp32", "T": 16, "W": 8, "columns": 17, **strided}),
        "conv_commit_narrowest": (conv_commit, {"data": "fp16", "W": 2, "D": 48}),
        "conv_commit_layers_bf16": (conv_commit_layers, {"data": "bf16"}),
        "conv_commit_layers_fp32_bf16": (conv_commit_layers, {"data": "fp32", "state": "bf16"}),
        "conv_commit_layers_columns": (conv_commit_layers, {"data": "bf16", "columns": 3, "packed": True}),
    }


VARIANTS = _all()
