"""The ways to run one speculative step: compiled, and timed side by side."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx

from benchmarks.timing import alternate, quartiles
from compile_passes import RecoverSSMPass
from models.captured_step import CapturedStep
from models.config import KDAConfig
from models.memory import peak_allocation
from models.model import KDAForCausalLM
from models.pools import Pools
from models.speculation import SpeculativeStep

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UNTOUCHED, REWRITTEN = "untouched", "rewritten"
MERGED, SEPARATE = "rewritten, merged commits", "rewritten, a commit a layer"
KEPT = "rewritten, but not convolutions"
PASS_OPTIONS = {
    REWRITTEN: {}, MERGED: {"merge_layers": True}, SEPARATE: {"merge_layers": False}, KEPT: {"convolutions": False},
}  # fmt: skip
LAUNCHED, CAPTURED = "launched", "captured"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all batch sizes of a run have in common."""

    config: KDAConfig
    drafts: int
    dtype: str
    state_dtype: str
    device: str
    accepted: float | None
    ways: tuple[str, ...] = ()
    cudagraphs: bool = False
    samples: int = 50

    @property
    def window(self) -> int:
        return 1 + self.drafts

    def state_bytes(self, batch: int) -> int:
        """The recurrent states after one window position, in float32."""
        config = self.config
        layers = sum(not config.is_full_attention(i) for i in range(config.num_layers))
        return batch * layers * config.num_heads * config.head_k_dim * config.head_v_dim * 4

    def model(self) -> KDAForCausalLM:
        torch.manual_seed(0)
        # Made on the device: half a billion random weights take long on a CPU.
        with torch.device(self.device):
            model = KDAForCausalLM(self.config)
        return model.to(DTYPES[self.dtype]).eval().requires_grad_(False)

    def step(self, model: KDAForCausalLM, batch: int) -> SpeculativeStep:
        """Pools as large as the batch: nothing but the batch decides whether the states fit a cache."""
        types = {"dtype": DTYPES[self.dtype], "recurrent_dtype": DTYPES[self.state_dtype]}
        return SpeculativeStep(model, Pools(self.config, batch, 4 * self.window, device=self.device, **types))

    def accepted_lengths(self, batch: int) -> Tensor:
        """``[B]`` in 1 .. T, different per row: uniform, or around the wanted mean, which their own mean then is (to 1/B)."""
        generator = torch.Generator().manual_seed(0)
        if self.accepted is None:
            return torch.randint(1, self.window + 1, (batch,), generator=generator)
        share = (self.accepted - 1) / max(self.drafts, 1)
        lengths = 1 + (torch.rand(batch, self.drafts, generator=generator) < share).sum(1)
        while (missing := round(self.accepted * batch) - int(lengths.sum())) != 0:
            row = int(torch.randint(batch, (1,), generator=generator))
            lengths[row] = (lengths[row] + (1 if missing > 0 else -1)).clamp(1, self.window)
        return lengths

    def inputs(self, batch: int) -> tuple[Tensor, ...]:
        """Random tokens whose accepted lengths are forced."""
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.config.vocab_size, (batch, self.window), generator=generator)
        forced = self.accepted_lengths(batch) - 1
        zeros = torch.zeros(batch, dtype=torch.int64)
        rows = (tokens, forced, forced.clone(), zeros, torch.arange(batch), torch.zeros(batch))
        noise = (torch.zeros(batch, self.window), torch.ones(batch, self.config.vocab_size))
        return tuple(x.to(self.device) for x in (*rows, *noise))


def pass_of(way: str) -> RecoverSSMPass | None:
    return None if way == UNTOUCHED else RecoverSSMPass(**PASS_OPTIONS[way])


def compile_step(
    step: nn.Module, recover: RecoverSSMPass | None, before_first_run: Callable[[], object] = lambda: None
) -> Callable:
    """``before_first_run`` is called when all is compiled and nothing has run."""
    # A graph from Inductor's caches is one that the pass has not seen, and then has no report of.
    options = {} if recover is None else {"post_grad_custom_pre_pass": recover, "fx_graph_cache": False}

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable:
        with warnings.catch_warnings():
            # Of the float32 products, here the logits', which the model wants exact: near-ties decide greedy tokens.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores", category=UserWarning)
            compiled = compile_fx(graph, inputs, config_patches=options)
        before_first_run()
        return compiled

    return torch.compile(step, backend=backend, fullgraph=True, dynamic=False)


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@dataclasses.dataclass
class Prepared:
    """A way of one batch size that is ready to be timed."""

    way: str
    compiled: Callable[..., tuple[Tensor, ...]]
    inputs: tuple[Tensor, ...]
    seconds: float  # tracing, and compiling what the caches did not hold
    layers: dict[str, int]  # rewritten and refused, and convolutions replaced, by the pass's own report

    def call(self) -> None:
        self.compiled(*self.inputs)


@torch.no_grad()
def prepare(
    setting: Setting,
    model: KDAForCausalLM,
    way: str,
    batch: int,
    turn: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
) -> Prepared:
    """Compile, and run once within a ``turn()``: kernels are tuned at their first run, and should have the device alone."""
    recover, inputs, seconds = pass_of(way), setting.inputs(batch), []
    started = time.perf_counter()
    with contextlib.ExitStack() as running:

        def compiled_and_not_run() -> None:
            seconds.append(time.perf_counter() - started)
            running.enter_context(turn())

        compiled = compile_step(setting.step(model, batch), recover, compiled_and_not_run)
        compiled(*inputs)
        synchronize(setting.device)
    report = None if recover is None else recover.last_report
    layers = {}
    if report is not None:
        layers = {"rewritten": report.matched, "refused": report.refused, "convolutions": report.convolutions_replaced}
    (took,) = seconds
    return Prepared(way, compiled, inputs, took, layers)


@torch.no_grad()
def measure(prepared: Sequence[Prepared], setting: Setting, batch: int) -> list[dict]:
    """Figures of all ways of one batch size."""
    calls, figures = {}, {}
    for way in prepared:
        # A capture frees the workspaces of cuBLAS, 32 MiB on Hopper: whoever comes next would be charged with new ones.
        way.call()
        peak = peak_allocation(way.call, setting.device)
        common = {"batch": batch, "way": way.way, "peak_bytes": peak, "compile_s": way.seconds, "layers": way.layers}
        calls[way.way, LAUNCHED] = way.call
        figures[way.way, LAUNCHED] = common
        if setting.cudagraphs:
            captured = CapturedStep(way.compiled)
            captured.capture(*way.inputs)
            calls[way.way, CAPTURED] = lambda captured=captured, inputs=way.inputs: captured(*inputs)
            figures[way.way, CAPTURED] = common | {"graph_bytes": captured.pool_bytes}
    for call in calls.values():
        for _ in range(3):
            call()
    accepted = setting.accepted_lengths(batch).sum().item()
    for key, values in alternate(calls, setting.samples, setting.device).items():
        low, median, high = quartiles(values)
        figures[key] |= {"launch": key[1], "step_ms": median, "quartiles_ms": [low, high]}
        figures[key] |= {"accepted_mean": accepted / batch, "tokens_per_second": 1e3 * accepted / median}
    return list(figures.values())
