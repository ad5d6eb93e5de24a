"""`flowgrpo-rc export`: write the LoRA of a checkpoint for other programs."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from flowgrpo_rc.config.tree import stored_config
from flowgrpo_rc.export.hub import check_push, push
from flowgrpo_rc.export.lora import export_lora
from flowgrpo_rc.export.model_card import check_card, write_model_card
from flowgrpo_rc.records.checkpoint import list_checkpoints, load_checkpoint
from flowgrpo_rc.records.run_folder import RunFolder


def export_checkpoint(
    checkpoint: str, out: str, *, raw: bool, push_to_hub: str | None = None, public: bool = False
) -> Path:
    """Write the LoRA of a checkpoint (its average unless `raw`) with a model card, for stock
    diffusers or peft; returns the file with the tensors.

    push_to_hub: also upload both to this repository, private where it is new and not `public`.
    Raises ValueError, before anything is loaded, where that cannot work.
    """
    if public and push_to_hub is None:
        raise ValueError("--public has no effect without --push-to-hub: drop it")
    api = HfApi()
    if push_to_hub is not None:
        check_push(api, push_to_hub, public=public)
    check_card(Path(out))
    path = Path(checkpoint)
    run_dir = path.parent.parent if path.parent.name == "checkpoints" else path
    if path == run_dir:
        found = list_checkpoints(RunFolder(run_dir).checkpoints)
        if not found:
            raise ValueError(
                f"{checkpoint} has no checkpoints: give a run's folder or one of its "
                "checkpoints/step_N"
            )
        path = found[-1]
    config = stored_config(RunFolder(run_dir).config)
    loaded = load_checkpoint(path)
    tensors = loaded.tensors["lora"] if raw else loaded.tensors.get("ema", loaded.tensors["lora"])
    written = export_lora(tensors, config.model, Path(out))
    source = push_to_hub or "path/to/this/folder"
    write_model_card(Path(out), run_dir, config, step=loaded.step, raw=raw, source=source)
    if push_to_hub is not None:
        print(push(api, Path(out), push_to_hub, public=public))
    return written
