"""Decode held-out source text three ways and compare: ``python -m models.generate``.

Plain decoding, speculative decoding of the untouched model, and the same through the ``recoverssm`` compiler backend.
The texts must be identical; the exit status is 1 if they are not.
"""

from __future__ import annotations

import argparse
import codecs
import os
import sys
import threading
from pathlib import Path

# Read when torch is imported: the profiler that measures memory would announce itself on the terminal.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

import torch
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

import compile_passes
from models.decode import example_inputs
from models.model import KDAForCausalLM
from models.persistence import WEIGHTS, load_model
from models.pools import Pools
from models.prompts import held_out_prompts
from models.speculation import SpeculativeStep
from models.ways import PLAIN, RECOVER, UNTOUCHED, Measured, run_way

MAX_DRAFTS = 15
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class UsageError(ValueError):
    """An option that cannot be honoured; the message says which and why."""


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.generate", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", help="text to continue (default: an excerpt of a held-out standard library module)")
    source.add_argument("--file", type=Path, help="file whose text to continue")
    parser.add_argument("--tokens", type=int, default=256, help="bytes to generate per request")
    parser.add_argument("--drafts", type=int, default=7, help=f"drafts a step, 0..{MAX_DRAFTS}")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--batch", type=int, default=1, help="requests decoded together")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of weights and activations; below float32, windows of different lengths round differently, and a near-tie "
        "can make the texts differ",
    )
    parser.add_argument("--state-dtype", choices=DTYPES, default="float32", help="of the recurrent state pools")
    # A step of the small model is too short to share: barriers between threads cost more than they save.
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--weights", type=Path, default=WEIGHTS, help="directory with model.safetensors and config.json"
    )
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raise UsageError for options no machine or model could honour."""
    if not 0 <= options.drafts <= MAX_DRAFTS:
        raise UsageError(f"--drafts should be in 0..{MAX_DRAFTS}, got {options.drafts}")
    if options.tokens < 1:
        raise UsageError(f"--tokens should be at least 1, got {options.tokens}")
    if options.batch < 1:
        raise UsageError(f"--batch should be at least 1, got {options.batch}")
    if options.threads < 1:
        raise UsageError(f"--threads should be at least 1, got {options.threads}")
    # The comparison is negated so that NaN is refused too.
    if not 0 <= options.temperature < float("inf"):
        raise UsageError(f"--temperature should be finite and not negative, got {options.temperature}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA GPU; use --device cpu")


def prompts_for(options: argparse.Namespace, max_length: int) -> list[bytes]:
    """The batch's prompts, checked against the length the model was trained for."""
    if options.file is not None:
        try:
            prompts = [options.file.read_bytes()] * options.batch
        except OSError as error:
            raise UsageError(f"--file {options.file}: {error.strerror}") from error
        name = f"--file {options.file}"
    elif options.prompt is not None:
        prompts = [options.prompt.encode("utf-8")] * options.batch
        name = "--prompt"
    else:
        room = max_length - options.tokens - 1 - options.drafts
        prompts = held_out_prompts(options.batch, min(512, room)) if room > 0 else [b" "]
        name = "the prompt"
    if not prompts[0]:
        raise UsageError(f"{name} is empty: there is nothing to continue")
    length = max(map(len, prompts)) + options.tokens + 1 + options.drafts
    if length > max_length:
        raise UsageError(
            f"{name} ({max(map(len, prompts))} bytes), --tokens {options.tokens} and a window of {1 + options.drafts} "
            f"make {length} positions; the model was trained for {max_length}"
        )
    return prompts


class Stream:
    """The first request's text as it grows. Accepted drafts are green, sampled bytes plain."""

    def __init__(self, prompt: bytes, total: int, title: str, console: Console) -> None:
        self.text = Text(prompt.decode("utf-8", "replace"), style="dim")
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.title, self.lines = title, max(6, min(24, console.height - 8))
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task("compiling", total=total)
        # Drawn by a thread a few times a second: drawing every byte would take longer than decoding it. The lock is for
        # rich's Text, whose reading joins its parts in place.
        self.lock = threading.Lock()
        self.live = Live(console=console, refresh_per_second=4, get_renderable=self.render, transient=True)

    def render(self) -> Group:
        with self.lock:
            lines = self.text.split("\n", allow_blank=True)[-self.lines :]
        return Group(Panel(Text("\n").join(lines), title=self.title), self.progress)

    def on_emit(self, request: int, tokens: bytes) -> None:
        self.progress.update(self.task, advance=len(tokens), description="decoding")
        if request == 0:
            with self.lock:
                self.text.append(self.decoder.decode(tokens[:-1]), style="green")
                self.text.append(self.decoder.decode(tokens[-1:]))


def explain_rewrite(model: KDAForCausalLM, options: argparse.Namespace, max_length: int) -> compile_passes.Report:
    """The compile pass' own report on the step that the third way compiles."""
    device, dtype = options.device, DTYPES[options.dtype]
    pools = Pools(
        model.config,
        options.batch,
        max_length,
        device=device,
        dtype=dtype,
        recurrent_dtype=DTYPES[options.state_dtype],
    )
    inputs = example_inputs(options.batch, options.drafts, model.config.vocab_size, device)
    with torch.no_grad():
        return compile_passes.explain(SpeculativeStep(model, pools), *inputs)


def kib(size: int) -> str:
    return f"{size / 1024:,.0f} KiB"


def summary(results: list[Measured], rewritten: str, model: KDAForCausalLM, options: argparse.Namespace) -> Table:
    config = model.config
    kda_layers = sum(not config.is_full_attention(i) for i in range(config.num_layers))
    positions = kda_layers * config.num_heads * config.head_k_dim * config.head_v_dim * 4 * (1 + options.drafts)
    peaks = [kib(result.step_peak_bytes) for result in results]
    texts = ["reference", *(verdict(result, results[0]) for result in results[1:])]
    if options.temperature > 0:
        texts = ["sampled"] * len(results)
    rows = {
        "tokens/s (decoding)": [f"{result.decoded.tokens_per_second:,.0f}" for result in results],
        "tokens per step": [f"{result.decoded.tokens_per_step:.2f}" for result in results],
        "compilation": [f"{result.compile_seconds:.1f} s" for result in results],
        "state at rest": [kib(result.state_bytes) for result in results],
        "KV cache": [kib(result.cache_bytes) for result in results],
        "step's temporaries, peak": peaks,
        "layers rewritten": [rewritten if result.way is RECOVER else "-" for result in results],
        "text": texts,
    }
    table = Table(
        title=f"{options.batch} request(s), {options.tokens} bytes each, {options.drafts} drafts, "
        f"{options.device}, {options.dtype}",
        caption="Memory is per request; the peak is measured from the allocator's events during one compiled step. "
        f"Calculated, to compare: the states of {1 + options.drafts} window positions take {kib(positions)}.",
    )
    table.add_column("")
    for result in results:
        table.add_column(result.way.name, justify="right")
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def verdict(result: Measured, reference: Measured) -> str:
    same = result.decoded.continuations == reference.decoded.continuations
    return "[green]identical[/green]" if same else "[red]different[/red]"


def first_difference(results: list[Measured]) -> str | None:
    """Where a way's text leaves the plain one's, or None where all are identical."""
    reference = results[0].decoded.continuations
    for result in results[1:]:
        for request, (a, b) in enumerate(zip(reference, result.decoded.continuations, strict=True)):
            if a != b:
                at = next(i for i in range(len(a)) if a[: i + 1] != b[: i + 1])
                return (
                    f"'{result.way.name}' leaves plain decoding at byte {at} of request {request}: "
                    f"{a[at:][:20]!r} != {b[at:][:20]!r}"
                )
    return None


def run(options: argparse.Namespace, console: Console) -> int:
    check_options(options)
    torch.set_num_threads(options.threads)
    try:
        model = load_model(options.weights, device=options.device, dtype=DTYPES[options.dtype])
    except FileNotFoundError as error:
        raise UsageError(f"--weights: {error}") from error
    prompts = prompts_for(options, model.config.max_length)
    results = []
    for way in (PLAIN, UNTOUCHED, RECOVER):
        stream = Stream(prompts[0], options.batch * options.tokens, way.name, console)
        with stream.live:
            result = run_way(
                way,
                model,
                prompts,
                num_tokens=options.tokens,
                num_drafts=options.drafts,
                temperature=options.temperature,
                seed=options.seed,
                state_dtype=DTYPES[options.state_dtype],
                on_emit=stream.on_emit,
            )
        results.append(result)
        console.print(
            f"{way.name}: {result.decoded.decode_tokens} bytes in {result.decoded.decode_seconds:.2f} s, compiled in "
            f"{result.compile_seconds:.1f} s"
        )
    console.print(Panel(stream.text, title="prompt (dim) and continuation (green: accepted drafts)"))
    longest = max(map(len, prompts)) + options.tokens + 1 + options.drafts
    report = explain_rewrite(model, options, longest)
    console.print(str(report), markup=False, highlight=False, soft_wrap=True)
    console.print(summary(results, f"{report.matched} of {report.matched + report.refused}", model, options))
    if options.temperature > 0:
        console.print("Sampled texts agree in distribution only, so they are not compared.")
        return 0
    difference = first_difference(results)
    console.print(difference or "All three texts are identical.", style="red" if difference else "green", markup=False)
    return 1 if difference else 0


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser()
    options = parser.parse_args(argv)
    try:
        return run(options, Console())
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
