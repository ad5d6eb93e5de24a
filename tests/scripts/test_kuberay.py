"""The numbers of the example for Kubernetes agree with each other."""

from __future__ import annotations

import re

import yaml
from support.documented import ROOT
from support.launching import ran

TEXT = (ROOT / "examples/kuberay.yaml").read_text(encoding="utf-8")


def test_the_numbers_of_its_objects_agree() -> None:
    _, cluster, job = (part["spec"] for part in yaml.safe_load_all(TEXT))
    (group,) = cluster["workerGroupSpecs"]
    sampler, trainer = (part["template"]["spec"]["containers"][0] for part in (group, job))
    assert ran("bash", "-n", input=trainer["args"][0]).returncode == 0
    given = dict(re.findall(r"([\w.]+)[= ](\d+)", trainer["args"][0]))
    gpus, cards = (pod["resources"]["limits"]["nvidia.com/gpu"] for pod in (sampler, trainer))
    assert int(given["rollout.workers"]) == group["replicas"] * int(gpus)
    assert given["nproc_per_node"] == cards
    assert int(given["nnodes"]) == job["completions"] == job["parallelism"]
