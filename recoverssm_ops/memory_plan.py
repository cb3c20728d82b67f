"""What speculative decoding needs of a GPU's memory, for both layouts: the figures and words of the planner."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from recoverssm_ops.state_spec import Layout, StateSpec, expect_size

MIB = 1024**2
GIB = 1024**3


@dataclass(frozen=True)
class MemoryPlan:
    """Both layouts for a number of requests, on one rank.

    Attributes:
        spec: the model's state.
        requests: running at the same time, on all data parallel ranks together.
        context: tokens that every request holds in the KV cache.
        kv_bytes_per_token: KV cache of all full attention layers for one token; 0: the model has none.
        budget: bytes of cache for states, records and KV; None: not given.
    """

    spec: StateSpec
    requests: int
    context: int = 0
    kv_bytes_per_token: int = 0
    budget: int | None = None

    def __post_init__(self) -> None:
        expect_size("requests", self.requests)
        for name in ("context", "kv_bytes_per_token"):
            expect_size(name, getattr(self, name), 0)
        if self.budget is not None:
            expect_size("budget", self.budget)
        if self.context and not self.kv_bytes_per_token:
            raise ValueError(
                f"context should be 0 for a model without full attention layers, but was {self.context}: give their number "
                "and kv_elements"
            )

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        return self.spec.plain(), self.spec.recoverssm()

    @property
    def requests_per_rank(self) -> int:
        return self.spec.requests_per_rank(self.requests)

    def used_bytes(self, layout: Layout) -> int:
        """All requests of one rank while a step runs, without their KV cache."""
        return self.requests_per_rank * layout.step_bytes

    def requests_that_fit(self, layout: Layout) -> int:
        """On all ranks together, each with ``context`` tokens of KV cache."""
        per_request = layout.step_bytes + self.context * self.kv_bytes_per_token
        return self.budget // per_request * self.spec.data_parallel

    def tokens_that_fit(self, layout: Layout) -> int:
        """KV cache tokens that one rank's requests leave room for; 0 where the requests themselves do not fit."""
        return max(self.budget - self.used_bytes(layout), 0) // self.kv_bytes_per_token

    @property
    def freed_bytes(self) -> int:
        plain, recoverssm = self.layouts
        return self.used_bytes(plain) - self.used_bytes(recoverssm)

    @property
    def tokens_gained(self) -> int:
        """KV cache tokens that the freed bytes hold, on one rank."""
        return max(self.freed_bytes, 0) // self.kv_bytes_per_token if self.kv_bytes_per_token else 0

    def as_json(self) -> dict:
        """Plain numbers, for programs."""
        layouts = {}
        for layout in self.layouts:
            fields = ("slots_per_request", "slot_bytes", "state_bytes", "transient_bytes", "step_bytes", "page_bytes")
            layouts[layout.name] = {name: getattr(layout, name) for name in fields}
            for kind, parts in {"state": layout.state, "transient": layout.transient}.items():
                layouts[layout.name][f"{kind}_parts"] = {
                    p.name: {"shape": list(p.shape), "dtype": _name(p.dtype), "bytes": p.nbytes} for p in parts
                }
            if self.budget is not None:
                layouts[layout.name]["requests_that_fit"] = self.requests_that_fit(layout)
                if self.kv_bytes_per_token:
                    layouts[layout.name]["tokens_that_fit"] = self.tokens_that_fit(layout)
        sizes = ("num_layers", "window", "tensor_parallel", "data_parallel", "alignment")
        own = (
            "requests",
            "requests_per_rank",
            "context",
            "kv_bytes_per_token",
            "budget",
            "freed_bytes",
            "tokens_gained",
        )
        return {
            **{name: getattr(self.spec, name) for name in sizes},
            **{name: getattr(self, name) for name in own},
            "layouts": layouts,
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """The table: label, plain, recoverssm. An empty row separates what one request needs from what all need."""
        layouts = self.layouts

        def row(label: str, value: Callable[[Layout], object]) -> tuple[str, str, str]:
            return label, *(f"{value(layout)}" for layout in layouts)

        def size(label: str, value: Callable[[Layout], int]) -> tuple[str, str, str]:
            both = [value(layout) for layout in layouts]
            return label, *(human_bytes(n, beside=max(both)) for n in both)

        def part(label: str, *names: str) -> tuple[str, str, str]:
            return size(label, lambda x: x.num_layers * sum(p.nbytes for p in x.state + x.transient if p.name in names))

        conv = self.spec.shard.conv_width is not None
        columns = " | ".join(f"{p.shape[1]}" for x in layouts for p in x.state if p.name == "conv")
        rows = [row("slots per request", lambda x: x.slots_per_request), part("recurrent state of a slot", "recurrent")]
        rows += [part(f"conv state of a slot ({columns} columns)", "conv")] if conv else []
        rows.append(size("slot (what is copied, moved, published)", lambda x: x.slot_bytes))
        rows.append(size("request at rest", lambda x: x.state_bytes))
        rows.append(part("+ records u, k, g in a step", "u", "k", "g"))
        rows += [part("+ conv inputs in a step", "conv_inputs")] if conv else []
        rows.append(size("request in a step", lambda x: x.step_bytes))
        rows.append(("", "", ""))
        rows.append(size(f"{_count(self.requests_per_rank, 'request')} in a step", self.used_bytes))
        if self.budget is not None:
            rows.append(row("share of the budget", lambda x: f"{self.used_bytes(x) / self.budget:.1%}"))
            rows.append(row(self._fit_label(), lambda x: f"{self.requests_that_fit(x):,}"))
            if self.kv_bytes_per_token:
                rows.append(row("KV cache tokens beside them", self._tokens))
        return rows

    def _fit_label(self) -> str:
        where = f" on {self.spec.data_parallel} ranks" if self.spec.data_parallel > 1 else ""
        return f"requests that fit{where}" + (f", {self.context:,} tokens each" if self.context else "")

    def _tokens(self, layout: Layout) -> str:
        return f"{self.tokens_that_fit(layout):,}" if self.used_bytes(layout) <= self.budget else "requests do not fit"

    def summary(self) -> str:
        if self.freed_bytes <= 0:
            more = human_bytes(-self.freed_bytes)
            return f"RecoverSSM frees nothing here: it needs {more} more (a window of {self.spec.window})."
        text = f"RecoverSSM frees {human_bytes(self.freed_bytes)} for {_count(self.requests_per_rank, 'request')}"
        if not self.kv_bytes_per_token:
            return text + " (no full attention layers given, so no tokens to count)."
        return text + f": room for {self.tokens_gained:,} more KV cache tokens of {self.kv_bytes_per_token:,} bytes."

    def title(self) -> str:
        spec, shard = self.spec, self.spec.shard
        heads = _count(shard.num_heads, "head")
        if shard.num_value_heads != shard.num_heads:
            heads += f" ({shard.num_value_heads} value heads)"
        shape = f"{_count(spec.num_layers, 'layer')}, {heads}, K {shard.head_k_dim}, V {shard.head_v_dim}"
        ranks = f"tensor parallel {spec.tensor_parallel}, data parallel {spec.data_parallel}"
        budget = "" if self.budget is None else f", budget {human_bytes(self.budget)}"
        state = f"{_name(shard.state_dtype)} state, {_count(spec.drafts, 'draft')}"
        return f"One GPU of {ranks}: {shape}, {state}{budget}"


def human_bytes(nbytes: int, beside: int = 0) -> str:
    """MiB, as the field counts states; KiB or GiB where this figure, or the larger one ``beside`` it, asks for them."""
    largest = max(nbytes, beside)
    unit, factor = ("GiB", GIB) if largest >= 10 * GIB else ("KiB", 1024) if 0 < largest < MIB else ("MiB", MIB)
    return f"{nbytes / factor:,.2f} {unit}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'' if n == 1 else 's'}"
