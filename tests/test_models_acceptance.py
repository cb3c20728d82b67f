"""Acceptance: the greedy rule, forced drafts, and sampling that loses nothing."""

import itertools

import pytest
import torch

from models.acceptance import accept

VOCAB = 7


def run(logits, window, num_drafts, num_forced=None, temperature=0.0, uniform=None, exponential=None):
    B, T = window.shape
    num_drafts = torch.as_tensor(num_drafts)
    return accept(
        logits,
        window,
        num_drafts,
        torch.zeros(B, dtype=torch.int64) if num_forced is None else torch.as_tensor(num_forced),
        torch.full((B,), temperature),
        torch.zeros(B, T) if uniform is None else uniform,
        torch.ones(B, logits.shape[-1]) if exponential is None else exponential,
    )


def greedy_by_hand(best, window, num_drafts, num_forced):
    """The rule in scalar code: walk the drafts until one is wrong."""
    emitted = []
    for i in range(num_drafts):
        draft = window[i + 1]
        if i >= num_forced and draft != best[i]:
            break
        emitted.append(draft)
    return [*emitted, best[len(emitted)]]


@pytest.mark.parametrize("seed", range(3))
def test_greedy_rule(seed):
    generator = torch.Generator().manual_seed(seed)
    B, T = 400, 5
    # Two tokens only: every prefix of matches is common.
    logits = torch.randn(B, T, 2, generator=generator)
    window = torch.randint(2, (B, T), generator=generator)
    num_drafts = torch.randint(T, (B,), generator=generator)
    num_forced = (torch.rand(B, generator=generator) * (num_drafts + 1)).long()
    tokens, num_accepted = run(logits, window, num_drafts, num_forced)
    best = logits.argmax(-1).tolist()
    seen = set()
    for b in range(B):
        expected = greedy_by_hand(best[b], window[b].tolist(), num_drafts[b].item(), num_forced[b].item())
        assert num_accepted[b] == len(expected)
        assert tokens[b].tolist() == expected + [-1] * (T - len(expected))
        seen.add(len(expected))
    assert seen == set(range(1, T + 1))


def test_padding_that_happens_to_match_is_not_accepted():
    logits = torch.zeros(1, 4, VOCAB)
    logits[..., 3] = 1.0
    window = torch.full((1, 4), 3)
    for num_drafts in range(4):
        tokens, num_accepted = run(logits, window, [num_drafts])
        assert num_accepted.item() == num_drafts + 1
        assert tokens[0].tolist() == [3] * (num_drafts + 1) + [-1] * (3 - num_drafts)


def emitted_distribution(p, drafts):
    """Exact distribution of the tokens one step emits, by integrating over the noise.

    The acceptance noise is enumerated: each draft is accepted on [0, p(d)), so one point of either side stands for its
    interval. The final token's conditional distribution is read off the code by its Gumbel scores, see below.
    """
    T = len(drafts) + 1
    logits = p.log().unsqueeze(0)
    window = torch.tensor([[0, *drafts]])
    distribution = {}
    for sides in itertools.product((True, False), repeat=T - 1):
        uniform, weight = torch.zeros(1, T), 1.0
        for i, accepted in enumerate(sides):
            probability = p[i, drafts[i]].item()
            uniform[0, i] = probability / 2 if accepted else (1 + probability) / 2
            weight *= probability if accepted else 1 - probability
        # With exponential noise e the code returns argmax p'(x) / e(x). Token x wins against y while e(x)/e(y) is below
        # p'(x)/p'(y); bisecting that threshold for every x against a reference recovers p' without knowing it.
        final = final_distribution(logits, window, T - 1, uniform)
        tokens, num_accepted = run(logits, window, [T - 1], temperature=1.0, uniform=uniform)
        prefix = tuple(tokens[0, : num_accepted.item() - 1].tolist())
        for token, probability in enumerate(final):
            key = (*prefix, token)
            distribution[key] = distribution.get(key, 0.0) + weight * probability
    return distribution


def final_distribution(logits, window, num_drafts, uniform):
    B = VOCAB
    wide = [x.expand(B, *x.shape[1:]) for x in (logits, window, uniform)]

    def last_token(exponential):
        tokens, n = run(wide[0], wide[1], [num_drafts] * B, temperature=1.0, uniform=wide[2], exponential=exponential)
        return tokens[torch.arange(B), n - 1]

    # The others are silenced by huge noise; the reference is whatever wins with equal noise.
    reference = last_token(torch.ones(B, VOCAB))[0]
    low, high = torch.full((B,), -30.0), torch.full((B,), 30.0)
    for _ in range(60):
        middle = (low + high) / 2
        exponential = torch.full((B, VOCAB), 1e30)
        exponential[:, reference] = 1.0
        exponential[torch.arange(B), torch.arange(B)] = middle.exp()
        wins = last_token(exponential) == torch.arange(B)
        low, high = torch.where(wins, middle, low), torch.where(wins, high, middle)
    ratio = low.exp()
    ratio[reference] = 1.0
    ratio[ratio < 1e-12] = 0.0
    return (ratio / ratio.sum()).tolist()


@pytest.mark.parametrize("drafts", [(2,), (2, 5), (0, 0, 6)], ids=str)
def test_sampling_is_lossless_by_exact_enumeration(drafts):
    torch.manual_seed(len(drafts))
    T = len(drafts) + 1
    # Position t's distribution, given that all drafts before it were accepted: all that one step can depend on.
    p = torch.randn(T, VOCAB).softmax(-1)
    emitted = emitted_distribution(p, drafts)
    # Plain sampling emits x with p[0, x] first; and where it followed the drafts so far, x with p[i, x] next.
    for i in range(T):
        reach = 1.0
        for j in range(i):
            reach *= p[j, drafts[j]].item()
        for token in range(VOCAB):
            prefix = (*drafts[:i], token)
            mass = sum(weight for key, weight in emitted.items() if key[: i + 1] == prefix)
            assert mass == pytest.approx(reach * p[i, token].item(), abs=1e-5)
    assert sum(emitted.values()) == pytest.approx(1.0, abs=1e-5)


def test_sampling_is_lossless_by_chi_square():
    """The real noise, end to end: the first emitted token's counts against p, whatever the draft was."""
    N, temperature = 60_000, 0.7
    generator = torch.Generator().manual_seed(11)
    logits = torch.randn(2, VOCAB, generator=generator)
    p = (logits[0] / temperature).softmax(-1)
    for draft in (p.argmax().item(), p.argmin().item()):
        window = torch.tensor([[0, draft]]).expand(N, 2)
        uniform = torch.rand(N, 2, generator=generator)
        exponential = torch.empty(N, VOCAB).exponential_(generator=generator)
        tokens, num_accepted = run(logits.expand(N, 2, VOCAB), window, [1] * N, None, temperature, uniform, exponential)
        counts = tokens[:, 0].bincount(minlength=VOCAB)
        statistic = ((counts - N * p).square() / (N * p)).sum().item()
        assert statistic < 22.5  # the 99.9 % quantile of chi-square with 6 degrees of freedom
        # A draft is accepted exactly as often as plain sampling would have drawn it, up to five standard deviations.
        share = (num_accepted == 2).double().mean().item()
        q = p[draft].item()
        assert abs(share - q) < 5 * (q * (1 - q) / N) ** 0.5


def test_rejected_draft_is_never_drawn_again():
    logits = torch.full((1, 2, VOCAB), -50.0)
    logits[..., 4] = 50.0  # p(4) is 1 in float32, yet noise above it is possible in principle
    tokens, num_accepted = run(
        logits, torch.tensor([[0, 4]]), [1], temperature=1.0, uniform=torch.full((1, 2), 1.0), exponential=None
    )
    assert num_accepted.item() == 1
    assert tokens[0, 0] not in (4, -1)


def test_rows_mix_greedy_and_sampling():
    torch.manual_seed(0)
    logits = torch.randn(2, 3, VOCAB)
    window = torch.tensor([[0, 1, 2], [0, 1, 2]])
    zeros = torch.zeros(2, dtype=torch.int64)
    exponential = torch.ones(2, VOCAB)
    exponential[:, 5] = 1e-20  # draws token 5 wherever noise is heard
    tokens, _ = accept(logits, window, zeros, zeros, torch.tensor([0.0, 1.0]), torch.zeros(2, 3), exponential)
    assert tokens[0, 0] == logits[0, 0].argmax() and logits[0, 0].argmax() != 5
    assert tokens[1, 0] == 5
