"""`flowgrpo-rc export`: write the LoRA of a checkpoint for other programs."""

import argparse
from pathlib import Path

from huggingface_hub import HfApi

from flowgrpo_rc.commands import EXIT_OK
from flowgrpo_rc.commands.finding import checkpoint_and_run
from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.exports.hub import Repository
from flowgrpo_rc.exports.model_card import LoraExport, check_card, export_with_card
from flowgrpo_rc.models.networks import others_in
from flowgrpo_rc.plugins import refuse
from flowgrpo_rc.records.checkpoint import CheckpointError, load_checkpoint
from flowgrpo_rc.records.run_folder import RunFolder


def main(arguments: argparse.Namespace) -> int:
    """Exports a checkpoint, and prints where it is on the Hub, if it is, and the file."""
    written, url = export_checkpoint(
        arguments.checkpoint,
        arguments.out,
        raw=arguments.raw,
        push_to_hub=arguments.push_to_hub,
        public=arguments.public,
    )
    if url is not None:
        print(url)
    print(written)
    return EXIT_OK


def export_checkpoint(
    checkpoint: str, out: str, *, raw: bool, push_to_hub: str | None = None, public: bool = False
) -> tuple[Path, str | None]:
    """Writes the LoRA of a checkpoint with a model card, for stock diffusers or peft.

    Of a run the newest checkpoint is taken, and of that the average of the weights unless `raw`. A
    new repository `push_to_hub` is private unless `public`. Returns the file with the tensors, and
    the address of that repository.
    """
    refuse(
        (public and push_to_hub is None, "--public has no effect without --push-to-hub: drop it"),
        (Path(out).is_file(), f"--out {out} is a file: give a folder"),
    )
    repository = None
    if push_to_hub is not None:
        repository = Repository(HfApi(), push_to_hub, public=public)
        repository.check()
    check_card(Path(out))
    path, run_dir = checkpoint_and_run(checkpoint)
    if Path(out).resolve() == run_dir.resolve():
        raise ValueError(f"--out {out} is the folder of the run itself: give another one")
    config = stored_config(RunFolder(run_dir).config)
    loaded = load_checkpoint(path)
    if "lora" not in loaded.tensors:
        raise CheckpointError(f"{path}: manifest.json does not list lora.safetensors")
    tensors = loaded.tensors["lora"] if raw else loaded.tensors.get("ema", loaded.tensors["lora"])
    lora = LoraExport(step=loaded.step, tensors=tensors, raw=raw, source=push_to_hub)
    written = export_with_card(config, run_dir, lora, Path(out))
    if repository is None:
        return written, None
    return written, repository.push(Path(out), others_in(tensors))
