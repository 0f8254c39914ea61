"""What a Python script passes to TRL's config and trainer: parsed, never executed."""

from __future__ import annotations

import ast
from typing import Any

from async_opd.importing.draft import Expression, flat

CONFIGS = ("GKDConfig", "GOLDConfig", "DistillationConfig", "AsyncDistillationConfig")
TRAINERS = tuple(name.replace("Config", "Trainer") for name in CONFIGS)
ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
DATASET = ("dataset_name", "dataset_config")


def read_python(text: str) -> dict[str, Any]:
    """TRL's keys by name, with ``config_class``. SyntaxError for what is no Python.

    A value that is neither a literal nor a name assigned one is an Expression.
    """
    tree = ast.parse(text)
    names = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    found: dict[str, Any] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _called(call)
        if name in CONFIGS:
            found["config_class"] = name
            found.update(flat({one: _value(v, names) for one, v in _keywords(call)}))
        elif name in TRAINERS:
            found.setdefault("config_class", name.replace("Trainer", "Config"))
            _read_trainer(call, names, found)
        elif name == "LoraConfig":
            known = ((ADAPTER.get(one, f"lora.{one}"), v) for one, v in _keywords(call))
            found.update({one: _value(v, names) for one, v in known})
        elif name == "load_dataset" and "dataset_name" not in found:
            found.update(
                {one: _value(v, names) for one, v in zip(DATASET, call.args, strict=False)}
            )
            for one, value in _keywords(call):
                if one == "split":
                    found["dataset_train_split"] = _value(value, names)
    return found


def _read_trainer(call: ast.Call, names: dict[str, ast.expr], found: dict[str, Any]) -> None:
    ours = {"model": "model_name_or_path", "teacher_model": "teacher_model_name_or_path"}
    for one, value in _keywords(call):
        if one in ours:
            found.setdefault(ours[one], _model(value, names))


def _model(value: ast.expr, names: dict[str, ast.expr]) -> Any:
    """The name of a model that is given itself or loaded by ``from_pretrained``."""
    while isinstance(value, ast.Name) and value.id in names:
        value = names[value.id]
    if isinstance(value, ast.Call) and _called(value) == "from_pretrained" and value.args:
        value = value.args[0]
    return _value(value, names)


def _value(node: ast.expr, names: dict[str, ast.expr], depth: int = 0) -> Any:
    if isinstance(node, ast.Name) and node.id in names and depth < 10:
        return _value(names[node.id], names, depth + 1)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Expression(ast.unparse(node))


def _keywords(call: ast.Call) -> list[tuple[str, ast.expr]]:
    return [(one.arg, one.value) for one in call.keywords if one.arg is not None]


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
