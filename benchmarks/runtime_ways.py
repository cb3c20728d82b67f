"""One step in several runtimes: what compiles each of them, mostly in a process of its own, and how it is called."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.step_ways import REWRITTEN, Setting, compile_step, pass_of, synchronize
from compile_passes import export_step
from models.model import KDAForCausalLM

EAGER, COMPILED, KERNELS, PORTABLE, TENSORRT = "eager", "compile", "aoti-triton", "aoti-portable", "tensorrt"
WAYS = {
    EAGER: "operators called from Python",
    COMPILED: "torch.compile through the pass",
    KERNELS: "AOTInductor package, Triton kernels inside",
    PORTABLE: "AOTInductor package, portable form",
    TENSORRT: "TensorRT engine of the verify half, commit by operators",
}
# Compiled by other processes, which leave it on disk. The rest lives in the process that made it.
ON_DISK = (COMPILED, KERNELS, PORTABLE)
_FORMS = {KERNELS: {"triton": True}, PORTABLE: {"portable": True}}
# The packages hold no weights: every way runs on those of the same model, and on pools of its own.
_WITHOUT_WEIGHTS = {"aot_inductor.package_constants_in_so": False}


def available(device: str) -> list[str]:
    on_gpu = torch.device(device).type == "cuda"
    missing = set() if on_gpu else {KERNELS, TENSORRT}
    if importlib.util.find_spec("torch_tensorrt") is None:
        missing.add(TENSORRT)
    return [way for way in WAYS if way not in missing]


@dataclass
class Way:
    """``call`` takes the step's inputs and updates ``pools``; ``seconds`` is what preparing it took."""

    name: str
    call: Callable[..., tuple[Tensor, ...]]
    pools: dict[str, Tensor]
    seconds: float = 0.0
    details: dict[str, object] = field(default_factory=dict)


def failure(error: Exception) -> dict[str, str]:
    """The row of a way that failed; where it did goes to stderr."""
    traceback.print_exception(error)
    return {"failed": f"{type(error).__name__}: {error}"}


@torch.no_grad()
def prepare_on_disk(way: str, setting: Setting, batch: int, directory: Path) -> None:
    """In a process of its own: leave the package, or the compile caches, and how long it took or what went wrong."""
    started = time.perf_counter()
    try:
        step, inputs = setting.step(setting.model(), batch), setting.inputs(batch)
        if way == COMPILED:
            compile_step(step, pass_of(REWRITTEN))(*inputs)
            synchronize(setting.device)
        else:
            exported = export_step(step, inputs, **_FORMS[way])
            exported.save(directory / way, aot_inductor=("step",), inductor_configs=_WITHOUT_WEIGHTS)
        result = {"seconds": time.perf_counter() - started}
    except Exception as error:
        result = failure(error)
    (directory / f"{way}.json").write_text(json.dumps(result), encoding="utf-8")


@contextlib.contextmanager
def preparing(
    ways: Iterable[str], setting: Setting, batch: int, directory: Path, patience: float
) -> Iterator[Callable[[], Iterator[tuple[str, dict]]]]:
    """Starts a process for each way that is compiled to disk. Yields what waits for them, up to ``patience`` seconds since
    the start, and gives (way, its seconds or failure) as they end; ends what is still running on the way out."""
    context = multiprocessing.get_context("spawn")
    started = time.perf_counter()
    running = {}
    for way in ways:
        process = context.Process(target=prepare_on_disk, args=(way, setting, batch, directory))
        process.start()
        running[way] = process

    def results() -> Iterator[tuple[str, dict]]:
        waiting = dict(running)
        while waiting:
            late = time.perf_counter() - started > patience
            for way, process in list(waiting.items()):
                if process.exitcode is None and not late:
                    continue
                del waiting[way]
                file = directory / f"{way}.json"
                if file.is_file():
                    yield way, json.loads(file.read_text(encoding="utf-8"))
                elif process.exitcode is None:
                    yield way, {"failed": f"not compiled within {patience:.0f} s"}
                else:
                    yield way, {"failed": f"the compiling process ended with {process.exitcode}"}
            time.sleep(0.1)

    try:
        yield results
    finally:
        for process in running.values():
            process.kill()
            process.join()


def load(way: str, setting: Setting, model: KDAForCausalLM, batch: int, directory: Path) -> Way:
    """A way that :func:`prepare_on_disk` has prepared."""
    step = setting.step(model, batch)
    pools = dict(step.pools.named_buffers(prefix="pools"))
    if way == COMPILED:
        return Way(way, compile_step(step, pass_of(REWRITTEN)), pools)
    package = torch._inductor.aoti_load_package(str(directory / way / "step.aoti.pt2"), run_single_threaded=True)
    tensors = dict(step.named_parameters()) | dict(step.named_buffers())
    names = package.get_constant_fqns()
    missing = [name for name in names if name not in tensors]
    if missing:
        raise RuntimeError(f"the package has constants that are not the model's: {', '.join(missing)}")
    # Not copied: what the caller holds is what the package reads and updates.
    package.load_constants({name: tensors[name] for name in names}, check_full_update=True, user_managed=True)
    return Way(way, lambda *inputs: tuple(package(*inputs)), pools, details={"held": (package, tensors)})


def eager(setting: Setting, model: KDAForCausalLM, batch: int) -> Way:
    exported = export_step(setting.step(model, batch), setting.inputs(batch))
    module = exported.step.module()
    names = [port["name"] for port in exported.manifest.programs["step"]["buffers"]]
    return Way(EAGER, module, {name: module.get_buffer(name) for name in names})


def tensorrt(setting: Setting, model: KDAForCausalLM, batch: int) -> Way:
    """The verify half as an engine, the commit half in PyTorch."""
    import recoverssm_ops.tensorrt

    step, inputs = setting.step(model, batch), setting.inputs(batch)
    # Both halves of one export: what one hands to the other differs between forms.
    exported = export_step(step, inputs)
    verify, commit = (exported.manifest.programs[name] for name in ("verify", "commit"))
    update = exported.commit.module()
    names = [port["name"] for port in exported.manifest.programs["step"]["inputs"] if port["role"] != "pool"]
    pools = dict(step.pools.named_buffers(prefix="pools"))

    def given(kind: dict, values: dict[str, Tensor]) -> list[Tensor]:
        return [values[port["name"]] for port in kind["inputs"]]

    engine = recoverssm_ops.tensorrt.compile(
        exported.verify, given(verify, dict(zip(names, inputs, strict=True)) | pools)
    )
    accepted = [port["role"] for port in verify["outputs"]].index("num_accepted")

    def call(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(names, inputs, strict=True)) | pools
        outputs = engine(*given(verify, values))
        values |= dict(zip((port["name"] for port in verify["outputs"]), outputs, strict=True))
        values["num_accepted"] = outputs[accepted]
        update(*given(commit, values))
        return tuple(outputs[:2])

    return Way(TENSORRT, call, pools, details={"partitions": len(list(engine.children()))})
