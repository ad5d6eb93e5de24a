"""Draws the rooms of the package, floor by floor: `python docs/rooms_figure.py` writes
docs/figures/rooms.svg. tests/test_layers.py holds the imports to the same floors.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

# From the ground up. A file imports its own room and lower floors.
FLOORS: tuple[dict[str, str], ...] = (
    {
        "batch": "data between rooms",
        "core": "[B, T] tensor maths",
        "distributed": "processes, shards, signals",
        "plugins": "finds plug-ins",
        "files": "atomic writes",
        "redaction": "hides secrets",
        "libraries": "diffusers, quiet",
        "reading": "foreign files",
        "pictures": "images of prompts",
    },
    {"correction": "weights, rejection, diagnostics of rollout against training"},
    {
        "losses": "policy losses",
        "models": "pipelines, LoRA",
        "rewards": "scores of samples",
        "data": "prompts",
    },
    {
        "policies": "sampling and log-probs, one transition code",
        "assets": "the bundled models",
    },
    {"rollout": "engines that sample: diffusers, transformers, vLLM, vLLM-Omni"},
    {"evaluation": "held-out prompts, suites, intervals"},
    {"monitoring": "mismatch, decisions, health, names of metrics"},
    {"records": "what a run leaves: checkpoints, metrics, samples"},
    {"report": "the page about a run", "workers": "rollouts in processes of their own, by Ray"},
    {"algorithms": "policy gradients in two modes, DiffusionNFT; one protocol"},
    {"training": "the loop: trainer, update, tasks, sources"},
    {"config": "the settings, Hydra, keys of verl-omni"},
    {"spec": "words become objects, once; all checks"},
    {"assembly": "assembles a run", "exports": "LoRA for others, model card"},
    {
        "calibration": "measures engine against trainer, finds settings",
        "planning": "memory, work and workers of a run",
    },
    {"diagnosis": "what the numbers of another trainer's dump show"},
    {"commands": "train, plan, evaluate, calibrate, diagnose, export, report, compare, doctor"},
    {"cli": "the command line", "api": "train(...) in Python"},
    {
        "train": "python -m flowgrpo_rc.train, for torchrun and accelerate",
        "__main__": "python -m flowgrpo_rc",
    },
)
WIDTH = 960
LEFT = 40
BOX_HEIGHT = 46
GAP = 10


def draw() -> str:
    """Returns the picture as SVG text."""
    height = len(FLOORS) * (BOX_HEIGHT + GAP) + GAP
    shapes = [
        f'<line x1="18" y1="{GAP}" x2="18" y2="{height - GAP - 8}" class="arrow"/>',
        f'<path d="M12 {height - GAP - 10} L18 {height - GAP} L24 {height - GAP - 10} Z" '
        'class="head"/>',
    ]
    for level, rooms in enumerate(reversed(FLOORS)):
        top = GAP + level * (BOX_HEIGHT + GAP)
        width = (WIDTH - LEFT - GAP * len(rooms)) / len(rooms)
        for place, (name, text) in enumerate(rooms.items()):
            left = LEFT + place * (width + GAP)
            middle = left + width / 2
            shapes.append(
                f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{BOX_HEIGHT}" '
                'rx="6" class="room"/>'
            )
            shapes.append(f'<text x="{middle:.1f}" y="{top + 19}" class="name">{name}</text>')
            shapes.append(
                f'<text x="{middle:.1f}" y="{top + 36}" class="about">{escape(text)}</text>'
            )
    style = (
        ".room{fill:#eef1fb;stroke:#5c6bc0}.name{font:bold 15px sans-serif;fill:#1a237e}"
        ".about{font:12px sans-serif;fill:#333}text{text-anchor:middle}"
        ".arrow{stroke:#888;stroke-width:2}.head{fill:#888}"
    )
    body = "\n".join(shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-label="The rooms of the package, floor by floor">\n'
        f'<style>{style}</style>\n<rect width="{WIDTH}" height="{height}" fill="#fff"/>\n'
        f"{body}\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("figures").joinpath("rooms.svg").write_text(draw())
