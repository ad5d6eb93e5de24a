"""The VAE as it decodes: its precision and the layout of its weights."""

import torch
from torch import channels_last, channels_last_3d, nn


def vae_dtype(dtype: str, device: torch.device, *, stock_in_bf16: bool) -> torch.dtype:
    """Returns the precision of a VAE beside a model in `dtype`.

    It is bf16 on a card where the stock pipeline in bf16 has its VAE so; else fp32, since SD3's
    overflows in half precision and a CPU convolves faster in fp32.
    """
    in_bf16 = stock_in_bf16 and dtype == "bf16" and device.type != "cpu"
    return torch.bfloat16 if in_bf16 else torch.float32


def keep_channels_last(vae: nn.Module) -> None:
    """Lays out the weights of a decoder so that its convolutions keep channels last.

    On a CPU they then take 0.4 to 1.0 of the time, whatever the VAE, and a pixel is at most one
    level off.
    """
    for name, layer in vae.named_modules():
        # What encodes pictures of prompts keeps its bits.
        if name.startswith("decoder") and isinstance(layer, nn.Conv2d | nn.Conv3d):
            layout = channels_last if isinstance(layer, nn.Conv2d) else channels_last_3d
            layer.weight.data = layer.weight.data.contiguous(memory_format=layout)
