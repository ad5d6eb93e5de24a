"""A model of your own, outside of the package: Chroma, an open relative of FLUX.1.

    python examples/my_model.py

takes two training steps from a checkpoint of random weights. For the real model
(https://huggingface.co/lodestones/Chroma1-HD), from this folder and with prompts and sizes of your
own:

    flowgrpo-rc train model.adapter=my_model.Chroma model.path=lodestones/Chroma1-HD ...

`model.adapter` names the class. It does what the stock pipeline's `__call__` does, piece by piece,
and knows nothing of the algorithm. docs/extending.md explains each piece, and the tests that
compare an adapter with its stock pipeline.

Legend: B samples, H and W height and width of a picture in pixels.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowgrpo_rc.batch import Conditioning, SamplerSpec
from flowgrpo_rc.models.base import FlowModel, Schedule
from flowgrpo_rc.models.layout import check_size, dynamic_shift, shifted_schedule, unpack


class Chroma(FlowModel):
    """Chroma: T5 gives the tokens; latents [B, H/16 * W/16, 64], packed.

    Tokens after the first padding are masked. guidance_scale guides on a negative prompt, which
    FLUX.1-dev has distilled away.
    """

    pipeline_class = "ChromaPipeline"
    default_target_modules = ("attn.to_k", "attn.to_out.0", "attn.to_q", "attn.to_v")

    def check(self, spec: SamplerSpec, key: str) -> None:
        """Refuses sizes that do not fill whole patches."""
        check_size(spec, key, multiple=2 * self.pipeline.vae_scale_factor)

    def _encode(self, prompts: Sequence[str], *, max_sequence_length: int) -> Conditioning:
        embeds, _, mask, *_ = self.pipeline.encode_prompt(
            list(prompts),
            do_classifier_free_guidance=False,
            device=self.device,
            max_sequence_length=max_sequence_length,
        )
        return Conditioning(embeds=embeds, mask=mask.bool())

    def latent_shape(self, spec: SamplerSpec) -> tuple[int, ...]:
        """Returns one token for each patch of 2 x 2 latents, with all their channels."""
        rows, columns = self._patches(spec)
        return rows * columns, self.transformer.config.in_channels

    def schedule(self, spec: SamplerSpec) -> Schedule:
        """Returns evenly spaced sigmas, shifted for the number of tokens."""
        rows, columns = self._patches(spec)
        mu = dynamic_shift(self.scheduler, rows * columns)
        return shifted_schedule(self.scheduler, spec.num_inference_steps, mu, self.device)

    def velocity(
        self,
        transformer: Any,
        latents: Tensor,
        timesteps: Tensor,
        conditioning: Conditioning,
        negative: Conditioning | None,
        spec: SamplerSpec,
    ) -> Tensor:
        """Predicts the velocity; `guidance_scale` guides if there is a negative prompt."""
        axes = (torch.arange(size, device=latents.device) for size in (1, *self._patches(spec)))
        positions = torch.cartesian_prod(*axes).to(latents.dtype)

        def predict(text: Conditioning) -> Tensor:
            tokens = text.tokens()
            mask = torch.cat([tokens, tokens.new_ones(latents.shape[:2])], 1)
            predicted: Tensor = transformer(
                hidden_states=latents.to(transformer.dtype),
                timestep=timesteps / 1000,
                encoder_hidden_states=text.embeds.to(transformer.dtype),
                txt_ids=positions.new_zeros(text.embeds.shape[1], 3),
                img_ids=positions,
                # Numbers, not bools: the attention adds them to its logits, as in the stock
                # pipeline.
                attention_mask=mask.to(transformer.dtype),
                return_dict=False,
            )[0]
            return predicted.float()

        guided = predict(conditioning)
        if negative is None:
            return guided
        unguided = predict(negative)
        return unguided + self.cfg_scale(spec) * (guided - unguided)

    def _decode(self, latents: Tensor, spec: SamplerSpec) -> Tensor:
        vae = self.pipeline.vae
        scaled = (
            unpack(latents, *self._patches(spec)) / vae.config.scaling_factor
            + vae.config.shift_factor
        )
        decoded = vae.decode(scaled.to(vae.dtype), return_dict=False)[0]
        return self.pipeline.image_processor.postprocess(decoded, output_type="pt")

    def _patches(self, spec: SamplerSpec) -> tuple[int, int]:
        """Rows and columns of the image's tokens."""
        side = 2 * self.pipeline.vae_scale_factor
        return spec.height // side, spec.width // side


def random_checkpoint(folder: Path) -> Path:
    """Writes a small untrained checkpoint of the true classes, to see that everything fits.

    Args:
      folder: the folder to write to.

    Returns:
      The folder.
    """
    from bundled_models import tiny_sd3
    from diffusers import ChromaPipeline, ChromaTransformer2DModel, FlowMatchEulerDiscreteScheduler

    tokenizer = tiny_sd3.t5_tokenizer()
    encoder = tiny_sd3.t5_encoder(tokenizer)
    vae = tiny_sd3.autoencoder()
    vae.register_to_config(scaling_factor=0.4, shift_factor=0.1)
    transformer = ChromaTransformer2DModel(
        in_channels=4 * tiny_sd3.LATENT_CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=encoder.config.d_model,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=16,
        approximator_hidden_dim=32,
        approximator_layers=1,
    )
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    ChromaPipeline(scheduler, vae, encoder, tokenizer, transformer).save_pretrained(folder)
    return folder


def main(argv: Sequence[str] | None = None) -> int:
    """Trains two steps and returns the exit status."""
    from flowgrpo_rc.cli import main as flowgrpo_rc

    parser = argparse.ArgumentParser(description="train two steps of a Chroma of random weights")
    parser.add_argument("--out", type=Path, default=Path("outputs/my_model"))
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args(argv)
    settings = {
        "model.adapter": "my_model.Chroma",
        "model.path": random_checkpoint(args.out / "checkpoint"),
        "data.train_batch_size": 2,
        "rollout.n": 4,
        "rollout.pipeline.guidance_scale": 3.5,
        "rollout.val_kwargs.guidance_scale": 3.5,
        "rollout.val_kwargs.n": 16,
        "actor.ppo_micro_batch_size_per_gpu": 4,
        "reward.terms.ocr": "null",  # random weights draw no words
        "reward.terms.jpeg.objective": "compressibility",
        "trainer.total_training_steps": 2,
        "trainer.output_dir": args.out / "run",
        "trainer.experiment_name": "my_model",
    }
    return flowgrpo_rc(
        ["train", *(f"{key}={value}" for key, value in settings.items()), *args.overrides]
    )


if __name__ == "__main__":
    raise SystemExit(main())
