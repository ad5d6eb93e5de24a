"""`export --push-to-hub` against a local server: uploads, refusals, and no token shown."""

from __future__ import annotations

import base64
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from support.hub import TOKEN, Hub

from flowgrpo_rc.commands.export import export_checkpoint
from flowgrpo_rc.exports.hub import Repository, Uploads

NOWHERE = HfApi(endpoint="http://127.0.0.1:9", token=TOKEN)


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags:\n- flowgrpo-rc\n---\n\n# A LoRA\n")
    (folder / "notes.txt").write_text("mine alone")
    for name in ("", "transformer_2", "other", "images"):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "pytorch_lora_weights.safetensors").write_bytes(name.encode())
    (folder / "images" / "0.png").write_bytes(b"a picture")
    return folder


def posted(hub: Hub, part: str) -> Any:
    (body,) = [body for path, body in hub.posted if part in path]
    return body


@pytest.mark.parametrize(("public", "others"), [(False, []), (True, ["transformer_2"])])
def test_the_lora_and_its_card_are_uploaded_and_nothing_else(
    hub: Hub, exported: Path, public: bool, others: list[str]
) -> None:
    api = HfApi(endpoint=hub.address, token=TOKEN)
    repository = Repository(api, "me/lora", public=public)
    repository.check()
    assert hub.posted == []
    assert repository.push(exported, others) == f"{hub.address}/me/lora"
    created = json.loads(posted(hub, "/api/repos/create"))
    assert created.get("private", created.get("visibility") == "private") is (not public)
    lines = [json.loads(line) for line in posted(hub, "/commit/").splitlines()]
    files = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in lines
        if line["key"] == "file"
    }
    lora = "pytorch_lora_weights.safetensors"
    names = ("README.md", "images/0.png", lora, *(f"{name}/{lora}" for name in others))
    assert files == {name: (exported / name).read_bytes() for name in names}


def test_what_cannot_work_is_refused_before_anything(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    other_token = "hf_" + "wrongwrongwrongwrong"
    api = HfApi(endpoint=hub.address, token=TOKEN)
    for repo, asked_api, message in (
        ("lora", api, "write it as user/name"),
        ("me/a/b", api, "--push-to-hub 'me/a/b'"),
        ("me/bad name", api, "--push-to-hub 'me/bad name'"),
        ("me/lora", HfApi(endpoint=hub.address), "hf auth login"),
        ("me/lora", HfApi(endpoint=hub.address, token=other_token), "the Hugging Face Hub refused"),
        ("me/lora", NOWHERE, "the Hugging Face Hub refused, or could not be reached"),
    ):
        with pytest.raises((ValueError, OSError), match=message) as raised:
            Repository(asked_api, repo).check()
        assert "wrongwrong" not in str(raised.value)
        assert TOKEN not in str(raised.value)
    hub.visible = "public"
    with pytest.raises(ValueError, match="this repository is public; add --public"):
        Repository(api, "me/lora").check()
    Repository(api, "me/lora", public=True).check()
    assert hub.posted == []


def test_an_export_is_refused_before_it_reads_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export = partial(export_checkpoint, str(tmp_path / "no_run"), str(out), raw=False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE") as refused:
        export(push_to_hub="me/lora")
    assert TOKEN not in str(refused.value)
    with pytest.raises(ValueError, match="--public has no effect without --push-to-hub"):
        export(public=True)
    assert not out.exists()
    out.write_text("a file")
    with pytest.raises(ValueError, match=r"--out .*out is a file"):
        export()


def test_uploads_go_on_in_the_background_and_warn_of_what_fails(
    hub: Hub, exported: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.visible = "public"
    uploads = Uploads(HfApi(endpoint=hub.address, token=TOKEN), "me/lora")
    uploads.add(exported, 1, ())
    uploads.finish()
    assert hub.posted == []
    assert "this repository is public" in caplog.text
    hub.visible = "private"
    uploads.add(exported, 2, ())
    uploads.finish()
    assert '"LoRA of step 2"' in posted(hub, "/commit/")
    nowhere = Uploads(NOWHERE, "me/lora")
    nowhere.add(exported, 3, ())
    nowhere.finish()
    why = "nothing is uploaded now, and the run goes on: the Hugging"
    assert caplog.messages[-1].startswith(why)
    assert TOKEN not in caplog.text
