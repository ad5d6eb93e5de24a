"""Draws figures/solvers.png: words by the solvers of Wan and Sana, and by Euler's steps."""

from pathlib import Path

import diffusers
import numpy as np
import torch
from PIL import Image, ImageDraw

from flowgrpo_rc import assets

WORDS = ['"AB7X"', '"K9Q"', '"7SV9"', '"HI"']
ASKED = {"num_inference_steps": 10, "guidance_scale": 1.0, "height": 32, "width": 64}
# As published, and the line of docs/usage.md.
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
FIRST_ORDER = {"solver_order": 1, "disable_corrector": [*range(100)]}
UNIPC = diffusers.UniPCMultistepScheduler(**FLOW)
DPM = diffusers.DPMSolverMultistepScheduler(**FLOW, final_sigmas_type="zero")
pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained(assets.path("tiny_glyph_sd3"))


def drawn(scheduler: diffusers.SchedulerMixin, sigmas: list[float] | None = None) -> np.ndarray:
    """Returns the words side by side, in [0, 1], from noise that is always the same."""
    pipeline.scheduler = scheduler
    noise = torch.Generator().manual_seed(0)
    found = pipeline(WORDS, sigmas=sigmas, generator=noise, output_type="np", **ASKED)
    return np.concatenate(list(found.images), axis=1)


lines = []
for name, solver in (("UniPC", UNIPC), ("DPM-Solver++", DPM)):
    solver.set_timesteps(ASKED["num_inference_steps"])
    euler = diffusers.FlowMatchEulerDiscreteScheduler()
    trained = drawn(euler, [1.0, *solver.sigmas[1:-1].tolist()])
    rows = {f"Euler's steps on the sigmas of {name}, as trained": trained}
    for told, options in (("as it comes", {}), ("at order 1", FIRST_ORDER)):
        rows[f"{name} {told}"] = drawn(type(solver).from_config(solver.config, **options))
    for label, found in rows.items():
        apart = np.abs(found - trained)
        row = np.concatenate([found, 1 - (3 * apart).clip(0, 1)], axis=1)
        image = Image.fromarray((row * 255).round().astype(np.uint8)).resize((1024, 64), 0)
        canvas = Image.new("RGB", (1024, 80), "white")
        canvas.paste(image, (0, 16))
        text = f"{label}; right: 3 x the distance from Euler, at most {apart.max():.2f}"
        ImageDraw.Draw(canvas).text((4, 2), text, "black")
        lines.append(canvas)
figure = Image.fromarray(np.concatenate(lines)).quantize(64)
figure.save(Path(__file__).parent / "figures" / "solvers.png", optimize=True)
