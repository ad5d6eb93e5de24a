"""The command line: its parser and its exit codes. What a command does is in `commands`.

It parses before it imports torch, so that help and usage errors come at once.
"""

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from flowgrpo_rc import __version__
from flowgrpo_rc.commands import EXIT_BAD_INPUT, EXIT_FAILED
from flowgrpo_rc.config.foreign import own_key
from flowgrpo_rc.config.names import CARD, DEFAULT_CONFIG, OTHER_CONFIG, RATE, TOKEN_ENV
from flowgrpo_rc.distributed.child import follow_parent, is_child, is_first, say_error
from flowgrpo_rc.libraries import quiet, set_allocator
from flowgrpo_rc.plugins import did_you_mean
from flowgrpo_rc.records.streams import lasting_streams
from flowgrpo_rc.redaction import redact

# What the modules of `commands` load models with.
BOTH = ("transformers", "diffusers")
# Commands that import what their command line names; the others are given a run's folder. A suite
# of the user's may name a reward of the user's.
OWN_CODE = ("train", "plan", "calibrate", "diagnose", "serve-reward")
LIBRARIES = {"evaluate": BOTH, "serve-reward": ("transformers",)}  # where nothing is composed


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command: that of `argv`, or else of the process.

    Returns the exit code: 0 when complete, 1 after a failure, 2 for bad input, 75 when stopped
    early.
    """
    with lasting_streams():
        return _run(sys.argv[1:] if argv is None else list(argv))


def _run(words: list[str]) -> int:
    handler = logging.StreamHandler()
    handler.setFormatter(_WithoutSecrets("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    arguments = _parsed(words)
    follow_parent()
    set_allocator()
    options = vars(arguments)
    composes = "config_name" in options and options["overrides"] is not None
    libraries = BOTH if composes else LIBRARIES.get(arguments.command, ())
    if libraries and sys.stderr.isatty() and not is_child():
        print(f"{arguments.command}: loads libraries and checks", file=sys.stderr, flush=True)
    for room in () if is_first() else ("config", "data", "spec"):  # each process would say the same
        logging.getLogger(f"flowgrpo_rc.{room}").setLevel(logging.ERROR)
    own_code = arguments.command in OWN_CODE or options.get("trust") or options.get("suite")
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
        done = prepare(arguments) if composes else None
        if done is not None:
            return done
        check_run_folder(arguments)
        with quiet(*libraries):
            module = arguments.command.replace("-", "_")
            command = import_module(f"flowgrpo_rc.commands.{module}")
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
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what the next word may be
        from flowgrpo_rc.commands.completing import complete

        complete(parser, commands.values())
    arguments = argparse.Namespace(words=list(words))
    if not words or words[0] not in commands:
        return parser.parse_args(words, arguments)  # prints help, the version or an error
    command = commands[words[0]]
    _, unknown = command.parse_known_intermixed_args(words[1:], arguments)
    # To argparse a word with a space is no option.
    unknown += [word for word in vars(arguments).get("overrides") or () if word.startswith("--")]
    if "=" in str(vars(arguments).get("fit")):  # the override behind an option without a number
        arguments.overrides.append(arguments.fit)
        arguments.fit = CARD
    if unknown:
        takes_settings = "config_name" in arguments
        command.error(_unknown_option(unknown[0], command, takes_settings=takes_settings))
    return arguments


def _unknown_option(option: str, command: argparse.ArgumentParser, *, takes_settings: bool) -> str:
    """Returns the message about an option that a command does not have."""
    name = option.partition("=")[0]
    message = f"there is no option {name}"
    if name in ("-m", "--multirun"):
        return f"{message}: for a sweep call flowgrpo_rc.train, such as from a study of Optuna"
    if takes_settings and (key := own_key(name.lstrip("-").replace("-", "_"))):
        return f"{message}: settings are written key=value, here {key}"
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
    for name, (help, options) in COMMANDS.items():
        aliases = ["eval"] if name == "evaluate" else []
        command = commands.add_parser(name, help=help, description=help, aliases=aliases)
        command.set_defaults(command=name)
        for option, keywords in options.items():
            command.add_argument(option, **keywords)
    return parser, dict(commands.choices)


def _option(help: str, **keywords: Any) -> dict[str, Any]:
    return keywords | {"help": help}


def _flag(help: str) -> dict[str, Any]:
    return _option(help, action="store_true")


def _words(help: str, **keywords: Any) -> dict[str, Any]:
    return _option(help, nargs="*", default=[], **keywords)


_CONFIG = {
    "--config-name": _option(
        f"a file of configs/ (default {DEFAULT_CONFIG}; {OTHER_CONFIG} for a whole command line of "
        "verl-omni)"
    ),
    "--config-dir": _option("a further folder with configuration files"),
    "overrides": _words("Hydra overrides such as model.path=... rollout.dtype=fp32"),
}
_PLAN = {
    "--processes": _option(
        "number of processes (trainer.num_processes; 1 if that is auto)", type=int, metavar="N"
    ),
    "--nodes": _option("number of machines (1)", type=int, default=1, metavar="N"),
    "--fit": _option(
        "propose micro-batches, checkpointing and offloading that fit a card of this memory, "
        "such as 24, or without a number the one in this machine",
        nargs="?",
        const=CARD,
        metavar="GIB",
    ),
    "--tflops": _option(
        "TFLOP that a card does in a second (%(default)s)", type=float, default=RATE, metavar="N"
    ),
}
_CALIBRATE = {
    "--out": _option("folder for the result (%(default)s)", default="outputs/calibration"),
    "--name": _option("of the settings, for +calibration=NAME (%(default)s)", default="measured"),
    "--prompts": _option("prompts to sample (%(default)s)", type=int, default=4, metavar="N"),
    "--mode": _option("auto (the rule decides), bypass or decoupled", default="auto"),
    "--tail": _flag("also try shorter rollouts, and choose the shortest whose advantages agree"),
    "--cache": _flag("also try rollout.cache, and choose what saves most and still agrees"),
    "--overwrite": _flag("replace the result that is in the folder"),
}
_EVALUATE = {
    "run_dir": _option("folder of a run"),
    "overrides": _words("such as rollout.val_kwargs.num_inference_steps=20"),
    "--suite": _option(
        "ask this suite instead: a name, NAME:FILE with other prompts, or a file of your own; may "
        "be given several times",
        action="append",
        metavar="SUITE",
    ),
    "--trust": _flag("import the rewards, losses and other code of its own that the run names"),
}
_EXPORT = {
    "checkpoint": _option("folder of a checkpoint, or of a run (its newest)"),
    "--out": _option("folder for the LoRA", required=True),
    "--raw": _flag("the last weights rather than their average"),
    "--push-to-hub": _option("also upload it to user/name, a private repository", metavar="REPO"),
    "--public": _flag("with --push-to-hub: for everybody to see"),
}
_COMPARE = {
    "run_dir": _option("folders of runs", nargs="+"),
    "--out": _option("the page (%(default)s)", default="compare.html", metavar="FILE"),
}
_DIAGNOSE = {
    "dump": _option("a .safetensors file, or a folder of them", metavar="DUMP"),
    **{name: _CONFIG[name] for name in ("--config-name", "--config-dir")},
    "--model": _option(
        "also evaluate the steps with the model of these settings, such as model.path=...",
        nargs="*",
        dest="overrides",
        metavar="key=value",
    ),
    "--out": _option("the page (%(default)s)", default="diagnosis.html", metavar="FILE"),
}
_SERVE_REWARD = {
    "reward": _option("such as ocr, or the full path of a class", metavar="NAME"),
    "options": _words("the reward's options, such as batch_size=8", metavar="key=value"),
    "--host": _option("address (127.0.0.1)", default="127.0.0.1"),
    "--port": _option("port (8000)", type=int, default=8000),
    "--token-env": _option(
        "environment variable with the token that clients must send (%(default)s)",
        default=TOKEN_ENV,
        metavar="NAME",
    ),
    "--certificate": _option("TLS certificate (PEM); needed beyond this machine", metavar="FILE"),
    "--key": _option("its private key", metavar="FILE"),
    "--max-body-mb": _option("longest request (256)", type=float, default=256.0, metavar="MB"),
}
# Command -> what it does, and its options.
COMMANDS = {
    "train": (
        "train; with no override, the bundled model on its OCR task",
        {
            **_CONFIG,
            "--cfg": _option("print the composed configuration and stop", choices=["job"]),
            "--dry-run": _flag("check everything that needs no model, then stop"),
        },
    ),
    "plan": ("what a run would need and do; allocates nothing", _CONFIG | _PLAN),
    "calibrate": (
        "measure engine against trainer, and write settings that fit",
        _CONFIG | _CALIBRATE,
    ),
    "evaluate": (
        "score a run's LoRA and the base model, on the held-out prompts or by suites",
        _EVALUATE,
    ),
    "export": ("write the LoRA of a checkpoint for stock diffusers, or peft", _EXPORT),
    "report": ("write report.html of a run", {"run_dir": _option("folder of a run")}),
    "watch": (
        "show the report of a run in a browser of this machine, while the run goes on",
        {
            "run_dir": _option("folder of a run"),
            "--port": _option("port (%(default)s); 0: a free one", type=int, default=8100),
        },
    ),
    "compare": ("one page about two to four runs", _COMPARE),
    "diagnose": (
        "say why a run of verl-omni, UniRL or flow_grpo collapses, from a dump of its trajectories",
        _DIAGNOSE,
    ),
    "serve-reward": ("a reward over HTTP, for the remote reward of a run", _SERVE_REWARD),
    "doctor": ("check the installation", {}),
}
