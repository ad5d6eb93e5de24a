"""A run as a notebook shows it: its numbers, and held-out pictures of before and after."""

from pathlib import Path

from PIL import Image

from flowgrpo_rc.records.metrics_file import MetricsFile, Row
from flowgrpo_rc.records.run_folder import RunFolder
from flowgrpo_rc.records.samples import png_bytes, read_grid
from flowgrpo_rc.report import folder
from flowgrpo_rc.report.page import templates
from flowgrpo_rc.report.run import outcome, tiles

_PAIRS = 4
_SIDE = 128  # pixels


def told(run_dir: Path) -> tuple[str, str]:
    """Returns the held-out reward before and after training, and the steps, as sentences."""
    total = folder.setting(folder.config(run_dir), "trainer.total_training_steps")
    return outcome(_rows(run_dir), total)


def card(run_dir: Path) -> str:
    """Returns a piece of HTML about a run, finished or not; its texts are escaped."""
    reward, progress = told(run_dir)
    pictures = held_out_pictures(run_dir).values()
    html: str = (
        templates()
        .get_template("card.html")
        .render(
            title=folder.title(run_dir, folder.config(run_dir)),
            lines=(reward, progress, f"LoRA: {RunFolder(run_dir).lora}"),
            tiles=tiles(_rows(run_dir)),
            pairs=[map(_small, pair) for pair in zip(*pictures, strict=False)][:_PAIRS],
        )
    )
    return html


def held_out_pictures(run_dir: Path) -> dict[str, list[Image.Image]]:
    """Returns the pictures of the first and the last evaluation, as `before` and `after`.

    Either is absent without its evaluation. `info` of a picture holds `subject` and `score`.
    """
    files = folder.sample_files(run_dir, "png")
    pictures: dict[str, list[Image.Image]] = {}
    for name, (_, path) in zip(("before", "after"), files, strict=False):
        pictures[name] = []
        for tile in read_grid(path):
            tile.image.info = {"subject": tile.subject, "score": tile.score}
            pictures[name].append(tile.image)
    return pictures


def _rows(run_dir: Path) -> list[Row]:
    return MetricsFile(RunFolder(run_dir).metrics).numbers()


def _small(image: Image.Image) -> tuple[str, bytes]:
    words = " ".join(image.info.values())
    image.thumbnail((_SIDE, _SIDE))
    return words, png_bytes(image)
