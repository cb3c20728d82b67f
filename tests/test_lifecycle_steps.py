"""Behaviours 16 and 22: a step is recorded once and committed once, and its slots stay its own until then."""

import pytest
import torch
from pools import guarded_pool, make_window

import recoverssm_ops as rs


def verified(layers=2):
    """Pools and records of one step over two rows, and the function that commits all layers."""
    pools = [guarded_pool(4, 2, 6, 8, seed=i) for i in range(layers)]
    records = []
    for i, pool in enumerate(pools):
        window = make_window(2, 4, seed=i)
        records.append(rs.kda_verify(*window.inputs, pool.state, torch.tensor([1, 3]), **window.options)[1])

    def commit(*given):
        for pool, record in zip(pools, given, strict=True):
            rs.kda_commit(pool.state, record, torch.tensor([2, 4]), torch.tensor([1, 3]))

    return pools, records, commit


def written(pool) -> bool:
    try:
        pool.check_unchanged()
    except AssertionError:
        return True
    return False


def test_record_then_commit_step_after_step():
    steps = rs.StepLifecycle()
    for _ in range(3):
        pools, records, commit = verified()
        assert not steps.pending
        steps.record_step(*records)
        assert steps.pending and not any(map(written, pools))
        steps.commit_step(commit)
        assert not steps.pending and all(map(written, pools))


def test_b16_forgetting_a_commit():
    steps = rs.StepLifecycle()
    _, records, commit = verified()
    steps.record_step(*records)
    with pytest.raises(RuntimeError, match=r"cannot record another step while step 1 has records .* call commit_step"):
        steps.record_step(*verified()[1])
    steps.commit_step(commit)
    steps.record_step(*verified()[1])


def test_b16_committing_twice():
    steps = rs.StepLifecycle()
    pools, records, commit = verified()
    with pytest.raises(RuntimeError, match="nothing to commit, no step was recorded: run verify, then record_step"):
        steps.commit_step(commit)
    steps.record_step(*records)
    steps.commit_step(commit)
    for pool in pools:
        pool.remember()
    with pytest.raises(RuntimeError, match="nothing to commit, step 1 was committed or discarded already: run verify"):
        steps.commit_step(commit)
    with pytest.raises(RuntimeError, match="got a record that was committed already: run kda_verify again"):
        steps.record_step(*records)
    assert not steps.pending and not any(map(written, pools))


def test_b16_a_step_made_for_capture_is_never_committed():
    """By then its slots are those of real requests."""
    steps = rs.StepLifecycle()
    pools, records, commit = verified()
    metadata = rs.StepBuffers([2], 4).stage_dummy(2)
    steps.record_step(*records, dummy=metadata.dummy)
    assert not steps.pending
    with pytest.raises(RuntimeError, match=r"step 1 is a dummy step .* run verify on real rows, then record_step"):
        steps.commit_step(commit)
    assert not any(map(written, pools))
    steps.record_step(*records, dummy=True)  # warm-up, capture: as many as it takes, none to discard
    pools, records, commit = verified()
    steps.record_step(*records)
    steps.commit_step(commit)
    assert all(map(written, pools))


def test_b16_forgetting_a_layer():
    """The step stays pending, and a second try commits what the first one left."""
    steps = rs.StepLifecycle()
    pools, records, _ = verified(layers=3)
    steps.record_step(*records)

    def commit_layers(layers):
        def commit(*given):
            for i in layers:
                rs.kda_commit(pools[i].state, given[i], torch.tensor([2, 4]), torch.tensor([1, 3]))

        return commit

    with pytest.raises(RuntimeError, match=r"records \[0, 2\] of step 1 \(of 3\) were not committed: .* every layer"):
        steps.commit_step(commit_layers([1]))
    assert steps.pending and [written(pool) for pool in pools] == [False, True, False]
    steps.commit_step(commit_layers([0, 2]))
    assert all(map(written, pools)) and not steps.pending


def test_a_refused_commit_leaves_the_step_pending():
    steps = rs.StepLifecycle()
    pools, records, commit = verified()
    steps.record_step(*records)
    with pytest.raises(TypeError, match="num_accepted"):
        steps.commit_step(lambda *given: rs.kda_commit(pools[0].state, given[0], torch.tensor([0.5, 1.0])))
    assert steps.pending and not any(map(written, pools))
    steps.commit_step(commit)
    assert all(map(written, pools))


def test_discarding():
    steps = rs.StepLifecycle()
    pools, records, commit = verified()
    with pytest.raises(RuntimeError, match="nothing to discard"):
        steps.discard_step()
    steps.record_step(*records)
    steps.discard_step()
    with pytest.raises(RuntimeError, match="step 1 was committed or discarded already"):
        steps.commit_step(commit)
    with pytest.raises(RuntimeError, match="nothing to discard"):
        steps.discard_step()
    assert not any(map(written, pools))
    steps.record_step(*verified()[1])


def test_replays_without_record_objects():
    """Verify and commit are graph replays: the steps alone are counted."""
    steps, replayed = rs.StepLifecycle(), []
    for step in range(2):
        steps.record_step()
        with pytest.raises(RuntimeError, match="cannot record another step"):
            steps.record_step()
        steps.commit_step(lambda step=step: replayed.append(step))
        with pytest.raises(RuntimeError, match="nothing to commit"):
            steps.commit_step(lambda: replayed.append("again"))
    assert replayed == [0, 1]


def test_only_records():
    with pytest.raises(TypeError, match="takes records made by kda_verify, but got Tensor"):
        rs.StepLifecycle().record_step(torch.zeros(1))


def test_b22_a_slot_changes_owner_only_between_steps():
    """Neither bookkeeping nor staging reaches a slot whose old record may still be committed."""
    steps = rs.StepLifecycle()
    buffers = rs.StepBuffers([2], 4, lifecycle=steps)
    metadata = buffers.stage([rs.StepRow.verify(1, 9, 3), rs.StepRow.verify(3, 5, 3)])
    pools, records, commit = verified()
    steps.require_idle("give slot 3 to a new request")
    steps.record_step(*records)
    with pytest.raises(RuntimeError, match="cannot give slot 3 to a new request while step 1 has records"):
        steps.require_idle("give slot 3 to a new request")
    for stage in (lambda: buffers.stage([rs.StepRow.prefill(3, 0, 4)]), lambda: buffers.stage_dummy(2)):
        with pytest.raises(RuntimeError, match="cannot stage a step while step 1 has records"):
            stage()
    assert metadata.slots.tolist() == [1, 3]
    steps.commit_step(commit)
    steps.require_idle("give slot 3 to a new request")
    assert buffers.stage([rs.StepRow.prefill(3, 0, 4)]).slots.tolist() == [3, -1]
    assert all(map(written, pools))
