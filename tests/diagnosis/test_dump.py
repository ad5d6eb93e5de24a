"""Dumps are read under several names, and refused where they cannot be."""

from __future__ import annotations

import json
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import reference_pages
import torch
from safetensors.torch import save_file
from support.dumps import Made, make_tensors, write_dump
from support.launching import ran
from torch import Tensor

from flowgrpo_rc import calibration, diagnosis
from flowgrpo_rc.calibration.causes import causes, keys_of
from flowgrpo_rc.cli import main
from flowgrpo_rc.diagnosis.checks import examine
from flowgrpo_rc.diagnosis.dump import Dump, read_dump

SETTINGS = {"noise_level": "0.7", "sde_type": "sde"}


def read(folder: Path, tensors: dict[str, Tensor], settings: dict[str, str] = SETTINGS) -> Dump:
    content = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(content, folder / "dump.safetensors", metadata=settings)
    return read_dump(folder)


def same_as_old(tensors: dict[str, Tensor]) -> None:
    tensors["new_log_probs"] = tensors["old_log_probs"].clone()


def of_verl_omni(tensors: dict[str, Tensor]) -> None:
    tensors["all_latents"] = tensors.pop("latents")
    tensors["all_timesteps"] = tensors.pop("timesteps")


def of_flow_grpo(tensors: dict[str, Tensor]) -> None:
    latents = tensors.pop("latents")
    tensors |= {"latents": latents[:, :-1], "next_latents": latents[:, 1:]}
    tensors["log_probs"] = tensors.pop("rollout_log_probs")


def of_unirl(tensors: dict[str, Tensor]) -> None:
    tensors["sde_logp"] = tensors.pop("rollout_log_probs")
    tensors["sde_means"] = tensors.pop("means")
    tensors["sde_indices"] = torch.arange(tensors["sde_logp"].shape[1])
    del tensors["timesteps"]


TRAINERS = {"verl-omni": of_verl_omni, "flow_grpo": of_flow_grpo, "UniRL": of_unirl}


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_names_of_a_trainer_are_known(trainer: str, tmp_path: Path) -> None:
    tensors, _ = make_tensors(Made(seed=1))
    plain = read(tmp_path, tensors)
    TRAINERS[trainer](tensors)
    settings = {"trainer": trainer, "eta": "0.7", "sde_type": "sde", "clip_range": "0.005"}
    found = read(tmp_path, tensors, settings)
    assert found.settings["trainer"] == trainer
    assert found.settings["clip_ratio"] == 0.005
    for name in ("start", "end", "rollout", "old", "place", "means"):
        assert torch.equal(getattr(found, name), getattr(plain, name))
    assert examine(found) == []


@pytest.mark.parametrize(("of_sum", "causes"), [(False, []), (True, ["convention"])])
def test_timesteps_say_the_schedule_but_for_its_end(
    of_sum: bool, causes: list[str], tmp_path: Path
) -> None:
    tensors, _ = make_tensors(Made(seed=2))
    sigmas = tensors.pop("sigmas").double()
    if of_sum:
        tensors["rollout_log_probs"] *= tensors["latents"][0, 0].numel()
    found = read(tmp_path, tensors)
    walked = sigmas[: tensors["timesteps"].shape[-1]]
    torch.testing.assert_close(found.sigmas[:-1], walked, rtol=1e-6, atol=1e-7)
    assert found.sigmas[-1].isnan()
    assert [cause for cause, _ in examine(found)][:1] == causes


def test_a_window_of_the_schedule_is_read(tmp_path: Path) -> None:
    tensors, _ = make_tensors(Made(seed=2, steps=10))
    for name in ("rollout_log_probs", "old_log_probs", "new_log_probs", "timesteps", "means"):
        tensors[name] = tensors[name][:, 3:6]
    tensors["latents"], tensors["step_indices"] = tensors["latents"][:, 3:7], torch.arange(3, 6)
    found = read(tmp_path, tensors)
    assert found.place[0].tolist() == [3, 4, 5]
    assert examine(found) == []
    tensors["rollout_log_probs"] *= 2
    assert examine(read(tmp_path, tensors))[0][0] == "convention"


def folder_of(folder: Path, *made: Made) -> Dump:
    for number, how in enumerate(made):
        write_dump(folder / f"step_{number}.safetensors", how)
    return read_dump(folder)


def test_all_files_of_a_folder_are_looked_at(tmp_path: Path) -> None:
    """Looks at what stands in the last file alone, and makes no rule of one file."""
    clean = [Made(seed=seed, means=False) for seed in range(3)]
    found = folder_of(tmp_path / "clean", *clean)
    assert (len(found.rollout), len(found.group.unique())) == (54, 9)
    assert examine(found) == []
    stale = Made(seed=7, means=False, stale=(1.0, 0.5))
    ((cause, evidence),) = examine(folder_of(tmp_path / "stale", *clean, stale))
    assert (cause, evidence[:16]) == ("stale", "18 of 72 samples")
    dead = [Made(seed=seed, change=same_as_old) for seed in (8, 9)]
    assert examine(folder_of(tmp_path / "once", dead[0], Made(seed=9))) == []
    assert examine(folder_of(tmp_path / "dead", *dead))[0][0] == "lora"
    again = examine(folder_of(tmp_path / "again", clean[0], replace(clean[0], groups=2)))
    assert again[0][0] == "noise"
    with pytest.raises(ValueError, match=r"step_1.safetensors cannot be read: its steps, sigmas"):
        folder_of(tmp_path / "other", clean[0], Made(seed=1, steps=9))


def test_rollouts_of_this_package_are_read(tmp_path: Path) -> None:
    tensors, _ = make_tensors(Made(seed=3))
    rows, steps = tensors["rollout_log_probs"].shape
    of_verl_omni(tensors)
    tensors["prev_sample_mean"] = tensors.pop("means")
    tensors["step_indices"] = torch.arange(steps).expand(rows, -1)
    header = json.dumps({"kind": "diffusion", "spec": {"sde_type": "sde", "noise_level": 0.7}})
    found = read(tmp_path, tensors, {"rollout": header})
    assert found.settings["trainer"] == "flowgrpo_rc"
    assert found.means is not None
    assert examine(found) == []


def without(name: str) -> dict[str, object]:
    return {name: None}


BAD = [
    (without("latents"), "no tensor 'latents', but advantages, group"),
    (without("rollout_log_probs"), "no tensor 'rollout_log_probs'"),
    (without("sigmas") | without("timesteps"), "no tensor 'sigmas'"),
    ({"latents": torch.zeros(18, 7, 4)}, r"does not fit latents \[18, 7, 4\]"),
    ({"latents": torch.zeros(5, 8, 4)}, r"rollout_log_probs \[18, 7\]: give states"),
    ({"means": torch.zeros(18, 7, 5)}, r"means \[18, 7, 5\] does not fit"),
    ({"old_log_probs": torch.zeros(18, 3)}, r"old_log_probs \[18, 3\] does not fit"),
    ({"rollout_log_probs": torch.full((18, 7), torch.nan)}, r"126 numbers of rollout_log_probs"),
    (
        without("means") | {"latents": torch.full((18, 8, 4), torch.inf)},
        "numbers of latents are nan or inf",
    ),
    ({"sigmas": torch.linspace(0, 1, 9)}, "falls from at most 1"),
    ({"sigmas": torch.linspace(1, 0, 3)}, "do not hold all steps"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_a_dump_that_is_wrong_says_how(
    change: dict[str, Tensor | None], message: str, tmp_path: Path
) -> None:
    tensors, _ = make_tensors(Made(seed=4))
    tensors = {n: t for n, t in (tensors | change).items() if t is not None}
    with pytest.raises(ValueError, match=message):
        read(tmp_path, tensors)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sde_type": "sde"}, "needs noise_level and sde_type"),
        ({"sde_type": "ode", "noise_level": "0.7"}, "sde, cps, dance_sde.*has .*ode"),
        (SETTINGS | {"clip_ratio": "-1"}, "clip_ratio=-1 must be above 0"),
        (SETTINGS | {"noise_level": "much"}, "noise_level cannot be read"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, make_tensors(Made(seed=5))[0], settings)


def test_a_pickle_is_refused_unread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "samples.pt"
    path.write_bytes(b"cos\nsystem\n(S'touch /tmp/never'\ntR.")
    for dump in (path, tmp_path):
        assert main(["diagnose", str(dump)]) == 2
        assert "A pickle (.pt, .pkl, .bin) can run code" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["nothing.safetensors", "empty", "broken.safetensors"])
def test_what_is_no_dump_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.safetensors").write_bytes(b"\x20\0\0\0\0\0\0\0{")
    with pytest.raises(ValueError, match=name.removesuffix("y")):
        read_dump(tmp_path / name)


def sparse(path: Path, shapes: dict[str, list[int]]) -> None:
    """Writes a header for tensors whose numbers are a hole in the file, all 0 but 5 sigmas."""
    header: dict[str, object] = {"__metadata__": SETTINGS}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + struct.pack("<5f", 1, 0.8, 0.6, 0.4, 0.2))
        file.truncate(8 + len(text) + end)


def test_ten_gigabytes_are_not_all_read(tmp_path: Path) -> None:
    path = tmp_path / "large.safetensors"
    shapes = {"sigmas": [5], "latents": [40000, 5, 16, 28, 28], "rollout_log_probs": [40000, 4]}
    for file in (path, *(tmp_path / f"{number}.safetensors" for number in range(3))):
        sparse(file, shapes)
    assert path.stat().st_size > 10e9
    # In a process of its own, whose largest size is not that of another test.
    code = "import resource, sys; from pathlib import Path; from flowgrpo_rc.diagnosis.dump import "
    code += "read_dump; size = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss; "
    code += (
        "a = size(); print(*(len(read_dump(Path(p)).rollout) for p in sys.argv[1:]), size() - a)"
    )
    said = ran(sys.executable, "-c", code, str(path), str(tmp_path)).stdout
    of_file, of_folder, kilobytes = map(int, said.split())
    assert of_file == of_folder == 256
    assert kilobytes < 1e6
    sparse(path, shapes | {"latents": [2, 5, 16, 4096, 4096], "rollout_log_probs": [2, 4]})
    with pytest.raises(ValueError, match="too large to look at"):
        read_dump(path)


def test_the_command_says_cause_and_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    for trainer, key in (("UniRL", "algorithm.clip_range=1e-4"), ("mine", "config.train.clip")):
        settings = {"clip_ratio": 0.2, "trainer": trainer}
        dump = write_dump(tmp_path / "dump.safetensors", Made(seed=6, settings=settings))
        assert main(["diagnose", str(dump), "--out", str(page)]) == 1
        said = capsys.readouterr().out
        assert said.startswith("Most probable cause: clip_wide")
        assert key in said
        assert len(said.splitlines()) < 24
        assert key in page.read_text().replace("<wbr>", "")
    clean = write_dump(tmp_path / "dump.safetensors", Made(seed=6, means=False))
    assert main(["diagnose", str(clean), "--out", str(page)]) == 0
    assert "trainer unknown, lacking: means" in capsys.readouterr().out


def test_every_cause_is_looked_for_and_can_be_mended() -> None:
    source = "".join(
        file.read_text()
        for room in (diagnosis, calibration)
        for file in Path(room.__file__).parent.glob("*.py")
    )
    for name, cause in causes().items():
        assert cause.replay or cause.dump
        assert bool(cause.replay) == bool(cause.mend)
        assert f'"{name}"' in source
        if cause.keys:
            assert all(keys_of(name, trainer) for trainer in TRAINERS)
    # A dump has no engine to ask, and no means are compared.
    without_keys = {name for name, cause in causes().items() if not cause.keys}
    assert without_keys == {"means", "settings", "weights"}


@pytest.mark.parametrize(("page", "column"), [("calibration", "replay"), ("diagnose", "dump")])
def test_the_pages_show_the_table_of_causes(page: str, column: str) -> None:
    text = (Path(reference_pages.__file__).parent / f"{page}.md").read_text()
    plain = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", text)
    expected = {name: getattr(cause, column) for name, cause in causes().items()}
    rows = {f"| `{name}` | {words} |" for name, words in expected.items() if words}
    assert rows <= set(plain.splitlines())
