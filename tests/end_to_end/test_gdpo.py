"""Training with each reward normalised alone: what is divided, what it cannot be combined with,
saved rollouts.
"""

from __future__ import annotations

import pytest
from support.runs import read_rows

HERE = __name__
GDPO = "algorithm.adv_estimator=gdpo"


def left(image, prompt):
    return float(image[:, :4].mean())


def test_two_rewards_of_any_scale_train_and_saved_ones_must_be_there(train, tmp_path, capsys):
    two = (
        GDPO,
        "reward.terms.jpeg.weight=1e3",
        f"+reward.terms.left={{_target_: function, path: '{HERE}:left'}}",
    )
    assert train(*two, "trainer.save_rollouts=true") == 0
    rows = read_rows(tmp_path / "run")
    assert {"reward/jpeg", "reward/left"} <= rows[1].keys()
    assert rows[1]["advantages/std"] == pytest.approx(1, abs=1e-3)
    assert rows[1]["advantages/mean"] == pytest.approx(0, abs=1e-9)
    page = (tmp_path / "run" / "report.html").read_text()
    assert all(f"<b>{name}</b>" in page for name in ("reward/jpeg", "reward/left"))
    replay = f"data.replay_dir={tmp_path / 'run'}"
    assert train(*two, replay, f"trainer.output_dir={tmp_path / 'again'}") == 0
    again = read_rows(tmp_path / "again")
    assert [row.get("advantages/max") for row in again] == [
        row.get("advantages/max") for row in rows
    ]
    other = f"+reward.terms.other={{_target_: function, path: '{HERE}:left'}}"
    assert train(GDPO, replay, other, f"trainer.output_dir={tmp_path / 'third'}") == 2
    assert (
        "has no reward 'other', and algorithm.adv_estimator=gdpo needs each"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize("setting", ["norm_adv_by_std_in_grpo=true", "global_std=false"])
def test_what_has_no_effect_is_refused(setting, train, capsys):
    assert train(GDPO, f"algorithm.{setting}") == 2
    assert "has no effect with algorithm.adv_estimator=gdpo" in capsys.readouterr().err
