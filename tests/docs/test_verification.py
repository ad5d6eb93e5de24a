"""The page of what was verified: each family and recipe has its row, and the tests are there."""

from __future__ import annotations

import json

import pytest
import verification
from support.documented import ROOT
from support.tiny_models import TINY

from flowgrpo_rc.config.compose import config_folder
from flowgrpo_rc.models.base import adapters_by_pipeline
from flowgrpo_rc.rollout.vllm_omni_engine import PIPELINES

STORE = json.loads(verification.STORE.read_text(encoding="utf-8"))
RENEW = "docs/verification.json is old: run `make verification`, where torchvision is installed"
OWN_ENVIRONMENT = "vllm_omni"  # its tests are skipped where vLLM-Omni is not installed


def test_the_page_shows_what_is_kept() -> None:
    committed = verification.PAGE.read_text(encoding="utf-8")
    assert committed == "".join(verification.page(STORE)), "run `python docs/verification.py page`"


def test_every_family_has_a_row_and_every_recipe_is_counted() -> None:
    assert set(verification.FAMILIES) == {*adapters_by_pipeline(), "flux2_klein_edits", "causal_lm"}
    assert set(verification.CARD["families"]) <= set(verification.FAMILIES)
    page = verification.PAGE.read_text(encoding="utf-8")
    assert [name for name in verification.FAMILIES.values() if f"\n| {name} | " not in page] == []
    shipped = [*config_folder().glob("*.yaml"), *config_folder().glob("experiment/*.yaml")]
    names = {path.stem for path in shipped} - {"verl_omni"}
    composed = {verification.row_of(name, "composes") for name in STORE["composes"]["passed"]}
    assert composed - {None} == names, RENEW  # None: the defaults of verl-omni
    assert f"* **composes**, {len(names)} of {len(names)}: " in page


def test_what_is_kept_is_what_there_is_to_run(collected: frozenset[str]) -> None:
    """No test has gone, and no family has a test that the page does not know.

    Tests of one that needs a further package may have been skipped: its row says untested.
    """
    may_miss = {name for name, tiny in TINY.items() if tiny.packages}
    asked = {key: one["tests"] for key, one in verification.FEATURES.items()}
    here = [test for key, tests in asked.items() if key != OWN_ENVIRONMENT for test in tests]
    files = {name.partition("::")[0] for name in collected}
    if not {test.partition("::")[0] for test in here} <= files:
        pytest.skip("needs a session of all tests, such as `make test`")
    for key in asked.keys() - {OWN_ENVIRONMENT}:
        found = {name for name in collected if name.partition("[")[0] in asked[key]}
        kept = set(STORE[key]["passed"])
        assert kept <= found, RENEW
        rows = {verification.row_of(name, key) for name in found}
        assert rows - {verification.row_of(name, key) for name in kept} <= may_miss, RENEW


def test_the_tests_of_vllm_omni_are_there_for_each_family_that_it_samples() -> None:
    (test,) = verification.FEATURES[OWN_ENVIRONMENT]["tests"]
    file, _, name = test.partition("::")
    assert f"def {name}(case: Case, guidance: str)" in (ROOT / file).read_text(encoding="utf-8")
    kept = STORE[OWN_ENVIRONMENT]["passed"]
    rows = {verification.row_of(one, OWN_ENVIRONMENT) for one in kept}
    assert rows == set(PIPELINES), RENEW
    none = set(verification.FEATURES[OWN_ENVIRONMENT]["not_for"])
    assert none == set(verification.FAMILIES) - rows
