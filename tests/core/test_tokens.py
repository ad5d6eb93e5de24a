"""Log-probs, sampling and positions of tokens."""

import pytest
import torch

from flowgrpo_rc.core.random import uniform
from flowgrpo_rc.core.tokens import positions, sample_tokens, token_log_probs, until_end


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_log_probs_are_those_of_log_softmax(temperature: float, dtype: torch.dtype) -> None:
    logits = (5 * torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0))).to(dtype)
    ids = torch.tensor([[0, 10, 4], [3, 3, 9]])
    wanted = (logits.double() / temperature).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    actual = token_log_probs(logits, ids, temperature)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_sampled_frequencies_are_the_probabilities(temperature: float) -> None:
    """Chi-squared over 9 tokens, 8 degrees of freedom: it exceeds 26 once in a thousand times."""
    logits = torch.randn(9, generator=torch.Generator().manual_seed(3))
    count = 20_000
    uniforms = uniform((count,), [1], "test")[0]
    ids = sample_tokens(logits.expand(count, -1), uniforms, temperature)
    wanted = count * (logits / temperature).softmax(-1).double()
    actual = torch.bincount(ids, minlength=9).double()
    assert (((actual - wanted) ** 2) / wanted).sum() < 26


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_token_without_probability_is_never_sampled(dtype: torch.dtype) -> None:
    one = torch.tensor(1.0, dtype=dtype)
    below = torch.nextafter(one, torch.zeros((), dtype=dtype))
    rows = [
        [-torch.inf, 1.0, -torch.inf],
        [-torch.inf, -torch.inf, 2.0],
        [0.0, -torch.inf, -torch.inf],
    ]
    rows += [[-200.0, 0.0, -200.0], [-torch.inf, 0.1, -300.0]]  # in fp32, too little to be anything
    for number in (torch.zeros((), dtype=dtype), torch.tensor(0.5, dtype=dtype), below):
        ids = sample_tokens(torch.tensor(rows), number.expand(len(rows)), 1.0)
        assert ids.tolist() == [1, 2, 0, 1, 1]


def test_the_extremes_of_a_large_vocabulary() -> None:
    logits = torch.randn(2, 50_000, generator=torch.Generator().manual_seed(0))
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    assert sample_tokens(logits, ends, 1.0).tolist() == [0, 49_999]


def test_positions_and_ends() -> None:
    assert positions(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]]).bool()).tolist() == [
        [0, 0, 0, 1],
        [0, 1, 2, 2],
    ]
    ids = torch.tensor([[4, 1, 0, 0], [1, 1, 5, 1], [4, 4, 4, 4], [4, 6, 1, 0]])
    wanted = [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0]]
    assert until_end(ids, torch.tensor([1, 6])).tolist() == [
        [bool(x) for x in row] for row in wanted
    ]
