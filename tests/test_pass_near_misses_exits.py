"""Look-alikes by what leaves the window: outputs, states and their selection."""

import pytest
import torch
from near_misses import Corpus, check_left_alone, kind
from plain_layers import B, H, K, T, V, correction, decay, looks_around, make_inputs, plain_step, read, select, write

CORPUS = Corpus()


@CORPUS.case("state_escapes")
def output_from_the_decayed_state(S, q, k, v, g, beta):
    S = decay(S, g)
    return write(S, correction(S, k, v, beta), k), read(S, q)


@CORPUS.case("state_escapes")
def two_queries(S, q, k, v, g, beta):
    S, o = plain_step(S, q, k, v, g, beta)
    return S, o + read(S, k.cos())


@CORPUS.case("state_escapes")
def state_summed(S, q, k, v, g, beta):
    S, o = plain_step(S, q, k, v, g, beta)
    return S, o + S.sum((-1, -2)).unsqueeze(-1)


@CORPUS.case("missing_output")
def query_on_the_value_axis(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    return S, (S * v.unsqueeze(-1)).sum(-2)


@CORPUS.case("missing_output")
def many_queries_at_once(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    queries = torch.stack([q, k.sin()], -2)
    return S, torch.einsum("bhvk,bhjk->bhjv", S, queries)


@CORPUS.case("missing_output")
def output_repeated_in_a_new_axis(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    return S, (S.unsqueeze(-1).expand(-1, -1, -1, -1, 4) * q[:, :, None, :, None]).sum(-2)


@CORPUS.case("missing_output")
def output_squared(S, q, k, v, g, beta):
    S, _ = plain_step(S, q, k, v, g, beta)
    return S, (S.square() * q.unsqueeze(-2)).sum(-1)


@CORPUS.case("depends_on_output")
@looks_around
def query_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q + outs[-1].mean(-1, keepdim=True) if outs else q, k, v, g, beta)


@CORPUS.case("depends_on_output")
@looks_around
def value_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q, k, (v * outs[-1]).relu() if outs else v, g, beta)


@CORPUS.case("depends_on_output")
@looks_around
def key_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q, (k + outs[-1].mean(-1, keepdim=True)).tanh() if outs else k, v, g, beta)


@CORPUS.case("depends_on_output")
@looks_around
def decay_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q, k, v, g - outs[-1].mean(-1, keepdim=True).square() if outs else g, beta)


@CORPUS.case("depends_on_output")
@looks_around
def step_size_depends_on_an_earlier_output(S, q, k, v, g, beta, t, window, outs):
    return plain_step(S, q, k, v, g, (beta + outs[-1].mean(-1)).sigmoid() if outs else beta)


# --- the states and their selection ---


CORPUS.after("state_returned", "state_escapes", finish=lambda states, n: (select(states, n), states[:, 0] * 1))
CORPUS.after("all_states_returned", "state_escapes", finish=lambda states, n: (select(states, n), states))
CORPUS.after("states_only_returned", "no_selection", finish=lambda s, n: (torch.zeros(s.shape[0], *s.shape[2:]), s))
CORPUS.after("states_selected_twice", "state_escapes", finish=lambda s, n: (select(s, n), select(s, n.flip(0))))
CORPUS.after("last_state_returned_too", "state_escapes", finish=lambda s, n: (select(s, n), s[:, -1] + 1))
CORPUS.after("always_the_last_state", "no_selection", finish=lambda s, n: s[:, -1])
CORPUS.after("mean_of_states", "no_selection", finish=lambda s, n: s.mean(1))
CORPUS.after(
    "masked_sum_of_states", "no_selection", finish=lambda s, n: (s * (n[:, None] == 1)[..., None, None, None]).sum(1)
)


def per_head_position(states, n):
    rows, heads = torch.arange(B)[:, None], torch.arange(H)
    return states[rows, (n[:, None] + heads) % T, heads]


def per_value_position(states, n):
    index = ((n[:, None] + torch.arange(V)) % T).view(B, 1, 1, V, 1).expand(-1, -1, H, -1, K)
    return states.gather(1, index).squeeze(1)


CORPUS.after("position_per_row_and_head", "selection_not_per_row", finish=per_head_position)
CORPUS.after("position_per_row_and_value_channel", "selection_not_per_row", finish=per_value_position)
CORPUS.after(
    "rows_exchanged_by_the_selection",
    "selection_not_per_row",
    finish=lambda s, n: s[torch.tensor([2, 0, 1]), n - 1],
)
CORPUS.after("rows_looked_up", "selection_not_per_row", finish=lambda s, n: s[n - 1, n - 1])
CORPUS.after("shifted_rows", "selection_not_per_row", finish=lambda s, n: s.roll(1, 0)[torch.arange(B), n - 1])


def same_position_repeated(states, n):
    """[B, 4, H, V, K]: one position a row, in a new axis that nothing varies with."""
    chosen = states[torch.arange(B)[:, None], (n - 1)[:, None].expand(-1, 4)]
    return chosen[:, 3] * 1


CORPUS.after("selection_in_a_new_axis", "selection_not_per_row", finish=same_position_repeated)


def part_of_the_heads(states, n):
    index = (n - 1).view(B, 1, 1, 1, 1).expand(-1, 1, 1, V, K)
    return states.gather(1, index).squeeze(1).expand(-1, H, -1, -1)


CORPUS.after("selection_of_a_part_of_the_heads", "selection_not_per_row", finish=part_of_the_heads)


@CORPUS.whole("stored_per_position")
def a_slot_for_every_position(pool, slots, q, k, v, g, beta, n):
    """As engines with a slot for each position have it: the next step begins with the state at ``num_accepted - 1``."""
    wide = pool.repeat(T, 1, 1, 1)
    table = slots[:, None] * T + torch.arange(T)
    S, outs, states = wide[table[torch.arange(B), n - 1]], [], []
    for t in range(T):
        S, o = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o)
        states.append(S)
    wide[table] = torch.stack(states, 1)
    return torch.stack(outs, 1), wide


@CORPUS.whole("state_escapes")
def selected_and_summed_elsewhere(pool, slots, q, k, v, g, beta, n):
    """One-hot weights beside another sum over the same states."""
    S, states = pool[slots], []
    for t in range(T):
        S, _ = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        states.append(S)
    whole = torch.stack(states, 1)
    pool[slots] = torch.einsum("bt,bthvk->bhvk", torch.nn.functional.one_hot(n - 1, T).float(), whole)
    return whole.sum(1)


@CORPUS.whole("no_selection")
def weights_that_are_not_one_hot(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots], [], []
    for t in range(T):
        S, o = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o)
        states.append(S)
    weights = (torch.arange(T) < n[:, None]).float()
    pool[slots] = torch.einsum("bt,bthvk->bhvk", weights, torch.stack(states, 1))
    return torch.stack(outs, 1)


@CORPUS.whole("selection_not_per_row", lambda: make_inputs(H=3))
def chosen_per_head_by_conditions(pool, slots, q, k, v, g, beta, n):
    S, outs, states = pool[slots], [], []
    for t in range(T):
        S, o = plain_step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
        outs.append(o)
        states.append(S)
    row = torch.where((n > 1).view(-1, 1, 1, 1), states[1], states[0])
    pool[slots] = torch.where((n > 2).view(1, -1, 1, 1), states[2], row)
    return torch.stack(outs, 1)


@pytest.mark.parametrize(("name", "dynamic"), CORPUS.parameters(), ids=kind)
def test_b29_look_alike_is_left_alone(name, dynamic):
    check_left_alone(*CORPUS[name], dynamic)
