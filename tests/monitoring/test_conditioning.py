"""The recorded conditioning beside the trainer's own."""

from __future__ import annotations

import pytest
import torch

from flowgrpo_rc.batch import Conditioning
from flowgrpo_rc.monitoring.conditioning import difference

EMBEDS = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))


def test_equal_prompts_differ_by_nothing_whatever_their_padding() -> None:
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    longer = torch.cat([EMBEDS, torch.full((2, 2, 64), 9.0)], 1)
    padded = Conditioning(embeds=longer, mask=torch.cat([mask, torch.zeros(2, 2).bool()], 1))
    ours = Conditioning(embeds=torch.where(mask.unsqueeze(2), EMBEDS, -3.0), mask=mask)
    theirs = Conditioning(embeds=EMBEDS, mask=mask)
    assert difference(theirs, ours).tolist() == [0, 0]
    assert difference(padded, ours).tolist() == [0, 0]
    assert difference(ours, padded).tolist() == [0, 0]


def test_rounding_is_small_and_another_token_is_not() -> None:
    ours = Conditioning(embeds=EMBEDS)
    assert difference(Conditioning(embeds=EMBEDS.bfloat16().float()), ours).max() < 0.01
    changed = EMBEDS.clone()
    changed[1, 4] = EMBEDS[1, 0]
    found = difference(Conditioning(embeds=changed), ours)
    assert found[0] == 0
    assert found[1] > 1


def test_a_token_with_a_small_embedding_does_not_count_for_more() -> None:
    small = EMBEDS.clone()
    small[0, 2] = 0
    moved = small + 0.01
    found = difference(Conditioning(embeds=moved), Conditioning(embeds=small))
    assert found.max() == pytest.approx(0.01, rel=0.3)


def test_another_number_of_tokens_is_another_prompt() -> None:
    theirs = Conditioning(embeds=EMBEDS, mask=torch.tensor([[True] * 5, [True] * 4 + [False]]))
    assert difference(theirs, Conditioning(embeds=EMBEDS)).tolist() == [0, 1]
