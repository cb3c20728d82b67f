"""Steps of several layers: windows and pools of every layer, seeded by the layer's number."""

import torch
from conv_cases import guarded_conv_pool, make_conv_window
from pools import guarded_pool, make_window, same_bits

import recoverssm_ops as rs

LAYERS = 3
SLOTS = 23


def make_layers(
    device: torch.device | str,
    *,
    layers: int = LAYERS,
    batch: int = 3,
    window: int = 4,
    slots: int = SLOTS,
    pool_dtype: torch.dtype = torch.float32,
    guard: int = 5,
    pool_order: str = "slot-first",
    sizes: dict | None = None,
    **kind,
):
    """``(pools, windows)``: a :class:`GuardedPool` and a :class:`Window` a layer; packed layers share ``cu_seqlens``."""
    sizes = sizes or {"heads": 1, "value_heads": 2, "key_dim": 16, "value_dim": 12}
    windows = [make_window(batch, window, device=device, seed=layer, **sizes, **kind) for layer in range(layers)]
    for name in ("cu_seqlens",):
        for other in windows[1:]:
            if name in other.options:
                other.options[name] = windows[0].options[name]
    shape = (slots, sizes["value_heads"], sizes["value_dim"], sizes["key_dim"])
    pools = [
        guarded_pool(*shape, dtype=pool_dtype, device=device, guard=guard, order=pool_order, seed=100 + layer)
        for layer in range(layers)
    ]
    return pools, windows


def make_conv_layers(
    device: torch.device | str,
    *,
    layers: int = LAYERS,
    batch: int = 3,
    window: int = 4,
    slots: int = SLOTS,
    channels: int = 40,
    width: int = 4,
    pool_dtype: torch.dtype = torch.float32,
    guard: int = 5,
    pool_order: str = "slot, channel, column",
    **kind,
):
    """``(pools, xs, cu_seqlens)``."""
    kind |= {"channels": channels, "width": width, "device": device}
    windows = [make_conv_window(batch, window, seed=layer, **kind) for layer in range(layers)]
    settings = {"dtype": pool_dtype, "device": device, "guard": guard, "order": pool_order}
    pools = [guarded_conv_pool(slots, channels, width, seed=100 + layer, **settings) for layer in range(layers)]
    return pools, [w.x for w in windows], windows[0].options.get("cu_seqlens")


def verify_all(pools, windows, slots, pad_slot_id: int = -1):
    """The records of every layer."""
    return [
        rs.kda_verify(*window.inputs, pool.state, slots, pad_slot_id=pad_slot_id, **window.options)[1]
        for pool, window in zip(pools, windows, strict=True)
    ]


def storages(pools) -> list[torch.Tensor]:
    return [pool.storage for pool in pools]


def assert_same(pools, others) -> None:
    for layer, (x, y) in enumerate(zip(storages(pools), storages(others), strict=True)):
        assert same_bits(x, y), f"layer {layer} differs"


def make_plan(device, batch: int, columns: int, pad_slot_id: int = -1, index_dtype=torch.int32) -> rs.CommitPlan:
    """Sources 5, 6, ..; columns in place, elsewhere or skipped; lengths beyond the row and below zero; one row of padding."""
    source = torch.arange(batch) + 5
    if batch > 2:
        source[1] = pad_slot_id
    dest = torch.full((batch, columns), pad_slot_id)
    length = torch.zeros(batch, columns, dtype=torch.int64)
    free = iter(range(5 + batch, SLOTS))
    for row in range(batch):
        for m in range(columns):
            dest[row, m] = source[row] if m == row % columns else (next(free) if (row + m) % 3 else pad_slot_id)
            length[row, m] = (3, 0, 2, 99, -1, 1)[(row + m) % 6]
    return rs.CommitPlan(*(x.to(device, index_dtype) for x in (source, dest, length)))
