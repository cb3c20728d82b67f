"""Serve many requests at once and compare with solo decoding: ``python -m models.serve``.

Requests over held-out source text arrive over time and share the engine's steps. The text of each must be the one it
gets alone, token by token without drafts: the exit status is 1 if a checked one is not, if a slot is still held at the
end, or if the engine's memory is not what was planned. ``--soak N`` does the same with N random requests of a small
random model, drafts made to be rejected anywhere, and checks all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from models.captured_step import CapturedStep
from models.decode import Drafter
from models.drafting import prompt_lookup
from models.engine import Engine
from models.engine_shape import EngineShape
from models.generate import DTYPES, MAX_DRAFTS, UsageError, kib
from models.memory_plan import MemoryPlan
from models.model import KDAForCausalLM
from models.persistence import WEIGHTS, load_model
from models.requests import Request
from models.scheduler import RandomPreemption
from models.serve_report import difference, judge, summary
from models.soak import SOAK_CONFIG, AdversarialDrafter, random_model, random_prompts, random_requests
from models.speculation import SpeculativeStep
from models.workload import Arrival, SoloTexts, arriving, held_out_requests, serve_all


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be served, and what decides whether it was served right."""

    model: KDAForCausalLM
    shape: EngineShape
    requests: list[Request]
    checked: list[Request]
    solo: SoloTexts
    drafter: Drafter


BACKENDS = ("eager", "inductor", "recoverssm")
GRAPHS = ("none", "inductor", "manual")
# What an option is where it is not given, in the demo and in a soak.
DEFAULTS = {
    "slots": (8, 32),
    "drafts": (7, 5),
    "tokens": (64, 24),
    "prompt_length": (256, 56),
    "block_size": (32, 8),
    "cache_mib": (16.0, 0.25),
    "arrival_rate": (0.5, 2.0),
    "preemption_rate": (0.02, 0.2),
}


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.serve", description=__doc__)

    def option(name: str, kind: Callable, text: str) -> None:
        demo, soak = DEFAULTS[name]
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, help=f"{text} (default: {demo}, in a soak {soak})")

    parser.add_argument("--requests", type=int, default=32, help="requests of the demo")
    parser.add_argument("--soak", type=int, metavar="N", help="instead: N random requests, small random model")
    option("slots", int, "requests that run at once")
    option("drafts", int, f"drafts a step, 0..{MAX_DRAFTS}")
    option("tokens", int, "new tokens a request, in a soak at most")
    option("prompt_length", int, "tokens of the longest prompt")
    option("block_size", int, "tokens between two states in the prefix cache")
    option("cache_mib", float, "MiB of prefix cache; 0 is none")
    option("arrival_rate", float, "requests that arrive per step on average")
    option("preemption_rate", float, "probability that a step begins with a preemption")
    parser.add_argument("--check", type=int, default=8, help="requests of the demo to compare with solo decoding")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    # In low precision the size of a batch rounds its products differently, and a near-tie may then be decided otherwise.
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the demo's weights and activations; texts of a batch and of solo decoding may differ in low precision",
    )
    parser.add_argument("--backend", choices=BACKENDS, default="eager", help="what runs a step")
    parser.add_argument(
        "--graphs",
        choices=GRAPHS,
        help="a step of each batch size as one CUDA graph: recorded by the engine (manual) or by Inductor, which may skip "
        "none (default: manual on a GPU, none elsewhere)",
    )
    parser.add_argument("--threads", type=int, default=1, help="CPU threads")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="of the demo: model.safetensors and config.json")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Fill in the defaults; raise UsageError for options that cannot be honoured."""
    for name, (demo, soak) in DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, demo if options.soak is None else soak)
    least = {"requests": 1, "slots": 1, "tokens": 1, "prompt_length": 1, "block_size": 1, "threads": 1, "check": 0}
    for name, bound in (least | ({} if options.soak is None else {"soak": 1})).items():
        if getattr(options, name) < bound:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} should be at least {bound}, got {getattr(options, name)}")
    if not 0 <= options.drafts <= MAX_DRAFTS:
        raise UsageError(f"--drafts should be in 0..{MAX_DRAFTS}, got {options.drafts}")
    # Comparisons are written so that NaN is refused too.
    if not 0 <= options.cache_mib < float("inf"):
        raise UsageError(f"--cache-mib should be finite and not negative, got {options.cache_mib}")
    if not 0 < options.arrival_rate < float("inf"):
        raise UsageError(f"--arrival-rate should be positive and finite, got {options.arrival_rate}")
    # At 1 the requests of a busy engine could take each other's slots for ever.
    if not 0 <= options.preemption_rate < 1:
        raise UsageError(f"--preemption-rate should be in 0..1, less than 1, got {options.preemption_rate}")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no CUDA GPU; use --device cpu")
    if options.graphs is None:
        options.graphs = "manual" if options.device == "cuda" else "none"
    if options.graphs != "none" and options.device != "cuda":
        raise UsageError(f"--graphs {options.graphs} needs --device cuda: what is recorded are launches on a CUDA GPU")
    if options.graphs == "inductor" and options.backend == "eager":
        raise UsageError(
            "--graphs inductor needs --backend inductor or recoverssm: Inductor records what it has compiled"
        )


def shape_of(options: argparse.Namespace, model: KDAForCausalLM) -> EngineShape:
    budget = int(options.cache_mib * 2**20)
    shape = EngineShape(
        max_running=options.slots,
        num_drafts=options.drafts,
        max_length=options.prompt_length + options.tokens + 1 + options.drafts,
        block_size=options.block_size if budget else None,
        cache_budget=budget,
        dtype=model.embed_tokens.weight.dtype,
    )
    if shape.max_length > model.config.max_length:
        raise UsageError(
            f"--prompt-length {options.prompt_length}, --tokens {options.tokens} and a window of {1 + options.drafts} "
            f"make {shape.max_length} positions; the model is made for {model.config.max_length}"
        )
    plan = MemoryPlan(model.config, shape.dtype)
    if budget and not plan.cache_bytes(options.block_size, budget):
        block = plan.saved_bytes(options.block_size)
        raise UsageError(f"--cache-mib {options.cache_mib} holds no block: one takes {kib(block)}")
    return shape


def step_function(options: argparse.Namespace) -> Callable[[SpeculativeStep], Callable]:
    """What makes of a step the function that the engine calls."""

    def make(step: SpeculativeStep) -> Callable:
        function = step
        if options.backend != "eager":
            graphs = {"triton.cudagraphs": True} if options.graphs == "inductor" else None
            function = torch.compile(step, backend=options.backend, fullgraph=True, dynamic=False, options=graphs)
        return CapturedStep(function) if options.graphs == "manual" else function

    return make


def no_graph_skipped(options: argparse.Namespace) -> contextlib.AbstractContextManager:
    """Inductor runs without a graph what it cannot record, with a warning; here that is an error, also at later calls."""
    if options.graphs != "inductor":
        return contextlib.nullcontext()
    return torch._inductor.config.patch({"triton.cudagraph_or_error": True})


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TextColumn("{task.fields[status]}"), console=console, refresh_per_second=4)


def serve(engine: Engine, arrivals: Sequence[Arrival], preemption: RandomPreemption, console: Console) -> float:
    """Run to the end under a progress bar; returns the seconds it took, compilation not counted."""
    with progress_bar(console) as progress:
        task = progress.add_task("warming up", total=len(arrivals), status="")
        engine.warm_up()
        started = time.perf_counter()

        def after_step(emitted: list[tuple[Request, bytes]]) -> None:
            scheduler, statistics = engine.scheduler, engine.statistics
            rate = statistics.emitted_tokens / (time.perf_counter() - started)
            status = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, {rate:,.0f} tokens/s"
            done = sum(request.finished for request, _ in emitted)
            progress.update(task, advance=done, description="serving", status=status)

        serve_all(engine, arrivals, preemption=preemption, after_step=after_step)
        return time.perf_counter() - started


def each(items: Sequence, description: str, console: Console) -> Iterator:
    with progress_bar(console) as progress:
        task = progress.add_task(description, total=len(items), status="")
        for item in items:
            yield item
            progress.update(task, advance=1)


def demo(options: argparse.Namespace, generator: random.Random) -> Job:
    try:
        model = load_model(options.weights, device=options.device, dtype=DTYPES[options.dtype])
    except FileNotFoundError as error:
        raise UsageError(f"--weights: {error}") from error
    shape = shape_of(options, model)
    requests = held_out_requests(options.requests, options.prompt_length, options.tokens, generator)
    solo = SoloTexts(model, shape.max_length, dtype=shape.dtype)
    return Job(model, shape, requests, requests[: options.check], solo, prompt_lookup)


def soak(options: argparse.Namespace, generator: random.Random, console: Console) -> Job:
    model = random_model(options.seed, SOAK_CONFIG, options.device)
    shape = shape_of(options, model)
    longest, window, block_size = options.prompt_length, 1 + options.drafts, options.block_size
    prompts = random_prompts(min(200, options.soak), longest, window, block_size, generator)
    requests = random_requests(options.soak, prompts, options.tokens, generator)
    solo = SoloTexts(model, shape.max_length, dtype=shape.dtype)
    texts = {prompt: solo.continuation(prompt, options.tokens) for prompt in each(prompts, "decoding alone", console)}
    return Job(model, shape, requests, requests, solo, AdversarialDrafter(texts, generator))


def run(options: argparse.Namespace, console: Console) -> int:
    check_options(options)
    torch.set_num_threads(options.threads)
    generator = random.Random(options.seed)
    job = demo(options, generator) if options.soak is None else soak(options, generator, console)
    planned = job.shape.planned_bytes(job.model.config)
    engine = job.shape.build(job.model, drafter=job.drafter, compile_step=step_function(options))
    arrivals = arriving(job.requests, options.arrival_rate, generator)
    with no_graph_skipped(options):
        seconds = serve(engine, arrivals, RandomPreemption(options.preemption_rate, generator), console)

    errors = judge(engine, planned, job.requests)
    for index, request in enumerate(each(job.checked, "comparing with solo decoding", console)):
        error = difference(request, job.solo.expected(request), index, job.model)
        errors += [error] if error else []
    title = f"{len(job.requests):,} requests, {options.slots} slots, {options.drafts} drafts, {options.device}"
    title += f", {job.shape.dtype}, {options.backend}, CUDA graphs: {options.graphs}".replace("torch.", "")
    table = summary(engine, planned, job.requests, seconds, title)
    table.add_row("texts compared", f"{len(job.checked):,} of {len(job.requests):,}")
    console.print(table)
    for error in errors:
        console.print(error, style="red", markup=False)
    if not errors:
        console.print(f"All {len(job.checked):,} compared texts are those of solo decoding.", style="green")
    return 1 if errors else 0


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser()
    options = parser.parse_args(argv)
    try:
        return run(options, Console())
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
