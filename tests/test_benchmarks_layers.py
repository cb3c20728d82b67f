"""``python -m benchmarks.conv`` and ``benchmarks.commit_layers``: tiny runs, their figures, and that they measure equals."""

import json
import os
import signal

import pytest
import torch

from benchmarks import commit_layers, conv

CONV = ["--batch", "1", "3", "--channels", "12", "--window", "5", "--samples", "2", "--mib", "0", "--device", "cpu"]
SIZES = ["--heads", "2", "--head-dim", "6", "--window", "5", "--device", "cpu"]
LAYERS = [*SIZES, "--batch", "1", "3", "--layers", "1", "2", "--samples", "2", "--mib", "0"]


def run(main, options, tmp_path):
    path = tmp_path / "figures.json"
    main([*options, "--json", str(path)])
    result = json.loads(path.read_text())
    assert result["device"] == "CPU" and result["torch"] == torch.__version__
    return result


def test_conv_measures_both_ways_of_every_batch(tmp_path, capsys):
    result = run(conv.main, CONV, tmp_path)
    keys = [(f["batch"], f["way"]) for f in result["figures"]]
    assert keys == [(1, "Inductor"), (1, "kernels"), (3, "Inductor"), (3, "kernels")]
    for f in result["figures"]:
        low, high = f["quartiles_us"]
        assert 0 < low <= f["layer_us"] <= high
    assert result["settings"]["channels"] == 12
    assert "12 channels" in capsys.readouterr().out


def test_conv_touches_as_much_as_asked():
    layers = conv.Layers(conv.parse_arguments([*CONV, "--mib", "1"]), 3)
    tensors = [*layers.xs, *layers.pools["kernels"]]
    # Windows and the batch's half of the pools are read, outputs and the same half are written.
    touched = sum(x.nbytes for x in layers.xs) * 2 + sum(pool.nbytes for pool in layers.pools["kernels"])
    assert touched >= 2**20 and layers.count == len(layers.xs) > 1
    assert len({x.data_ptr() for x in tensors}) == len(tensors)


@pytest.mark.parametrize("wrong", ["output", "history"])
def test_conv_refuses_to_compare_what_differs(wrong):
    layers = conv.Layers(conv.parse_arguments(CONV), 3)

    def other(x, weight, pool, slots, num_accepted):
        y = conv.kernel_layer(x, weight, pool, slots, num_accepted)
        if wrong == "history":
            pool[slots[0], 0, 0] += 1
        return y + 1 if wrong == "output" else y

    conv.check_equal(layers, {"Inductor": conv.compiled_layer, "kernels": conv.kernel_layer})
    with pytest.raises(AssertionError, match=r"not close|not equal"):
        conv.check_equal(layers, {"Inductor": conv.compiled_layer, "kernels": other})


def test_commits_are_measured_by_kind_layers_and_batch(tmp_path):
    result = run(commit_layers.main, LAYERS, tmp_path)
    keys = [(f["what"], f["layers"], f["batch"], f["way"]) for f in result["figures"]]
    kinds, ways = ("states", "histories"), ("loop", "one call")
    assert keys == [(kind, n, batch, way) for kind in kinds for n in (1, 2) for batch in (1, 3) for way in ways]
    assert all(0 < f["quartiles_us"][0] <= f["step_us"] <= f["quartiles_us"][1] for f in result["figures"])


@pytest.mark.parametrize("kind", [commit_layers.States, commit_layers.Histories])
def test_commits_of_a_replay_write_slots_of_their_own(kind):
    step = kind(2, 3, commit_layers.parse_arguments([*LAYERS, "--mib", "1"]))
    assert step.repeats > 1 and len(step.slots) == step.repeats
    slots = torch.cat(step.slots)
    assert sorted(slots.tolist()) == list(range(step.pools[0].shape[0]))
    commit_layers.check_equal(step)
    # Records are made anew, or the second commit would be refused.
    step.loop()


@pytest.mark.parametrize("kind", [commit_layers.States, commit_layers.Histories])
def test_commits_that_differ_are_refused(kind):
    step = kind(2, 3, commit_layers.parse_arguments(LAYERS))
    together = step.together

    def spoiled():
        together()
        step.pools[1][0] += 1

    step.together = spoiled
    with pytest.raises(RuntimeError, match="layer 1: one call for all layers should write what the loop writes"):
        commit_layers.check_equal(step)


@pytest.mark.parametrize(("module", "options", "digits"), [(conv, CONV, 2), (commit_layers, LAYERS, 1)])
def test_a_run_that_is_stopped_shows_and_keeps_what_it_has(module, options, digits, tmp_path, monkeypatch, capsys):
    measure, calls = module.measure, []

    def stopped(*size):
        calls.append(size)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return measure(*size)

    monkeypatch.setattr(module, "measure", stopped)
    path = tmp_path / "figures.json"
    assert module.main([*options, "--json", str(path)]) == 130
    (one, other) = json.loads(path.read_text())["figures"]
    assert one["batch"] == other["batch"] == 1 and one["way"] != other["way"]
    assert len(calls) == 2 and f"({one['quartiles_us'][0]:.{digits}f} .. " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (conv, ["--batch", "4", "0"], "--batch should be at least 1, got 0"),
        (conv, ["--width", "1"], "--width should be at least 2, got 1"),
        (commit_layers, ["--layers", "0"], "--layers should be at least 1, got 0"),
        (commit_layers, ["--head-dim", "0"], "--head-dim should be at least 1, got 0"),
    ],
)
def test_bad_options_are_refused_by_name(module, options, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        module.parse_arguments(options)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
