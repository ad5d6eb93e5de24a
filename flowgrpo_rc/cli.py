"""The command line: train, plan, calibrate, eval, export, report, compare, serve-reward, doctor."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flowgrpo_rc.config.compose import Composition

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 when complete, 1 after a failure, 2 for bad input, 75 when stopped
    early.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    _quieten_libraries()
    arguments = _parser().parse_args(argv)
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.append(
            os.getcwd()
        )  # rewards and functions of the user's own, as under `python -m`
    from flowgrpo_rc.distributed.processes import ProcessLost
    from flowgrpo_rc.records.checkpoint import CheckpointError
    from flowgrpo_rc.rewards.manager import RewardError
    from flowgrpo_rc.rollout.engine import EngineError
    from flowgrpo_rc.training.update import NonFiniteGradient

    try:
        return int(arguments.command(arguments))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (
        RewardError,
        CheckpointError,
        NonFiniteGradient,
        ProcessLost,
        EngineError,
        OSError,
        ImportError,
    ) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED


def _quieten_libraries() -> None:
    """Loading notices and progress bars would bury the run's own lines; diffusers imports torchao
    where it is.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (diffusers_logging, transformers_logging):
        library.disable_progress_bar()
        library.set_verbosity_error()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flowgrpo-rc", description="FlowGRPO with rollout correction"
    )
    commands = parser.add_subparsers(required=True, metavar="command")

    train = commands.add_parser(
        "train", help="train; with no override, the bundled model on its OCR task"
    )
    _add_config_options(train)
    train.add_argument("--cfg", choices=["job"], help="print the composed configuration and stop")
    train.add_argument(
        "--dry-run", action="store_true", help="check everything that needs no model, then stop"
    )
    train.set_defaults(command=_train)

    plan = commands.add_parser("plan", help="what a run would need and do; allocates nothing")
    _add_config_options(plan)
    default = int(os.environ.get("WORLD_SIZE", "1"))
    plan.add_argument(
        "--processes",
        type=int,
        default=default,
        metavar="N",
        help=f"number of processes ({default})",
    )
    plan.add_argument("--nodes", type=int, default=1, metavar="N", help="number of machines (1)")
    plan.set_defaults(command=_plan)

    calibrate = commands.add_parser(
        "calibrate", help="measure engine against trainer, and write settings that fit"
    )
    _add_config_options(calibrate)
    calibrate.add_argument(
        "--out", default="outputs/calibration", help="folder for the result (%(default)s)"
    )
    calibrate.add_argument(
        "--name", default="measured", help="of the settings, for +calibration=NAME (%(default)s)"
    )
    calibrate.add_argument(
        "--prompts", type=int, default=4, metavar="N", help="prompts to sample (%(default)s)"
    )
    calibrate.add_argument(
        "--mode", default="auto", help="auto (the rule decides), bypass or decoupled"
    )
    calibrate.add_argument(
        "--overwrite", action="store_true", help="replace the result that is in the folder"
    )
    calibrate.set_defaults(command=_calibrate)

    evaluate = commands.add_parser(
        "eval", help="score a run's LoRA and the base model on the held-out prompts"
    )
    evaluate.add_argument("run_dir", help="folder of a run")
    evaluate.add_argument(
        "overrides", nargs="*", help="such as rollout.val_kwargs.num_inference_steps=20"
    )
    evaluate.set_defaults(command=_evaluate)

    export = commands.add_parser(
        "export", help="write the LoRA of a checkpoint for stock diffusers, or peft"
    )
    export.add_argument("checkpoint", help="folder of a checkpoint, or of a run (its newest)")
    export.add_argument("--out", required=True, help="folder for the LoRA")
    export.add_argument(
        "--raw", action="store_true", help="the last weights rather than their average"
    )
    export.add_argument(
        "--push-to-hub", metavar="REPO", help="also upload it to user/name, a private repository"
    )
    export.add_argument(
        "--public", action="store_true", help="with --push-to-hub: for everybody to see"
    )
    export.set_defaults(command=_export)

    report = commands.add_parser("report", help="write report.html of a run")
    report.add_argument("run_dir", help="folder of a run")
    report.set_defaults(command=_report)

    compare = commands.add_parser("compare", help="one page about two to four runs")
    compare.add_argument("run_dir", nargs="+", help="folders of runs")
    compare.add_argument(
        "--out", default="compare.html", metavar="FILE", help="the page (%(default)s)"
    )
    compare.set_defaults(command=_compare)

    serve = commands.add_parser(
        "serve-reward", help="a reward over HTTP, for the remote reward of a run"
    )
    serve.add_argument("reward", metavar="NAME", help="such as ocr, or the full path of a class")
    serve.add_argument(
        "options", nargs="*", metavar="key=value", help="the reward's options, such as batch_size=8"
    )
    serve.add_argument("--host", default="127.0.0.1", help="address (127.0.0.1)")
    serve.add_argument("--port", type=int, default=8000, help="port (8000)")
    serve.add_argument(
        "--token-env",
        default="FLOWGRPO_REWARD_TOKEN",
        metavar="NAME",
        help="environment variable with the token that clients must send (FLOWGRPO_REWARD_TOKEN)",
    )
    serve.add_argument(
        "--certificate", metavar="FILE", help="TLS certificate (PEM); needed beyond this machine"
    )
    serve.add_argument("--key", metavar="FILE", help="its private key")
    serve.add_argument(
        "--max-body-mb", type=float, default=256.0, metavar="MB", help="longest request (256)"
    )
    serve.set_defaults(command=_serve_reward)

    doctor = commands.add_parser("doctor", help="check the installation")
    doctor.set_defaults(command=_doctor)
    return parser


def _add_config_options(parser: argparse.ArgumentParser) -> None:
    from flowgrpo_rc.config.compose import DEFAULT_CONFIG, OTHER_CONFIG

    default = f"default {DEFAULT_CONFIG}; {OTHER_CONFIG} for a whole command line of verl-omni"
    parser.add_argument("--config-name", help=f"a file of configs/ ({default})")
    parser.add_argument("--config-dir", help="a further folder with configuration files")
    parser.add_argument(
        "overrides", nargs="*", help="Hydra overrides such as model.path=... rollout.dtype=fp32"
    )


def _composed(arguments: argparse.Namespace) -> Composition:
    """Compose, and print the table of what was written in other words."""
    from flowgrpo_rc.config.compat import table
    from flowgrpo_rc.config.compose import compose_all

    composed = compose_all(
        arguments.overrides, config_name=arguments.config_name, config_dir=arguments.config_dir
    )
    if composed.rows:
        print(table(composed.rows), file=sys.stderr)
    return composed


def _train(arguments: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from flowgrpo_rc.config.compose import to_config
    from flowgrpo_rc.files import redact

    composed = _composed(arguments)
    if arguments.cfg:
        shown = redact(OmegaConf.to_container(composed.config, resolve=True))
        print(OmegaConf.to_yaml(OmegaConf.create(shown)), end="")
        return EXIT_OK
    composed.check()
    config = to_config(composed.config)
    config.check_output()
    if arguments.dry_run:
        config.check_replay(0, int(os.environ.get("WORLD_SIZE", "1")))
        sampler, held_out = config.read_prompts()
        print(
            f"ok: {len(sampler.prompts)} training prompts, {len(held_out)} held-out prompts, "
            "nothing was loaded"
        )
        return EXIT_OK
    from flowgrpo_rc.commands.train import run
    from flowgrpo_rc.training.stopping import EXIT_STOPPED

    return EXIT_OK if run(config) is None else EXIT_STOPPED


def _plan(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.config.compose import config_folder, to_config

    composed = _composed(arguments)
    composed.check()
    if arguments.nodes < 1 or arguments.processes % arguments.nodes:
        raise ValueError(
            f"--processes {arguments.processes} are not spread evenly over --nodes "
            f"{arguments.nodes}"
        )
    config = to_config(composed.config, num_processes=arguments.processes)
    from flowgrpo_rc.commands.plan import make_plan

    print(
        make_plan(
            config,
            arguments.processes,
            config_folder() / "architectures",
            num_nodes=arguments.nodes,
        )
    )
    return EXIT_OK


def _calibrate(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.config.compose import to_config

    composed = _composed(arguments)
    composed.check()
    config = to_config(composed.config, num_processes=1)
    from flowgrpo_rc.commands.calibrate import calibrate

    calibrate(
        config,
        out=arguments.out,
        name=arguments.name,
        num_prompts=arguments.prompts,
        mode=arguments.mode,
        overwrite=arguments.overwrite,
    )
    return EXIT_OK


def _evaluate(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.commands.evaluate import evaluate_run

    evaluate_run(arguments.run_dir, arguments.overrides)
    return EXIT_OK


def _export(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.commands.export import export_checkpoint

    written = export_checkpoint(
        arguments.checkpoint,
        arguments.out,
        raw=arguments.raw,
        push_to_hub=arguments.push_to_hub,
        public=arguments.public,
    )
    print(written)
    return EXIT_OK


def _report(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from flowgrpo_rc.report.run import write_report

    print(write_report(Path(arguments.run_dir)))
    return EXIT_OK


def _compare(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from flowgrpo_rc.report.compare import write_comparison

    print(write_comparison([Path(folder) for folder in arguments.run_dir], Path(arguments.out)))
    return EXIT_OK


def _serve_reward(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.commands.serve import serve_reward

    serve_reward(arguments)
    return EXIT_OK


def _doctor(arguments: argparse.Namespace) -> int:
    from flowgrpo_rc.commands.doctor import doctor

    return EXIT_OK if doctor() else EXIT_FAILED
