"""A Python script's arguments of TRL's config and trainer: parsed, never executed."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import dataclass
from typing import Any

from async_opd.tools.importing.budget import Budget
from async_opd.tools.importing.draft import Expression, flat

CONFIGS = ("GKDConfig", "GOLDConfig", "DistillationConfig", "AsyncDistillationConfig")
TRAINERS = tuple(name.replace("Config", "Trainer") for name in CONFIGS)
ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
DATASET = ("dataset_name", "dataset_config")


def read_python(text: str, budget: Budget) -> dict[str, Any]:
    """TRL's keys by name, with ``config_class``.

    SyntaxError for text that is not Python, and for values that are more than the budget.

    A value that is neither a literal nor a name assigned one, once, is an Expression, and so is
    one that two calls give differently.
    """
    tree = ast.parse(text)
    names, found = _Names(_assigned(tree), budget), dict[str, Any]()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _called(call)
        if name in CONFIGS:
            found["config_class"] = name
            _add(found, flat({one: _value(v, names) for one, v in _keywords(call, names)}, budget))
        elif name in TRAINERS:
            found.setdefault("config_class", name.replace("Trainer", "Config"))
            _read_trainer(call, names, found)
        elif name == "LoraConfig":
            known = ((ADAPTER.get(one, f"lora.{one}"), v) for one, v in _keywords(call, names))
            _add(found, {one: _value(v, names) for one, v in known})
        elif name == "load_dataset" and "dataset_name" in found:
            found["load_dataset"] = Expression(ast.unparse(call))
        elif name == "load_dataset":
            found.update(
                {one: _value(v, names) for one, v in zip(DATASET, call.args, strict=False)}
            )
            for one, value in _keywords(call, names):
                if one == "split":
                    found["dataset_train_split"] = _value(value, names)
    return found


@dataclass
class _Names:
    """Names that are assigned once, and their values."""

    values: dict[str, ast.expr]
    budget: Budget

    def followed(self, node: ast.expr) -> ast.expr:
        """The value of a name, through names that it is assigned; one of a circle means itself."""
        seen = set[str]()
        while isinstance(node, ast.Name) and node.id in self.values and node.id not in seen:
            seen.add(node.id)
            self.budget.take(len(node.id), node.id)
            node = self.values[node.id]
        if seen:
            text = ast.unparse(node)
            self.budget.take(len(text), text)
        return node


def _assigned(tree: ast.Module) -> dict[str, ast.expr]:
    """The values of names that are assigned once, and are not an argument of a function."""
    bound = Counter(
        node.arg if isinstance(node, ast.arg) else node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.arg) or (isinstance(node, ast.Name) and _is_set(node))
    )
    return {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and bound[target.id] == 1
    }


def _is_set(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _add(found: dict[str, Any], given: dict[str, Any]) -> None:
    for key, value in given.items():
        if key in found and found[key] != value:
            value = Expression(f"{_text(found[key])} or {_text(value)}")
        found[key] = value


def _text(value: Any) -> str:
    return value.text if isinstance(value, Expression) else repr(value)


def _read_trainer(call: ast.Call, names: _Names, found: dict[str, Any]) -> None:
    ours = {"model": "model_name_or_path", "teacher_model": "teacher_model_name_or_path"}
    for one, value in [*zip(ours, call.args, strict=False), *_keywords(call, names)]:
        if one in ours:
            found.setdefault(ours[one], _model(value, names))


def _model(value: ast.expr, names: _Names) -> Any:
    """The name of a model that is given itself or loaded by ``from_pretrained``."""
    value = names.followed(value)
    if isinstance(value, ast.Call) and _called(value) == "from_pretrained" and value.args:
        value = value.args[0]
    return _value(value, names)


def _value(node: ast.expr, names: _Names) -> Any:
    node = names.followed(node)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Expression(ast.unparse(node))


def _keywords(call: ast.Call, names: _Names) -> list[tuple[str, ast.expr]]:
    """Arguments by name, those of a ``**`` dictionary too; of another one that as a whole."""
    found: list[tuple[str, ast.expr]] = []
    for one in call.keywords:
        passed = names.followed(one.value)
        if one.arg is not None:
            found.append((one.arg, one.value))
        elif isinstance(passed, ast.Dict) and all(isinstance(k, ast.Constant) for k in passed.keys):
            keys = (str(k.value) for k in passed.keys if isinstance(k, ast.Constant))
            found += zip(keys, passed.values, strict=True)
        else:
            found.append((f"**{ast.unparse(one.value)}", one.value))
    return found


def _called(call: ast.Call) -> str:
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""
