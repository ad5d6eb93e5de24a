"""Arguments of three published scripts of verl-omni, as the shell passes them on, and its keys."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).with_name("verl_omni")
QWEN_IMAGE = (FOLDER / "run_qwen_image_ocr_lora_rollout_corr.txt").read_text().splitlines()
SD35 = (FOLDER / "run_sd35_medium_ocr_lora.txt").read_text().splitlines()
NFT = (FOLDER / "run_qwen_image_ocr_lora_nft.txt").read_text().splitlines()
