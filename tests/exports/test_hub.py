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
from flowgrpo_rc.exports.hub import Uploads, check_push, push


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "README.md").write_text("---\ntags:\n- flowgrpo-rc\n---\n\n# A LoRA\n")
    (folder / "pytorch_lora_weights.safetensors").write_bytes(b"tensors")
    (folder / "notes.txt").write_text("mine alone")
    for name in ("transformer_2", "other"):
        (folder / name).mkdir()
        (folder / name / "pytorch_lora_weights.safetensors").write_bytes(name.encode())
    return folder


def posted(hub: Hub, part: str) -> Any:
    (found,) = [body for path, body in hub.posted if part in path]
    return found


@pytest.mark.parametrize(("public", "others"), [(False, []), (True, ["transformer_2"])])
def test_the_lora_and_its_card_are_uploaded_and_nothing_else(
    hub: Hub, exported: Path, public: bool, others: list[str]
) -> None:
    api = HfApi(endpoint=hub.address, token=TOKEN)
    check_push(api, "me/lora", public=public)
    assert hub.posted == []
    url = push(api, exported, "me/lora", public=public, others=others)
    assert url == f"{hub.address}/me/lora"
    created = json.loads(posted(hub, "/api/repos/create"))
    assert created.get("private", created.get("visibility") == "private") is (not public)
    lines = [json.loads(line) for line in posted(hub, "/commit/").splitlines()]
    files = {
        line["value"]["path"]: base64.b64decode(line["value"]["content"])
        for line in lines
        if line["key"] == "file"
    }
    lora = "pytorch_lora_weights.safetensors"
    names = ("README.md", lora, *(f"{name}/{lora}" for name in others))
    assert files == {name: (exported / name).read_bytes() for name in names}


@pytest.mark.parametrize(
    ("repo", "visible", "token", "message"),
    [
        ("lora", None, TOKEN, "write it as user/name"),
        ("me/a/b", None, TOKEN, "--push-to-hub 'me/a/b'"),
        ("me/bad name", None, TOKEN, "--push-to-hub 'me/bad name'"),
        ("me/lora", None, None, "hf auth login"),
        ("me/lora", "public", TOKEN, "this repository is public; add --public"),
        ("me/lora", None, "hf_" + "wrongwrongwrongwrong", "the Hugging Face Hub refused"),
    ],
)
def test_what_cannot_work_is_refused_before_anything(
    hub: Hub,
    repo: str,
    visible: str | None,
    token: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    hub.visible = visible
    with pytest.raises((ValueError, OSError), match=message) as raised:
        check_push(HfApi(endpoint=hub.address, token=token), repo, public=False)
    assert "wrongwrong" not in str(raised.value)
    assert TOKEN not in str(raised.value)
    assert hub.posted == []
    if visible == "public":
        check_push(HfApi(endpoint=hub.address, token=token), repo, public=True)


def test_a_hub_that_cannot_be_reached_is_a_clear_failure() -> None:
    with pytest.raises(OSError, match="the Hugging Face Hub refused, or could not be reached"):
        check_push(HfApi(endpoint="http://127.0.0.1:9", token=TOKEN), "me/lora", public=False)


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
    (exported / "images").mkdir()
    (exported / "images" / "0.png").write_bytes(b"a picture")
    hub.visible = "public"
    uploads = Uploads(HfApi(endpoint=hub.address, token=TOKEN), "me/lora")
    uploads.finish()
    uploads.add(exported, 1, ())
    uploads.finish()
    assert hub.posted == []
    assert "this repository is public" in caplog.text
    hub.visible = "private"
    uploads.add(exported, 2, ())
    uploads.finish()
    assert '"LoRA of step 2"' in posted(hub, "/commit/")
    assert "images/0.png" in posted(hub, "/commit/")
    nowhere = Uploads(HfApi(endpoint="http://127.0.0.1:9", token=TOKEN), "me/lora")
    nowhere.add(exported, 3, ())
    nowhere.finish()
    assert caplog.messages[-1].startswith(
        "nothing is uploaded now, and the run goes on: the Hugging"
    )
    assert TOKEN not in caplog.text
