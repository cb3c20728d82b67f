"""What was served: the table, and everything that is wrong with it."""

from __future__ import annotations

import torch
from rich.table import Table

from models.captured_step import CapturedStep
from models.engine import Engine
from models.generate import kib
from models.model import KDAForCausalLM
from models.requests import Phase, Request


def difference(request: Request, expected: bytes, index: int, model: KDAForCausalLM) -> str | None:
    """Where the request's text leaves solo decoding, and how close a decision that was; None where it does not."""
    actual = request.continuation
    if actual == expected:
        return None
    shorter = min(len(actual), len(expected))
    at = next((i for i in range(shorter) if actual[i] != expected[i]), shorter)
    prefix = list(request.prompt + expected[:at])
    with torch.no_grad():
        logits = model(torch.tensor([prefix], device=model.embed_tokens.weight.device))[0, -1]
    first, second = logits.topk(2).values.tolist()
    return (
        f"request {index} leaves solo decoding at token {at}: {actual[at : at + 20]!r} != {expected[at : at + 20]!r} "
        f"(the two most likely tokens there are {first - second:.2g} apart)"
    )


def judge(engine: Engine, planned: dict[str, int], requests: list[Request]) -> list[str]:
    errors = []
    unfinished = sum(not request.finished for request in requests)
    if unfinished:
        errors.append(f"requests not finished: {unfinished}")
    if engine.slots.in_use:
        errors.append(f"slots leaked: {engine.slots.in_use}")
    if engine.statistics.saved_bytes:
        errors.append(f"bytes of copied-out state leaked: {engine.statistics.saved_bytes}")
    if engine.allocated_bytes != planned:
        errors.append(f"allocated {engine.allocated_bytes} bytes, planned {planned}")
    return errors


def summary(engine: Engine, planned: dict[str, int], requests: list[Request], seconds: float, title: str) -> Table:
    s = engine.statistics
    table = Table("", title=title, show_header=False)
    table.add_column(justify="right")
    phases = ", ".join(f"{s.phases[phase]:,} {phase.value}" for phase in Phase)
    rows = {
        "requests finished": f"{sum(request.finished for request in requests):,}",
        "new tokens": f"{s.emitted_tokens:,} in {seconds:.2f} s",
        "tokens/s": f"{s.emitted_tokens / seconds:,.0f}",
        "tokens per emitting row and step": f"{s.tokens_per_row:.2f}",
        "steps": f"{s.steps:,}, {s.mixed_steps:,} of mixed phases",
        "rows": f"{phases}, {s.padding_rows:,} padding",
        "known tokens run": f"{s.prefilled_tokens:,}",
    }
    if engine.prefix_cache is not None:
        c = engine.prefix_cache.statistics
        share = c.hit_tokens / c.looked_up_tokens if c.looked_up_tokens else 0.0
        rows["prefix hits"] = f"{c.hits:,} of {c.lookups:,} admissions, {c.hit_tokens:,} tokens ({share:.0%})"
        rows["blocks"] = f"{c.published:,} published, {c.evicted:,} evicted, {engine.prefix_cache.capacity:,} fit"
    total, allocated = sum(planned.values()), sum(engine.allocated_bytes.values())
    rows |= {
        "preemptions": f"{s.copied_out:,} copied out, {s.dropped:,} computed again",
        "requests at once": f"{s.peak_running:,} of {engine.max_running:,}",
        "slots leaked" if all(request.finished for request in requests) else "slots in use": f"{engine.slots.in_use}",
        "memory planned": f"{kib(total)} ({', '.join(f'{name} {kib(size)}' for name, size in planned.items())})",
        "memory allocated": kib(allocated) + (" (as planned)" if planned == engine.allocated_bytes else ""),
    }
    if isinstance(engine.step_fn, CapturedStep):
        rows["CUDA graphs"] = f"{engine.step_fn.num_graphs}, {kib(engine.step_fn.pool_bytes)} beside the planned memory"
    for name, cell in rows.items():
        table.add_row(name, cell)
    return table
