"""Serve many requests at once and compare with solo decoding: ``python -m models.serve``.

Requests over held-out source text arrive over time and share the engine's steps. The text of each must be the one it
gets alone, token by token without drafts: the exit status is 1 if a checked one is not, if a slot is still held at the
end, or if the engine's memory is not what was planned. ``--soak N`` does the same with N random requests of a small
random model, drafts made to be rejected anywhere, and checks all of them. Stopped by Ctrl-C or SIGTERM, it compares and
reports what has finished; the exit status is then 130.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console

from models.captured_step import CapturedStep, CudaRecorder
from models.decode import Drafter
from models.drafting import prompt_lookup
from models.engine import Engine
from models.engine_shape import EngineShape
from models.generate import DTYPES, UsageError, kib
from models.interruption import Interruptible
from models.memory_plan import MemoryPlan
from models.model import KDAForCausalLM
from models.persistence import load_model
from models.progress import Stage, each
from models.requests import Request
from models.scheduler import RandomPreemption
from models.serve_options import argument_parser, check_options
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


SHOWN_ERRORS = 10


def shape_of(options: argparse.Namespace, model: KDAForCausalLM) -> EngineShape:
    budget = int(options.cache_mib * 2**20)
    shape = EngineShape(
        max_running=options.slots,
        num_drafts=options.drafts,
        max_length=options.prompt_length + options.tokens + 1 + options.drafts,
        block_size=options.block_size if budget else None,
        cache_budget=budget,
        dtype=model.embed_tokens.weight.dtype,
        most_buckets=options.batch_sizes,
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


def serve(
    engine: Engine, arrivals: Sequence[Arrival], preemption: RandomPreemption, console: Console
) -> tuple[float, bool]:
    """Run to the end, or until it is stopped: the seconds it took, compilation not counted, and whether it was stopped."""
    started = None
    with Interruptible() as work, Stage("warming up", len(arrivals), console) as stage:
        engine.warm_up()
        started = time.perf_counter()

        def after_step(emitted: list[tuple[Request, bytes]]) -> None:
            scheduler, statistics = engine.scheduler, engine.statistics
            rate = statistics.emitted_tokens / (time.perf_counter() - started)
            status = f"{len(scheduler.running)} running, {len(scheduler.waiting)} waiting, {rate:,.0f} tokens/s"
            done = sum(request.finished for request, _ in emitted)
            stage.update(advance=done, description="serving", status=status)

        serve_all(engine, arrivals, preemption=preemption, after_step=after_step)
    return time.perf_counter() - (started or time.perf_counter()), work.interrupted


def solo_texts(model: KDAForCausalLM, shape: EngineShape) -> SoloTexts:
    device = model.embed_tokens.weight.device
    recorder = CudaRecorder(device) if device.type == "cuda" else None
    return SoloTexts(model, shape.max_length, recorder=recorder, dtype=shape.dtype)


def compare(job: Job, console: Console) -> tuple[list[str], int, bool]:
    """What is wrong with the checked texts that are finished, how many were compared, and whether that was stopped."""
    finished = [(index, request) for index, request in enumerate(job.checked) if request.finished]
    errors, compared, wrong = [], 0, 0
    with Interruptible() as work:
        for index, request in each(finished, "comparing with solo decoding", console):
            expected = job.solo.expected(request)
            if request.continuation != expected:
                wrong += 1
                if wrong <= SHOWN_ERRORS:
                    errors.append(difference(request, expected, index, job.model))
            compared += 1
    if wrong > SHOWN_ERRORS:
        errors.append(f"{wrong - SHOWN_ERRORS:,} more texts leave solo decoding")
    return errors, compared, work.interrupted


def demo(options: argparse.Namespace, generator: random.Random) -> Job:
    try:
        model = load_model(options.weights, device=options.device, dtype=DTYPES[options.dtype])
    except FileNotFoundError as error:
        raise UsageError(f"--weights: {error}") from error
    shape = shape_of(options, model)
    requests = held_out_requests(options.requests, options.prompt_length, options.tokens, generator)
    solo = solo_texts(model, shape)
    return Job(model, shape, requests, requests[: options.check], solo, prompt_lookup)


def soak(options: argparse.Namespace, generator: random.Random, console: Console) -> Job:
    model = random_model(options.seed, SOAK_CONFIG, options.device)
    shape = shape_of(options, model)
    longest, window, block_size = options.prompt_length, 1 + options.drafts, options.block_size
    prompts = random_prompts(min(200, options.soak), longest, window, block_size, generator)
    requests = random_requests(options.soak, prompts, options.tokens, generator)
    solo = solo_texts(model, shape)
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
        seconds, stopped = serve(engine, arrivals, RandomPreemption(options.preemption_rate, generator), console)
    if not engine.statistics.steps:
        console.print("stopped before the first step")
        return 130
    errors, compared, stopped_comparing = compare(job, console)
    stopped = stopped or stopped_comparing
    # What is still running holds slots by right.
    errors += [] if stopped else judge(engine, planned, job.requests)
    title = f"{len(job.requests):,} requests, {options.slots} slots, {options.drafts} drafts, {options.device}"
    title += f", {job.shape.dtype}, {options.backend}, CUDA graphs: {options.graphs}".replace("torch.", "")
    table = summary(engine, planned, job.requests, seconds, title)
    table.add_row("texts compared", f"{compared:,} of {len(job.requests):,}")
    console.print(table)
    for error in errors:
        console.print(error, style="red", markup=False)
    if not errors:
        console.print(f"All {compared:,} compared texts are those of solo decoding.", style="green")
    if stopped:
        console.print(f"Stopped: {len(job.checked) - compared:,} texts were not compared.", style="yellow")
    return 130 if stopped else int(bool(errors))


def main(argv: list[str] | None = None) -> int:
    parser = argument_parser(__doc__)
    options = parser.parse_args(argv)
    try:
        return run(options, Console())
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
