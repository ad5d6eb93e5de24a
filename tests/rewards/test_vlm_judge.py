"""The judge as a reward: scores, failures that are counted, servers that misbehave."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path

import numpy as np
import pytest
from support.hostile_servers import HOSTILE, TOKEN, says
from support.reward_servers import Received, answering, chat, http, scripted, shown

from flowgrpo_rc.batch import Prompt
from flowgrpo_rc.plugins import build
from flowgrpo_rc.rewards.http.wire import encode_png
from flowgrpo_rc.rewards.manager import (
    RewardConfig,
    RewardManager,
    build_terms,
    check_images,
)
from flowgrpo_rc.rewards.vlm_judge import VlmJudge

IMAGES = np.zeros((4, 6, 8, 3), dtype=np.uint8)
IMAGES[:, 0, 0, 0] = [2, 9, 200, 0]
PROMPTS = [Prompt(text=f"dog {index}", index=index, target="ab") for index in range(4)]
QUICK = {"model": "m", "deadline_s": 1.0, "max_pause_s": 0.02, "max_response_mb": 0.5}
PATIENT = {**QUICK, "deadline_s": 60.0}


def test_scores_parts_and_what_is_asked() -> None:
    def judge(received: Received) -> object:
        (seen,) = shown(received)
        asked_again = len(received.body["messages"]) > 1
        return chat(f"I say {seen}" if seen or not asked_again else "10 of course")

    question = 'Is "{target}" in {prompt}? {low}-{high}, {"no": 0}'
    with scripted(answering(judge)) as server:
        reward = VlmJudge(question=question, low=1, high=11, url=server.url, **PATIENT)
        scores = reward(IMAGES, PROMPTS)
    assert scores.values == pytest.approx([0.1, 0.8, math.nan, 0.9], nan_ok=True)
    assert scores.parts == {"unanswered": [0, 0, 1, 0], "repeats": [0, 0, 1, 1]}
    assert scores.failure.startswith("1 of 4 questions have no answer that counts: not between")
    assert reward.requires_target
    body = server.received[0].body
    assert (body["temperature"], body["model"], body["max_tokens"]) == (0, "m", 128)
    texts = {sent.body["messages"][0]["content"][-1]["text"] for sent in server.received}
    assert texts == {f'Is "ab" in dog {index}? 1-11, {{"no": 0}}' for index in range(4)}


def test_frames_of_a_video() -> None:
    videos = np.zeros((1, 9, 4, 4, 3), dtype=np.uint8)
    videos[0, :, 0, 0, 0] = np.arange(9)
    with scripted(answering(lambda received: chat("5"))) as server:
        scores = VlmJudge(kind="video", every=3, url=server.url, **PATIENT)(videos, PROMPTS[:1])
    assert scores.values == [0.5]
    assert shown(server.received[0]) == [0, 3, 6]


def test_the_images_of_the_prompt_are_shown_first() -> None:
    source = np.full((4, 4, 3), 77, dtype=np.uint8)
    prompt = Prompt(text="x", index=0, images=(base64.b64decode(encode_png(source)),))
    with scripted(answering(lambda received: chat("5"))) as server:
        for first in (True, False):
            reward = VlmJudge(source=first, url=server.url, **PATIENT)
            assert reward(IMAGES[:1], [prompt]).values == [0.5]
            assert reward.requires_images == first
    assert [shown(received) for received in server.received] == [[77, 2], [2]]
    config = RewardConfig(terms={"vlm_judge": {"path": "a/b", "source": True}})
    check_images(build_terms(config), 1)
    with pytest.raises(ValueError, match=r"reward\.terms\.vlm_judge looks at .*condition_images=0"):
        check_images(build_terms(config), 0)


MISBEHAVING = {
    **{name: HOSTILE[name] for name in ("hangs", "is busy", "echoes the token")},
    "says nonsense": says(http(chat("as a language model \u202e\0 I ..."))),
    "repeats the token": says(http(chat(f"no {TOKEN[:5]}\0{TOKEN[5:]}"))),
    "says a number far off": says(http(chat("1000"))),
    "is cut": says(http(chat("5", finish_reason="length"))),
    "has no choice": says(http({"choices": []})),
    "has no text": says(http(chat(None))),
}


@pytest.mark.parametrize("name", MISBEHAVING)
def test_a_bad_judge_fails_its_samples_and_gives_no_number(name, monkeypatch, caplog) -> None:
    monkeypatch.setenv("REWARD_TOKEN", TOKEN)
    with scripted(MISBEHAVING[name]) as server:
        term = {"url": server.url, "token_env": "REWARD_TOKEN", **QUICK}
        manager = RewardManager(RewardConfig(terms={"vlm_judge": term, "jpeg": {}}))
        rewards = manager.collect([manager.submit(IMAGES, PROMPTS)])
        manager.close()
    assert rewards.parts["vlm_judge"].isnan().all()
    assert rewards.total.isnan().all()
    assert not rewards.valid.any()
    assert rewards.parts["vlm_judge/unanswered"].tolist() == [1, 1, 1, 1]
    assert rewards.parts["jpeg"].isfinite().all()
    assert manager.last_error["vlm_judge"].startswith("4 of 4 questions have no answer that counts")
    assert TOKEN not in caplog.text + manager.last_error["vlm_judge"]
    assert manager.last_error["vlm_judge"].isprintable()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"which model answers\? Give url and model .* or path"),
        ({"url": "http://localhost:1", "path": "x/y"}, r"which model answers\?"),
        ({"url": "http://localhost:1"}, r"VlmServer needs the option model"),
        ({"url": "http://localhost:1", "model": "m", "batch_size": 2}, r"batch_size: unknown"),
        ({"path": "./none"}, r"there is no such folder"),
        ({"path": "a/b", "concurrency": 2}, r"concurrency: unknown option"),
        ({"path": "a/b", "max_tokens": 0}, r"max_tokens=0: give a whole number of at least 1"),
        ({"path": "a/b", "kind": "text"}, r"kind='text': allowed are image, video"),
        ({"path": "a/b", "every": 2}, r"every=2 is for videos"),
        (
            {"path": "a/b", "kind": "video", "every": 0},
            r"every=0: give a whole number of at least 1",
        ),
    ],
)
def test_wrong_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=rf"reward\.terms\.vlm_judge.*{message}"):
        build_terms(RewardConfig(terms={"vlm_judge": options}))


def test_a_folder_of_another_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    with pytest.raises(ValueError, match=r"holds a llava; allowed are qwen2_vl.*url and model"):
        build(VlmJudge, {"path": str(tmp_path)}, "x")
