"""Prefix cache: published states are those after exactly so many tokens, never change, and continue identically.

The numbered behaviours are failures that public bug reports of other projects describe.
"""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import same_bits
from serving import BLOCK, WINDOW, Oracle, assert_same_state, build, poison, serve, solo_on, state_after, tokens

from models.config import KDAConfig
from models.pools import Pools
from models.prefix_cache import PrefixCache
from models.request_state import RequestState
from models.requests import Request
from models.scheduler import RandomPreemption
from models.soak import AdversarialDrafter, random_prompts, random_requests
from models.workload import arriving, serve_all


def copies(cache):
    return {key: {name: tensor.clone() for name, tensor in block.items()} for key, block in cache.contents().items()}


def in_order(cache, text, length):
    """The cached state after ``length`` tokens, put together as a request would get it."""
    keys = cache.keys(text, length)
    blocks = [cache.contents()[key] for key in keys]
    state = {}
    for name in blocks[0]:
        growing = name.partition("_")[0] in ("key", "value")
        state[name] = torch.cat([block[name] for block in blocks]) if growing else blocks[-1][name]
    return state


@pytest.mark.parametrize("kind", ["all-right", "all-wrong", "random"])
def test_behaviour_19_a_published_state_is_that_after_exactly_so_many_tokens(kind):
    """At every boundary of prompt and generated text, whatever the windows before it accepted."""
    request, generator = Request(tokens(5, 2 * BLOCK + 3), 3 * BLOCK), random.Random(0)
    distortions = {
        "all-right": lambda right, call: right,
        "all-wrong": lambda right, call: [(token + 1) % 17 for token in right],
        "random": lambda right, call: [t if generator.random() < 0.7 else (t + 1) % 17 for t in right],
    }
    engine = build(drafter=Oracle([request], solo_on("cpu"), distortions[kind]))
    serve(engine, [request])
    reached = request.committed // BLOCK * BLOCK
    assert reached == 5 * BLOCK
    for length in range(BLOCK, reached + 1, BLOCK):
        assert_same_state(in_order(engine.prefix_cache, request.text, length), state_after(request.text[:length]))


@pytest.mark.parametrize("blocks", [1, 3, 12, 60])
def test_behaviour_19_a_published_state_never_changes(blocks):
    """Bit for bit, as long as its key is there: under publishing, hits, eviction, preemption and reuse of slots."""
    generator, solo = random.Random(blocks), solo_on("cpu")
    prompts = random_prompts(12, 40, WINDOW, BLOCK, generator)
    texts = {prompt: solo.continuation(prompt, 16) for prompt in prompts}
    requests = random_requests(40, prompts, 16, generator)
    engine, published, seen = build(drafter=AdversarialDrafter(texts, generator), blocks=blocks), {}, 0
    publish = engine.prefix_cache.publish

    def publish_and_compare(*arguments):
        """After every single one: a key that is evicted and published again in between may differ by rounding."""
        nonlocal published, seen
        publish(*arguments)
        contents = engine.prefix_cache.contents()
        for key in published.keys() & contents.keys():
            for name, tensor in contents[key].items():
                assert same_bits(tensor, published[key][name]), name
                seen += 1
        published = copies(engine.prefix_cache)

    engine.prefix_cache.publish = publish_and_compare
    preemption = RandomPreemption(0.3, generator)
    serve_all(engine, arriving(requests, 0.5, generator), preemption=preemption, before_step=lambda: poison(engine))
    assert all(request.continuation == solo.expected(request) for request in requests)
    statistics = engine.prefix_cache.statistics
    assert seen > 100 and statistics.published > blocks // 2
    assert (statistics.evicted > 0) == (blocks < 60)
    assert len(engine.prefix_cache) == statistics.published - statistics.evicted <= blocks


def test_behaviour_20_what_is_copied_is_state_and_no_more():
    """Entries behind the committed length are a rejected window's: junk there changes no text, no copy, no block."""
    requests = [Request(tokens(i, 4 * i + 3), 20) for i in range(9)]
    generator = random.Random(1)
    texts = {request.prompt: solo_on("cpu").continuation(request.prompt, 20) for request in requests}
    engine = build(drafter=AdversarialDrafter(texts, generator), slots=3)
    preemption, copied = RandomPreemption(0.4, generator), []
    copy_out = engine.state.copy_out

    def spy(slot, length):
        copied.append((length, copy_out(slot, length)))
        return copied[-1][1]

    def junk():
        for request in engine.scheduler.running:
            for buffer in engine.state.cache.values():
                # Finite: attention weighs it with zero, and zero times NaN is not zero.
                buffer[request.slot, request.committed :] = 1e30
        while copied:
            length, saved = copied.pop()
            assert all(tensor.abs().max() < 1e6 for tensor in saved.tensors.values())
            assert {tensor.shape[0] for name, tensor in saved.tensors.items() if name[:3] in ("key", "val")} == {length}

    engine.state.copy_out = spy
    serve(engine, requests, preemption=preemption, before_step=junk)
    assert engine.statistics.copied_out > 3
    for block in engine.prefix_cache.contents().values():
        assert set(block) == {name for name, _ in engine.pools.named_buffers()}
        assert all(tensor.abs().max() < 1e6 for tensor in block.values())


@pytest.mark.parametrize("length", [BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 1, 3 * BLOCK + 5])
def test_a_hit_gives_the_identical_continuation(length):
    """The same prompt again, its longer relatives, and a prompt that goes on from the generated text."""
    engine = build(blocks=40)
    prompt = tokens(length, length)
    first = Request(prompt, 15)
    serve(engine, [first])
    assert first.restored_tokens == 0
    again = Request(prompt, 15)
    relative = Request(prompt + tokens(99, 4), 10)
    going_on = Request(bytes(first.text), 10)
    serve(engine, [again, relative, going_on])
    assert again.continuation == first.continuation
    # At least the last token of a prompt has to be run.
    assert again.restored_tokens == (length - 1) // BLOCK * BLOCK
    assert relative.restored_tokens == length // BLOCK * BLOCK
    assert going_on.restored_tokens == (length + 14) // BLOCK * BLOCK
    assert again.row_steps <= first.row_steps
    statistics = engine.prefix_cache.statistics
    assert statistics.lookups == 4 and statistics.hits == 3 - (length == BLOCK)
    assert statistics.hit_tokens == sum(r.restored_tokens for r in (again, relative, going_on))


def test_a_hit_skips_the_prefill():
    """One step a token and none for the prompt, of which all but the last token is there."""
    engine = build(blocks=40, drafter=lambda text, n: b"")
    prompt = tokens(1, 5 * BLOCK + 1)
    first, second = Request(prompt, 4), Request(prompt, 4)
    serve(engine, [first])
    known = engine.statistics.prefilled_tokens
    serve(engine, [second])
    # A block takes a whole window and the rest of the block; the prompt's last token begins to decode.
    assert (first.row_steps, second.row_steps) == (5 * 2 + 4, 4)
    assert known > 0 and engine.statistics.prefilled_tokens == known


def test_other_prompts_do_not_hit():
    engine = build(blocks=40)
    prompt = bytearray(tokens(1, 2 * BLOCK + 1))
    serve(engine, [Request(bytes(prompt), 4)])
    prompt[BLOCK - 1] = (prompt[BLOCK - 1] + 1) % 17
    other = Request(bytes(prompt), 4)
    serve(engine, [other])
    assert other.restored_tokens == 0


def test_windows_longer_than_a_block():
    """With blocks of two tokens every window ends early, at each boundary."""
    requests = [Request(tokens(i, 5 + i), 14) for i in range(3)]
    oracle = Oracle(requests, solo_on("cpu"), lambda right, call: right)
    engine = serve(build(drafter=oracle, block_size=2, blocks=60), requests)
    assert engine.prefix_cache.statistics.published > 3 * 7
    again = Request(requests[0].prompt, 14)
    serve(engine, [again])
    assert again.restored_tokens == 4


# The cache alone, over pools whose contents say which slot and length they stand for.

CONFIG = KDAConfig(hidden_size=4, num_layers=2, full_attn_period=2, num_heads=1, head_k_dim=2, head_v_dim=3)


def small_cache(blocks, block_size=2):
    pools = Pools(CONFIG, 3, 16)
    state = 4 * (2 * 3 + CONFIG.conv_dim * 3)
    block = state + 4 * 2 * 2 * block_size
    return pools, PrefixCache(pools, block_size, blocks * block + block - 1)


def test_the_arena_is_the_whole_blocks_within_the_budget():
    for blocks in (1, 2, 7):
        pools, cache = small_cache(blocks)
        assert cache.capacity == blocks
        pools_bytes = sum(buffer.numel() * 4 for name, buffer in pools.named_buffers() if name[0] in "rc")
        assert cache.nbytes == blocks * (pools_bytes // 3 + 32)
    with pytest.raises(ValueError, match="should hold at least one block, which takes 140 bytes"):
        small_cache(0)
    with pytest.raises(ValueError, match="block_size should be at least 1, got 0"):
        PrefixCache(pools, 0, 10**6)
    for length in (0, 1, 3):
        with pytest.raises(ValueError, match=f"published at multiples of 2 tokens, got {length}"):
            cache.publish(b"abcdef", length, 1)


def publish(pools, cache, text):
    """As an engine does: every boundary in turn, of a slot that holds a value made from the tokens so far."""
    for length in range(2, len(text) + 1, 2):
        value = float(int.from_bytes(text[:length], "big") % 99991)
        for name, buffer in pools.named_buffers():
            if name.partition("_")[0] in ("key", "value"):
                buffer[1, length - 2 : length] = value
            else:
                buffer[1] = value
        cache.publish(text, length, 1)


def restored(pools, cache, text):
    """Restore into another slot, check what it holds, return its length."""
    RequestState(pools).clear(2)
    length = cache.restore(text, 2)
    for name, buffer in pools.named_buffers():
        if name.partition("_")[0] in ("key", "value"):
            expected = [float(int.from_bytes(text[: i // 2 * 2 + 2], "big") % 99991) for i in range(length)]
            assert buffer[2, :, 0, 0].tolist() == expected + [0.0] * (16 - length)
        else:
            expected = float(int.from_bytes(text[:length], "big") % 99991)
            assert set(buffer[2].flatten().tolist()) == {expected}
    return length


def test_least_recently_used_goes_first():
    pools, cache = small_cache(4)
    publish(pools, cache, b"aabb")
    publish(pools, cache, b"ccdd")
    assert restored(pools, cache, b"aabb.") == 4
    publish(pools, cache, b"ee")  # in place of ccdd, whose prefix cc is older than aabb but needed by nobody else now
    assert restored(pools, cache, b"ccdd.") == 2
    assert restored(pools, cache, b"aabb.") == 4
    assert restored(pools, cache, b"ee.") == 2
    assert cache.statistics.evicted == 1


def test_a_text_longer_than_the_cache_keeps_its_beginning():
    pools, cache = small_cache(2)
    publish(pools, cache, b"aabbccdd")
    assert restored(pools, cache, b"aabbccdd.") == 4
    assert cache.statistics.skipped == 2 and cache.statistics.evicted == 0


def test_the_last_token_is_never_restored():
    pools, cache = small_cache(4)
    publish(pools, cache, b"aabb")
    assert [restored(pools, cache, b"aabb."[:n]) for n in range(1, 6)] == [0, 0, 2, 2, 4]


@settings(max_examples=60)
@given(
    st.integers(1, 6),
    st.lists(st.tuples(st.booleans(), st.lists(st.sampled_from([b"aa", b"ab", b"bc"]), max_size=5)), max_size=25),
)
def test_no_block_without_the_blocks_before_it(blocks, actions):
    """Any order of publishing and hits: what is found is right, and no block stands without its prefix."""
    pools, cache = small_cache(blocks)
    texts = {b"".join(pieces) for _, pieces in actions}
    for publishing, pieces in actions:
        text = b"".join(pieces)
        if publishing:
            publish(pools, cache, text)
        else:
            restored(pools, cache, text + b".")
        present = cache.contents()
        assert len(present) == len(cache) <= blocks
        places = {block["conv_0"].data_ptr() for block in present.values()}
        assert len(places) == len(present)
        for text in texts:
            found = [key in present for key in cache.keys(text, len(text))]
            assert found == sorted(found, reverse=True)
