"""Whole models of transformers, called once a token with its own cache, are rewritten (tests/third_party_models.py)."""

import copy

import pytest
import torch
from rewriting import run_rewritten, verify_calls
from third_party_models import MODULES, ModelStep, pytorch_functions

# What of each layer the operators do themselves. Kimi Linear's gate is log(1 + exp(x)), which is not what they compute.
FOLDED = {"Qwen3Next": (True, True, True), "KimiLinear": (True, False, True)}
FLAGS = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")


def check(name: str, layer_types: list[str], T: int, dynamic: bool = False):
    step = ModelStep(name, layer_types)
    eager = copy.deepcopy(step)
    torch.manual_seed(1)
    args = [torch.randint(1, 32, (3, T)), torch.tensor([3, 0, 4]), torch.tensor([1, T, 2]), step.past(3)]
    for x in (*args[:3], *args[3]) if dynamic else ():
        torch._dynamo.mark_dynamic(x, 0)
    with pytorch_functions(name), torch.no_grad():
        expected = eager(*copy.deepcopy(args))
        result, seen = run_rewritten(step, *args, dynamic=None if dynamic else False)
    linear = len(step.linear_layers)
    assert [(layer.reason, layer.form) for layer in seen.report.layers] == [(None, "commit")] * linear
    folded = [tuple(call[flag] for flag in FLAGS) for call in verify_calls(seen.graph)]
    assert folded == [FOLDED[name]] * linear
    torch.testing.assert_close((result, step.pools()), (expected, eager.pools()))


@pytest.mark.parametrize("name", MODULES)
def test_model_is_rewritten(name):
    check(name, ["linear_attention", "full_attention"], T=2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "batch_dynamic"])
@pytest.mark.parametrize("name", MODULES)
def test_model_of_several_layers_is_rewritten(name, dynamic):
    check(name, ["linear_attention", "full_attention", "linear_attention"], T=4, dynamic=dynamic)
