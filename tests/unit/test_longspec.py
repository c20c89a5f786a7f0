"""LongSpec: a constant memory, parts of attention merged exactly, and what anchor offsets change. (Drafting computes what
training computes: test_heads.)"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from killed_run import assert_goes_on_exactly
from test_heads import TARGET, TEXT, packed
from test_methods import PROMPTS, serve, tokens
from test_train import CORPUS
from tiny_heads import random_head, random_heads
from tiny_pair import VOCAB

from outrider.core.errors import CompositionError, ModelError, OptionError
from outrider.core.interfaces import Context, Plan
from outrider.core.params import SamplingParams
from outrider.core.request import Request, RequestState
from outrider.core.rng import Noise
from outrider.core.sampling import Sampler
from outrider.drafters.heads.head_drafter import HeadState
from outrider.drafters.heads.longspec import LongSpec
from outrider.drafters.heads.token_window import TokenWindow
from outrider.methods import compose
from outrider.models.attention.parts import attend_part, merged
from outrider.models.decoder import Decoder
from outrider.models.heads.longspec import LongSpecHead
from outrider.models.random_decoder import tiny_config, tiny_weights
from outrider.train.loop import Settings, train
from outrider.train.objective import HeadObjective, HeadSettings


def new_head(**changes: int) -> LongSpecHead:
    head = random_head("longspec", **changes)
    assert isinstance(head, LongSpecHead)
    return head


def drafted(drafter: LongSpec, text: list[int]) -> HeadState:
    """The state after one round behind a text."""
    cache = TARGET.new_cache(1)
    TARGET.prefill([text[:-1]], cache)
    state = drafter.start([text], {})
    request = RequestState.of(Request(text, SamplingParams()))
    noise = Noise(torch.zeros(1).long(), torch.zeros(1).long())
    context = Context([text], Sampler([request], VOCAB, TARGET.device), noise, TARGET.device, cache)
    with torch.inference_mode():
        drafter.propose(state, context, Plan((3,), (6,)))
    return state


def test_what_the_draft_remembers_does_not_grow_with_the_context() -> None:
    drafter, sizes = LongSpec(new_head(draft_window=16)), []
    for length in (16, 64, 240):
        state = drafted(drafter, [token % VOCAB for token in range(length)])
        assert state.cache is None and state.window is not None
        sizes.append(state.window.num_bytes)
        assert all(part.untyped_storage().nbytes() == part.numel() * 4 for part in state.window.keys)  # no larger block behind
    assert len(set(sizes)) == 1 and sizes[0] == 2 * 16 * 2 * 8 * 4


def test_the_window_takes_the_same_bytes_behind_1k_and_32k_tokens() -> None:
    """All that the draft keeps is made from the text, so no target has to read it."""
    head, sizes = new_head(draft_window=512), set[int]()
    for length in (1024, 8192, 32768):
        window = TokenWindow.empty(head, 1, torch.float32, torch.device("cpu"))
        with torch.inference_mode():
            near = window.read(head, [[token % VOCAB for token in range(length)]], torch.float32)
        assert near.positions.tolist() == [[*range(length - 512, length)]]
        sizes.add(window.num_bytes)
    assert sizes == {2 * 512 * 2 * 8 * 4}


def test_parts_of_attention_are_merged_exactly() -> None:
    torch.manual_seed(0)
    queries, keys, values = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 11, 8), torch.randn(2, 2, 11, 8)
    sight = torch.rand(2, 3, 11) > 0.4
    sight[1, :, 6:] = False  # nothing to see in the second part of one row
    sight[:, :, 0] = True
    whole = attend_part(queries, keys, values, scale=0.3, sight=sight).seen
    cuts = [
        attend_part(queries, keys[:, :, part], values[:, :, part], scale=0.3, sight=sight[:, :, part])
        for part in (slice(0, 6), slice(6, 11))
    ]
    torch.testing.assert_close(merged(*cuts), whole, atol=1e-6, rtol=1e-5)
    blind = attend_part(queries, keys, values, scale=0.3, sight=torch.zeros_like(sight)).seen
    empty = attend_part(queries, keys[:, :, :0], values[:, :, :0], scale=0.3)
    assert not blind.any() and not empty.seen.any()
    wide = keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(queries, *wide, attn_mask=sight[:, None], scale=0.3)
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=1e-5)


def test_a_depth_sees_the_window_and_the_target_up_to_its_place() -> None:
    """Tokens far behind count through the target's cache alone; entries of the target behind a place do not count."""
    head, place = new_head(draft_window=3), 12
    batch = packed([TEXT], head.config.taps)
    tokens, features = batch.tokens.clone(), batch.features.clone()
    tokens[:, : place - 2] = 1
    features[:, place + 1 :] += 1
    with torch.no_grad():
        mine, other = next(head.depths(batch, 1)), next(head.depths(replace(batch, tokens=tokens, features=features), 1))
        torch.testing.assert_close(mine[:, place], other[:, place])
        features[:, 0] += 1
        moved = next(head.depths(replace(batch, features=features), 1))
    assert float((moved - mine)[:, place].abs().max()) > 1e-4


def test_anchor_offsets_move_only_the_distance_to_the_first_tokens() -> None:
    """Without sinks a common offset changes nothing, since rotations are relative; with some, they stand farther away."""
    head = new_head(max_offset=60)
    batch = packed([TEXT], head.config.taps)
    with torch.no_grad():
        plain = next(head.eval().depths(batch, 1))
        head.train()
        found = []
        for seed in range(12):
            torch.manual_seed(seed)
            sinks = int(torch.randint(5, ()))
            torch.manual_seed(seed)
            found.append((sinks, float((next(head.depths(batch, 1)) - plain)[:, 5:-1].abs().max())))
    assert {sinks > 0 for sinks, _ in found} == {True, False}
    assert all((moved > 1e-3) == (sinks > 0) for sinks, moved in found), found


def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    """With offsets from the random numbers."""

    def objective() -> HeadObjective:
        head = random_head("longspec", max_offset=60)
        head.freeze()
        return HeadObjective(head, TARGET, HeadSettings(num_depths=3))

    assert_goes_on_exactly(objective, tmp_path)
    with pytest.raises(OptionError, match="without store"):
        train([objective()], TARGET, CORPUS, tmp_path / "s", settings=Settings(max_steps=1, store=str(tmp_path / "store")))


def test_pages_are_read_as_blocks_are() -> None:
    """The same committed keys and values, whatever holds them."""
    config, rows = tiny_config(), [[1, 2, 3, 4, 5, 6], [7, 8], [9] * 11]
    found = []
    for page_len in (0, 4):
        model = Decoder(config, tiny_weights(config), page_len)
        cache = model.new_cache(3)
        model.prefill(rows, cache)
        found.append(cache.entries(1))
    for block, pages in zip(*found, strict=True):
        assert block.shape == pages.shape == (3, 2, 11, 8)
        for row, text in enumerate(rows):
            torch.testing.assert_close(block[row, :, : len(text)], pages[row, :, : len(text)])


def test_the_text_stays_with_pages_long_windows_and_short_ones(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, seed=5)
    expected = tokens(serve(TARGET, compose("plain", TARGET), PROMPTS, params))
    for window in (1, 300):
        folder = random_heads("longspec", tmp_path / str(window), draft_window=window)
        method = compose("longspec", TARGET, options={"heads": folder, "branching": "2,2,1"})
        assert tokens(serve(TARGET, method, PROMPTS, params, batch=4)) == expected


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ModelError, match="are not valid"):
        new_head(draft_window=0)
    with pytest.raises(ModelError, match="are not what medusa heads read"):
        random_head("medusa", taps=[TARGET.num_layers + 1])
    request = RequestState.of(Request(TEXT, SamplingParams()))
    noise = Noise(torch.zeros(1).long(), torch.zeros(1).long())
    context = Context([TEXT], Sampler([request], VOCAB, TARGET.device), noise, TARGET.device)
    with pytest.raises(CompositionError, match="fast=False"):
        LongSpec(new_head())._far(context)
