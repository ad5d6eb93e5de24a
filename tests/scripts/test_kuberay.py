"""The example for Kubernetes has fields that its objects have, and they agree with each other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend
from support.documented import ROOT
from support.launching import ran

TEXT = (ROOT / "examples/kuberay.yaml").read_text(encoding="utf-8")
SCHEMAS = yaml.safe_load(Path(__file__).with_name("kuberay_schema.yaml").read_text())


def only_named(validator: Any, named: dict, found: dict, schema: dict) -> Iterator[ValidationError]:
    """Checks the fields of an object, and that it has no other ones than the schema names."""
    yield from Draft202012Validator.VALIDATORS["properties"](validator, named, found, schema)
    for name in found.keys() - named.keys():
        yield ValidationError(f"there is no {name}")


STRICT = extend(Draft202012Validator, {"properties": only_named})


def refused(text: str) -> str:
    """Returns what is wrong with the objects of a file."""
    found = []
    for part in yaml.safe_load_all(text):
        validator = STRICT(SCHEMAS[f"{part['apiVersion']} {part['kind']}"])
        found += [error.message for error in validator.iter_errors(part["spec"])]
    return "; ".join(found)


def test_its_objects_have_the_fields_of_their_kind_and_agree() -> None:
    assert refused(TEXT) == ""
    assert refused(TEXT.replace("minReplicas: 2", "")) == "'minReplicas' is a required property"
    assert "there is no mountpath" in refused(TEXT.replace("mountPath", "mountpath"))
    assert refused(TEXT.replace('"0"', "0")) == "0 is not of type 'string'"
    _, cluster, job = (part["spec"] for part in yaml.safe_load_all(TEXT))
    (group,) = cluster["workerGroupSpecs"]
    sampler, trainer = (part["template"]["spec"]["containers"][0] for part in (group, job))
    assert ran("bash", "-n", input=trainer["args"][0]).returncode == 0
    given = dict(re.findall(r"([\w.]+)[= ](\d+)", trainer["args"][0]))
    gpus, cards = (pod["resources"]["limits"]["nvidia.com/gpu"] for pod in (sampler, trainer))
    assert int(given["rollout.workers"]) == group["replicas"] * int(gpus)
    assert given["nproc_per_node"] == cards
    assert int(given["nnodes"]) == job["completions"] == job["parallelism"]
