"""Checks of the models that get images: that they see, and that theirs is a family that is taken.

data sources whose rows have images ──routes──► teachers, and always the student
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

from async_opd.config.sections.section import ModelSection
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.models.families import PROCESSORS, TAKEN, refused, renamed_tower, without_processor

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from async_opd.core.errors import Findings
    from async_opd.models.engine_args import Device
    from async_opd.models.model_files import ModelFiles

STUDENT = "student.model"
PACKAGES = {"PIL": "Pillow", "torchvision": "torchvision"}
"""Packages that transformers' image processors and vLLM's vision models import."""
INSTALL = "pip install 'async-opd[vision]'"


def check_families(
    config: RunConfig,
    device: Device,
    files: Mapping[str, ModelFiles],
    partial: Set[str],
    sources: Set[str],
    found: Findings,
) -> None:
    """Reports every model that cannot compute the images of these data sources.

    ``files``: those of the models that could be read, by config key; ``partial`` ones may lack
    some. A VLM student is checked without images too, because it is loaded as a whole.
    """
    vision = {key for key, one in files.items() if one.config.get("vision_config") is not None}
    asked = {STUDENT: sorted(sources)} if sources else {}
    for source in sorted(sources):
        teacher = config.teacher_of(source)
        if teacher is not None:
            asked.setdefault(f"teachers.{teacher}.model", []).append(source)
    for key, theirs in asked.items():
        if key in files and key not in vision:
            what = f"rows of {', '.join(theirs)} have images, and {files[key].path} takes none"
            remedy = f"a vision model ({', '.join(TAKEN)}), or these rows without images"
            found.add(key, f"{what}: its config.json has no vision_config", remedy)
    for key in sorted(vision & {STUDENT, *asked}):
        _family(key, files[key], device, key in partial, found)
    for key, theirs in asked.items():
        served = config.teachers.get(key.removeprefix("teachers.").removesuffix(".model"))
        if isinstance(served, EndpointTeacher) and served.api == "sglang":
            message = f"rows of {', '.join(theirs)} have images, which go to servers of vLLM only"
            remedy = "serve the teacher by vLLM with --enable-scale-out, and set api to vllm"
            found.add(f"{key.removesuffix('.model')}.api", message, remedy)
    _settings(config, files, vision, found)
    missing = [name for module, name in PACKAGES.items() if not importlib.util.find_spec(module)]
    if missing and (asked or STUDENT in vision):
        needs = f"vision models need {' and '.join(missing)}, which this Python lacks"
        found.add(min(vision & {STUDENT, *asked}, default=STUDENT), needs, INSTALL)


def _family(key: str, files: ModelFiles, device: Device, partial: bool, found: Findings) -> None:
    """Reports what stops a vision model."""
    if key == STUDENT and files.untrainable:
        return  # reported already
    reason = refused(files.config, device, trained=key == STUDENT)
    if reason:
        possible = [one for one in TAKEN if not refused({"model_type": one}, device, True)]
        found.add(key, f"{files.path} {reason}", f"possible: {', '.join(possible)}")
        return
    if not partial and without_processor(files.path):
        message = f"{files.path} has none of {', '.join(PROCESSORS)}: its images have no processor"
        found.add(key, message, "save the model's processor there")
    if name := renamed_tower(files.path):
        message = f"{files.path} has {name}, which vLLM does not load"
        found.add(key, message, "name it vision_tower.vision_model.…, as the hub's models do")


def _settings(
    config: RunConfig, files: Mapping[str, ModelFiles], vision: Set[str], found: Findings
) -> None:
    """Reports settings of processors that nothing reads."""
    named = {"student": config.student}
    sections = named | {f"teachers.{name}": one for name, one in config.teachers.items()}
    for section, one in sections.items():
        given = one.processor_kwargs if isinstance(one, ModelSection) else {}
        key = f"{section}.model"
        if given and key in files and key not in vision:
            message = f"found {', '.join(given)}, but {files[key].path} takes no images"
            found.add(f"{section}.processor_kwargs", message, "remove it")
