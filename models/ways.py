"""The three ways of the demo: one model, one step, compiled differently; and what is measured of each."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from models.decode import Decoded, decode, example_inputs
from models.memory import peak_allocation
from models.model import KDAForCausalLM
from models.pools import Pools
from models.speculation import SpeculativeStep


@dataclasses.dataclass(frozen=True)
class Way:
    """``speculative`` decides the window's length, ``backend`` what ``torch.compile`` makes of the step."""

    name: str
    speculative: bool
    backend: str


PLAIN = Way("plain", speculative=False, backend="inductor")
UNTOUCHED = Way("speculative", speculative=True, backend="inductor")
RECOVER = Way("speculative, recoverssm", speculative=True, backend="recoverssm")


@dataclasses.dataclass(frozen=True)
class Measured:
    """Bytes and seconds of one way; bytes are per request."""

    way: Way
    decoded: Decoded
    compile_seconds: float
    state_bytes: int
    cache_bytes: int
    step_peak_bytes: int


def run_way(
    way: Way,
    model: KDAForCausalLM,
    prompts: Sequence[bytes],
    *,
    num_tokens: int,
    num_drafts: int,
    temperature: float = 0.0,
    seed: int = 0,
    state_dtype: torch.dtype = torch.float32,
    compile_step: Callable[..., Callable] = torch.compile,
    on_emit: Callable[[int, bytes], None] | None = None,
) -> Measured:
    """Compile the step, measure the memory of one, and decode every prompt with it.

    ``compile_step(step, backend=, ...)`` is ``torch.compile``; tests pass another.
    """
    weight = model.embed_tokens.weight
    device, batch = weight.device, len(prompts)
    drafts = num_drafts if way.speculative else 0
    pools = Pools(
        model.config,
        batch,
        # Every way gets room for the longest window: caches of one size make their memory comparable.
        max(map(len, prompts)) + num_tokens + 1 + num_drafts,
        device=device,
        dtype=weight.dtype,
        recurrent_dtype=state_dtype,
    )
    step = SpeculativeStep(model, pools)
    inputs = example_inputs(batch, drafts, model.config.vocab_size, device)
    # Each way is compiled from nothing: what one leaves behind must not be another's.
    torch.compiler.reset()
    compiled = compile_step(step, backend=way.backend, fullgraph=True, dynamic=False)
    with torch.no_grad():
        started = time.perf_counter()
        compiled(*inputs)
        if device.type == "cuda":
            torch.cuda.synchronize()
        compile_seconds = time.perf_counter() - started
        peak = peak_allocation(lambda: compiled(*inputs), device)
        if device.type == "cuda":
            # A step is far shorter than its launches, so its speed is a graph's speed. The memory was measured without:
            # a graph's private pool would hide when its tensors live.
            torch.compiler.reset()
            started = time.perf_counter()
            options = {"triton.cudagraphs": True}
            compiled = compile_step(step, backend=way.backend, fullgraph=True, dynamic=False, options=options)
            for _ in range(3):  # warm-up, recording, replay
                compiled(*inputs)
            torch.cuda.synchronize()
            compile_seconds += time.perf_counter() - started
    decoded = decode(
        compiled,
        pools,
        prompts,
        num_tokens=num_tokens,
        num_drafts=drafts,
        vocab_size=model.config.vocab_size,
        temperature=temperature,
        seed=seed,
        on_emit=on_emit,
    )
    sizes = pools.bytes_per_request()
    return Measured(
        way=way,
        decoded=decoded,
        compile_seconds=compile_seconds,
        state_bytes=sizes["recurrent"] + sizes["conv"],
        cache_bytes=sizes["cache"],
        step_peak_bytes=round(peak / batch),
    )
