"""Which model is meant, whose code runs, and files of models that are nested too deeply."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer

from async_opd.config.load import dump_config, load_config
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.yaml_text import YamlError, load_yaml
from async_opd.core.errors import ConfigError
from async_opd.models.engine_args import engine_kwargs
from async_opd.models.hub import localize, naming_faults
from async_opd.models.special_tokens import SpecialTokens
from tests.fuzz.command import STUDENT, Said, command, good, written
from trainer.saving.export import save_model
from trainer.student.loading import EmptyStudent

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DEPTHS = [100, 900, 100_000]


def checked(folder: Path, *overrides: str) -> Said:
    """``check`` of a good config; whatever it raises is a traceback of the user's."""
    return command("check", str(written(folder, good(folder))), *overrides)


def test_a_mistyped_directory_is_not_asked_for_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "models" / "student").mkdir(parents=True)
    said = checked(tmp_path, "student.model=models/studnet")
    assert said.code == 2
    assert f"no such directory: {tmp_path}/models/studnet" in said.err


def test_a_hub_id_is_one_and_check_says_so(tmp_path: Path) -> None:
    said = checked(tmp_path, "teachers.sort.model=somebody/sorter")
    assert said.code == 0
    assert (
        "teachers.sort.model: somebody/sorter is not a local directory and is used as a hub id"
        in said.out
    )
    assert "hub id" not in checked(tmp_path).out


def downloads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None]]:
    """The requests to the hub; it gives the quickstart's student."""
    import huggingface_hub

    asked: list[tuple[str, str | None]] = []

    def download(model: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((model, revision))
        return str(STUDENT)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_the_revision_is_what_the_hub_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = downloads(monkeypatch)
    student = f"student={{model: a/student, revision: {COMMIT}}}"
    file = written(tmp_path, good(tmp_path))
    config = load_config(file, [student, "teachers.sort={model: a/sorter, revision: v1}"])
    local = localize(config, "c.yaml")
    assert asked == [("a/student", COMMIT), ("a/sorter", "v1")]
    assert (local.student.model, local.student.revision) == (str(STUDENT), None)
    assert naming_faults(local, "c.yaml") == []
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


@pytest.mark.parametrize("revision", ["", ", revision: main", f", revision: {COMMIT[:12]}"])
@pytest.mark.parametrize("section", ["student", "teachers.sort"])
def test_code_of_a_model_of_the_hub_runs_at_a_commit_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: str, revision: str
) -> None:
    asked = downloads(monkeypatch)
    override = f"{section}={{model: a/b, trust_remote_code: true{revision}}}"
    said = checked(tmp_path, override)
    assert said.code == 2
    assert f"{section}.revision" in said.err
    config = load_config(written(tmp_path, good(tmp_path)), [override])
    with pytest.raises(ConfigError, match="expected the commit of a/b"):
        localize(config, "c.yaml")
    assert asked == []


def test_a_directory_has_no_revision(tmp_path: Path) -> None:
    said = checked(tmp_path, "student.revision=main")
    assert said.code == 2
    assert "is a directory, which has none" in said.err


def copied(folder: Path, **files: Any) -> Path:
    """The quickstart's student with other JSON files."""
    shutil.copytree(STUDENT, folder / "model")
    for name, content in files.items():
        file = folder / "model" / f"{name}.json"
        text = content if isinstance(content, str) else json.dumps(content)
        file.write_text(text)
    return folder / "model"


@pytest.mark.parametrize("trusted", [True, False])
def test_code_of_another_repository_is_refused_where_code_runs(
    tmp_path: Path, trusted: bool
) -> None:
    config = json.loads((STUDENT / "config.json").read_text())
    foreign = {"auto_map": {"AutoModelForCausalLM": "somebody/else--modeling.M"}}
    model = copied(tmp_path, config=config | foreign)
    said = checked(tmp_path, f"student={{model: {model}, trust_remote_code: {trusted}}}")
    assert ("code of another repository" in said.err) == trusted


THEIRS = {"AutoModel": "modeling.M", "AutoTokenizer": ["slow.T", "fast.T"]}
NAMING_CODE: list[tuple[str, dict[str, Any], str]] = [
    ("config", {"text_config": {"auto_map": THEIRS}}, "text_config.auto_map.AutoModel"),
    ("config", {"a": [{"b": {"auto_map": THEIRS}}]}, "a.0.b.auto_map.AutoModel"),
    ("config", {"auto_map": {"AutoProcessor": "p.P"}}, "auto_map.AutoProcessor"),
    ("config", {"auto_map": "modeling.M"}, "auto_map"),
    ("config", {"auto_map.AutoModel": {"auto_map": THEIRS}}, "auto_map.AutoModel.auto_map"),
    ("generation_config", {"auto_map": THEIRS}, "auto_map.AutoModel"),
    ("tokenizer_config", {"auto_map": THEIRS}, "auto_map.AutoModel"),
    ("processor_config", {"image_processor": {"auto_map": THEIRS}}, "image_processor.auto_map"),
    ("preprocessor_config", {"auto_map": {"AutoImageProcessor": "p.P"}}, "auto_map.AutoImage"),
    (
        "video_preprocessor_config",
        {"auto_map": {"AutoVideoProcessor": "p.P"}},
        "auto_map.AutoVideo",
    ),
]


def with_settings(folder: Path, name: str, more: dict[str, Any]) -> Path:
    """The quickstart's student with more settings in one of its JSON files."""
    file = STUDENT / f"{name}.json"
    own = json.loads(file.read_text()) if file.exists() else {}
    return copied(folder, **{name: own | more})


@pytest.mark.parametrize("section", ["student", "teachers.sort"])
@pytest.mark.parametrize(("name", "more", "key"), NAMING_CODE)
def test_code_of_a_part_of_a_model_is_refused_unless_it_is_trusted(
    tmp_path: Path, section: str, name: str, more: dict[str, Any], key: str
) -> None:
    model = with_settings(tmp_path, name, more)
    said = checked(tmp_path, f"{section}.model={model}")
    assert said.code == 2
    assert f"{section}.model: {model}/{name}.json: {key}" in said.err
    assert f"set {section}.trust_remote_code: true" in said.err
    assert checked(tmp_path, f"{section}={{model: {model}, trust_remote_code: true}}").code == 0


def test_the_first_authors_code_of_a_family_that_transformers_has_is_no_fault(
    tmp_path: Path,
) -> None:
    classes = {
        "AutoConfig": "theirs.C",
        "AutoModel": "theirs.M",
        "AutoModelForCausalLM": "theirs.L",
        "AutoTokenizer": "somebody/else",  # read from tokenizer_config.json only
    }
    model = with_settings(tmp_path, "config", {"auto_map": classes})
    assert checked(tmp_path, f"student.model={model}").code == 0


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (
            {"attribute_map": {"theirs": "auto_map"}, "theirs": {"AutoModel": "a/b--m.M"}},
            "attribute_map",
        ),
        ({"text_config": {"attribute_map": {"theirs": "auto_map"}}}, "text_config.attribute_map"),
        ({"_auto_class": "AutoConfig"}, "_auto_class"),
        ({"text_config": {"sub_configs": {}}}, "text_config.sub_configs"),
        ({"__module__": "json.decoder"}, "__module__"),
    ],
)
def test_keys_that_replace_what_a_class_has_are_refused_also_of_a_trusted_model(
    tmp_path: Path, content: dict[str, Any], key: str
) -> None:
    model = with_settings(tmp_path, "config", content)
    said = checked(tmp_path, f"student={{model: {model}, trust_remote_code: true}}")
    assert said.code == 2
    assert f"has config.json: {key}" in said.err
    assert "other files would be loaded, or saved" in said.err


def test_no_file_of_a_module_that_a_config_names_gets_into_the_trained_model(
    tmp_path: Path,
) -> None:
    hook = {"_auto_class": "AutoConfig", "__module__": "json.decoder"}
    source = with_settings(tmp_path, "config", hook)
    student = EmptyStudent(source)
    student.fill(torch.device("cpu"))
    save_model(
        student.model, str(source), str(tmp_path / "out"), student.model.state_dict().items()
    )
    assert not list((tmp_path / "out").glob("*.py"))
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_the_code_of_a_part_is_that_of_the_repository_which_the_part_names(tmp_path: Path) -> None:
    part = {"_name_or_path": "somebody/else", "auto_map": {"AutoModel": "modeling.M"}}
    model = with_settings(tmp_path, "config", {"vision_config": part})
    said = checked(tmp_path, f"teachers.sort={{model: {model}, trust_remote_code: true}}")
    assert said.code == 2
    assert "vision_config.auto_map.AutoModel takes 'somebody/else--modeling.M'" in said.err


def test_a_model_with_more_layers_than_any_is_refused_before_they_are_counted(
    tmp_path: Path,
) -> None:
    model = with_settings(tmp_path, "config", {"num_hidden_layers": 10**9})
    said = checked(tmp_path, f"student.model={model}")
    assert said.code == 2
    assert "1000000000 layers, at most 10000" in said.err


@pytest.mark.parametrize(
    "extra",
    [
        {"trust_remote_code": True},
        {"hf_overrides": {"trust_remote_code": True}},
        {"hf_overrides": {"a": [{"b": {"trust-remote-code": True}}]}},
        {"speculative_config": {"draft_load_config": {"load_format": "pt"}}},
        {"model_loader_extra_config": {"load_format": "auto"}},
        {"model_loader_extra_config": '{"Load_Format": "auto"}'},
        {"load-format": "pt"},
        {"model": "somebody/else"},
        {"speculative_config": {"model": "somebody/draft"}},
        {"speculative_config": '{"model": "somebody/draft"}'},
        {"tokenizer": "somebody/else"},
        {"hf_overrides": '{"trust\\u005fremote_code": true}'},
        {"config_format": "mistral"},
        {"hf_config_path": "somebody/else"},
        {"revision": "main"},
        {"mm_processor_kwargs": {"size": {"longest_edge": 784}}},
    ],
)
def test_what_decides_whose_code_runs_is_refused_at_any_depth(
    tmp_path: Path, extra: dict[str, Any]
) -> None:
    for engine in ("rollout.engine", "teachers.sort.engine"):
        said = checked(tmp_path, f"{engine}.extra={json.dumps(extra)}")
        assert said.code == 2
        assert " here: " in said.err


@pytest.mark.parametrize("section", ["student", "teachers.sort"])
def test_settings_of_a_processor_trust_no_code(tmp_path: Path, section: str) -> None:
    said = checked(tmp_path, f"{section}.processor_kwargs={{trust_remote_code: true}}")
    assert said.code == 2
    assert "no trust_remote_code here" in said.err


def test_an_engine_reads_safetensors_whatever_stands_in_extra() -> None:
    extra = {"load_format": "pt", "trust_remote_code": True, "max_logprobs": 5}
    extra["config_format"] = "mistral"
    engine = EngineConfig.model_construct(**{**EngineConfig().model_dump(), "extra": extra})
    bare: dict[str, Any] = {"device": "cpu", "tensor_parallel": 1, "seed": 0}
    found = engine_kwargs(engine, model="m", trust_remote_code=False, **bare)
    assert (found["load_format"], found["trust_remote_code"]) == ("safetensors", False)
    assert found["config_format"] == "hf"
    assert found["max_logprobs"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize(
    "name",
    ["config", "generation_config", "tokenizer_config", "model.safetensors.index", "tokenizer"],
)
def test_a_file_of_a_model_that_is_nested_too_deeply_is_named(
    tmp_path: Path, name: str, depth: int
) -> None:
    deep = '{"a": ' * depth + "1" + "}" * depth
    model = copied(tmp_path, **{name: deep})
    (model / "chat_template.jinja").unlink(missing_ok=True)
    for support in ("teacher_topk", "full_vocab"):
        said = checked(tmp_path, f"student.model={model}", f"loss.support={support}")
        assert said.code == 2
        assert str(model) in said.err


@pytest.mark.slow
@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("form", ["{}=1", "train.lr={}", "data.train={}", "{}"])
def test_an_override_that_is_nested_too_deeply_is_refused(
    tmp_path: Path, form: str, depth: int
) -> None:
    deep = ".".join("a" * depth) if form == "{}=1" else "[" * depth + "]" * depth
    said = checked(tmp_path, form.format(deep))
    assert said.code == 2
    assert len(said.err) < 3000 + depth


@pytest.mark.parametrize("form", ["{}", "!!int {}", "!!int '{}'", "!!float {}", "[{}.5]"])
def test_numbers_of_base_60_take_no_time(form: str) -> None:
    text = form.format(":".join(["1"] * 300_000))
    started = time.process_time()
    with contextlib.suppress(YamlError):
        assert isinstance(load_yaml(text), str | list)
    assert time.process_time() - started < 10


@pytest.mark.parametrize("word", ["12:30:00", "2026-01-01", "010", "1:1", "2026-01-01 10:00:00"])
def test_words_that_only_resemble_numbers_and_dates_are_strings(word: str) -> None:
    assert load_yaml(word) == word


NUMBERS = {
    "1_000": 1000,
    "0x1f": 31,
    "0o17": 15,
    "-3": -3,
    "1.5": 1.5,
    "~": None,
    "off": False,
    "true": True,
    "+.inf": float("inf"),
    "0": 0,
    ".5": 0.5,
}


@pytest.mark.parametrize(
    ("word", "value"),
    list(NUMBERS.items()),
)
def test_words_that_are_numbers_stay_such(word: str, value: Any) -> None:
    assert load_yaml(word) == value


@pytest.mark.parametrize("digits", ["9" * 5000, "0x" + "f" * 5000, "!!int 0x" + "f" * 5000])
def test_a_number_that_cannot_be_shown_is_refused(tmp_path: Path, digits: str) -> None:
    said = checked(tmp_path, f"train.steps={digits}")
    assert said.code == 2
    assert len(said.err) < 1000


VERIFIER = {"algorithm": "eagle3", "verifier": {"name_or_path": "somebody/else"}}


@pytest.mark.parametrize("key", ["student", "teachers.sort"])
@pytest.mark.parametrize(
    ("name", "said_there"),
    [
        ("config", {"speculators_config": VERIFIER}),
        ("config", {"configuration_files": ["config.4.0.0.json"]}),
        ("config", {"model_type": "ultravox", "text_model_id": "somebody/else"}),
        ("config", {"model_type": "ultravox", "audio_model_id": "somebody/else"}),
        ("config", {"backbone": "somebody/else"}),
        ("config", {"vision_config": {"backbone": "resnet50"}}),
        ("config", {"backbone_config": {"model_type": "timm_backbone", "backbone": "a/b"}}),
        ("config", {"vision_config": {"model_type": "timm_wrapper", "architecture": "resnet18"}}),
        ("config", {"vision_config": {"pretrained_cfg": {"file": "/home/user/weights.bin"}}}),
        ("adapter_config", {"base_model_name_or_path": "somebody/else"}),
    ],
)
def test_a_model_that_has_another_one_loaded_in_its_place_is_refused(
    tmp_path: Path, key: str, name: str, said_there: dict[str, Any]
) -> None:
    own = json.loads((STUDENT / "config.json").read_text()) if name == "config" else {}
    model = copied(tmp_path, **{name: own | said_there})
    said = checked(tmp_path, f"{key}.model={model}")
    assert said.code == 2
    assert f"{name}.json: {list(said_there)[-1]}" in said.err


@pytest.mark.parametrize(
    "named",
    [
        {"speculators_config": None},
        {"backbone": None, "use_timm_backbone": False},
        {"backbone_config": {"model_type": "resnet", "backbone": None}},
        {"label2id": {"backbone": 3}},
    ],
)
def test_a_key_of_another_model_that_names_none_is_no_fault(
    tmp_path: Path, named: dict[str, Any]
) -> None:
    own = json.loads((STUDENT / "config.json").read_text())
    model = copied(tmp_path, config=own | named)
    assert checked(tmp_path, f"student.model={model}").code == 0


def test_a_folder_of_the_working_directory_is_not_taken_for_a_model_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / "work"
    for name in ("somebody/sorter", "sorter"):
        shutil.copytree(STUDENT, work / name)
    monkeypatch.chdir(work)
    asked = downloads(monkeypatch)
    override = f"student={{model: somebody/sorter, trust_remote_code: true, revision: {COMMIT}}}"
    config = load_config(written(tmp_path, good(tmp_path)), [override])
    assert localize(config, "c.yaml").student.model == str(STUDENT)
    assert asked == [("somebody/sorter", COMMIT)]
    said = checked(tmp_path, "student.model=somebody/sorter")
    assert (
        "student.model: somebody/sorter is not a local directory and is used as a hub id"
        in said.out
    )
    said = checked(tmp_path, "student.model=sorter")
    assert said.code == 2
    assert "no such directory: sorter" in said.err


def test_a_long_special_token_takes_no_more_memory_than_its_letters() -> None:
    tokenizer = Tokenizer.from_file(str(STUDENT / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("ab" * 10_000, special=True)])
    tracemalloc.start()
    special = SpecialTokens(tokenizer)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
    assert special.quoted("x aba") != "x aba"
    assert special.quoted("x") == "x"
