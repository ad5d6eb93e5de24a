"""What VllmEngine uses of vLLM's interface, read from the published wheel without importing or
installing it.

    python tests/vllm_real/read_interface.py [VERSION]

downloads the wheel (300 MB) into a temporary folder and writes interface_VERSION.json beside this
file. The regular tests hold every call of the engine against that file; the tests on the real vLLM
hold it against what is installed.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

VERSION = "0.30.0"

METHODS = {
    "LLM.__init__": "entrypoints/llm.py",
    "LLM.generate": "entrypoints/llm.py",
    "LLMEngine.add_lora": "v1/engine/llm_engine.py",
    "LLMEngine.remove_lora": "v1/engine/llm_engine.py",
    "LLMEngine.list_loras": "v1/engine/llm_engine.py",
    "EngineCoreClient.shutdown": "v1/engine/core_client.py",
    "RequestOutput.__init__": "outputs.py",
}
FIELDS = {
    "EngineArgs": "engine/arg_utils.py",
    "ModelConfig": "config/model.py",
    "SamplingParams": "sampling_params.py",
    "TokensPrompt": "inputs/llm.py",
    "LoRARequest": "lora/request.py",
    "PEFTHelper": "lora/peft_helper.py",
    "CompletionOutput": "outputs.py",
    "FlatLogprobs": "logprobs.py",
}
ATTRIBUTES = {"LLM": "entrypoints/llm.py", "LLMEngine": "v1/engine/llm_engine.py"}
LITERALS = {
    "LogprobsMode": "config/model.py",
    "ModelDType": "config/model.py",
    "MaxLoRARanks": "config/lora.py",
}


def interface(source: Callable[[str], str]) -> dict[str, Any]:
    """The interface of the package whose file at a path (relative to `vllm/`) has the text
    source(path).

    exports: names that `import vllm` offers; methods: [name, kind of inspect.Parameter, has a
    default] of each parameter after self; fields: of dataclasses and structs; attributes: what
    __init__ puts on self.
    """
    trees = {path: ast.parse(source(path)) for path in {"__init__.py", *_paths()}}
    classes = {
        (path, node.name): node
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    return {
        "exports": sorted(ast.literal_eval(_named(trees["__init__.py"], "MODULE_ATTRS"))),
        "methods": {
            name: _parameters(_method(classes[path, name.split(".")[0]], name.split(".")[1]))
            for name, path in METHODS.items()
        },
        "fields": {name: _fields(classes[path, name]) for name, path in FIELDS.items()},
        "attributes": {
            name: sorted(set(_assigned(_method(classes[path, name], "__init__"))))
            for name, path in ATTRIBUTES.items()
        },
        "literals": {name: _literal(trees[path], name) for name, path in LITERALS.items()},
    }


def _paths() -> set[str]:
    return {path for table in (METHODS, FIELDS, ATTRIBUTES, LITERALS) for path in table.values()}


def _named(tree: ast.Module, name: str) -> ast.expr:
    """Returns the value of `name = value` or `name: type = value`."""
    (found,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target) == name
    )
    assert found is not None
    return found


def _method(cls: ast.ClassDef, name: str) -> ast.FunctionDef:
    """Returns the last definition, which follows those that only declare overloads."""
    return [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == name][
        -1
    ]


def _parameters(function: ast.FunctionDef) -> list[list[Any]]:
    arguments = function.args
    positional = arguments.args[1:]
    without_default = len(positional) - len(arguments.defaults)
    found = [
        [arg.arg, "POSITIONAL_OR_KEYWORD", i >= without_default] for i, arg in enumerate(positional)
    ]
    found += [
        [arg.arg, "KEYWORD_ONLY", default is not None]
        for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return found + ([[arguments.kwarg.arg, "VAR_KEYWORD", False]] if arguments.kwarg else [])


def _fields(cls: ast.ClassDef) -> list[str]:
    names = [
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    ]
    return [name for name in names if not name.startswith("_")]


def _assigned(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        for target in (
            node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        ):
            if (
                isinstance(target, ast.Attribute)
                and isinstance(target.value, ast.Name)
                and target.value.id == "self"
            ):
                yield target.attr


def _literal(tree: ast.Module, name: str) -> list[Any]:
    value = _named(tree, name)
    assert isinstance(value, ast.Subscript)
    return list(ast.literal_eval(value.slice))


def main(version: str = VERSION) -> None:
    with TemporaryDirectory() as folder:
        download = f"-m pip download --no-deps vllm=={version} --dest".split()
        subprocess.run([sys.executable, *download, folder], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with ZipFile(wheel) as archive:
            found = interface(lambda path: archive.read(f"vllm/{path}").decode())
    out = Path(__file__).with_name(f"interface_{version.replace('.', '_')}.json")
    out.write_text(as_json({"version": version, **found}))


def as_json(found: dict[str, Any]) -> str:
    """Writes one entry to a line."""
    sections = []
    for section, content in found.items():
        if isinstance(content, dict):
            entries = ",\n".join(
                f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in content.items()
            )
            sections.append(f"{json.dumps(section)}: {{\n{entries}\n}}")
        else:
            sections.append(f"{json.dumps(section)}: {json.dumps(content)}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


if __name__ == "__main__":
    main(*sys.argv[1:])
