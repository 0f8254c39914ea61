"""A Python script's arguments of TRL's config and trainer: parsed, never executed.

Followed are names, ``args.NAME`` of an ``add_argument(default=…)`` or of a dataclass's field, and
models through ``from_pretrained`` and methods such as ``.eval()``. Anything else is an Expression.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from async_opd.tools.importing.draft import Budget, Expression, add, flat

CONFIGS = ("GKDConfig", "GOLDConfig", "DistillationConfig", "AsyncDistillationConfig")
TRAINERS = tuple(name.replace("Config", "Trainer") for name in CONFIGS)
ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "target_modules": "lora_target_modules"}
MODELS = {"model": "model_name_or_path", "teacher_model": "teacher_model_name_or_path"}
DATASET = ("dataset_name", "dataset_config")
CHANGES = ("update", "setdefault", "pop", "append", "extend", "insert", "remove", "clear")
"""Methods after which a literal is another one."""
SWITCHES = {"store_true": False, "store_false": True}
COST = 4
"""Characters that one of an expression counts: to write it as text takes that much longer."""


def read_python(text: str, budget: Budget) -> tuple[dict[str, Any], list[str]]:
    """TRL's keys by name, with ``config_class``, and notes; ``args`` is a config that is not there.

    SyntaxError for text that is not Python, and for values that are more than the budget.

    A value that two calls give differently is an Expression too.
    """
    tree = ast.parse(text)
    names, found = _names(tree, budget), dict[str, Any]()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = _name_of(call)
        if name in CONFIGS:
            given = {one: names.value(v) for one, v in _keywords(call, names)}
            add(found, {"config_class": name, **flat(given, budget)})
        elif name.endswith(TRAINERS):
            longest = max((one for one in TRAINERS if name.endswith(one)), key=len)
            add(found, {"config_class": longest.replace("Trainer", "Config")})
            _read_trainer(call, names, found)
        elif name == "LoraConfig":
            known = ((ADAPTER.get(one, f"lora.{one}"), v) for one, v in _keywords(call, names))
            add(found, {one: names.value(v) for one, v in known})
        elif name == "load_dataset":
            _read_dataset(call, names, found)
    for owner, key, value in names.stored:  # settings.beta = 0.5, after settings = GKDConfig(…)
        made = names.followed(owner)
        if isinstance(made, ast.Call) and _name_of(made) in CONFIGS:
            add(found, {key: names.value(value)})
    return found, names.notes()


@dataclass
class _Names:
    """Values of names, of which each has all that are assigned to it; ``options`` are arguments."""

    budget: Budget
    values: dict[str, list[ast.expr | None]] = field(default_factory=lambda: defaultdict(list))
    options: dict[str, list[ast.expr | None]] = field(default_factory=lambda: defaultdict(list))
    configs: bool = False
    stored: list[tuple[ast.expr, str, ast.expr]] = field(default_factory=list)
    used: dict[str, None] = field(default_factory=dict)

    def value(self, node: ast.expr) -> Any:
        """A literal, or the Expression that only running the script would give."""
        node = self.followed(node)
        try:
            return ast.literal_eval(node)
        except ValueError:
            return Expression(self.text(node))

    def followed(self, node: ast.expr) -> ast.expr:
        """The value of a name that has one, through other names; one of a circle means itself."""
        seen = set[str]()
        while (name := _key(node)) is not None and name not in seen:
            option = isinstance(node, ast.Attribute)
            known = self.options.get(name[1:]) if option else self.values.get(name)
            if not known or len(known) != 1 or known[0] is None:
                break
            seen.add(name)
            if option:
                self.used[name[1:]] = None
            self.budget.take(len(name), name)
            node = known[0]
        if seen:
            self.text(node)
        return node

    def text(self, node: ast.expr) -> str:
        """The source text of a value. Of calls inside of each other all have the inner ones'."""
        text = ast.unparse(node)
        self.budget.take(COST * len(text), text)
        return text

    def model(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> Any:
        """The name of a model that is given itself, loaded, moved, or loaded in two ways."""
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "from_pretrained":
                given = [k.value for k in node.keywords if k.arg == "pretrained_model_name_or_path"]
                return self.value([*node.args, *given, node][0])
            node = node.func.value  # .eval(), .to("cuda"): the model is the same
        if not isinstance(node, ast.Name) or node.id not in self.values or node.id in seen:
            return self.value(node)
        self.budget.take(100, node.id)  # names with two values each would double the calls
        known = [one for one in self.values[node.id] if one is None or _root(one) != node.id]
        if None in known or not known:
            return Expression(self.text(node))
        seen |= {node.id}
        found = [self.model(one, seen) for one in known if one is not None]
        return found[0] if all(one == found[0] for one in found) else Expression(self.text(node))

    def notes(self) -> list[str]:
        """Names the arguments of the script whose defaults were taken."""
        options = ", ".join(f"--{name}" for name in self.used)
        note = f"arguments of the script have their defaults here: compare its command: {options}"
        return [note] if options else []


def _names(tree: ast.Module, budget: Budget) -> _Names:
    """All names of a script; None for a value that an assignment alone does not show."""
    names, plain, fields = _Names(budget), set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "dataclass" in map(_name_of, node.decorator_list):
            fields.update(map(id, node.body))
            for name, default in _fields(node):
                names.options[name].append(default)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            plain |= _read_assignment(node, node.value, names, id(node) in fields)
        elif isinstance(node, ast.arg):
            names.values[node.arg].append(None)
        elif isinstance(node, ast.Call):
            _read_option(node, names)
    for node in ast.walk(tree):
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            _read_store(node, names, plain)
    return names


def _read_store(node: ast.AST, names: _Names, plain: set[int]) -> None:
    """Marks a name or an attribute unknown that something else than an assignment sets."""
    if isinstance(node, ast.Attribute):
        names.options[node.attr].append(None)
        if id(node) not in plain:
            names.stored.append((node.value, node.attr, node))
    while isinstance(node, ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name) and id(node) not in plain:
        names.values[node.id].append(None)


def _read_assignment(
    node: ast.Assign | ast.AnnAssign, value: ast.expr, names: _Names, of_class: bool
) -> set[int]:
    """Adds the values that an assignment shows; returns the ids of the names that it sets."""
    targets: list[ast.expr] = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        if isinstance(target, ast.Name) and not of_class:
            names.values[target.id].append(value)
        elif isinstance(target, ast.Attribute):
            names.stored.append((target.value, target.attr, value))
    return set(map(id, targets))


def _read_option(call: ast.Call, names: _Names) -> None:
    """The default of an argument of the script, what a call changes, and whether it is a config."""
    names.configs |= _name_of(call) in CONFIGS
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and _name_of(call) in CHANGES:
        names.values[owner.id].append(None)
    elif _name_of(call) == "setattr" and len(call.args) == len(("owner", "name", "value")):
        name = _constant(call.args[1])
        names.options[str(name)].append(None)
        names.stored.append((call.args[0], name or f"**{names.text(call)}", call))
    elif _name_of(call) == "add_argument":
        name, default = _option(call)
        names.options[name].append(default)
    elif _name_of(call) == "set_defaults":
        for keyword in call.keywords:
            names.options[keyword.arg or ""] = [keyword.value]


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            value = one.value
            if isinstance(value, ast.Call) and _name_of(value) == "field":
                value = next((k.value for k in value.keywords if k.arg == "default"), None)
            yield one.target.id, value


def _option(call: ast.Call) -> tuple[str, ast.expr | None]:
    """The name and the default of an argument; None for one that the command line has to give."""
    flags = [str(one.value) for one in call.args if isinstance(one, ast.Constant)]
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    flag = next((one for one in flags if one.startswith("--")), (flags or [""])[0])
    dest, action, required = (_constant(given.get(n)) for n in ("dest", "action", "required"))
    default = given.get("default")
    if default is None and flag.startswith("-") and not required:
        default = ast.Constant(SWITCHES.get(str(action)))
    return str(dest or flag.lstrip("-").replace("-", "_")), default


def _constant(node: ast.expr | None) -> Any:
    return node.value if isinstance(node, ast.Constant) else None


def _key(node: ast.expr) -> str | None:
    """``NAME`` of a name, ``.NAME`` of ``args.NAME``."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def _root(node: ast.expr) -> str | None:
    """The name at which a chain of methods begins, as ``a`` of ``a.eval().to(b)``."""
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def _read_trainer(call: ast.Call, names: _Names, found: dict[str, Any]) -> None:
    for one, value in [*zip(MODELS, call.args, strict=False), *_keywords(call, names)]:
        if one in MODELS:
            add(found, {MODELS[one]: names.model(value)})
        elif one == "args" and not names.configs:
            found["args"] = Expression(names.text(value))
        elif one == "peft_config":
            known = names.followed(value)
            if isinstance(known, ast.Call) and _name_of(known) == "LoraConfig":
                add(found, {"use_peft": True})
            elif not isinstance(known, ast.Constant):
                add(found, {"use_peft": Expression(names.text(value))})


def _read_dataset(call: ast.Call, names: _Names, found: dict[str, Any]) -> None:
    given = dict(_keywords(call, names))
    split = names.value(given["split"]) if "split" in given else None
    if isinstance(split, str) and split.startswith(("test", "val", "dev", "eval")):
        found["eval_dataset"] = Expression(names.text(call))
        return
    if "dataset_name" in found:
        found["load_dataset"] = Expression(names.text(call))
        return
    found.update({one: names.value(v) for one, v in zip(DATASET, call.args, strict=False)})
    files = names.value(given["data_files"]) if "data_files" in given else None
    files = files.get("train") if isinstance(files, dict) else files
    if files is not None and found.get("dataset_name") in ("json", "parquet"):
        found["dataset_name"] = files
    elif files is not None:
        found["data_files"] = files
    if split is not None:
        found["dataset_train_split"] = split


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
            found.append((f"**{names.text(one.value)}", one.value))
    return found


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return _name_of(node.func)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
