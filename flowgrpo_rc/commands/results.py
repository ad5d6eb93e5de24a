"""Writes what a run leaves for others: LoRAs with their model cards, uploads, and the report."""

import shutil
from collections.abc import Mapping

from huggingface_hub import HfApi
from torch import Tensor

from flowgrpo_rc.config.tree import Config
from flowgrpo_rc.exports.hub import Uploads
from flowgrpo_rc.exports.model_card import export_with_card
from flowgrpo_rc.models.networks import others_in
from flowgrpo_rc.records.best import BestEvaluation
from flowgrpo_rc.records.checkpoint import PARTIAL, list_checkpoints, load_checkpoint
from flowgrpo_rc.records.metrics_file import MetricsFile
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.report.run import write_report


def uploads_of(config: Config) -> Uploads | None:
    """Returns what uploads the LoRAs of a run on the main process; None if nobody asked for it."""
    repo = config.trainer.push_to_hub
    return None if repo is None else Uploads(HfApi(), repo)


def export_step(
    config: Config,
    folder: RunFolder,
    uploads: Uploads | None,
    step: int,
    tensors: Mapping[str, Tensor],
) -> None:
    """Writes lora/step_N, whole or not at all, and begins its upload."""
    final = folder.lora / f"step_{step}"
    partial = folder.lora / f"{PARTIAL}{final.name}"
    for path in (partial, final):
        shutil.rmtree(path, ignore_errors=True)
    repo = config.trainer.push_to_hub
    export_with_card(config, folder.root, step, tensors, partial, source=repo)
    partial.rename(final)
    if uploads is not None:
        uploads.add(final, step, others_in(tensors))


def leave_results(config: Config, folder: RunFolder, uploads: Uploads | None = None) -> None:
    """Exports the LoRAs of the newest checkpoint and of the best, and writes the report.

    A checkpoint with averaged weights gives these.
    """
    newest = list_checkpoints(folder.checkpoints)[-1]
    best = BestEvaluation(MetricsFile(folder.metrics).rows()).step
    of_best = folder.checkpoints / f"step_{best}"
    repo = config.trainer.push_to_hub
    places = ((newest, folder.lora, ""), (of_best, folder.lora_best, "lora_best"))
    try:
        shutil.rmtree(folder.lora_best, ignore_errors=True)  # it may be of steps that are redone
        for path, into, subfolder in places:
            if path.is_dir():
                loaded = load_checkpoint(path)
                tensors = loaded.tensors.get("ema", loaded.tensors["lora"])
                card = {"source": repo, "subfolder": subfolder}
                export_with_card(config, folder.root, loaded.step, tensors, into, **card)
                if uploads is not None:
                    uploads.add(into, loaded.step, others_in(tensors), subfolder)
        write_report(folder.root)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write the results of this run ({error.strerror}); its state of "
            f"{newest.name.replace('_', ' ')} is saved in {folder.checkpoints}, and the same "
            "command writes them when there is room",
            error.filename or str(folder.root),
        ) from error
