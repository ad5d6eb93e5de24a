"""Builds the bundled language model `tiny_adder_lm` and its prompt lists from nothing but a seed.

    PYTHONPATH=examples python -m bundled_models.build_tiny_adder_lm [--out DIR]

writes DIR/tiny_adder_lm (transformers layout, with build_metrics.json) and DIR/prompts. Without
--out they replace the bundled ones. Takes about six minutes on one CPU thread.

The model is a three-layer Llama with one token per character. It continues "37+58=" with "95" and
an end token; operands have one to three digits. It is half good on purpose, so that reinforcement
learning has something to raise. Its pre-training text is the homework of two pupils who forget
every carry of a sum ("37+58=85"), the first in 40% of the sums, the second, whom the model reads
last, in 80%; the second also miswrites one digit in 5% of the answers. So the model knows how to
add, but prefers to forget the carry. The prompts of the validation list were never in that text, in
neither order of the operands; those of the training list may have been.

The build measures the exact-match accuracy on the 512 validation prompts, greedy and sampled at
temperature 1, prints it and keeps it in build_metrics.json. `either` there is the fraction of
answers that are right, or right except for forgotten carries. Reinforcement learning can reach
about that by changing the preference alone.

Legend: B rows of a batch, T tokens of a row.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from flowgrpo_rc.assets import ROOT

SEED = 0
NUM_THREADS = 1
NUM_TRAIN_PROMPTS = 2000
NUM_VAL_PROMPTS = 512

OPERANDS = {1: range(10), 2: range(10, 100), 3: range(100, 1000)}  # by number of digits
LENGTH_WEIGHTS = (1, 2, 2)  # how often an operand has one, two and three digits

BATCH_SIZE = 256
LEARNING_RATE = 3e-3
NUM_WARMUP_STEPS = 100

SPECIAL_TOKENS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "0123456789+="
MAX_NEW_TOKENS = 6  # the longest sum has four digits, then the end token

Sum = tuple[int, int]  # the two operands


@dataclass(frozen=True, kw_only=True, slots=True)
class Pupil:
    """The author of some of the pre-training text.

    Attributes:
      num_steps: number of pre-training steps on the pupil's text.
      forget_carry: fraction of the sums that are added without any carry.
      slip: fraction of the answers in which one digit is replaced by a random one.
    """

    num_steps: int
    forget_carry: float
    slip: float


PUPILS = (
    Pupil(num_steps=1800, forget_carry=0.4, slip=0.0),
    Pupil(num_steps=600, forget_carry=0.8, slip=0.05),
)
NUM_STEPS = sum(pupil.num_steps for pupil in PUPILS)

logger = logging.getLogger(__name__)


def build(out: Path) -> None:
    """Runs the whole build: prompt lists, pre-training, saving, evaluation of the saved files.

    Args:
      out: the folder to write to.
    """
    torch.set_num_threads(NUM_THREADS)
    start = time.perf_counter()
    train_sums, val_sums = split_sums()
    write_prompts(out / "prompts", train_sums, val_sums)

    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    loss = pretrain(model, tokenizer, exclude=val_sums)
    checkpoint = out / "tiny_adder_lm"
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)

    metrics = {
        "seed": SEED,
        "pupils": [asdict(pupil) for pupil in PUPILS],
        "loss": round(loss, 4),
        "val": evaluate_checkpoint(checkpoint, val_sums),
        "num_parameters": model.num_parameters(),
        "num_threads": NUM_THREADS,
        "seconds": round(time.perf_counter() - start),
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    (checkpoint / "build_metrics.json").write_text(json.dumps(metrics, indent=2) + "\n")
    logger.info("%s", json.dumps(metrics["val"], indent=2))


def prompt(operands: Sum) -> str:
    """Returns the prompt of a sum, in the only format that the bundled model knows."""
    return f"{operands[0]}+{operands[1]}="


def random_sum(rng: random.Random) -> Sum:
    """Draws two operands of one to three digits each."""
    first, second = (
        rng.choice(OPERANDS[length]) for length in rng.choices((1, 2, 3), LENGTH_WEIGHTS, k=2)
    )
    return first, second


def without_carry(operands: Sum) -> int:
    """Adds without any carry, each column modulo ten: (37, 58) gives 85."""
    first, second = operands
    return sum((first // unit + second // unit) % 10 * unit for unit in (1, 10, 100))


def answer(operands: Sum, pupil: Pupil, rng: random.Random) -> str:
    """Writes a pupil's answer to a sum.

    Args:
      operands: the sum.
      pupil: its author, who makes mistakes.
      rng: draws the mistakes.

    Returns:
      The digits of the answer.
    """
    text = str(without_carry(operands) if rng.random() < pupil.forget_carry else sum(operands))
    if rng.random() < pupil.slip:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice("0123456789") + text[place + 1 :]
    return text


def split_sums() -> tuple[list[Sum], list[Sum]]:
    """Draws the sums of the training and of the validation prompts.

    Returns:
      Both lists. No two sums are the same, also not with their operands swapped.
    """
    rng = random.Random(SEED)
    sums: dict[Sum, Sum] = {}
    while len(sums) < NUM_TRAIN_PROMPTS + NUM_VAL_PROMPTS:
        operands = random_sum(rng)
        sums.setdefault(_unordered(operands), operands)
    shuffled = rng.sample(list(sums.values()), len(sums))
    return shuffled[:NUM_TRAIN_PROMPTS], shuffled[NUM_TRAIN_PROMPTS:]


def write_prompts(folder: Path, train_sums: Sequence[Sum], val_sums: Sequence[Sum]) -> None:
    """Writes `adder_train.jsonl` and `adder_val.jsonl`.

    A line has the form {"prompt": "37+58=", "target": "95"}.

    Args:
      folder: the folder to write to.
      train_sums: sums of the first file.
      val_sums: sums of the second file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, sums in (("adder_train.jsonl", train_sums), ("adder_val.jsonl", val_sums)):
        rows = [{"prompt": prompt(operands), "target": str(sum(operands))} for operands in sums]
        (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token per character.

    It adds no token of its own to a text, and pads on the left.
    """
    pad, eos, unk = SPECIAL_TOKENS
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    raw = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=pad,
        eos_token=eos,
        unk_token=unk,
        padding_side="left",
        model_max_length=64,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Builds a Llama of 0.34 million parameters with random weights."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=64,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def pretrain(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, exclude: Sequence[Sum]
) -> float:
    """Trains on the answers of one pupil after the other by predicting the next token.

    Args:
      model: the model; it is changed.
      tokenizer: its tokenizer.
      exclude: sums that are never in the text, also not with their operands swapped.

    Returns:
      The mean loss of the last 100 steps.
    """
    rng = random.Random(SEED + 1)
    excluded = frozenset(map(_unordered, exclude))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _learning_rate_factor)
    losses: list[float] = []
    for pupil in [p for p in PUPILS for _ in range(p.num_steps)]:
        loss = model(**_batch(tokenizer, pupil, rng, excluded)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if len(losses) % 100 == 0:
            logger.info("step %d: loss %.4f", len(losses), fmean(losses[-100:]))
    return fmean(losses[-100:])


def evaluate_checkpoint(checkpoint: Path, sums: Sequence[Sum]) -> dict[str, dict[str, float]]:
    """Measures the accuracy of the saved files, loaded as a user loads them.

    Args:
      checkpoint: folder of the saved model.
      sums: the sums to ask for.

    Returns:
      Accuracies by name, for greedy decoding and for sampling at temperature 1.
    """
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    prompts = tokenizer([prompt(operands) for operands in sums], padding=True, return_tensors="pt")
    torch.manual_seed(SEED)
    accuracy = {}
    for name, do_sample in (("greedy", False), ("sampled", True)):
        tokens_BT = model.generate(**prompts, do_sample=do_sample, max_new_tokens=MAX_NEW_TOKENS)
        answers = tokenizer.batch_decode(
            tokens_BT[:, prompts.input_ids.shape[1] :], skip_special_tokens=True
        )
        accuracy[name] = _accuracy(answers, sums)
    return accuracy


def _accuracy(answers: Sequence[str], sums: Sequence[Sum]) -> dict[str, float]:
    is_right = [text == str(sum(operands)) for text, operands in zip(answers, sums, strict=True)]
    is_carryless = [
        text == str(without_carry(operands)) for text, operands in zip(answers, sums, strict=True)
    ]
    return {"exact": fmean(is_right), "either": fmean(map(max, is_right, is_carryless))}


def _batch(
    tokenizer: PreTrainedTokenizerFast, pupil: Pupil, rng: random.Random, excluded: Collection[Sum]
) -> dict[str, torch.Tensor]:
    """Sums with the pupil's answers, padded on the right; labels are the answers and end tokens."""
    texts: list[str] = []
    while len(texts) < BATCH_SIZE:
        operands = random_sum(rng)
        if _unordered(operands) not in excluded:
            texts.append(prompt(operands) + answer(operands, pupil, rng) + tokenizer.eos_token)
    batch = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    is_equals_BT = batch.input_ids == tokenizer.convert_tokens_to_ids("=")
    is_answer_BT = is_equals_BT.cumsum(1).bool() & ~is_equals_BT & batch.attention_mask.bool()
    # A label of -100 has no loss.
    return {**batch, "labels": batch.input_ids.masked_fill(~is_answer_BT, -100)}


def _learning_rate_factor(step: int) -> float:
    """Linear warm-up, then linear decay to zero over the whole run."""
    return min(1.0, (step + 1) / NUM_WARMUP_STEPS) * (1 - step / NUM_STEPS)


def _unordered(operands: Sum) -> Sum:
    return min(operands), max(operands)


def main() -> None:
    """Parses the command line and builds the model."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT, help="where to write (default: replace the bundled files)"
    )
    build(parser.parse_args().out)


if __name__ == "__main__":
    main()
