"""The shipped configurations of `accelerate launch`, and every launch that is documented."""

import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from support.compositions import checked_config
from support.documented import PAGES, ROOT, arguments

from flowgrpo_rc.cli import _parsed
from flowgrpo_rc.config.compose import compose_config

WRITTEN = {".md", ".py", ".sh", ".yaml"}
FOLDERS = [path for name in ("configs", "examples") for path in sorted((ROOT / name).rglob("*"))]
SOURCES = [*PAGES, *(path for path in FOLDERS if path.suffix in WRITTEN)]
_LAUNCH = re.compile(
    r"(?:(?:accelerate launch|torchrun|sbatch|srun) |flowgrpo-rc train .*num_processes=)[^`)\n]*"
)


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


def documented_launches() -> dict[str, str]:
    """Returns launches of pages, scripts and comments; one of `N` or "$cards" is left out."""
    launches = {}
    for path in SOURCES:
        text = re.sub("^# ?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for line in _LAUNCH.findall(text.replace("\\\n", " ")):
            if arguments(line) is not None and not re.search(r'[ =](N|"\$\w+") ', line):
                launches[f"{path.name}:{len(launches)}"] = line
    return launches


LAUNCHES = documented_launches()


def launched(line: str) -> int:
    """Returns how many processes of a launch train."""
    options = re.findall(r"[ -]([a-z._-]+)[= ](\d+)", line)
    given = {name.strip("-").replace("_", "-"): int(number) for name, number in options}
    if "examples/slurm_workers.sh" in line:
        return given["gpus-per-node"]  # on the first node
    if "examples/slurm.sh" in line:
        return given["nodes"] * given["ntasks-per-node"]
    if line.startswith("torchrun"):
        return given.get("nnodes", 1) * given["nproc-per-node"]
    return given["num-processes" if line.startswith("accelerate") else "trainer.num-processes"]


@pytest.mark.parametrize("line", LAUNCHES.values(), ids=list(LAUNCHES))
def test_the_processes_of_a_documented_launch_share_its_batch(line: str) -> None:
    if line.startswith("accelerate"):
        parsed = launch_command_parser().parse_args(shlex.split(line)[2:])
        assert parsed.config_file is None or (ROOT / parsed.config_file).is_file()
        assert (parsed.module, parsed.training_script) == (True, "flowgrpo_rc.train")
    given = _parsed(arguments(line))
    composed = compose_config(given.overrides, config_name=given.config_name)
    checked_config(composed, num_processes=launched(line))


def test_launches_of_every_launcher_are_documented() -> None:
    started = {(line.split()[0], launched(line)) for line in LAUNCHES.values()}
    assert started >= {("accelerate", 8), ("accelerate", 16), ("sbatch", 16), ("torchrun", 8)}
    assert started >= {("flowgrpo-rc", 2), ("torchrun", 16)}
