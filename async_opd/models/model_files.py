"""Model directories: their JSON files and tokenizer, read without transformers."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from async_opd.core.errors import in_words
from async_opd.files.absent import nearest
from async_opd.models.json_files import LONGEST_KEY, every_value, named_values, read_json
from async_opd.models.own_files import folders
from async_opd.models.processor import further_models, other_classes
from async_opd.models.tokenizer import Text, eos_ids, text_settings

HUB_ID = re.compile(r"^[\w.-]{1,96}/[\w.-]{1,96}$")


def is_hub_id(model: str) -> bool:
    """Whether a config's model has the form of a hub id.

    A directory's path is absolute once the config is read. A directory with the id's name in the
    working directory is another model.
    """
    return bool(HUB_ID.fullmatch(model))


OF_ATTENTION = frozenset({"full_attention", "sliding_attention", "mlp", "moe"})
"""Kinds of layers, as ``layer_types`` names them, that pass on tokens by attention or not at all.
transformers' ``linear_attention`` is any layer with a recurrent state."""
MEDIA = ("audio_config", "thinker_config")
"""Keys of configurations of models with audio input or output."""


REDIRECTS = ("speculators_config", "configuration_files", "text_model_id", "audio_model_id")
"""Keys of a config.json that make vLLM or transformers load another model or configuration."""
QUANTIZED = ("quantization_config", "compression_config")
"""Keys of a config.json whose weights are quantized; the second is of compressed-tensors."""
OWN_QUANTIZATION = "hf_quant_config.json"
"""The file that vLLM reads where config.json has no ``quantization_config``."""
QUANTIZATIONS = frozenset(
    {
        *("fp8", "fbgemm_fp8", "compressed-tensors", "mxfp4", "gpt_oss_mxfp4", "experts_int8"),
        *("awq", "awq_marlin", "gptq", "gptq_marlin", "moe_wna16"),
        *("modelopt", "modelopt_fp4", "modelopt_mxfp8"),
    }
)
"""Methods whose settings vLLM reads as numbers and names of layers. Those of torchao name functions
of torch, and their arguments: such a file runs any command."""
GLOBAL = {"global_head_dim": "head_dim", "num_global_key_value_heads": "num_key_value_heads"}
"""Keys of Gemma 4's published configs for its layers without a window, and the keys that they
replace there. transformers writes ``per_layer_config`` instead."""
OF_CLASSES = frozenset(
    {
        *("attribute_map", "sub_configs", "_auto_class", "validate", "to_dict", "to_diff_dict"),
        *("to_json_string", "save_pretrained", "get_text_config"),
    }
)
"""Keys that would replace an attribute of transformers' configuration. By an alias another key
would count as ``auto_map``; with ``_auto_class``, saving copies the file of ``__module__``."""
BACKBONE = "backbone"
"""Key of a model of a hub or of timm, at any depth of a config.json: transformers would ask there
for its configuration. The settings of a backbone, in ``backbone_config``, are the model's own."""
TIMM = frozenset({"timm_wrapper", "timm_backbone"})
"""Kinds of models that timm makes, of a name and of files that ``pretrained_cfg`` may name."""
MOST_LAYERS = 10_000
WITH_CODE = (
    *("config.json", "generation_config.json", "tokenizer_config.json", "processor_config.json"),
    *("preprocessor_config.json", "video_preprocessor_config.json"),
)
"""Files whose ``auto_map``, at any depth, names classes of a model's own code."""
CONFIG = "config.json"
ADAPTER, BASE = "adapter_config.json", "base_model_name_or_path"
"""With peft installed, transformers loads the model that an adapter's configuration names."""


class ModelError(Exception):
    """A model directory that cannot be used, with the cause and the remedy."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message, self.remedy = message, remedy


@dataclass(frozen=True)
class OwnCode:
    """A class of a model's own code, and the file and keys that name it.

    Or one of transformers that is to be a tokenizer or a processor, and is neither.
    """

    file: str
    keys: tuple[str, ...]
    name: str

    @property
    def place(self) -> str:
        """The file and the keys, such as ``config.json: vision_config.auto_map.AutoModel``."""
        return f"{self.file}: {'.'.join(self.keys)}"

    @property
    def unused(self) -> bool:
        """Whether transformers takes one of its classes instead, or none, if code is not trusted.

        So do the calls that load a whole model: they say that code may not run. Those that load a
        part of it, its tokenizer or its processor may not say it. Many models that transformers has
        has itself name the code of their first authors there. A tokenizer's is read from
        tokenizer_config.json only.
        """
        read = ("AutoConfig", "AutoModel", "AutoTokenizer")
        whole = len(self.keys) == 2 and self.keys[1].startswith(read)
        return whole and self.file == "config.json"


@dataclass(frozen=True)
class ModelFiles:
    """A model directory whose JSON files and tokenizer could be read."""

    path: Path
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    tokens: int
    eos: tuple[int, ...]
    base: str | None = None
    """The model that the directory's adapter configuration names."""
    code: tuple[OwnCode, ...] = ()
    further: tuple[str, ...] = ()
    """Files and keys that name a processor's further model."""
    quantization: Mapping[str, Any] = field(default_factory=dict)
    """The content of ``hf_quant_config.json``."""
    inner: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The content of each ``config.json`` in a folder below, by its path in the directory."""

    @classmethod
    def read(cls, model: str, weights: bool = True) -> ModelFiles | None:
        """Reads a local model's files; None for a hub id. Raises ModelError.

        ``weights``: also require the weight files.
        """
        if is_hub_id(model):
            return None
        if not (os.path.isabs(model) and os.path.isdir(model)):
            absent = os.path.isabs(model) and not os.path.lexists(model)
            near = f" ({nearest(Path(model))})" if absent else ""
            remedy = f"check the path{near}; a hub id whose owner is also a folder here is a path"
            raise ModelError(f"no such directory: {model[:200]}", remedy)
        path = Path(model)
        missing = [n for n in ("config.json", "tokenizer.json") if not (path / n).is_file()]
        if missing:
            raise ModelError(f"{path} has no {', '.join(missing)}", "save both there")
        if weights and not list(path.glob("*.safetensors")):
            raise ModelError(f"{path} has no *.safetensors", "save the weights as safetensors")
        for file in path.glob("*.safetensors") if weights else ():
            if not file.is_file():
                raise ModelError(f"{file} is not a regular file", "put the weights there")
        lacking = missing_shards(path)
        if weights and lacking:
            message = f"{path} lacks weights that its index names: {', '.join(lacking)}"
            raise ModelError(message, "copy the missing files")
        try:
            config = read_json(path / "config.json")
            layers_of(text_settings(config))
            return cls(
                path=path,
                config=config,
                tokenizer=read_json(path / "tokenizer.json"),
                tokens=Text(path).size,
                eos=eos_ids(path),
                base=_text(read_json(path / ADAPTER).get(BASE)),
                code=(*_own_code(path), *(OwnCode(*one) for one in other_classes(path))),
                further=tuple(further_models(path)),
                quantization=read_json(path / OWN_QUANTIZATION),
                inner={
                    str(folder.relative_to(path) / CONFIG): read_json(folder / CONFIG)
                    for folder in folders(path)
                },
            )
        except ModelError:
            raise
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise ModelError(
                f"{path} cannot be read: {in_words(error)}", "save the model again"
            ) from error

    @property
    def vocabulary(self) -> int | None:
        """Rows of the embedding, if config.json has them."""
        return self._number("vocab_size")

    @property
    def positions(self) -> int | None:
        """Tokens of the longest sequence, if config.json has them."""
        return self._number("max_position_embeddings")

    @property
    def head_sizes(self) -> set[int]:
        """Sizes of attention heads, as far as config.json has them."""
        hidden, heads = self._number("hidden_size"), self._number("num_attention_heads")
        default = hidden // heads if hidden and heads else None
        settings = text_settings(self.config)
        sizes = [one.get("head_dim") or default for one in layers_of(settings) or [settings]]
        return {size for size in sizes if isinstance(size, int) and size > 0}

    @property
    def untrainable(self) -> str:
        """The reason why the trainer cannot train the model; empty if none is known."""
        media = [key for key in MEDIA if self.config.get(key) is not None]
        layers = self.config.get("layer_types")
        if media:
            return f"has a {media[0]}: models with audio input cannot be trained"
        if self.config.get("is_encoder_decoder"):
            return "has an encoder: it cannot be trained"
        if self.config.get("model_type") == "llama4_text" or (
            isinstance(layers, list) and "chunked_attention" in layers
        ):
            return "attends in chunks, which packed sequences would share: it cannot be trained"
        return ""

    @property
    def quantized(self) -> bool:
        """Whether its files say so, where vLLM looks: for the model, or for its text part."""
        text = self.config.get("text_config")
        parts = (self.config, text if isinstance(text, dict) else {})
        found = any(part.get(key) is not None for part in parts for key in QUANTIZED)
        return found or bool(self.quantization)

    @property
    def unknown_quantization(self) -> str:
        """The first quantization, at any depth, whose settings may name functions; '' if none."""
        places: dict[str, object] = {
            f"{file}: {'.'.join(keys)}": one
            for file, content in {CONFIG: self.config, **self.inner}.items()
            for key in QUANTIZED
            for keys, one in named_values(content, key)
        }
        if self.quantization:
            places[OWN_QUANTIZATION] = self.quantization
        for place, settings in places.items():
            if (method := _quantization_method(settings)) not in QUANTIZATIONS:
                return f"{place} of the quant_method {method[:LONGEST_KEY]!r}"
        return ""

    @property
    def redirects(self) -> list[str]:
        """Keys, each after its file, that make an engine load another model in its place."""
        found = [f"config.json: {key}" for key in REDIRECTS if self.config.get(key) is not None]
        named = [keys for keys, one in named_values(self.config, BACKBONE) if isinstance(one, str)]
        named += [keys for keys, _ in named_values(self.config, "pretrained_cfg")]
        of_timm = named_values(self.config, "model_type")
        named += [keys for keys, one in of_timm if isinstance(one, str) and one in TIMM]
        named += [keys for keys, _ in every_value(self.config) if is_of_class(keys[-1])]
        found += [f"config.json: {'.'.join(keys)}" for keys in islice(named, 3)]
        found += self.further
        return found if self.base is None else [*found, f"{ADAPTER}: {BASE}"]

    def same_tokenizer(self, other: ModelFiles) -> bool:
        """Whether both have the same vocabulary, so that token ids mean the same to both."""
        own, others = (
            (one.tokenizer.get("model", {}).get("vocab"), one.tokenizer.get("added_tokens"))
            for one in (self, other)
        )
        return bool(own == others)

    def differing_token(self, other: ModelFiles) -> str:
        """The first token, by this model's ids, that has another id in the other; '' if none."""
        own, others = (_ids(one.tokenizer) for one in (self, other))
        for token, at in sorted(own.items(), key=lambda item: (item[1], item[0])):
            if others.get(token) != at:
                there = "none" if token not in others else str(others[token])
                return f"{token[:40]!r} is {at} in {self.path.name}, {there} in {other.path.name}"
        return "" if own.keys() == others.keys() else other.differing_token(self)

    def _number(self, name: str) -> int | None:
        value = text_settings(self.config).get(name)
        return value if isinstance(value, int) and value > 0 else None


def is_of_class(key: str) -> bool:
    """Whether a configuration with this key would have lost an attribute of its class."""
    return key in OF_CLASSES or key.startswith("__")


def is_vision_model(model: str) -> bool:
    """Whether a local model computes images, by its config.json; a model without one does not.

    ValueError or OSError if the file cannot be read.
    """
    return read_json(Path(model) / "config.json").get("vision_config") is not None


def _own_code(path: Path) -> Iterator[OwnCode]:
    """Every class that an ``auto_map`` of a model's files names. Raises what ``read_json`` does."""
    for file in WITH_CODE:
        tree = read_json(path / file)
        parts = {keys[:-1]: one for keys, one in named_values(tree, "_name_or_path")}
        for keys, found in named_values(tree, "auto_map"):
            named = found if isinstance(found, Mapping) else {"": found}
            # transformers takes the code of a part from the repository that the part names
            place = f"{parts[keys[:-1]]}--" if keys[1:] and parts.get(keys[:-1]) else ""
            for kind, classes in named.items():
                of_kind = (*keys, kind[:LONGEST_KEY]) if kind else keys
                for one in classes if isinstance(classes, list) else [classes]:
                    if one is not None:
                        name = str(one) if "--" in str(one) else f"{place}{one}"
                        yield OwnCode(file, of_kind, name)


def _quantization_method(settings: object) -> str:
    """The method, as vLLM finds it; that of modelopt's older files is the name of their maker."""
    if not isinstance(settings, Mapping):
        return ""
    producer = settings.get("producer")
    older = producer.get("name") if isinstance(producer, Mapping) else None
    found = str(settings.get("quant_method") or older or "").lower()
    return found.replace("compressed_tensors", "compressed-tensors")


def _ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """The id of each token of a tokenizer.json, as far as it has the usual form."""
    ids: dict[str, int] = {}
    vocabulary = tokenizer.get("model", {}).get("vocab")
    if isinstance(vocabulary, Mapping):
        ids |= {str(token): at for token, at in vocabulary.items() if isinstance(at, int)}
    elif isinstance(vocabulary, list):  # of pairs of a token and its score
        ids |= {str(pair[0]): at for at, pair in enumerate(vocabulary) if pair}
    for added in tokenizer.get("added_tokens") or ():
        if isinstance(added, Mapping) and isinstance(added.get("id"), int):
            ids[str(added.get("content"))] = added["id"]
    return ids


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def has_weights(path: Path) -> bool:
    """Whether all weight files are in the directory."""
    try:
        return bool(list(path.glob("*.safetensors"))) and not missing_shards(path)
    except ModelError:  # a damaged index is reported where the weights are required
        return True


def missing_shards(path: Path) -> list[str]:
    """Weight files that the index names and the directory lacks. Raises ModelError."""
    file = path / "model.safetensors.index.json"
    try:
        shards = read_json(file).get("weight_map", {})
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}", "save the model again") from error
    if not isinstance(shards, dict) or not all(isinstance(one, str) for one in shards.values()):
        message = f"{file}: weight_map does not map names to files"
        raise ModelError(message, "save the model again")
    return sorted({name for name in shards.values() if not os.path.isfile(path / name)})


def layers_of(settings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """All settings of each layer, some of which may have others than the model (Gemma 4).

    ``settings``: the text settings of a config.json. Empty if they have no number of layers.
    """
    count = settings.get("num_hidden_layers") or settings.get("n_layer")
    if isinstance(count, int) and count > MOST_LAYERS:
        message = f"config.json has {count} layers, at most {MOST_LAYERS} are supported"
        raise ModelError(message, "check num_hidden_layers")
    own, kinds = settings.get("per_layer_config"), settings.get("layer_types")
    if not isinstance(own, Mapping) and isinstance(kinds, list):
        wide = {ours: settings[theirs] for theirs, ours in GLOBAL.items() if settings.get(theirs)}
        if not settings.get("attention_k_eq_v", True):
            wide.pop("num_key_value_heads", None)
        own = {str(at): wide for at, kind in enumerate(kinds) if kind == "full_attention"}
    changed = own if isinstance(own, Mapping) else {}
    each = [changed.get(str(at)) for at in range(count if isinstance(count, int) else 0)]
    return [{**settings, **(one if isinstance(one, Mapping) else {})} for one in each]
