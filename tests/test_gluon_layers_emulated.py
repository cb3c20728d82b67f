"""The Gluon commit of all layers, compiled and emulated on the CPU: the bits of one launch a layer."""

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import layers_kernel_checks as checks
from layers_kernel_checks import Case
from programs import LIMITS, launch_as
from ptx_emulator.launches import emulated

from recoverssm_ops.triton import configs, launch, launch_layers

POOLS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def case_of(name: str, K: int, V: int, value_heads: int = 2, **settings) -> Case:
    sizes = {"heads": 1, "value_heads": value_heads, "key_dim": K, "value_dim": V}
    kind = {"sizes": sizes, "guard": 0, **settings.pop("kind", {})}
    return Case(name, kind=kind, **settings)


LAYERS = [
    next(case for case in checks.CASES if case.name == "whole_rows_columns"),
    case_of("packed", 96, 96, layers=2, kind={"lengths": [4, 0, 2], "tail": 3}),
    case_of("precomputed", 64, 32, 1, pad_slot_id=0, kind={"gate": "precomputed"}),
    case_of("scalar_gate", 48, 32, kind={"scalar_gate": True, "gate": "unbounded"}),
]
MORE_LAYERS = [
    next(case for case in checks.CASES if case.name == "whole_rows"),
    case_of("one_layer", 64, 64, layers=1),
    case_of("many_layers", 128, 64, 1, layers=11, batch=1),
    case_of("smallest", 16, 32),
    case_of("cut_off", 112, 160, pad_slot_id=0),
    case_of("unbounded", 64, 64, kind={"gate": "unbounded"}),
    case_of("head_first", 64, 64, kind={"pool_order": "head-first"}),
    case_of("no_norm", 64, 64, kind={"l2norm": False}),
]


def parity(case, data, pool, programs, monkeypatch):
    launch_as(programs, monkeypatch)
    address_table = launch_layers.address_table
    with emulated() as emulator:

        def noted(kinds, device):
            emulator.reachable = [x for tensors in kinds for x in tensors]
            return address_table(kinds, device)

        monkeypatch.setattr(launch_layers, "address_table", noted)
        checks.parity(case, "cpu", data, pool)
    assert emulator.kernels.count("commit_layers_rows_kernel") == 1
    assert emulator.kernels.count("commit_rows_kernel") == case.layers


@pytest.mark.parametrize(
    ("case", "pool", "programs"),
    [(LAYERS[0], "bf16", "many"), (LAYERS[1], "fp32", "many"), (LAYERS[2], "bf16", "few"), (LAYERS[3], "fp32", "wave")],
    ids=lambda x: getattr(x, "name", x),
)
def test_layers_have_the_bits_of_one_launch_each(case, pool, programs, monkeypatch):
    parity(case, torch.bfloat16, POOLS[pool], programs, monkeypatch)


def test_all_layers_are_more_programs_than_one(monkeypatch):
    """Two programs a head in a layer's own launch, one in that of all layers: the same bits."""
    case = case_of("halves", 64, 64, layers=3)
    chosen = []

    def noted(*arguments):
        chosen.append(configs.commit_rows_config(*arguments))
        return chosen[-1]

    for module in (launch, launch_layers):
        monkeypatch.setattr(module, "commit_rows_config", noted)
    programs = case.batch * case.kind["sizes"]["value_heads"]
    monkeypatch.setitem(LIMITS, "two layers", (0, 0, 0, 4 * programs))
    parity(case, torch.bfloat16, torch.float32, "two layers", monkeypatch)
    assert sorted(config["PART"] for config in chosen) == [32, 32, 32, 64]


@pytest.mark.exhaustive
@pytest.mark.parametrize("programs", LIMITS)
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("data", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("case", [*LAYERS, *MORE_LAYERS], ids=lambda case: case.name)
def test_more_layers_have_the_bits_of_one_launch_each(case, data, pool, programs, monkeypatch):
    parity(case, data, POOLS[pool], programs, monkeypatch)
