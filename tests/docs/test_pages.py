"""Blocks of README.md and docs/ parse, commands compose, links work; blocks.py runs them."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from support.compositions import checked_config
from support.documented import PAGES, ROOT, Block, arguments, blocks
from support.launching import ran

from flowgrpo_rc.cli import _parsed
from flowgrpo_rc.config.compose import compose_all, compose_config
from flowgrpo_rc.monitoring.health_rules import RULES

LANGUAGES = {"bash", "python", "yaml", "json", "text"}
COMMANDS = [
    (block, line)
    for block in blocks("bash")
    for line in block.lines()
    if arguments(line) is not None
]


def test_every_block_says_what_it_is() -> None:
    found = blocks()
    assert len(found) > 40
    assert [str(block) for block in found if block.language not in LANGUAGES] == []
    fences = sum(page.read_text().count("```") for page in PAGES)
    assert fences == 2 * len(found), "a block is indented, or not closed"
    marks = sum(len(re.findall("^<!-- not run", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert marks == sum(block.why_not is not None for block in found), (
        "a mark does not stand right above a block"
    )


@pytest.mark.parametrize("block", blocks("bash"), ids=str)
def test_shell_parses(block: Block) -> None:
    done = ran("bash", "-n", input=block.text)
    assert done.returncode == 0, done.stderr
    for line in block.lines():
        if line.startswith("make "):
            targets = shlex.split(line, comments=True)[1:]
            assert ran("make", "-n", *targets, cwd=ROOT).returncode == 0


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=[str(block) for block, _ in COMMANDS])
def test_commands_compose(block: Block, line: str) -> None:
    given = _parsed(arguments(line))
    composes = "config_name" in given and given.overrides is not None
    if composes and given.config_dir is None:
        compose_all(given.overrides, config_name=given.config_name)


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python_compiles(block: Block) -> None:
    compile(block.text, str(block), "exec")


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_configurations_compose(block: Block, tmp_path: Path) -> None:
    (tmp_path / "documented.yaml").write_text(block.text)
    checked_config(compose_config([], config_name="documented", config_dir=str(tmp_path)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    """mkdocs checks anchors and the links between pages."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)
    links = [
        link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link
    ]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


def test_the_navigation_holds_every_page_once() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    named = re.findall(r"(\w+\.md)$", yaml.safe_dump(yaml.safe_load(text)["nav"]), re.MULTILINE)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_every_warning_is_explained() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    watched = {rule.metric for rule in RULES} | {
        "pre_update_clip_fraction",
        "mismatch_over_expected",
    }
    assert [metric for metric in sorted(watched) if f"`{metric}`" not in page] == []
