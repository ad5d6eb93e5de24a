"""Rewards behind HTTP ask their server before a run whether it is there and has what they need."""

from __future__ import annotations

import pytest
from support.hostile_servers import HOSTILE, says
from support.reward_servers import http, scripted

from flowgrpo_rc.rewards.remote import Remote
from flowgrpo_rc.rewards.vlm_ocr import VlmOCR

MODELS = {"object": "list", "data": [{"id": "a"}, {"id": "b"}]}
# Servers that are there, though they do not answer the question.
THERE = ["refuses", "answers HTML", "hangs up", "is unavailable", "redirects", "answers nothing"]


@pytest.mark.parametrize("name", THERE)
def test_a_server_need_not_answer_the_question(name: str) -> None:
    with scripted(HOSTILE[name]) as server:
        Remote(url=server.url, part_names=["x"]).check()
        VlmOCR(url=server.url, model="a").check()
        assert [each.head.split(" ")[0] for each in server.received] == ["GET", "GET"]


@pytest.mark.parametrize("status", ["401 Unauthorized", "403 Forbidden"])
def test_a_token_that_the_server_refuses(status: str) -> None:
    with (
        scripted(says(http({}, status))) as server,
        pytest.raises(ValueError, match=f"answered {status[:3]}.*token_env"),
    ):
        Remote(url=server.url).check()


def test_parts_that_the_server_does_not_return() -> None:
    with scripted(says(http({"part_names": ["x", "y"]}))) as server:
        Remote(url=server.url, part_names=["y"]).check()
        with pytest.raises(ValueError, match=r"part_names=\['z'\]: the server .*'x', 'y'"):
            Remote(url=server.url, part_names=["z"]).check()


def test_a_model_that_the_server_does_not_have() -> None:
    with scripted(says(http(MODELS))) as server:
        VlmOCR(url=server.url, model="b").check()
        with pytest.raises(ValueError, match="model=c: the server has a, b"):
            VlmOCR(url=server.url, model="c").check()
