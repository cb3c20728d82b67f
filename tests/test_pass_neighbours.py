"""The pass beside everything else that a program compiles, wraps or caches. (Passes in one slot: test_pass_install.py.)"""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rewriting import copied
from small_layer import make_inputs
from spellings import Spelling, Step, inputs
from torch import nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.utils import _pytree as pytree

from compile_passes import RecoverSSMPass, explain, recoverssm_passes
from compile_passes.backend import recoverssm
from compile_passes.install import SLOT
from compile_passes.reporting import log

S = Spelling(T=2)
TWO = Spelling(T=2, layers=2)


@pytest.fixture(autouse=True)
def no_caches(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(log, "_said", set())
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


class Layers(nn.Module):
    """Two layers as submodules, each with a pool of its own, and what stands between them."""

    def __init__(self, between=lambda o: o, wrap=lambda layer: layer):
        super().__init__()
        self.layers = nn.ModuleList(Layer(pool) for pool in inputs(TWO)[0])
        self.calls, self.between = [wrap(layer) for layer in self.layers], between

    def forward(self, layers, slots, n):
        o = layers[0]["v"]
        for call, layer in zip(self.calls, layers, strict=True):
            o = self.between(call({**layer, "v": o}, slots, n))
        return o


class Layer(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.step = Step(S)
        self.register_buffer("pool", pool)

    def forward(self, layer, slots, n):
        return self.step([self.pool], [layer], slots, n)


def same(model: nn.Module, compiled, plain: nn.Module, steps: int = 2) -> None:
    """Several steps of the compiled model and of a plain copy of it: outputs and pools."""
    for step in range(steps):
        _, *args = inputs(TWO, seed=step)
        with torch.no_grad():
            torch.testing.assert_close(compiled(*copied(args)), plain(*args))
        torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))


def graph_break(o):
    torch._dynamo.graph_break()
    return o


# --- what is compiled ---------------------------------------------------------------------------------------------------


def test_submodules_compiled_one_by_one():
    """Layers share their code: each has to keep a pool of its own, whether or not they share a graph."""
    with recoverssm_passes() as added:
        model = Layers(wrap=torch.compile)
        same(model, model, Layers())
    assert sum(report.matched for report in added.reports) >= 1 and all(not r.refused for r in added.reports)


def test_compiled_layers_inside_a_compiled_model():
    with recoverssm_passes() as added:
        model = Layers(wrap=torch.compile)
        same(model, torch.compile(model), Layers())
    assert [report.matched for report in added.reports] == [2], "the inner torch.compile is part of the outer graph"


def test_module_compiled_in_place():
    model = Layers()
    model.compile(options={SLOT: (added := RecoverSSMPass())})
    same(model, model, Layers())
    assert added.last_report.matched == 2


def test_b28_graph_breaks_between_layers():
    with recoverssm_passes() as added:
        model = Layers(between=graph_break)
        same(model, torch.compile(model), Layers())
    # One frame calls both layers: they share its graph.
    assert sum(report.matched for report in added.reports) >= 1 and all(not r.refused for r in added.reports)


def test_a_break_inside_of_the_window_computes_the_same():
    """Dynamo leaves a function with a break in its loop to Python. Nothing is rewritten, and explain writes no pool."""

    def step(pool, slots, q, k, v, g, beta, n):
        S, outs, states = pool[slots], [], []
        for t in range(q.shape[1]):
            S = S * g[:, t].exp().unsqueeze(-2)
            u = beta[:, t].unsqueeze(-1) * (v[:, t] - (S * k[:, t].unsqueeze(-2)).sum(-1))
            S = S + u.unsqueeze(-1) * k[:, t].unsqueeze(-2)
            outs.append((S * q[:, t].unsqueeze(-2)).sum(-1))
            states.append(S)
            graph_break(S)
        pool[slots] = torch.stack(states, 1)[torch.arange(len(slots)), n - 1]
        return torch.stack(outs, 1)

    args, expected = make_inputs(T=2), make_inputs(T=2)
    with torch.no_grad(), recoverssm_passes() as added:
        report = explain(step, *args)
        assert report.layers == [] and "no per-position states found" in str(report)
        assert all(torch.equal(x, y) for x, y in zip(args, expected, strict=True))
        result = torch.compile(step)(*args)
    torch.testing.assert_close((result, args[0]), (step(*expected), expected[0]))
    assert sum(report.matched for report in added.reports) == 0


region = torch.compiler.nested_compile_region(lambda step, *args: step(*args))


@pytest.mark.parametrize("checkpoint", ["pool", "functional"])
def test_b35_nested_compiled_region(checkpoint, caplog):
    """A region is a graph of its own, and layers that are alike share it."""

    class Regions(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = Step(Spelling(T=2, checkpoint=checkpoint))

        def forward(self, states, layers, slots, n):
            pairs = zip(states, layers, strict=True)
            return [region(self.step, [state], [layer], slots, n) for state, layer in pairs]

    s = Spelling(T=2, layers=2, checkpoint=checkpoint)
    args, expected = inputs(s), inputs(s)
    with torch.no_grad():
        assert (report := explain(Regions(), *args)).matched >= 1 and not report.refused
        result = torch.compile(Regions(), backend=recoverssm, fullgraph=True)(*args)
        torch.testing.assert_close((result, args[0]), (Regions()(*expected), expected[0]))
    assert "rewrote 0 layers" not in caplog.text, "the graph around the regions has no layer, and needs none"


def test_weights_and_pools_handed_in_by_functional_call():
    model, plain = Layers(), Layers()
    with recoverssm_passes() as added, torch.no_grad():
        compiled = torch.compile(lambda buffers, *args: torch.func.functional_call(model, buffers, args))
        buffers = copied(dict(plain.named_buffers()))
        for step in range(2):
            _, *args = inputs(TWO, seed=step)
            torch.testing.assert_close(compiled(buffers, *args), plain(*args))
            torch.testing.assert_close(buffers, dict(plain.named_buffers()))
    assert sum(report.matched for report in added.reports) == 2


def test_a_copied_model_has_pools_of_its_own():
    """Both share the code, and may share the graph."""
    model = Layers()
    other = copy.deepcopy(model)
    with recoverssm_passes():
        for one in (model, other):
            same(one, torch.compile(one), Layers())


# --- precision and modes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("contraction", ["mul", "matmul", "einsum"])
def test_b35_autocast_around_a_layer_that_opts_out(mode, contraction):
    """How models keep a float32 recurrence under autocast: the projections are rounded, the layer is not."""
    s = Spelling(T=2, contraction=contraction)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.projection, self.step = nn.Linear(s.V, s.V), Step(s)

        def forward(self, states, layers, slots, n):
            v = self.projection(layers[0]["v"])
            with torch.autocast("cpu", enabled=False):
                o = self.step(states, [{**layers[0], "v": v.float()}], slots, n)
            return self.projection(o)

    model = Model()
    args, expected = inputs(s), inputs(s)
    with mode(), torch.autocast("cpu", torch.bfloat16), recoverssm_passes() as added:
        result, plain = torch.compile(model)(*args), model(*expected)
    assert added.last_report.matched == 1 and result.dtype == torch.bfloat16
    torch.testing.assert_close((result, args[0]), (plain, expected[0]))


def test_b35_products_that_autocast_rounds_are_left_alone():
    s = Spelling(T=2, contraction="matmul")
    args, expected = inputs(s), inputs(s)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), recoverssm_passes() as added:
        result, plain = torch.compile(Step(s))(*args), Step(s)(*expected)
    assert added.last_report.matched == 0 and added.last_report.refused == 1
    # Inductor keeps products in float32 that eager mode rounds to bfloat16, with and without the pass.
    torch.testing.assert_close((result, args[0]), (plain, expected[0]), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("v2", [True, False], ids=["functionalization_v2", "v1"])
def test_b23_either_functionalization_with_the_check_on(v2):
    with config.patch(enable_auto_functionalized_v2=v2), recoverssm_passes(check=True) as added:
        model = Layers()
        same(model, torch.compile(model), Layers())
    assert added.last_report.matched == 2


# --- other libraries ----------------------------------------------------------------------------------------------------


class Doubling(CustomGraphPass):
    """A pass of another library that edits the graph: every sigmoid becomes twice as large, and half again."""

    def __init__(self):
        self.edited = 0

    def __call__(self, graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sigmoid.default):
            with graph.inserting_after(node):
                twice = graph.call_function(torch.ops.aten.mul.Tensor, (node, 2.0))
            with graph.inserting_after(twice):
                half = graph.call_function(torch.ops.aten.mul.Tensor, (twice, 0.5))
            for new in (twice, half):
                new.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(half, delete_user_cb=lambda user, keep=twice: user is not keep)
            self.edited += 1

    def uuid(self):
        return "doubling"


@pytest.mark.parametrize(
    "slot", [SLOT, "post_grad_custom_post_pass", "joint_custom_pre_pass", "joint_custom_post_pass"]
)
def test_b27_a_pass_that_edits_what_we_read(slot):
    neighbour = Doubling()
    with config.patch({slot: neighbour}), recoverssm_passes() as added:
        model = Layers()
        same(model, torch.compile(model), Layers())
        assert (neighbour.edited > 0) == (slot != "post_grad_custom_post_pass"), (
            "after ours no sigmoid of a layer is left"
        )
    assert added.last_report.matched == 2
    assert getattr(config, slot) is None


def test_b28_two_models_at_once_take_turns():
    models = [(Step(s), s) for s in (S, Spelling(T=3, contraction="einsum"))]
    with recoverssm_passes() as added, torch.no_grad():
        compiled = [torch.compile(model) for model, _ in models]
        states = [(inputs(s)[0], inputs(s)[0]) for _, s in models]
        for step in range(2):
            for (model, s), fast, (own, plain) in zip(models, compiled, states, strict=True):
                _, *args = inputs(s, seed=step)
                torch.testing.assert_close((fast(own, *args), own), (model(plain, *args), plain))
    assert [report.matched for report in added.reports] == [1, 1]


# --- caches -------------------------------------------------------------------------------------------------------------

PROGRAM = """
import sys
sys.path[:0] = {paths!r}
import logging
import torch
import torch._inductor.config as config
from torch._dynamo.utils import counters
from compile_passes import RecoverSSMPass
from compile_passes.backend import recoverssm
from compile_passes.install import SLOT
from spellings import Spelling, Step, inputs

config.cpp_cache_precompile_headers = False
s = Spelling(T=2, checkpoint="buffer", gate="precomputed", l2norm="none", beta="raw")
for options in {options}:
    torch._dynamo.reset()
    counters.clear()
    args = inputs(s)
    with torch.no_grad():
        result = torch.compile(Step(s), backend=recoverssm, options=options)(*args)
    hit = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
    print("REPORT", hit, result.double().sum().item(), args[0][0].double().sum().item())
"""


def test_b26_backend_in_a_second_process_with_a_warm_cache(tmp_path):
    root = Path(__file__).resolve().parent.parent

    def process(*options: str):
        program = PROGRAM.format(paths=[str(root), str(root / "tests")], options=f"[{', '.join(options)}]")
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        reports = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("REPORT")]
        return reports, done.stderr

    (cold,), _ = process("{}")
    (warm, checked), errors = process("{}", "{SLOT: RecoverSSMPass(check=True)}")
    assert (cold[0], warm[0], checked[0]) == ("False", "True", "False"), "a checked graph is another entry"
    assert cold[1:] == warm[1:] == checked[1:]
    assert "rewrote 0 layers" not in errors, "a cache hit says nothing about what was rewritten"


def test_results_of_a_pytree_and_keyword_arguments():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.step = Step(S)

        def forward(self, *, batch):
            return {"o": self.step(batch["states"], batch["layers"], batch["slots"], batch["n"]), "n": batch["n"] + 0}

    def batch():
        return dict(zip(("states", "layers", "slots", "n"), inputs(S), strict=True))

    own, plain = batch(), batch()
    with torch.no_grad(), recoverssm_passes() as added:
        result = torch.compile(Wrapped())(batch=own)
    expected = Wrapped()(batch=plain)
    for x, y in zip(*map(pytree.tree_leaves, ((result, own), (expected, plain))), strict=True):
        torch.testing.assert_close(x, y)
    assert added.last_report.matched == 1
