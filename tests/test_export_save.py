"""Saved steps: fresh processes with and without this library, the manifest, and what does not fit it."""

import json
import re

import pytest
import torch
from exporting import SLOTS, T, assert_same_step, export_small, pools_of, run_eagerly, small_step, step_inputs
from test_export_step import function_inputs, plain_function
from test_ops_export import fresh_process

from compile_passes import export_step, load_step
from compile_passes.exporting.graph import ExportError
from compile_passes.exporting.manifest import FORMAT, Manifest, ManifestError


@pytest.fixture(scope="module")
def portable(tmp_path_factory):
    directory = tmp_path_factory.mktemp("portable")
    return export_small(small_step(), dynamic=True, portable=True).save(directory / "step")


@pytest.fixture(scope="module")
def operators(tmp_path_factory):
    return export_small(small_step()).save(tmp_path_factory.mktemp("operators"))


def filled(step, pools):
    for name, pool in step.buffers.items():
        pool.copy_(pools[name])
    return step


@pytest.mark.parametrize("saved", ["portable", "operators"])
def test_loaded_step_and_halves_equal_the_step(saved, request):
    loaded = load_step(request.getfixturevalue(saved), window=T, dtype=torch.float32, state_dtype=torch.float32)
    given, before = step_inputs(), pools_of(small_step())
    expected, pools_after = run_eagerly(small_step(), given)
    step = filled(loaded.step, before)
    assert_same_step(step(*given), step.buffers, expected, pools_after)

    pools = {name: pool.clone() for name, pool in before.items()}
    verify, commit = loaded.verify, loaded.commit
    values = dict(zip((port["name"] for port in step.inputs), given, strict=True)) | pools
    outputs = verify(*(values[port["name"]] for port in verify.inputs))
    values |= dict(zip((port["name"] for port in verify.outputs), outputs, strict=True))
    values["num_accepted"] = values["result_1"]
    commit(*(values[port["name"]] for port in commit.inputs))
    assert_same_step(outputs[:2], pools, expected, pools_after)


@pytest.mark.parametrize("saved", ["portable", "operators"])
def test_fresh_process(saved, request, tmp_path):
    """The portable form needs nothing but torch; the other one needs the import and says so."""
    directory = request.getfixturevalue(saved)
    given = step_inputs()
    expected, pools_after = run_eagerly(small_step(), given)
    torch.save((given, pools_of(small_step()), expected, pools_after), tmp_path / "case.pt")
    code = f"""
import sys, torch
given, before, expected, after = torch.load({str(tmp_path / "case.pt")!r})
module = torch.export.load({str(directory / "step.pt2")!r}).module()
for name, pool in before.items():
    module.get_buffer(name).copy_(pool)
results = module(*given)
assert all(torch.equal(x, y) for x, y in zip(results, expected))
for name, pool in after.items():
    torch.testing.assert_close(module.get_buffer(name), pool, rtol=1e-4, atol=1e-5)
print("right", "recoverssm_ops" in sys.modules)
"""
    bare = fresh_process(code)
    if saved == "portable":
        assert bare.stdout.split() == ["right", "False"], bare.stderr
    else:
        assert bare.returncode != 0 and "recoverssm" in bare.stderr
        assert fresh_process("import recoverssm_ops\n" + code).stdout.split() == ["right", "True"]


def test_manifest_says_what_a_runtime_binds(portable, operators):
    manifest = json.loads((portable / "manifest.json").read_text())
    assert (manifest["format"], manifest["window"], manifest["pools"], manifest["operators"]) == (
        FORMAT,
        T,
        "buffers",
        "portable",
    )
    assert (
        manifest["versions"]["torch"] == torch.__version__ and manifest["device"] == "cpu" and manifest["uncut"] is None
    )
    (layer,) = manifest["layers"]
    assert (layer["lower_bound"], layer["key_dim"], layer["value_dim"], layer["state_dtype"]) == (-5.0, 8, 6, "float32")
    ((batch, bounds),) = manifest["dims"].items()
    assert bounds == [2, SLOTS]
    step = manifest["programs"]["step"]
    assert step["inputs"][0] == {"name": "window", "role": "input", "shape": [batch, T], "dtype": "int64"}
    assert [port["role"] for port in step["outputs"]] == ["result", "num_accepted"]
    assert {port["name"] for port in step["buffers"]} == set(pools_of(small_step()))
    commit = manifest["programs"]["commit"]
    assert commit["inputs"][0]["role"] == "num_accepted"
    records = [port["name"] for port in commit["inputs"] if port["role"] == "record"]
    assert records == [port["name"] for port in manifest["programs"]["verify"]["outputs"] if port["role"] == "record"]
    assert {"record_0_u", "record_0_k", "record_0_g"} <= set(records)
    assert Manifest.read(operators).operators == "recoverssm" and Manifest.read(operators).dims == {}


def edited(directory, tmp_path, **changes):
    for name in ("step.pt2", "verify.pt2", "commit.pt2"):
        (tmp_path / name).symlink_to(directory / name)
    manifest = json.loads((directory / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | changes))
    return tmp_path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 8}, "exported for windows of 4 tokens, but 8 were asked for"),
        ({"dtype": torch.bfloat16}, "exported with dtype float32, but bfloat16 was asked for"),
        ({"state_dtype": torch.float16}, "exported with state_dtype float32, but float16 was asked for"),
        ({"aot_inductor": True}, "holds no AOTInductor package"),
    ],
)
def test_a_step_of_another_kind_is_refused(operators, options, message):
    with pytest.raises(ManifestError, match=message):
        load_step(operators, **options)


def test_another_torch_or_format_is_refused(operators, tmp_path):
    with pytest.raises(ManifestError, match=r"exported with torch 2\.5\.0, but this is torch"):
        load_step(edited(operators, tmp_path, versions={"torch": "2.5.0"}))
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT + 1}))
    with pytest.raises(ManifestError, match=f"format {FORMAT + 1}; this version reads format {FORMAT}"):
        load_step(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(ManifestError, match="is not a manifest"):
        load_step(tmp_path)


def test_missing_files_are_named(operators, tmp_path):
    with pytest.raises(FileNotFoundError, match="not a saved step"):
        load_step(tmp_path)
    (edited(operators, tmp_path) / "verify.pt2").unlink()
    with pytest.raises(FileNotFoundError, match=r"verify\.pt2 is missing"):
        load_step(tmp_path)


def changed(given, index, value):
    return (*given[:index], value, *given[index + 1 :])


BAD_INPUTS = {
    "count": (lambda x: x[:-1], "step takes 8 tensors .window, num_drafts"),
    "dtype": (lambda x: changed(x, 0, x[0].int()), "window should have dtype int64, but had int32"),
    "window": (
        lambda x: changed(x, 0, torch.zeros(3, 8, dtype=torch.int64)),
        r"window should have shape .*but had \[3, 8\]",
    ),
    "rows differ": (lambda x: changed(x, 2, x[2][:2]), r"num_forced should have shape .*but had \[2\]"),
    "batch": (lambda x: tuple(y[:1] for y in x), rf"window should have shape .* in \[2, {SLOTS}\].*but had \[1, 4\]"),
    "no tensor": (lambda x: changed(x, 3, 7), "positions should be a tensor, but was int"),
}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_inputs_that_do_not_fit_are_named_before_anything_is_written(portable, case):
    loaded = load_step(portable)
    before = {name: pool.clone() for name, pool in loaded.step.buffers.items()}
    make, message = BAD_INPUTS[case]
    with pytest.raises(ManifestError, match=message):
        loaded.step(*make(step_inputs()))
    assert all(torch.equal(pool, before[name]) for name, pool in loaded.step.buffers.items())


def test_pools_that_are_inputs_are_not_saved(tmp_path):
    given = function_inputs(slots=4000)
    export_step(plain_function, given).save(tmp_path)
    for file in tmp_path.glob("*.pt2"):
        assert file.stat().st_size < given[0].nbytes // 4, file.name


def test_packages_are_asked_for_by_name_and_need_the_portable_form(tmp_path):
    exported = export_small(small_step())
    with pytest.raises(ExportError, match=re.escape("but had ['whole']")):
        exported.save(tmp_path, aot_inductor=("whole",))
    with pytest.raises(ExportError, match="export with portable=True, or on CUDA with triton=True"):
        exported.save(tmp_path, aot_inductor=("step",))
