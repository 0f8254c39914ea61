"""What the files of a model may make an engine do: nothing but load that model's weights.

Settings of torchao name functions of torch with their arguments, and so run any command; files of a
processor may name a further model.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config
from async_opd.core.errors import Problem
from async_opd.models.engine_args import engine_env
from async_opd.models.json_files import read_json
from async_opd.models.model_files import QUANTIZATIONS
from async_opd.models.model_size import ModelSize
from async_opd.models.processor import ImageProcessor, ProcessorError
from async_opd.models.tokenizer import Text
from tests.fuzz.command import STUDENT, command, good, written

TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}
FURTHER = {"audio_tokenizer_class": "AutoModel", "audio_tokenizer_name_or_path": "somebody/further"}


def problems(folder: Path, section: str, files: dict[str, Any], *overrides: str) -> list[Problem]:
    """Of a good config whose ``section`` has a copy of the student with changed files."""
    path = shutil.copytree(STUDENT, folder / "model")
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        before = json.loads((path / name).read_text()) if (path / name).exists() else {}
        (path / name).write_text(json.dumps(before | content))
    file = written(folder, good(folder))
    config = load_config(file, [f"{section}.model={path}", "sync.verify_every=0", *overrides])
    return preflight(config, "c.yaml", 0).problems


@pytest.mark.parametrize("section", ["student", "teachers.sort"])
@pytest.mark.parametrize(
    "files",
    [
        {"config.json": {"quantization_config": TORCHAO}},
        {"config.json": {"quantization_config": TORCHAO | {"quant_method": "TorchAO"}}},
        {"config.json": {"quantization_config": {"bits": 4}}},
        {"config.json": {"text_config": {"compression_config": TORCHAO}}},
        {"config.json": {"thinker_config": {"a": [{"quantization_config": TORCHAO}]}}},
        {"hf_quant_config.json": TORCHAO},
        {"a/.b/config.json": {"quantization_config": TORCHAO}},
    ],
    ids=["config", "capitals", "no method", "text part", "any depth", "beside it", "a folder"],
)
def test_quantization_whose_settings_may_name_functions_is_refused(
    tmp_path: Path, section: str, files: dict[str, Any]
) -> None:
    found = [one for one in problems(tmp_path, section, files) if "may run code" in one.message]
    assert [one.key for one in found] == [f"{section}.model"]
    assert f"{section}.trust_remote_code: true" in found[0].remedy


@pytest.mark.parametrize("method", sorted(QUANTIZATIONS))
def test_quantization_of_numbers_and_names_of_layers_is_not(tmp_path: Path, method: str) -> None:
    files = {"config.json": {"quantization_config": {"quant_method": method}}}
    assert problems(tmp_path, "teachers.sort", files) == []


def test_modelopts_older_file_is_not(tmp_path: Path) -> None:
    files = {"hf_quant_config.json": {"producer": {"name": "modelopt"}, "quantization": {}}}
    assert problems(tmp_path, "teachers.sort", files) == []


def test_quantization_of_a_trusted_model_is_the_users_decision(tmp_path: Path) -> None:
    files = {"config.json": {"quantization_config": TORCHAO}}
    found = problems(tmp_path, "teachers.sort", files, "teachers.sort.trust_remote_code=true")
    assert [one for one in found if "may run code" in one.message] == []


def test_a_servers_model_is_loaded_by_no_engine_of_ours(tmp_path: Path) -> None:
    path = shutil.copytree(STUDENT, tmp_path / "model")
    own = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(own | {"quantization_config": TORCHAO}))
    server = {"kind": "endpoint", "urls": ["http://127.0.0.1:9"], "served_model": "m"}
    config = good(tmp_path)
    config["teachers"] = {"sort": server | {"model": str(path), "sources": ["sort", "reverse"]}}
    found = preflight(load_config(written(tmp_path, config)), "c.yaml", 0).problems
    assert [one for one in found if "may run code" in one.message] == []


@pytest.mark.parametrize("section", ["student", "teachers.sort"])
@pytest.mark.parametrize(
    "files",
    [
        {"processor_config.json": {"audio_tokenizer": FURTHER}},
        {"preprocessor_config.json": {"image_processor": {"audio_tokenizer": FURTHER}}},
        {"audio_tokenizer_config.json": {}},
    ],
    ids=["processor", "any depth", "a file"],
)
def test_a_further_model_of_a_processor_is_refused_before_an_engine_reads_it(
    tmp_path: Path, section: str, files: dict[str, Any]
) -> None:
    (found,) = problems(tmp_path, section, files)
    assert (found.key, "audio_tokenizer" in found.message) == (f"{section}.model", True)


@pytest.mark.parametrize("file", ["tokenizer_config.json", ".a/tokenizer_config.json"])
def test_a_tokenizer_in_another_file_than_the_one_that_is_read_is_refused(
    tmp_path: Path, file: str
) -> None:
    named = {"fast_tokenizer_files": ["tokenizer.4.0.json"]}
    (found,) = problems(tmp_path, "student", {file: named})
    assert f"{file}: fast_tokenizer_files" in found.message


@pytest.mark.parametrize("section", ["student", "teachers.sort"])
@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "RagRetriever"}),
        ("config.json", {"tokenizer_class": "AutoModelForCausalLM"}),
        ("processor_config.json", {"processor_class": "RagRetriever"}),
        ("preprocessor_config.json", {"image_processor": {"image_processor_type": "AutoModel"}}),
        ("a/b/tokenizer_config.json", {"tokenizer_class": "RagRetriever"}),
        (".a/tokenizer_config.json", {"tokenizer_class": "LlamaForCausalLM"}),
        ("preprocessor_config.json", {"image_processor_type": "LayoutLMv2ImageProcessor"}),
    ],
)
def test_a_class_that_is_neither_tokenizer_nor_processor_is_refused(
    tmp_path: Path, section: str, file: str, content: dict[str, Any]
) -> None:
    (found,) = problems(tmp_path, section, {file: content})
    assert (found.key, file in found.message) == (f"{section}.model", True)
    assert found.remedy.endswith("trust_remote_code: true")


@pytest.mark.parametrize("name", ["Qwen2TokenizerFast", "TokenizersBackend", "PreTrainedTokenizer"])
def test_a_class_of_a_tokenizer_is_not(tmp_path: Path, name: str) -> None:
    files = {"tokenizer_config.json": {"tokenizer_class": name}}
    assert problems(tmp_path, "teachers.sort", files) == []


def test_a_link_to_a_folder_is_refused_where_an_image_processor_is_loaded(tmp_path: Path) -> None:
    (tmp_path / ".q").mkdir()
    (tmp_path / "qformer_tokenizer").symlink_to(".q")
    with pytest.raises(ProcessorError, match="qformer_tokenizer is a link to a folder"):
        ImageProcessor.load(str(tmp_path))


def test_such_a_class_is_refused_where_an_image_processor_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"processor_class": "RagRetriever"}')
    with pytest.raises(ProcessorError, match="'RagRetriever', which is not a processor"):
        ImageProcessor.load(str(tmp_path))


def test_a_folder_with_the_name_of_a_hub_id_is_never_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(STUDENT, tmp_path / "somebody" / "sorter")
    monkeypatch.chdir(tmp_path)
    assert read_json(Path("somebody/sorter/config.json")) == {}
    with pytest.raises(ValueError, match="is a model of a hub"):
        Text("somebody/sorter")
    assert ModelSize.read("somebody/sorter").floats == 0
    with pytest.raises(ProcessorError, match="is a model of a hub"):
        ImageProcessor.load("somebody/sorter")


def test_check_asks_no_server_by_a_student_whose_files_are_not_here(tmp_path: Path) -> None:
    server = {"kind": "endpoint", "urls": ["http://127.0.0.1:9"], "served_model": "m"}
    config = good(tmp_path) | {"teachers": {"sort": server}}
    config["student"] = {"model": "somebody/sorter"}
    said = command("check", str(written(tmp_path, config)))
    assert (said.code, "a bug" in said.err) == (0, False), said.err


def test_an_engine_asks_no_hub_unless_its_models_code_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert engine_env("cuda")["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in engine_env("cuda", trusted=True)
