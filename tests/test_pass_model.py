"""The generic model of ``models/``: every KDA layer is rewritten, and speculative text stays plain decoding's text."""

import pytest
import torch
from rewriting import compile_rewritten, verify_calls

from compile_passes import explain
from models.config import KDAConfig
from models.decode import decode, example_inputs
from models.model import KDAForCausalLM
from models.pools import Pools
from models.speculation import SpeculativeStep

TINY = dict(vocab_size=256, hidden_size=24, num_heads=2, head_k_dim=8, head_v_dim=6, gate_rank=4, intermediate_size=16)
FOLDED = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel")


def speculative_step(seed=0, slots=3, **config) -> SpeculativeStep:
    torch.manual_seed(seed)
    model = KDAForCausalLM(KDAConfig(**{**TINY, **config})).eval()
    for p in model.parameters():
        p.data.mul_(3)  # logits far enough apart that rounding decides no token
    pools = Pools(model.config, slots, 64)
    return SpeculativeStep(model, pools).requires_grad_(False)


def test_explain_finds_every_kda_layer():
    report = explain(speculative_step(), *example_inputs(3, 3, 256, "cpu"))
    assert [(layer.reason, layer.form) for layer in report.layers] == [(None, "commit")] * 3


@pytest.mark.parametrize(("lower_bound", "num_drafts"), [(-5.0, 1), (None, 2)], ids=["bounded", "unbounded"])
def test_every_kda_layer_is_rewritten_with_everything_folded(lower_bound, num_drafts):
    step = speculative_step(lower_bound=lower_bound)
    torch._dynamo.reset()
    compiled, seen = compile_rewritten(step)
    with torch.no_grad():
        compiled(*example_inputs(3, num_drafts, 256, "cpu"))
    assert [(layer.reason, layer.form) for layer in seen.report.layers] == [(None, "commit")] * 3
    found = verify_calls(seen.graph)
    assert len(found) == 3
    for call in found:
        assert all(call[flag] for flag in FOLDED), {flag: call[flag] for flag in FOLDED}
        assert call["lower_bound"] == (lower_bound or 0.0) and call["scale"] == pytest.approx(8**-0.5)
        assert call["state"].op == "placeholder"


def test_plain_decoding_has_nothing_to_rewrite():
    report = explain(speculative_step(), *example_inputs(3, 0, 256, "cpu"))
    assert report.layers == []


def guessing(right: bytes, prompt: bytes, pattern):
    """Drafts the text to come, up to a mistake whose place the pattern gives."""
    places = iter(pattern)

    def draft(text: bytearray, n: int) -> bytes:
        at = len(text) - len(prompt)
        guess = bytearray(right[at : at + n])
        place = next(places, n)
        if place < len(guess):
            guess[place] = (guess[place] + 1) % 256
        return bytes(guess)

    return draft


@pytest.mark.parametrize(
    ("seed", "pattern", "config"),
    [
        (0, [0, 1, 2, 3, 0, 2], {}),
        (1, [3, 3, 3, 0, 0, 0, 1], {"lower_bound": None}),
        (2, [1, 2, 0] * 4, {"num_layers": 2, "full_attn_period": 0, "num_heads": 3, "head_v_dim": 8}),
    ],
)
def test_speculative_text_equals_plain_text(seed, pattern, config):
    step = speculative_step(seed, slots=1, **config)
    prompt = b"states of linear attention"
    plain = decode(step, step.pools, [prompt], num_tokens=14, num_drafts=0)
    plain_pools = {name: buffer.clone() for name, buffer in step.pools.named_buffers()}
    (right,) = plain.continuations

    torch._dynamo.reset()
    compiled, seen = compile_rewritten(step)
    drafter = guessing(right, prompt, pattern)
    speculative = decode(compiled, step.pools, [prompt], num_tokens=14, num_drafts=3, drafter=drafter)
    assert seen.report.matched == sum(not step.model.config.is_full_attention(i) for i in range(len(step.model.layers)))
    assert seen.report.refused == 0 and len(seen.graphs) == 1
    assert speculative.continuations == plain.continuations
    assert min(speculative.emitted) < max(speculative.emitted)  # some drafts were kept and some were not
    for name, buffer in step.pools.named_buffers():
        if name.startswith("recurrent"):
            torch.testing.assert_close(buffer, plain_pools[name], rtol=1e-4, atol=1e-5)


def test_prompt_chunks_and_ragged_rows_share_the_graph():
    step = speculative_step(3)
    prompts = [b"a", b"some text", b"a somewhat longer prompt to read"]
    plain = decode(step, step.pools, prompts, num_tokens=8, num_drafts=0)
    torch._dynamo.reset()
    compiled, seen = compile_rewritten(step)
    speculative = decode(compiled, step.pools, prompts, num_tokens=8, num_drafts=2)
    assert speculative.continuations == plain.continuations
    assert [report.matched for report in seen.reports] == [3]
