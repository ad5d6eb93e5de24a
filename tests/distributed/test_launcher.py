"""The shipped configurations of `accelerate launch`, and the launches in the documentation."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from support.documented import ROOT

from flowgrpo_rc.config.compose import compose_config, to_config


@pytest.mark.parametrize(
    "path", sorted((ROOT / "configs" / "accelerate").glob("*.yaml")), ids=lambda path: path.stem
)
def test_configurations_of_the_launcher(path: Path) -> None:
    config = load_config_from_file(str(path))
    sharded = path.stem.startswith("fsdp2")
    assert config.distributed_type == ("FSDP" if sharded else "MULTI_GPU")
    assert (config.num_machines > 1) == path.stem.endswith("multi_node")
    if sharded:
        assert config.fsdp_config["fsdp_version"] == 2
        assert config.fsdp_config["fsdp_cpu_ram_efficient_loading"] is False


def documented_launches() -> list[str]:
    pages = [ROOT / "README.md", ROOT / "docs" / "scaling_out.md"]
    lines = "\n".join(page.read_text() for page in pages).replace("\\\n", " ").splitlines()
    return [line.removesuffix("...") for line in lines if line.startswith("accelerate launch")]


@pytest.mark.parametrize("command", documented_launches())
def test_documented_launches_parse_and_compose(command: str, prompt_file: Path) -> None:
    parsed = launch_command_parser().parse_args(shlex.split(command)[2:])
    assert (ROOT / parsed.config_file).is_file()
    assert parsed.module
    assert parsed.training_script == "flowgrpo_rc.train"
    arguments = [
        argument for argument in parsed.training_script_args if not argument.endswith("=...")
    ]
    name = (
        arguments.pop(arguments.index("--config-name") + 1)
        if "--config-name" in arguments
        else None
    )
    overrides = [argument for argument in arguments if argument != "--config-name"]
    files = [f"data.train_files={prompt_file}", f"data.val_files={prompt_file}"]
    to_config(compose_config([*overrides, *files], config_name=name))
