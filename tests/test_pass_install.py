"""Ways to install the pass, beside other passes, and with the compile caches."""

import importlib.metadata
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rewriting import copied
from spellings import Spelling, Step, inputs
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import recoverssm_ops.ops as ops
from compile_passes import RecoverSSMPass, recoverssm_passes
from compile_passes.backend import recoverssm
from compile_passes.install import SLOT
from compile_passes.recover_pass import check_views

S = Spelling(T=2)


@pytest.fixture(autouse=True)
def no_caches():
    torch._dynamo.reset()
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


class Neighbour(CustomGraphPass):
    """A pass of another library: notes which states it still saw."""

    def __init__(self, name="neighbour"):
        self.name, self.saw = name, []

    def __call__(self, graph):
        self.saw.append(not graph.find_nodes(op="call_function", target=ops.kda_verify))

    def uuid(self):
        return self.name


def runs_right(compiled, s=S) -> None:
    args, expected = inputs(s), inputs(s)
    with torch.no_grad():
        result = compiled(*args)
    torch.testing.assert_close((result, args[0]), (Step(s)(*expected), expected[0]))


def test_as_an_option():
    added = RecoverSSMPass()
    runs_right(torch.compile(Step(S), options={SLOT: added}))
    assert added.last_report.matched == 1


def test_b27_as_a_context_beside_another_pass():
    neighbour = Neighbour()
    with config.patch({SLOT: neighbour}):
        with recoverssm_passes() as added:
            assert getattr(config, SLOT) is added
            runs_right(torch.compile(Step(S)))
        assert getattr(config, SLOT) is neighbour
    assert added.last_report.matched == 1 and neighbour.saw == [True]
    assert getattr(config, SLOT) is None


def test_b27_context_restores_the_configuration_after_an_error():
    with pytest.raises(KeyError), recoverssm_passes():
        raise KeyError
    assert getattr(config, SLOT) is None


def test_contexts_nest():
    with recoverssm_passes() as outer, recoverssm_passes() as inner:
        runs_right(torch.compile(Step(S)))
    assert (outer.last_report.matched, inner.last_report.matched) == (1, 0)


@pytest.mark.skipif(torch.__version__ < "2.13", reason="a slot holds one pass before torch 2.13")
@pytest.mark.parametrize("several", [list, tuple])
def test_b27_several_passes_in_the_slot(several):
    first, second = Neighbour("first"), Neighbour("second")
    with config.patch({SLOT: several([first, second])}), recoverssm_passes() as added:
        runs_right(torch.compile(Step(S)))
        assert added.uuid()[1:] == ("first", "second")
    assert first.saw == second.saw == [True] and added.last_report.matched == 1


def test_b27_as_a_backend_beside_a_pass_of_the_options():
    neighbour = Neighbour()
    runs_right(torch.compile(Step(S), backend=recoverssm, options={SLOT: neighbour}))
    assert neighbour.saw == [True]


def test_backend_takes_a_mode(monkeypatch):
    import compile_passes.backend as backend

    patches, compile_fx = [], backend.compile_fx

    def spied(*args, config_patches):
        patches.append(config_patches)
        return compile_fx(*args, config_patches=config_patches)

    monkeypatch.setattr(backend, "compile_fx", spied)
    runs_right(torch.compile(Step(S), backend=recoverssm, mode="max-autotune-no-cudagraphs"))
    assert patches[0]["max_autotune"] and isinstance(patches[0][SLOT], RecoverSSMPass)


def test_backend_is_an_entry_point_of_the_installed_package():
    try:
        importlib.metadata.distribution("recoverssm")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("recoverssm is not installed: its entry points cannot be discovered")
    assert "recoverssm" in torch._dynamo.list_backends()
    runs_right(torch.compile(Step(S), backend="recoverssm"))


def test_b28_two_models_in_one_process_are_both_rewritten():
    with recoverssm_passes() as added:
        for s in (Spelling(T=2), Spelling(T=3, contraction="matmul", layers=2)):
            runs_right(torch.compile(Step(s)), s)
            assert added.last_report.matched == s.layers


# --- uuid ---------------------------------------------------------------------------------------------------------------


def test_b26_uuid_can_be_pickled_and_names_everything_that_decides_the_result(monkeypatch):
    added = RecoverSSMPass()
    assert added.uuid() and pickle.loads(pickle.dumps(added.uuid())) == RecoverSSMPass().uuid()
    assert pickle.loads(pickle.dumps(added)).uuid() == added.uuid()
    before = added.uuid()
    assert RecoverSSMPass(then=Neighbour()).uuid() != before
    assert RecoverSSMPass(merge_layers=True).uuid() != before
    monkeypatch.setattr(ops, "SCHEMAS", (*ops.SCHEMAS[:-1], "kda_recover() -> Tensor"))
    assert added.uuid() != before
    monkeypatch.undo()
    monkeypatch.setattr(torch, "__version__", "2.99")
    assert added.uuid() != before


@pytest.mark.parametrize("neighbour", [Neighbour(None), print, [Neighbour(), lambda graph: None]])
def test_b26_uuid_is_none_beside_a_pass_that_has_none(neighbour):
    """Inductor then caches nothing, rather than to serve a graph that the unnamed pass would have changed."""
    assert RecoverSSMPass(then=neighbour).uuid() is None


CACHE_PROGRAM = """
import sys
sys.path[:0] = {paths!r}
import torch
import torch._inductor.config as config
from torch._dynamo.utils import counters
from compile_passes import RecoverSSMPass
from compile_passes.install import SLOT
from spellings import Spelling, Step, inputs

config.cpp_cache_precompile_headers = False
runs = []

class Counted(RecoverSSMPass):
    option = None
    def __call__(self, graph):
        runs.append(1)
        super().__call__(graph)
    def uuid(self):
        return (super().uuid(), self.option)

s = Spelling(T=2, checkpoint="buffer", gate="precomputed", l2norm="none", beta="raw")
for option in {options!r}:
    torch._dynamo.reset()
    counters.clear()
    runs.clear()
    Counted.option = option
    args = inputs(s)
    with torch.no_grad():
        result = torch.compile(Step(s), options={{SLOT: Counted()}})(*args)
    hit = counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"] > 0
    print("REPORT", len(runs), hit, result.double().sum().item(), args[0][0].double().sum().item())
"""


def test_b26_second_process_hits_the_cache_and_computes_the_same(tmp_path):
    root = Path(__file__).resolve().parent.parent

    def process(*options: str) -> list[list[str]]:
        program = CACHE_PROGRAM.format(paths=[str(root), str(root / "tests")], options=options)
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"}
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("REPORT")]

    (cold,) = process("one")
    warm, changed = process("one", "two")
    assert cold[:2] == ["1", "False"]
    assert warm[:2] == ["0", "True"], "the pass does not run on a hit"
    assert changed[:2] == ["1", "False"], "another uuid is another key"
    assert cold[2:] == warm[2:] == changed[2:]


# --- surroundings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "surroundings",
    [torch.no_grad, torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["no_grad", "inference_mode", "grad_enabled", "autocast"],
)
def test_b35_pool_is_updated_under(surroundings):
    """The generic spelling has no operation that autocast would round."""
    added = RecoverSSMPass()
    args, expected = inputs(S), inputs(S)
    with surroundings():
        result = torch.compile(Step(S), options={SLOT: added})(*args)
        expected_result = Step(S)(*expected)
    assert added.last_report.matched == 1
    torch.testing.assert_close((result, args[0]), (expected_result, expected[0]))


def test_training_keeps_its_states():
    """Where gradients flow the backward pass needs the states: nothing is rewritten, and nothing breaks."""
    from rewriting import compile_rewritten

    s = Spelling(T=2, checkpoint="functional")
    states, layers, slots, n = inputs(s)
    plain, compiled_layers = copied(layers), copied(layers)
    for group in (plain, compiled_layers):
        group[0]["k"].requires_grad_()
    with torch.enable_grad():
        Step(s)(states, plain, slots, n)[0].sum().backward()
        compiled, seen = compile_rewritten(Step(s))
        compiled(states, compiled_layers, slots, n)[0].sum().backward()
    assert seen.report.matched == 0
    torch.testing.assert_close(compiled_layers[0]["k"].grad, plain[0]["k"].grad)


def test_layers_in_two_graphs_are_both_rewritten():
    class Broken(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Step(S)

        def forward(self, states, layers, slots, n):
            o = self.layer(states[:1], layers[:1], slots, n)
            torch._dynamo.graph_break()
            return self.layer(states[1:], [{**layers[1], "v": o}], slots, n)

    reports = []

    class Kept(RecoverSSMPass):
        def __call__(self, graph):
            super().__call__(graph)
            reports.append(self.last_report)

    s = Spelling(T=2, layers=2)
    args, expected = inputs(s), inputs(s)
    with torch.no_grad():
        result = torch.compile(Broken(), options={SLOT: Kept()})(*args)
    torch.testing.assert_close((result, args[0]), (Step(s)(*expected), expected[0]))
    assert [report.matched for report in reports] == [1, 1]


# --- views of a pool ----------------------------------------------------------------------------------------------------


def commit_to_layer(pool, layer, u, k, g, rows):
    ops.kda_commit(
        pool[layer], u, k, g, rows, rows.unsqueeze(1), rows.unsqueeze(1), None, 2, None, None, 0.0, False, False, -1
    )
    return u + 1


def commit_arguments():
    torch.manual_seed(0)
    B, T, H, K, V = 3, 2, 4, 8, 6
    pool = torch.randn(5, 7, H, V, K)
    return pool, torch.randn(B, T, H, V), torch.randn(B, T, H, K), -torch.rand(B, T, H, K), torch.arange(B)


def test_symbolic_view_is_refused():
    """Inductor would write it at offset 0 (pytorch/pytorch#198068): a wrong layer's states."""
    pool, u, k, g, rows = commit_arguments()
    compiled = torch.compile(lambda *a: commit_to_layer(a[0], 1, *a[1:]), backend=recoverssm, dynamic=True)
    with torch.no_grad(), pytest.raises(Exception, match=r"symbolic storage offset.*Pass the whole pool"):
        compiled(pool, u, k, g, rows)


def test_static_view_is_accepted_and_leaves_other_layers_alone():
    pool, *rest = commit_arguments()
    expected = pool.clone()
    compiled = torch.compile(lambda *a: commit_to_layer(a[0], 1, *a[1:]), backend=recoverssm, dynamic=False)
    with torch.no_grad():
        compiled(pool, *rest)
        commit_to_layer(expected, 1, *rest)
    torch.testing.assert_close(pool, expected)


def test_a_rewritten_model_passes_the_check_of_views_itself():
    from rewriting import run_rewritten

    s = Spelling(T=2, shapes="all_dynamic")
    _, seen = run_rewritten(Step(s), *inputs(s), dynamic=True)
    assert seen.report.matched == 1
    check_views(seen.graph)
