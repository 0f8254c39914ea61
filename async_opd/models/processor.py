"""A model's image processor: placeholders to the tokens that it computes, images to its inputs.

It is what vLLM calls for the same model, through transformers' ``AutoProcessor``, so that engines
and ranks expand a prompt to the same ids and see the same pixels. There is no code for single
families here: each image's tokens are those that the processor puts in place of its placeholder.
"""

from __future__ import annotations

import logging
import math
import os.path
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from async_opd.core.row import Media
from async_opd.core.sequence import Int32
from async_opd.media.cache import MediaCache
from async_opd.media.decode import decode
from async_opd.media.engine_prompts import EnginePrompts
from async_opd.models.json_files import named_values, read_json
from async_opd.models.own_files import folders, linked_folders
from async_opd.models.unasked import without_hub

if TYPE_CHECKING:
    import torch

PROBE = 64
"""Width and height in pixels of an image that shows which tokens stand around an image's own."""
UNSAMPLED = ("image", "video", "audio")
"""Kinds of placeholders that no response may have."""
AUDIO_TOKENIZER = "audio_tokenizer"
"""Key of a processor's further model, which transformers loads by its own rules: with pickles, with
code after a question, from a hub."""
PROCESSORS = ("processor_config.json", "preprocessor_config.json")
FURTHER = (
    *((file, AUDIO_TOKENIZER) for file in PROCESSORS),
    ("tokenizer_config.json", "fast_tokenizer_files"),
)
"""Files and keys of them. By the second another file than tokenizer.json would be the tokenizer."""
CLASS_FILES = (
    *("config.json", "tokenizer_config.json", *PROCESSORS, "video_preprocessor_config.json"),
    *("feature_extractor_config.json", "special_tokens_map.json"),
)
CLASS_KEYS = (
    *("tokenizer_class", "processor_class", "image_processor_type", "feature_extractor_type"),
    *("video_processor_type", "audio_processor_type", "image_processor_class"),
)
"""Keys by which transformers chooses a class for a tokenizer or a processor."""
CLASSES = re.compile(
    r"(?!Layout)\w*(Processor|ProcessorFast|ProcessorPil|FeatureExtractor|Tokenizer|TokenizerFast)"
    r"|(Tokenizers|Python|MistralCommon)Backend"
)
"""Those of LayoutLM run a program, with arguments that the model's files give."""


@contextmanager
def _without_warnings() -> Iterator[None]:
    """No log lines below an error.

    Importing transformers' processors imports torchao, which names each of its kernels that cannot
    be loaded here.
    """
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class ProcessorError(ValueError):
    """A processor that cannot be loaded or used, with the cause and the remedy."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(f"{message}: {remedy}")
        self.message, self.remedy = message, remedy


class ImageProcessor:
    """Expands prompts with images, and makes a model's inputs of them.

    ``placeholder_id`` is the token that stands for an image in a short prompt; ``unsampled_ids``
    are all tokens that stand for images, videos and sounds, which a response must not have.
    """

    def __init__(self, processor: Any) -> None:
        """``processor``: of transformers. ProcessorError if it has no placeholder for images."""
        self._processor = processor
        name = type(processor).__name__
        token = getattr(processor, "image_token", None)
        if not isinstance(token, str):
            raise ProcessorError(f"{name} has no token for images", "take another model")
        found = processor.tokenizer.convert_tokens_to_ids(token)
        if found is None or found == processor.tokenizer.unk_token_id:
            remedy = "give the model the tokenizer that it was trained with"
            raise ProcessorError(f"{name}'s tokenizer has no token {token!r}", remedy)
        self._token = token
        self.placeholder_id: int = int(found)
        self.unsampled_ids: tuple[int, ...] = _unsampled(processor, self.placeholder_id)

    @classmethod
    def load(
        cls,
        model: str,
        *,
        trust_remote_code: bool = False,
        processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Self:
        """The processor of a model's directory.

        ``processor_kwargs`` replace settings of the image processor, such as ``max_pixels``.
        ProcessorError if it cannot be loaded, or has no such setting.
        """
        with _without_warnings():
            from transformers import AutoProcessor
            from transformers.processing_utils import ProcessorMixin

        load = partial(AutoProcessor.from_pretrained, model, trust_remote_code=trust_remote_code)
        _refuse_further(Path(model), trust_remote_code)
        try:
            with without_hub(trust_remote_code):
                processor = load()
        except Exception as error:  # transformers raises what its classes raise
            shown = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            remedy = "save the model's processor there, and install async-opd[vision]"
            raise ProcessorError(f"{model} has no processor that loads: {shown}", remedy) from error
        if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
            found = f"{model} has only a {type(processor).__name__}"
            raise ProcessorError(found, "save preprocessor_config.json or processor_config.json")
        kind = processor.image_processor
        known = kind.valid_kwargs.__annotations__
        if unknown := [name for name in processor_kwargs or {} if name not in known]:
            message = f"{type(kind).__name__} of {model} has no setting {', '.join(unknown)}"
            raise ProcessorError(message, f"one of {', '.join(sorted(known))}")
        # only now: other names are settings of the loading, such as ``weights_only``
        with without_hub(trust_remote_code):
            return cls(load(**processor_kwargs) if processor_kwargs else processor)

    def expand(self, ids: Int32, images: Sequence[bytes]) -> Int32:
        """Token ids int32 [P'] of a short prompt [P], which has one placeholder an image.

        ValueError if places and images differ in number, or an image cannot be decoded.
        """
        places = np.flatnonzero(ids == self.placeholder_id)
        if len(places) != len(images):
            raise ValueError(
                f"the prompt has {len(places)} placeholders (token {self.placeholder_id}) for "
                f"{len(images)} images"
            )
        parts: list[Int32] = []
        start = 0
        for place, image in zip(places, images, strict=True):
            parts += [ids[start:place], self._tokens_of(image)]
            start = int(place) + 1
        expanded: Int32 = np.concatenate([*parts, ids[start:]])
        return expanded

    def inputs(self, images: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """The model's inputs for the images of a sequence, in order, such as ``pixel_values``.

        They are float32 and int64, as the processor gives them, and have no token ids. Empty
        without images. Raises what ``decode`` raises.
        """
        if not images:
            return {}
        made = self._made([decode(image) for image in images])
        return {name: made[name] for name in made if name in self._names}

    def tokens(self, media: Media) -> int:
        """The most tokens that an image may become, from its width and height alone.

        An EXIF orientation may exchange them. ProcessorError if the processor does not count.
        """
        sizes = [(media.height, media.width), (media.width, media.height)]
        return max(self._counted(sizes)) + self._around

    def _counted(self, sizes: list[tuple[int, int]]) -> list[int]:
        """The tokens of images of these heights and widths, by the processor's own count."""
        count = getattr(self._processor, "_get_num_multimodal_tokens", None)
        if count is None:
            name = type(self._processor).__name__
            raise ProcessorError(f"{name} does not say how many tokens an image has", "another")
        return [int(number) for number in count(image_sizes=sizes)["num_image_tokens"]]

    @cached_property
    def _around(self) -> int:
        """Tokens of an image beside those counted, such as a mark before and after them."""
        from PIL import Image

        made = self._made([Image.new("RGB", (PROBE, PROBE))])
        return int(made["input_ids"].shape[-1]) - self._counted([(PROBE, PROBE)])[0]

    @property
    def _names(self) -> set[str]:
        return set(self._processor.image_processor.model_input_names)

    def _tokens_of(self, image: bytes) -> Int32:
        """The token ids that stand for one image, from its first placeholder to its last token."""
        made = self._made([decode(image)])
        return np.asarray(made["input_ids"], dtype=np.int32).reshape(-1)

    def _made(self, images: list[Any]) -> Any:
        """The processor's result for images and their placeholders, as torch tensors."""
        text = self._token * len(images)
        return self._processor(
            text=[text], images=images, add_special_tokens=False, return_tensors="pt"
        )


def prompts_of(
    engine: Any, stage: str, media: MediaCache | None
) -> tuple[EnginePrompts, dict[str, Any]]:
    """The prompts of a vLLM engine, and arguments of its requests, which exclude unsampled tokens.

    ``engine``: an ``AsyncLLM``. It has its processor loaded if it takes images.
    """
    if not engine.model_config.is_multimodal_model:
        return EnginePrompts(stage, engine.renderer, None, media), {}
    processor = ImageProcessor(engine.renderer.get_mm_processor().info.get_hf_processor())
    prompts = EnginePrompts(stage, engine.renderer, processor.placeholder_id, media)
    return prompts, {"logit_bias": dict.fromkeys(processor.unsampled_ids, -math.inf)}


def further_models(path: Path) -> Iterator[str]:
    """Where a processor's files name a further model, or a tokenizer's another file, in any folder.

    Raises what ``read_json`` does.
    """
    for folder in (path, *folders(path)):
        of_folder = folder.relative_to(path)
        for file, key in FURTHER:
            for keys, _ in islice(named_values(read_json(folder / file), key), 3):
                yield f"{of_folder / file}: {'.'.join(keys)}"
        if os.path.lexists(folder / f"{AUDIO_TOKENIZER}_config.json"):
            yield str(of_folder / f"{AUDIO_TOKENIZER}_config.json")


def other_classes(path: Path) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Files, keys and names of classes that are neither tokenizers nor processors.

    transformers takes any of its classes for one, by name, and calls its ``from_pretrained``:
    those of retrieval, say, read and write files wherever another file says. Raises what
    ``read_json`` does.
    """
    for folder in (path, *folders(path)):
        for name in CLASS_FILES:
            content = read_json(folder / name)
            for key in CLASS_KEYS:
                for keys, found in named_values(content, key):
                    if not CLASSES.fullmatch(str(found)):
                        yield str((folder / name).relative_to(path)), keys, str(found)


def _refuse_further(model: Path, trusted: bool) -> None:
    """ProcessorError for a processor with a further model or class, which would be loaded."""
    if not model.is_absolute():
        remedy = "download it first: a folder of that name is another model"
        raise ProcessorError(f"{model} is a model of a hub, whose files are not here", remedy)
    try:
        linked = linked_folders(model)
        named, others = list(further_models(model)), list(other_classes(model))
    except (OSError, ValueError) as error:
        raise ProcessorError(f"{model} cannot be read: {error}", "repair the file") from error
    if linked:
        cause = f"{linked[0]} is a link to a folder, whose files are not looked at"
        raise ProcessorError(cause, "put the folder itself there, or remove the link")
    if named:
        cause = f"{model}/{named[0]} is of a further model or tokenizer"
        raise ProcessorError(cause, "take a model without it, or remove it from the file")
    if others and not trusted:
        file, keys, name = others[0]
        cause = f"{model}/{file}: {'.'.join(keys)} is {name[:80]!r}, which is not a processor"
        raise ProcessorError(cause, "take a model without it, or remove it from the file")


def _unsampled(processor: Any, placeholder: int) -> tuple[int, ...]:
    """The ids of all tokens that stand for more than text, in order, each once."""
    found = {placeholder}
    for kind in UNSAMPLED:
        for name in (f"{kind}_token_id", f"{kind}_token_ids"):
            value = getattr(processor, name, None)
            values = value if isinstance(value, list | tuple) else [value]
            found |= {int(one) for one in values if isinstance(one, int)}
    unknown = processor.tokenizer.unk_token_id
    return tuple(sorted(one for one in found if one != unknown))
