"""The table of a reward that is gamed holds the numbers of the run."""

from __future__ import annotations

import suite_table


def test_the_table_is_that_of_the_run() -> None:
    committed = suite_table.PAGE.read_text(encoding="utf-8")
    assert committed == suite_table.page(), "docs/reports.md is old: run `make reference`"


def test_what_the_page_concludes() -> None:
    rows = {row["step"]: row for row in suite_table.rows()}
    told = [step for step, row in rows.items() if "message" in row]
    assert len(told) == 1
    assert rows[told[0]]["suite/words/change_high"] < 0
    text = suite_table.PAGE.read_text(encoding="utf-8")
    assert f"The warning comes at step {told[0]}:" in text
    assert rows[told[0]]["message"].startswith("suite/words/change is")
