"""Speculative decoding equals plain decoding, whatever was drafted.

Behaviours 6, 12 and 13 are failures that public bug reports of other projects describe; the tests carry their numbers.
"""

import ast
import dataclasses
import functools
import itertools
from pathlib import Path

import pytest
import torch

import models
from models.config import KDAConfig
from models.decode import decode, example_inputs
from models.model import KDAForCausalLM
from models.pools import Pools
from models.speculation import SpeculativeStep

VOCAB = 17
DRAFTS = 5
TINY = KDAConfig(
    vocab_size=VOCAB,
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    head_k_dim=6,
    head_v_dim=10,
    gate_rank=4,
    intermediate_size=24,
    # A tied head would prefer the token just read, and greedy text would repeat it for ever.
    tie_word_embeddings=False,
    max_length=64,
)


@functools.lru_cache
def random_model(seed, **changes):
    """Weights far from the start of training, so that greedy text wanders instead of repeating one token."""
    torch.manual_seed(seed)
    model = KDAForCausalLM(dataclasses.replace(TINY, **changes)).double().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "conv1d" not in name:
            parameter.normal_(std=1.0 if "embed" in name else parameter.shape[1] ** -0.5)
    return model


def random_prompts(seed, lengths):
    generator = torch.Generator().manual_seed(seed)
    return [bytes(torch.randint(VOCAB, (n,), generator=generator).tolist()) for n in lengths]


def new_step(model, batch, **options):
    return SpeculativeStep(model, Pools(model.config, batch, 64, dtype=torch.float64, **options))


def generate(model, prompts, num_tokens=20, num_drafts=DRAFTS, drafter=None, **options):
    step = new_step(model, len(prompts))
    keywords = {} if drafter is None else {"drafter": drafter}
    return decode(
        step,
        step.pools,
        prompts,
        num_tokens=num_tokens,
        num_drafts=num_drafts,
        vocab_size=VOCAB,
        **keywords,
        **options,
    )


@functools.lru_cache
def plain_text(model, prompt, num_tokens):
    return generate(model, [prompt], num_tokens, num_drafts=0).continuations[0]


def plain_texts(model, prompts, num_tokens=20):
    """Each prompt decoded alone, token by token: no batch, no window."""
    return [plain_text(model, prompt, num_tokens) for prompt in prompts]


def feed(step, window, num_drafts, num_forced, positions, slots):
    """One greedy step from Python lists."""
    batch, T = len(window), len(window[0])
    integers = (torch.tensor(x) for x in (window, num_drafts, num_forced, positions, slots))
    return step(*integers, torch.zeros(batch), torch.zeros(batch, T), torch.ones(batch, VOCAB))


class Oracle:
    """Knows the plain text, and drafts from it as ``distort(right drafts, call number)`` says."""

    def __init__(self, prompts, texts, distort):
        self.full = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
        self.distort, self.calls = distort, itertools.count()

    def __call__(self, text, n):
        if n < 1:
            return b""
        for full in self.full:
            if full.startswith(text):
                return bytes(self.distort(full[len(text) : len(text) + n], next(self.calls)))[:n]
        raise AssertionError("the decoded text left the plain one")


def wrong(token):
    return (token + 1) % VOCAB


DISTORTIONS = {
    "right": lambda right, call: right,
    "wrong": lambda right, call: [wrong(t) for t in right],
    "half-right": lambda right, call: [t if i < len(right) // 2 else wrong(t) for i, t in enumerate(right)],
    "right-but-for-the-first": lambda right, call: [wrong(t) if i == 0 else t for i, t in enumerate(right)],
    "one-wrong-in-turn": lambda right, call: [wrong(t) if i == call % DRAFTS else t for i, t in enumerate(right)],
    "none": lambda right, call: b"",
    "growing-counts": lambda right, call: right[: call % (DRAFTS + 1)],
    "nothing-after-everything": lambda right, call: right if call % 2 else b"",
}


@pytest.mark.parametrize("lower_bound", [-5.0, None], ids=["bounded", "unbounded"])
@pytest.mark.parametrize("rejected", range(1, DRAFTS + 2))
def test_behaviour_6_reject_at_every_position_rolls_conv_and_state_back_alike(rejected, lower_bound):
    """After a rejection the conv history and the recurrent state both equal plain decoding's; so does the KV cache."""
    model = random_model(rejected, lower_bound=lower_bound)
    prompt = random_prompts(rejected, [7])[0]
    text = prompt + plain_texts(model, [prompt])[0]
    step, plain = new_step(model, 2), new_step(model, 1)
    slot = 1
    # The prompt but for its last token, then a window whose draft number `rejected` is wrong (the last run: none is).
    feed(step, [[*prompt[:6]]], [5], [5], [0], [slot])
    drafts = list(text[7 : 7 + DRAFTS])
    if rejected <= DRAFTS:
        drafts[rejected - 1] = wrong(drafts[rejected - 1])
    tokens, num_accepted = feed(step, [[text[6], *drafts]], [DRAFTS], [0], [6], [slot])
    assert num_accepted.item() == rejected
    assert tokens[0, :rejected].tolist() == list(text[7 : 7 + rejected])
    committed = 6 + rejected
    for i in range(committed):
        feed(plain, [[text[i]]], [0], [0], [i], [0])
    kinds = set()
    for name, expected in plain.pools.named_buffers():
        actual, expected = dict(step.pools.named_buffers())[name][slot], expected[0]
        kind = name.partition("_")[0]
        if kind in ("key", "value"):
            actual, expected = actual[:committed], expected[:committed]
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(
            actual, expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        kinds.add(kind)
    assert kinds == {"recurrent", "conv", "key", "value"}
    # The other slot was never named, hence never written.
    assert all(not buffer[0].any() for buffer in step.pools.buffers())


@pytest.mark.parametrize("distortion", DISTORTIONS)
def test_behaviour_12_any_alternation_of_draft_counts_equals_plain_decoding(distortion):
    """Adversarial drafters, ragged batch: token for token the text that each request gets alone."""
    model = random_model(1)
    prompts = random_prompts(2, [1, 4, DRAFTS, DRAFTS + 1, DRAFTS + 2, 13])
    texts = plain_texts(model, prompts)
    assert all(len(set(text)) > 3 for text in texts)
    decoded = generate(model, prompts, drafter=Oracle(prompts, texts, DISTORTIONS[distortion]))
    assert decoded.continuations == texts
    if distortion == "right":
        assert decoded.tokens_per_step > 4
    if distortion in ("wrong", "none", "right-but-for-the-first"):
        assert set(decoded.emitted) == {1}


@pytest.mark.parametrize("counts", list(itertools.product((0, 2, DRAFTS), repeat=3)), ids=str)
def test_behaviour_12_every_sequence_of_three_draft_counts(counts):
    """Rows without drafts after accepted drafts, and a whole batch that drafts nothing, in every order."""
    model = random_model(5)
    prompts = random_prompts(5, [3, 3])
    texts = plain_texts(model, prompts, 14)
    # Two requests a step: the calls of one step get one count.
    oracle = Oracle(prompts, texts, lambda right, call: right[: counts[call // 2 % 3]])
    assert generate(model, prompts, 14, drafter=oracle).continuations == texts


@pytest.mark.parametrize("seed", range(12))
def test_random_models_and_acceptance_patterns(seed):
    generator = torch.Generator().manual_seed(seed)

    def random_mix(right, call):
        flips = torch.rand(len(right), generator=generator) < 0.3
        count = int(torch.randint(len(right) + 1, (), generator=generator))
        return [wrong(t) if flip else t for t, flip in zip(right, flips.tolist(), strict=True)][:count]

    no_attention, unbounded = {"full_attn_period": 0, "num_layers": 2}, {"conv_size": 2, "lower_bound": None}
    changes = [{}, no_attention, {"num_kv_heads": 2}, unbounded]
    model = random_model(seed, **changes[seed % 4])
    lengths = torch.randint(1, 20, (1 + seed % 4,), generator=generator).tolist()
    prompts = random_prompts(seed, lengths)
    texts = plain_texts(model, prompts)
    assert generate(model, prompts, drafter=Oracle(prompts, texts, random_mix)).continuations == texts


@pytest.mark.parametrize("length", range(1, 2 * (DRAFTS + 1) + 2))
def test_behaviour_13_prompt_of_any_length_is_never_taken_for_drafts(length):
    """A prompt the model would not have written is kept, at lengths around one and two windows."""
    model = random_model(8)
    prompts = random_prompts(length, [length])
    assert generate(model, prompts).continuations == plain_texts(model, prompts)


def test_window_forward_reads_pools_only():
    model = random_model(0)
    step = new_step(model, 3)
    for buffer in step.pools.buffers():
        buffer.normal_()
    before = {name: buffer.clone() for name, buffer in step.pools.named_buffers()}
    inputs = example_inputs(2, DRAFTS, VOCAB, "cpu")
    model.window(inputs[0], inputs[3], inputs[4], step.pools)
    for name, buffer in step.pools.named_buffers():
        assert torch.equal(buffer, before[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_is_rounded_once_to_the_pools_dtype(dtype):
    model = random_model(3)
    low, high = new_step(model, 1, recurrent_dtype=dtype), new_step(model, 1)
    for step in (low, high):
        feed(step, [[3, 1, 4, 1, 5, 9]], [5], [5], [0], [0])
    for name, buffer in high.pools.named_buffers():
        if name.startswith("recurrent"):
            assert torch.equal(low.pools.get_buffer(name), buffer.to(dtype))


def test_sampled_text_has_the_models_distribution():
    """Three sampled tokens of many requests, likely and unlikely drafts, against the model's exact probabilities."""
    vocab, batch, temperature = 4, 4000, 1.3
    torch.manual_seed(4)
    model = KDAForCausalLM(dataclasses.replace(TINY, vocab_size=vocab)).double().eval().requires_grad_(False)
    model.embed_tokens.weight.normal_()
    model.lm_head.weight.normal_(std=0.3)
    prompt = b"\1\2\0\3\3"
    step = new_step(model, batch)
    decoded = decode(
        step,
        step.pools,
        [prompt] * batch,
        num_tokens=3,
        num_drafts=3,
        vocab_size=vocab,
        temperature=temperature,
        seed=7,
        drafter=lambda text, n: bytes([(len(text) + text[-1]) % vocab, 2, 0][: max(n, 0)]),
    )
    assert max(decoded.emitted) > 1, "no draft was ever accepted"
    continuations = list(itertools.product(range(vocab), repeat=3))
    sequences = torch.tensor([[*prompt, *c] for c in continuations])
    log_p = (model(sequences)[:, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    p = log_p.gather(-1, sequences[:, len(prompt) :, None]).sum((1, 2)).exp().double()
    assert p.sum() == pytest.approx(1.0, abs=1e-5)
    index = {bytes(c): i for i, c in enumerate(continuations)}
    counts = torch.tensor([index[c] for c in decoded.continuations]).bincount(minlength=len(p))
    expected = batch * p
    # Cells too rare for the approximation are pooled.
    rare = expected < 5
    statistic = ((counts - expected).square() / expected)[~rare].sum()
    if rare.any():
        statistic += (counts[rare].sum() - expected[rare].sum()).square() / expected[rare].sum()
    degrees = int((~rare).sum()) - 1 + int(rare.any())
    # Five standard deviations of chi-square; the seed is fixed.
    assert statistic < degrees + 5 * (2 * degrees) ** 0.5


def test_same_seed_same_sample():
    model, prompts = random_model(6), random_prompts(6, [3, 9])
    first, second, other = (generate(model, prompts, temperature=1.0, seed=seed).continuations for seed in (1, 1, 2))
    assert first == second != other


def test_step_is_one_graph_and_acceptance_recompiles_nothing():
    torch.compiler.reset()
    graphs = []

    def backend(graph, example):
        graphs.append(graph)
        return graph.forward

    model, prompts = random_model(1), random_prompts(2, [1, 4, 9])
    texts = plain_texts(model, prompts)
    step = new_step(model, 3)
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    oracle = Oracle(prompts, texts, DISTORTIONS["one-wrong-in-turn"])
    decoded = decode(compiled, step.pools, prompts, num_tokens=20, num_drafts=DRAFTS, vocab_size=VOCAB, drafter=oracle)
    assert decoded.continuations == texts
    assert len(set(decoded.emitted)) > 2
    assert len(graphs) == 1


def test_decode_refuses_what_does_not_fit():
    model = random_model(0)
    with pytest.raises(ValueError, match="an empty one"):
        generate(model, [b"\1", b""])
    with pytest.raises(ValueError, match="need 66 positions, the pools hold 64"):
        generate(model, [b"\1" * 40])


def test_model_and_loop_import_nothing_of_this_project_but_themselves():
    root = Path(models.__file__).parent
    users = set()
    for path in root.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in getattr(node, "names", [])]
            if any(str(name).split(".")[0] in ("recoverssm_ops", "compile_passes") for name in names):
                users.add(path.name)
    assert users == {"generate.py"}
