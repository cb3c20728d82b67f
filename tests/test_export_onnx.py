"""ONNX: standard operators alone, and ONNX Runtime computes what the step computes."""

import pytest
import torch
from exporting import (
    Operators,
    assert_same_step,
    export_small,
    named_inputs,
    pools_of,
    run_eagerly,
    small_step,
    step_inputs,
)
from test_export_step import function_inputs
from test_ops_export import fresh_process

import recoverssm_ops.onnx

for needed in ("onnx", "onnxscript"):
    pytest.importorskip(needed, reason=f"{needed} is not installed (extra: onnx)")
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (extra: onnx)")


def session(program, path, described=None, **options):
    if described is not None:
        options |= {f"{kind}_names": [port["name"] for port in described[f"{kind}s"]] for kind in ("input", "output")}
    converted = recoverssm_ops.onnx.export(program, str(path), **options)
    assert {node.domain for node in converted.model.graph} == {""}, "standard operators alone"
    return onnxruntime.InferenceSession(str(path))


def run(loaded, values):
    outputs = loaded.run(None, {port.name: values[port.name].numpy() for port in loaded.get_inputs()})
    names = [port.name.removesuffix("_new") for port in loaded.get_outputs()]
    return {name: torch.from_numpy(x) for name, x in zip(names, outputs, strict=True)}


def test_whole_step_and_halves_with_dynamic_batch(tmp_path):
    exported = export_small(small_step(), functional=True, portable=True, dynamic=True)
    programs = exported.manifest.programs
    step, verify, commit = (
        session(getattr(exported, name), tmp_path / f"{name}.onnx", programs[name])
        for name in ("step", "verify", "commit")
    )
    for batch in (2, 7):
        given = step_inputs(batch, seed=batch)
        expected, after = run_eagerly(small_step(), given)
        values = named_inputs(exported, given) | pools_of(small_step())
        whole = run(step, values)
        assert_same_step([whole.pop("result_0"), whole.pop("result_1")], whole, expected, after)
        halves = run(verify, values)
        pools = run(commit, values | halves | {"num_accepted": halves["result_1"]})
        assert_same_step([halves["result_0"], halves["result_1"]], pools, expected, after)


GATES = {
    "raw": {},
    "bounded": {"lower_bound": -5.0, "A_log": torch.tensor([0.1, -0.2]), "use_gate_in_kernel": True},
    "unbounded": {"A_log": torch.tensor([0.1, -0.2]), "dt_bias": torch.full((2, 8), 0.3), "use_gate_in_kernel": True},
}


@pytest.mark.parametrize("gate", GATES)
def test_operators_through_their_portable_form(gate, tmp_path):
    flags = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
    model, given = Operators(**GATES[gate], **flags), function_inputs()
    loaded = session(torch.export.export(model, given), tmp_path / "operators.onnx", opset_version=18)
    outputs = loaded.run(None, {port.name: x.numpy() for port, x in zip(loaded.get_inputs(), given, strict=True)})
    torch.testing.assert_close(tuple(map(torch.from_numpy, outputs)), model(*given))


def test_mutation_is_refused_with_the_remedy(tmp_path):
    in_place = export_small(small_step(), portable=True)
    with pytest.raises(ValueError, match=r"updates pools\.recurrent_0.*functional=True, portable=True"):
        recoverssm_ops.onnx.export(in_place.step, str(tmp_path / "step.onnx"))
    with pytest.raises(ValueError, match=r"updates pools_recurrent_0.*ONNX has no mutation"):
        recoverssm_ops.onnx.export(in_place.commit)
    with pytest.raises(ValueError, match="calls a commit operator"):
        recoverssm_ops.onnx.export(export_small(small_step(), functional=True).step)
    assert not list(tmp_path.iterdir())


def test_nothing_is_imported_before_it_is_asked_for():
    code = (
        "import sys, recoverssm_ops.onnx; print([m for m in ('onnx', 'onnxscript', 'onnxruntime') if m in sys.modules])"
    )
    assert fresh_process(code).stdout.strip() == "[]"
