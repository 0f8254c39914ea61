"""A model's weights in its safetensors files, of which each rank reads its own parts.

    files ──names, shapes──► StoredWeights ──read──► own slices of each tensor, in the model's dtype

transformers loads some tensors under other names and joins others, such as the experts of a
mixture: its own rules, by model, say which (``transformers.core_model_loading``). A tensor that is
made of several is joined first and sliced then, but of stacked ones, such as experts, a rank reads
only those that it holds.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from async_opd.core.errors import StageError
from async_opd.core.stages import TRAINER
from async_opd.models.json_files import read_json
from trainer.student.sharding import is_sharded, own_part, own_slices, sharded_as

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
NAMED = 5
"""Names in an error."""
REMEDY = "save the model again, with the weights that its config.json describes"
Place = tuple[torch.nn.Module, str]
"""A module, and the name of its parameter or buffer."""


@dataclass(frozen=True)
class Source:
    """The stored parts of one tensor of the model, or of several.

    ``stored``: names in the files by the pattern of the rule, in the order in which they are
    joined. ``rule`` is transformers', None for a tensor that is read as it is. ``name`` is the
    first tensor's in the model.
    """

    name: str
    stored: Mapping[str, Sequence[str]]
    rule: Any = None

    @property
    def stacked(self) -> bool:
        """Whether slices of the tensor's first dimension are made of the same slices of names."""
        if self.rule is None:
            return False
        first, *others = ((type(op).__name__, vars(op)) for op in self.rule.operations)
        inner = {"Concatenate": ("dim",), "Transpose": ("dim0", "dim1")}
        return first == ("MergeModulelist", {"dim": 0}) and all(
            kind in inner and all(settings[key] > 0 for key in inner[kind])
            for kind, settings in others
        )

    @property
    def names(self) -> list[str]:
        """All names in the files."""
        return [name for names in self.stored.values() for name in names]

    def joined(self, model: Any, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """The model's tensors, by name, made of those of the files."""
        if self.rule is None:
            return {self.name: tensors[self.names[0]]}
        rule = copy.deepcopy(self.rule)
        for pattern, names in self.stored.items():
            for name in names:
                rule.add_tensor(self.name, name, pattern, tensors[name])
        made = rule.convert(self.name, model=model, config=model.config)
        return {n: one[0] if isinstance(one, list) else one for n, one in made.items()}


class StoredWeights:
    """The weights of a model on ``meta``, and what they are read from.

    They stay those of the model's modules, whatever is put around these later.
    """

    def __init__(self, model: Any, directory: Path, whole: bool = True) -> None:
        """Reads no weight. StageError, with names, if the files are not those of the model.

        Files that are not ``whole`` may lack weights that are not trained.
        """
        self._model = model
        self._whole = whole
        self._directory = directory
        self._files = _weight_files(directory)
        self._tensors = model.state_dict()
        self._places = dict(_places(model))
        with ExitStack() as stack:
            shapes = {name: one.get_shape() for name, one in self._opened(stack).items()}
        self._sources, unknown = self._matched(shapes)
        self._check(shapes, unknown)

    def fill(self, device: torch.device, home: torch.device | None = None) -> None:
        """Reads this rank's parts into new memory on the device, and computes all other buffers.

        ``home``: the parameters' device if it is another. Tied weights are read once. StageError if
        two have different values.
        """
        _allocate(self._model, home or device, device)
        self.refill()
        self._model.initialize_weights()  # buffers that no file has; all else is marked

    def refill(self) -> None:
        """Reads this rank's parts into the memory that the model has. StageError as ``fill``."""
        with torch.no_grad(), ExitStack() as stack:
            stored = self._opened(stack)
            filled: set[int] = set()
            for source in self._sources:
                for name, part in self._read(source, stored):
                    self._write(name, part, filled)

    def tensor(self, name: str) -> Any:
        """The model's parameter or buffer of this name, with which the model was made."""
        return getattr(*self._places[name])

    def _opened(self, stack: ExitStack) -> dict[str, Any]:
        """Readers of slices of the tensors, by the tensors' names in the files."""
        try:
            files = [stack.enter_context(safe_open(file, "pt")) for file in self._files]
        except (OSError, SafetensorError) as error:
            raise self._fault(f"they cannot be read: {error}", "save the model again") from error
        return {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118

    def _matched(self, names: Mapping[str, Any]) -> tuple[list[Source], set[str]]:
        """The sources of the model's tensors, and the stored names that belong to none."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        rules = get_model_conversion_mapping(self._model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        where = self._model.base_model_prefix, self._tensors
        stored: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        rule_of: dict[str, Any] = {}
        unknown = set()
        for name in sorted(names, key=dot_natural_key):
            own, pattern = rename_source_key(name, renamings, converters, *where)
            if own not in self._tensors and name in self._tensors:
                own, pattern = rename_source_key(name, [], [], *where)
            if own not in self._tensors:
                unknown.add(own)
                continue
            stored[own][pattern or name].append(name)
            rule_of[own] = by_pattern[pattern] if pattern else None
        if self._whole:
            # transformers names tensors in files by these rules when it saves the model
            self._model._weight_conversions = [rule for rule in rules if rule.was_used()]
        return [Source(own, found, rule_of[own]) for own, found in stored.items()], unknown

    def _check(self, shapes: Mapping[str, Sequence[int]], unknown: set[str]) -> None:
        """StageError for tensors that are missing, that the model lacks, or of another shape."""
        made: dict[str, Any] = {}
        for source in self._sources:
            names = [name for some in source.stored.values() for name in some]
            empty = {name: torch.empty(shapes[name], device="meta") for name in names}
            if source.rule is None:
                made[source.name] = empty[names[0]]
                continue
            try:
                made |= source.joined(self._model, empty)
            except Exception as error:  # an operation of transformers, on tensors it cannot take
                cause = f"{source.name} cannot be made of {_some(names)}: {error}"
                raise StageError(
                    TRAINER, f"weights of {self._directory}: {cause}", REMEDY
                ) from error
        missing = self._tensors.keys() - made.keys()
        for one, other in self._model.all_tied_weights_keys.items():
            if not {one, other} <= missing:
                missing -= {one, other}
        if not self._whole:
            missing -= {n for n, one in self._model.named_parameters() if not one.requires_grad}
        found = SimpleNamespace(
            missing_keys=missing, unexpected_keys=unknown | (made.keys() - self._tensors.keys())
        )
        self._model._adjust_missing_and_unexpected_keys(found)  # what the model may lack or ignores
        other_shapes = [
            f"{name} {tuple(one.shape)}, not {tuple(self._tensors[name].shape)}"
            for name, one in made.items()
            if name in self._tensors and one.shape != self._tensors[name].shape
        ]
        faults = {
            "missing": found.missing_keys,
            "unknown to the model": found.unexpected_keys,
            "of another shape": other_shapes,
        }
        text = "; ".join(f"{kind}: {_some(sorted(some))}" for kind, some in faults.items() if some)
        if text:
            raise self._fault(text, REMEDY)

    def _fault(self, cause: str, remedy: str) -> StageError:
        return StageError(TRAINER, f"weights of {self._directory}: {cause}", remedy)

    def _read(self, source: Source, stored: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """This rank's part of each tensor that the source makes, by name; nothing of empty ones."""
        own = own_slices(self.tensor(source.name))
        if (source.rule is None or source.stacked) and any(one.start == one.stop for one in own):
            return
        if source.rule is None:
            yield source.name, stored[source.names[0]][own or ...]
            return
        if source.stacked:
            names = {pattern: some[own[0]] for pattern, some in source.stored.items()}
            source = replace(source, stored=names)
        dtype = self._tensors[source.name].dtype
        whole = {name: stored[name][...].to(dtype) for name in source.names}
        for name, made in source.joined(self._model, whole).items():
            own = own_slices(self.tensor(name))
            yield name, made[(slice(None), *own[1:]) if source.stacked else own]

    def _write(self, name: str, part: torch.Tensor, filled: set[int]) -> None:
        """Copies the part into the model; compares it if a tied tensor was read before."""
        tensor = self.tensor(name)
        target = own_part(tensor.detach())
        if id(tensor) not in filled:
            target.copy_(part)
            filled.add(id(tensor))
        elif not torch.equal(target, part.to(target)):
            raise self._fault(
                f"{name} has other values than the weight that config.json ties it to",
                "set tie_word_embeddings: false in config.json if the model has both",
            )


def _weight_files(directory: Path) -> list[Path]:
    """The files with the model's weights. StageError if there are none."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    try:
        named = read_json(directory / INDEX).get("weight_map", {})
        files = sorted({directory / str(name) for name in named.values()})
    except (AttributeError, ValueError) as error:
        cause = f"{directory / INDEX} is not the index of weights: {error}"
        raise StageError(TRAINER, cause, "save the model again") from error
    if not files:
        cause = f"{directory} has neither {WEIGHTS} nor {INDEX}"
        raise StageError(TRAINER, cause, "save the weights as safetensors")
    return files


def _places(model: Any) -> Iterator[tuple[str, Place]]:
    """All parameters and buffers by name, a tied one under each of its names."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key in (*module._parameters, *module._buffers):
            yield f"{prefix}.{key}" if prefix else key, (module, key)


def _allocate(model: Any, home: torch.device, device: torch.device) -> None:
    """Replaces all tensors on ``meta`` by uninitialized ones; tied ones stay tied.

    Parameters are at ``home``, buffers on the device; tensors that a GPU reads from host memory are
    pinned.

    Those that a state dict has are marked, so that transformers initializes none of them, nor any
    that is not on ``meta``, such as an adapter's.
    """
    made: dict[int, tuple[Any, Any]] = {}  # the old one too: its id may not be used again
    for module in model.modules():
        places: Any = ((module._parameters, home), (module._buffers, device))
        for tensors, where in places:
            for key, old in tensors.items():
                if old is None:
                    continue
                if id(old) not in made:
                    pinned = where.type == "cpu" and device.type == "cuda"
                    new = _uninitialized(old, where, pinned) if old.is_meta else old
                    made[id(old)] = old, new
                tensors[key] = made[id(old)][1]
                if key not in module._non_persistent_buffers_set:
                    tensors[key]._is_hf_initialized = True


def _uninitialized(tensor: Any, device: torch.device, pinned: bool) -> Any:
    """A tensor like this, with its sharding, in memory of the device."""
    made = torch.empty_like(own_part(tensor.detach()), device=device, pin_memory=pinned)
    if is_sharded(tensor):
        made = sharded_as(tensor, made)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _some(names: Sequence[str]) -> str:
    """Up to ``NAMED`` names, and how many there are besides."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
