"""The kernel benchmark's table, one per shape, and what stands above all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.table import Table

from benchmarks import floors
from benchmarks import kernel_timing as timing
from benchmarks.shapes import Shape


@dataclass(frozen=True)
class Header:
    """The machine and what it can do at best."""

    device: str
    torch: str
    triton: str
    copy_bytes_per_s: float
    empty_launch_us: float
    l2_bytes: int
    warm: bool

    @classmethod
    def measured(cls, device: str, warm: bool) -> Header:
        on_gpu = torch.device(device).type == "cuda"
        try:
            from triton import __version__ as triton
        except ImportError:
            triton = "absent"
        return cls(
            torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
            str(torch.__version__),
            triton,
            floors.copy_bandwidth(device),
            timing.empty_launch(device),
            timing.cache_bytes(device),
            warm,
        )

    def __str__(self) -> str:
        caches = "L2 warm" if self.warm else "L2 cold" if self.l2_bytes else "sets in turn"
        text = f"{self.device}, torch {self.torch}, triton {self.triton}, {caches}, "
        return text + f"copy {self.copy_bytes_per_s / 1e9:,.0f} GB/s, empty launch {self.empty_launch_us:.2f} µs"


def table(shape: Shape, rows: list[dict], header: Header, layers: bool) -> Table:
    result = Table(title=str(shape), caption=str(header), title_justify="left", caption_justify="left")
    columns = ["operation", "provider", "µs (quartiles)", "floor µs", "× floor", "GB/s", "error u", "o", "state"]
    if layers:
        columns.insert(3, "ms, all layers")
    for column in columns:
        result.add_column(column, justify="left" if column in ("operation", "provider") else "right", no_wrap=True)
    timed = [row for row in rows if "us" in row]
    for at, row in enumerate(timed):
        name = row["operation"] + (f", {row['accepted']} accepted" if row["accepted"] else "")
        first = at == 0 or (row["operation"], row["accepted"]) != (
            timed[at - 1]["operation"],
            timed[at - 1]["accepted"],
        )
        if first and at:
            result.add_section()
        low, high = row["us_quartiles"]
        cells = [
            name if first else "",
            row["provider"],
            f"{row['us']:.2f} ({low:.2f} .. {high:.2f})",
            f"{row['floor_us']:.1f}" if first else "",
            f"{row['times_floor']:.2f}",
            f"{row['gigabytes_per_s']:,.0f}",
            *(_error(row[f"error_{key}"]) for key in ("u", "o", "state")),
        ]
        if layers:
            cells.insert(3, f"{1e-3 * row['us'] * row['sets']:.3f}")
        result.add_row(*cells)
    return result


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
