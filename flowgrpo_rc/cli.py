"""The command line: its parser and its exit codes. What a command does is in `commands`.

It parses before it imports torch, so that help and usage errors come at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from flowgrpo_rc import __version__
from flowgrpo_rc.commands import EXIT_BAD_INPUT, EXIT_FAILED
from flowgrpo_rc.config.names import DEFAULT_CONFIG, OTHER_CONFIG, TOKEN_ENV
from flowgrpo_rc.distributed.child import follow_parent, say_error
from flowgrpo_rc.libraries import quiet
from flowgrpo_rc.plugins import did_you_mean
from flowgrpo_rc.records.streams import lasting_streams
from flowgrpo_rc.redaction import redact

# Options of other programs, and the settings that do here what they do there.
SETTINGS_OF_OPTIONS = {
    "batch_size": "data.train_batch_size",
    "data": "data.train_files",
    "device": "trainer.device",
    "epochs": "trainer.total_training_steps",
    "learning_rate": "actor.optim.lr",
    "lora_rank": "model.lora_rank",
    "lr": "actor.optim.lr",
    "max_steps": "trainer.total_training_steps",
    "max_train_steps": "trainer.total_training_steps",
    "model": "model.path",
    "num_processes": "trainer.num_processes",
    "out": "trainer.output_dir",
    "output_dir": "trainer.output_dir",
    "pretrained_model_name_or_path": "model.path",
    "prompts": "data.train_files",
    "rank": "model.lora_rank",
    "resolution": "rollout.pipeline.height",
    "seed": "trainer.seed",
    "steps": "trainer.total_training_steps",
}
# What the modules of `commands` load models with.
BOTH = ("transformers", "diffusers")
# Commands that import what their command line names; the others are given a run's folder. A suite
# of the user's may name a reward of the user's.
OWN_CODE = ("train", "plan", "calibrate", "serve")
LIBRARIES = {"train": BOTH, "calibrate": BOTH, "evaluate": BOTH, "serve": ("transformers",)}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      argv: the words after `flowgrpo-rc`; None takes them from the process.

    Returns:
      The exit code: 0 when complete, 1 after a failure, 2 for bad input, 75 when stopped early.
    """
    with lasting_streams():
        return _run(sys.argv[1:] if argv is None else list(argv))


def _run(words: list[str]) -> int:
    handler = logging.StreamHandler()
    handler.setFormatter(_WithoutSecrets("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    arguments = _parsed(words)
    follow_parent()
    given = vars(arguments)
    own_code = arguments.command in OWN_CODE or given.get("trust") or given.get("suite")
    if own_code and "" not in sys.path and os.getcwd() not in sys.path:
        # Rewards and functions of the user's own, as under `python -m`.
        sys.path.append(os.getcwd())
    from flowgrpo_rc.commands.composing import prepare
    from flowgrpo_rc.commands.finding import check_run_folder
    from flowgrpo_rc.distributed.memory import OutOfMemory
    from flowgrpo_rc.distributed.processes import ProcessLost
    from flowgrpo_rc.records.checkpoint import CheckpointError
    from flowgrpo_rc.rewards.manager import RewardError
    from flowgrpo_rc.rollout.engine import EngineError

    try:
        done = prepare(arguments) if "config_name" in arguments else None
        if done is not None:
            return done
        check_run_folder(arguments)
        with quiet(*LIBRARIES.get(arguments.command, ())):
            command = import_module(f"flowgrpo_rc.commands.{arguments.command}")
            return int(command.main(arguments))
    except ValueError as error:
        say_error(f"error: {error}")
        return EXIT_BAD_INPUT
    except (
        RewardError,
        CheckpointError,
        FloatingPointError,
        ProcessLost,
        EngineError,
        OutOfMemory,
        OSError,
        ImportError,
    ) as error:
        say_error(f"error: {error}")
        return EXIT_FAILED


class _WithoutSecrets(logging.Formatter):
    """Takes secrets out of messages: a failed request may be quoted with all that was sent."""

    def format(self, record: logging.LogRecord) -> str:
        return str(redact(super().format(record)))


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parses a command line; options may stand before, between and behind overrides."""
    parser, commands = _parsers()
    arguments = argparse.Namespace(words=list(words))
    if not words or words[0] not in commands:
        return parser.parse_args(words, arguments)  # prints help, the version or an error
    command = commands[words[0]]
    found, unknown = command.parse_known_intermixed_args(words[1:], arguments)
    if unknown:
        command.error(_unknown_option(unknown[0], command, takes_settings="config_name" in found))
    return found


def _unknown_option(option: str, command: argparse.ArgumentParser, *, takes_settings: bool) -> str:
    """Returns the message about an option that a command does not have."""
    name = option.partition("=")[0]
    message = f"there is no option {name}"
    key = SETTINGS_OF_OPTIONS.get(name.lstrip("-").replace("-", "_"))
    if takes_settings and key is not None:
        return f"{message}: settings are written key=value, here {key}=..."
    options = [text for action in command._actions for text in action.option_strings]
    message += did_you_mean(name, options)
    if takes_settings:
        message += "; settings are written key=value, such as trainer.total_training_steps=5"
    return message


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Returns the parser of the whole command line, and that of each command by its name."""
    parser = argparse.ArgumentParser(
        prog="flowgrpo-rc", description="FlowGRPO with rollout correction"
    )
    parser.add_argument("--version", action="version", version=f"flowgrpo-rc {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")

    def command(name: str, module: str, help: str, *aliases: str) -> argparse.ArgumentParser:
        """Adds a command; `main` of `commands.MODULE` runs it."""
        added = commands.add_parser(name, help=help, aliases=aliases)
        added.set_defaults(command=module)
        return added

    _train_options(
        command("train", "train", "train; with no override, the bundled model on its OCR task")
    )
    _plan_options(command("plan", "plan", "what a run would need and do; allocates nothing"))
    _calibrate_options(
        command(
            "calibrate",
            "calibrate",
            "measure engine against trainer, and write settings that fit",
        )
    )
    _evaluate_options(
        command(
            "evaluate",
            "evaluate",
            "score a run's LoRA and the base model, on the held-out prompts or by suites",
            "eval",
        )
    )
    _export_options(
        command("export", "export", "write the LoRA of a checkpoint for stock diffusers, or peft")
    )
    report = command("report", "report", "write report.html of a run")
    report.add_argument("run_dir", help="folder of a run")
    _compare_options(command("compare", "compare", "one page about two to four runs"))
    _serve_options(
        command("serve-reward", "serve", "a reward over HTTP, for the remote reward of a run")
    )
    _doctor_options(
        command("doctor", "doctor", "check the installation, and what a GPU can do of a run")
    )
    return parser, dict(commands.choices)


def _train_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument("--cfg", choices=["job"], help="print the composed configuration and stop")
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything that needs no model, then stop"
    )


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu", action="store_true", help="check what runs on the GPU, in a few minutes"
    )
    parser.add_argument("--out", metavar="FILE", help="write what --gpu has found, for an issue")


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="number of processes (trainer.num_processes; 1 if that is auto)",
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of machines (1)")
    parser.add_argument(
        "--fit",
        type=float,
        metavar="GIB",
        help="propose micro-batches, checkpointing and offloading that fit a card of this memory",
    )
    parser.add_argument(
        "--workers",
        type=_number_of_workers,
        nargs="*",
        metavar="N",
        help="seconds of a step with so many rollout.workers, from those of --measured; without a "
        "number for 1, 2, 4, ...",
    )
    parser.add_argument(
        "--measured", metavar="RUN", help="with --workers: folder of a run, whose settings it takes"
    )


def _number_of_workers(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        message = f"{word!r} is no number of workers; settings stand before --workers"
        raise argparse.ArgumentTypeError(message) from None


def _calibrate_options(parser: argparse.ArgumentParser) -> None:
    _config_options(parser)
    parser.add_argument(
        "--out", default="outputs/calibration", help="folder for the result (%(default)s)"
    )
    parser.add_argument(
        "--name", default="measured", help="of the settings, for +calibration=NAME (%(default)s)"
    )
    parser.add_argument(
        "--prompts", type=int, default=4, metavar="N", help="prompts to sample (%(default)s)"
    )
    parser.add_argument(
        "--mode", default="auto", help="auto (the rule decides), bypass or decoupled"
    )
    parser.add_argument(
        "--tail",
        action="store_true",
        help="also try shorter rollouts, and choose the shortest whose advantages agree",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the result that is in the folder"
    )


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", help="folder of a run")
    parser.add_argument(
        "overrides", nargs="*", default=[], help="such as rollout.val_kwargs.num_inference_steps=20"
    )
    parser.add_argument(
        "--suite",
        action="append",
        metavar="SUITE",
        help="ask this suite instead: a name, NAME:FILE with other prompts, or a file of your own; "
        "may be given several times",
    )
    parser.add_argument(
        "--trust",
        action="store_true",
        help="import the rewards, losses and other code of its own that the run names",
    )


def _export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="folder of a checkpoint, or of a run (its newest)")
    parser.add_argument("--out", required=True, help="folder for the LoRA")
    parser.add_argument(
        "--raw", action="store_true", help="the last weights rather than their average"
    )
    parser.add_argument(
        "--push-to-hub", metavar="REPO", help="also upload it to user/name, a private repository"
    )
    parser.add_argument(
        "--public", action="store_true", help="with --push-to-hub: for everybody to see"
    )


def _compare_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", nargs="+", help="folders of runs")
    parser.add_argument(
        "--out", default="compare.html", metavar="FILE", help="the page (%(default)s)"
    )


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("reward", metavar="NAME", help="such as ocr, or the full path of a class")
    parser.add_argument(
        "options",
        nargs="*",
        default=[],
        metavar="key=value",
        help="the reward's options, such as batch_size=8",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address (127.0.0.1)")
    parser.add_argument("--port", type=int, default=8000, help="port (8000)")
    parser.add_argument(
        "--token-env",
        default=TOKEN_ENV,
        metavar="NAME",
        help="environment variable with the token that clients must send (%(default)s)",
    )
    parser.add_argument(
        "--certificate", metavar="FILE", help="TLS certificate (PEM); needed beyond this machine"
    )
    parser.add_argument("--key", metavar="FILE", help="its private key")
    parser.add_argument(
        "--max-body-mb", type=float, default=256.0, metavar="MB", help="longest request (256)"
    )


def _config_options(parser: argparse.ArgumentParser) -> None:
    default = f"default {DEFAULT_CONFIG}; {OTHER_CONFIG} for a whole command line of verl-omni"
    parser.add_argument("--config-name", help=f"a file of configs/ ({default})")
    parser.add_argument("--config-dir", help="a further folder with configuration files")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        help="Hydra overrides such as model.path=... rollout.dtype=fp32",
    )
