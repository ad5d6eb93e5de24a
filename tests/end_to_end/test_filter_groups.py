"""Groups that are dropped and filled again: which prompts come, resuming, bounds."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.marks import slow_but
from support.runs import NFT, Train, final_state, read_rows, stopped_and_whole

from flowgrpo_rc.data.prompts import PromptSampler, read_prompts
from flowgrpo_rc.records.rollout_files import replay_files
from flowgrpo_rc.training.sources.filtered import FilteredSource
from flowgrpo_rc.training.sources.source import Collected

FILTER = "algorithm.filter_groups"
PICKY = (
    "reward.terms.jpeg=null",
    "+reward.terms.picky={_target_: function, path: 'support.prompts:picky'}",
    f"{FILTER}.enable=true",
)
RC = "algorithm.rollout_correction"
MODES = {
    "bypass": (f"{RC}.bypass_mode=true", f"{RC}.rollout_rs_threshold=auto:4"),
    "recomputed": (f"{RC}.rollout_is=token", f"{RC}.rollout_is_batch_normalize=true"),
    "nft": NFT,
}
EQUAL, FAILED = {"HELP", "TUV2"}, {"K9Q"}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[Collected]:
    """Notes what the trainer gets in each step."""
    found: list[Collected] = []
    collect = FilteredSource.collect

    def noted(self: FilteredSource, step: int) -> Collected:
        found.append(collect(self, step))
        return found[-1]

    monkeypatch.setattr(FilteredSource, "collect", noted)
    return found


@pytest.mark.slow
def test_the_prompts_that_come_next_take_the_places(
    train: Train, tmp_path: Path, prompt_file: Path, given: list[Collected]
) -> None:
    """A refill of K9Q alone has no reward at all, and the run goes on: a step counts as a whole."""
    assert train(*PICKY, "trainer.total_training_steps=4") == 0
    prompts = read_prompts(prompt_file, require_target=True)
    sampler = PromptSampler(prompts, 1, seed=42)
    stream = iter([str(sampler.step(place)[0].target) for place in range(100)])
    seeds: set[int] = set()
    for row, collected in zip(read_rows(tmp_path / "run")[1:], given, strict=True):
        # Slots are filled from the stream, as the page says.
        slots, dropped, refills = [next(stream) for _ in range(4)], [], 0
        while missing := [slot for slot, word in enumerate(slots) if word in EQUAL | FAILED]:
            dropped += [slots[slot] for slot in missing]
            for slot in missing:
                slots[slot] = next(stream)
            refills += 1
        assert [prompt.target for prompt in collected.shown.prompts[::2]] == slots
        assert collected.batch.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
        assert row["groups/dropped_failed"] == sum(word in FAILED for word in dropped)
        assert row["groups/dropped_equal"] == sum(word in EQUAL for word in dropped)
        assert (row["groups/refills"], row["groups/unfilled"]) == (refills, 0)
        assert row["reward/failed_fraction"] == 0
        # What is scored, shown and trained belongs together.
        totals = dict(zip(collected.batch.seed.tolist(), collected.rewards().total, strict=True))
        assert len(totals) == 8
        assert not seeds & totals.keys()
        seeds |= totals.keys()
        # Brightness is below 1.
        assert max(totals.values()) < 1
    assert any(row["groups/refills"] for row in read_rows(tmp_path / "run")[1:])


@pytest.mark.slow
def test_a_run_goes_on_behind_the_prompts_that_were_drawn(train: Train, tmp_path: Path) -> None:
    run = stopped_and_whole(train, tmp_path, *PICKY, "trainer.total_training_steps=3")
    _, state, rows = final_state(run)
    drawn = sum(row["groups/dropped_equal"] + row["groups/dropped_failed"] for row in rows[1:])
    assert state["source"] == {"further_prompts": drawn}
    assert drawn > 0


@pytest.mark.parametrize("mode", slow_but(["bypass"], MODES))
def test_steps_without_a_signal_take_no_update(train, tmp_path, given, caplog, mode) -> None:
    words = tmp_path / "equal.txt"
    words.write_text('"HELP"\n"TUV2"\n' * 2)
    settings = (*MODES[mode], f"{FILTER}.max_num_gen_batches=3", f"data.train_files={words}")
    saves = mode != "nft"
    assert train(*PICKY, *settings, f"trainer.save_rollouts={saves}") == 0
    if saves:  # a replay is refused unless all steps are there
        assert len(replay_files(tmp_path / "run", rank=0, count=1)) == 2
    for row in read_rows(tmp_path / "run")[1:]:
        counts = {name: row[f"groups/{name}"] for name in ("dropped_equal", "refills", "unfilled")}
        assert counts == {"dropped_equal": 8, "refills": 2, "unfilled": 4}
        assert "actor/grad_norm" not in row
    assert "step 2: no update" in caplog.text
    assert not any(one.teaches for one in given)
    _, state, _ = final_state(tmp_path / "run")
    assert state["update"]["updates"] == 0  # type: ignore[index]


@pytest.mark.slow
def test_what_is_missing_in_the_end_stays_beside_what_teaches(train: Train, tmp_path: Path) -> None:
    """Two batches do not fill each step of these prompts; its other groups are trained on."""
    bound = f"{FILTER}.max_num_gen_batches=2"
    assert train(*PICKY, bound, "trainer.total_training_steps=4") == 0
    rows = read_rows(tmp_path / "run")[1:]
    unfilled = [row for row in rows if row["groups/unfilled"]]
    assert unfilled
    assert all(row["actor/grad_norm"] > 0 for row in rows)
    for row in unfilled:
        assert row["zero_std_ratio"] == row["groups/unfilled"] / 4
