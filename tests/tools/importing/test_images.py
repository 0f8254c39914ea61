"""Keys about images: their field, the processor's settings, and a tower that is not trained."""

from __future__ import annotations

from typing import Any

from tests.tools.importing.test_steps import drafted


def verl(**keys: Any) -> dict[str, Any]:
    return drafted("verl", **keys).ours


def test_verls_field_with_images_is_data_images() -> None:
    assert verl(data__image_key="pictures")["data.images"] == "pictures"


def test_pixel_limits_are_the_students_processor_kwargs() -> None:
    limits = {
        "data.mm_processor_kwargs.max_pixels": 602_112,
        "data.mm_processor_kwargs.min_pixels": 3136,
    }
    ours = drafted("verl", **limits).ours
    assert ours["student.processor_kwargs"] == {"max_pixels": 602_112, "min_pixels": 3136}
    whole = {"data.mm_processor_kwargs": {"max_pixels": 602_112}}
    assert drafted("verl", **whole).ours["student.processor_kwargs"] == {"max_pixels": 602_112}


def test_separate_settings_of_teachers_are_reported() -> None:
    said = drafted("verl", **{"data.mm_processor_kwargs.max_pixels": 602_112}).differs
    assert any("processor_kwargs of a VLM teacher" in one for one in said)


def test_images_of_a_prompt_are_bounded_by_limit_images() -> None:
    assert (
        drafted("verl", **{"actor_rollout_ref.rollout.limit_images": 5}).ours["data.max_images"]
        == 5
    )


def test_keys_for_films_and_sounds_have_no_meaning_here() -> None:
    found = drafted("verl", data__video_key="videos", data__audio_key="audios").meaningless
    assert set(found.values()) == {"rows with films or sounds are refused"}
