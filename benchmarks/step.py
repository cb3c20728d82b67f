"""Time and memory of one compiled speculative step: the untouched model against the model through the pass.

    python -m benchmarks.step --preset kimi_linear --batch 32 --drafts 7

Both run the same :class:`models.speculation.SpeculativeStep`, compiled by Inductor, once as it is and once with
``backend="recoverssm"``. Timing: the two alternate within one run, every sample is one step between CUDA events (on the CPU:
the clock), the median and the quartiles are reported. The pools are as large as the batch, so nothing but the batch decides
whether the states fit a cache. Accepted lengths differ per row and step.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compile_passes import explain
from compile_passes.report import readable
from models.config import PRESETS
from models.memory import peak_allocation
from models.model import KDAForCausalLM
from models.pools import Pools
from models.speculation import SpeculativeStep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WAYS = {"untouched": "inductor", "through the pass": "recoverssm"}


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="kimi_linear")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="weights and activations")
    parser.add_argument("--state-dtype", choices=DTYPES, default="fp32", help="recurrent pools")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cudagraphs", action="store_true", help="capture each step as one CUDA graph")
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    return parser.parse_args(argv)


def inputs_of_a_step(arguments: argparse.Namespace, vocab_size: int) -> tuple[Tensor, ...]:
    """Random tokens; the accepted length of each row is forced, any of 1 .. T."""
    batch, window, device = arguments.batch, 1 + arguments.drafts, arguments.device
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (batch, window), generator=generator)
    forced = torch.randint(window, (batch,), generator=generator)
    zeros = torch.zeros(batch, dtype=torch.int64)
    rows = (tokens, forced, forced, zeros, torch.arange(batch), torch.zeros(batch))
    noise = (torch.zeros(batch, window), torch.ones(batch, vocab_size))
    return tuple(x.to(device) for x in (*rows, *noise))


def sample(call: Callable[[], object], device: str) -> float:
    """Milliseconds of one call."""
    if device == "cpu":
        started = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - started)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # The device is kept busy while the host enqueues, or the host's own time would be measured.
    torch.cuda._sleep(2_000_000)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    console = Console()
    torch.manual_seed(0)
    config = PRESETS[arguments.preset]
    model = KDAForCausalLM(config).to(arguments.device, DTYPES[arguments.dtype]).eval()
    inputs = inputs_of_a_step(arguments, config.vocab_size)
    figures, calls = {}, {}
    for name, backend in WAYS.items():
        pools = Pools(
            config,
            arguments.batch,
            4 * (1 + arguments.drafts),
            device=arguments.device,
            dtype=DTYPES[arguments.dtype],
            recurrent_dtype=DTYPES[arguments.state_dtype],
        )
        step = SpeculativeStep(model, pools)
        if name != "untouched":
            print(explain(step, *inputs))
        started = time.perf_counter()
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
        with console.status(f"compiling the step, {name}"):
            compiled(*inputs)
        seconds = time.perf_counter() - started
        compiled(*inputs)
        peak = peak_allocation(functools.partial(compiled, *inputs), arguments.device)
        figures[name] = {"compile_s": seconds, "peak_bytes": peak}
        if arguments.cudagraphs:
            options = {"triton.cudagraphs": True}
            compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False, options=options)
        for _ in range(4):
            compiled(*inputs)
        calls[name] = functools.partial(compiled, *inputs)
    samples = {name: [] for name in calls}
    for _ in range(arguments.samples):
        for name, call in calls.items():
            samples[name].append(sample(call, arguments.device))
    states = config.num_layers - sum(map(config.is_full_attention, range(config.num_layers)))
    state_bytes = arguments.batch * config.num_heads * config.head_k_dim * config.head_v_dim * 4 * states
    for name, values in samples.items():
        low, median, high = statistics.quantiles(values, n=4)
        figures[name] |= {"step_ms": median, "quartiles_ms": [low, high]}

    device = torch.cuda.get_device_name() if arguments.device != "cpu" else "CPU"
    title = f"{arguments.preset}, batch {arguments.batch}, T {1 + arguments.drafts}, {arguments.dtype} activations, "
    title += f"{arguments.state_dtype} pools, {device}, torch {torch.__version__}"
    table = Table(title=title + (", CUDA graph" if arguments.cudagraphs else ""))
    for column in ("", "step ms (quartiles)", "peak memory of a step", "of one position's states", "compile s"):
        table.add_column(column, justify="right" if column else "left")
    for name, f in figures.items():
        low, high = f["quartiles_ms"]
        ratio = f"{f['peak_bytes'] / state_bytes:.2f}x"
        spread = f"{f['step_ms']:.3f} ({low:.3f} .. {high:.3f})"
        table.add_row(name, spread, readable(f["peak_bytes"]), ratio, f"{f['compile_s']:.0f}")
    console.print(table)
    plain, ours = figures.values()
    speed, memory = plain["step_ms"] / ours["step_ms"], plain["peak_bytes"] / ours["peak_bytes"]
    console.print(f"through the pass: {speed:.2f}x as fast, {memory:.1f}x less peak memory")
    if arguments.json:
        settings = {k: str(v) for k, v in vars(arguments).items()}
        arguments.json.write_text(
            json.dumps({"settings": settings, "device": device, "figures": figures}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
