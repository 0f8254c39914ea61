"""A stranger's data can do one thing while it is read: be refused, with file and row."""

from __future__ import annotations

import resource
import tracemalloc
from pathlib import Path
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.core.nesting import MAX_DEPTH
from async_opd.core.row import Row
from async_opd.data.files import FileSource
from async_opd.data.stored_rows import StoredRows, read_source
from async_opd.grading.graders import has_verifier, load_grader
from tests.data.pictures import RED, picture
from tests.fuzz.command import checked, good, written
from tests.security.hostile_data import GOOD, MANY, hostile_folder, lines, state


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("strangers")
    return hostile_folder(folder / "data", str(folder / "secret.png"))


def read(path: Path, images: str = "images") -> StoredRows:
    data = DataConfig(train=[], images=images, image_placeholder="")
    return read_source(FileSource(path=str(path)), 0, data)


def test_an_image_of_another_folder_is_not_opened(hostile: Path) -> None:
    (hostile.parent / "secret.png").write_bytes(RED)
    with pytest.raises(SourceError, match=r"outside of .*, and nothing there is opened"):
        read(hostile / "images", images="image")


@settings(max_examples=200)
@given(st.binary(max_size=200), st.integers(0, 400), st.sampled_from(["PNG", "JPEG", "GIF"]))
def test_bytes_that_are_no_image_are_refused_as_a_row(new: bytes, at: int, kind: str) -> None:
    encoded = picture(kind=kind)
    changed = encoded[:at] + new + encoded[at + len(new) :]
    source, fields = FileSource(path="a.jsonl"), {**GOOD, "prompt": "<image>", "images": changed}
    try:
        (image,) = source.row(fields, "0:0", DataConfig(train=[])).images
    except ValueError as error:
        assert "image" in str(error)  # noqa: PT017
    else:
        assert image.nbytes == len(changed)


def test_a_url_of_an_image_is_not_asked_for(tmp_path: Path) -> None:
    import socket

    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        url = f"http://127.0.0.1:{server.getsockname()[1]}/me.png"

        def listen() -> None:
            connection, _ = server.accept()
            asked.append(connection.recv(100).decode())
            connection.close()

        listener = Thread(target=listen)
        listener.start()
        with pytest.raises(SourceError, match="a URL, which is not downloaded"):
            read(hostile_folder(tmp_path / "data", url) / "images", images="image")
        with socket.create_connection(server.getsockname()) as ours:
            ours.sendall(b"the test itself")
        listener.join()
    assert asked == ["the test itself"]


def test_rows_of_another_folder_are_not_opened(hostile: Path) -> None:
    with pytest.raises(SourceError, match=r"names '\.\./outside\.arrow', not a file of the"):
        read(hostile / "escaping")


@pytest.mark.parametrize("names", [["/etc/passwd"], [".."], [""], ["a\x00b"], ["x.arrow"] * 2])
def test_names_of_files_that_are_none(tmp_path: Path, names: list[str]) -> None:
    (tmp_path / "x.arrow").touch()
    state(tmp_path, names)
    with pytest.raises(SourceError, match="is not a datasets directory"):
        read(tmp_path)


def test_a_row_that_is_too_deep_is_refused_with_its_number(hostile: Path) -> None:
    with pytest.raises(SourceError, match=f"more than {MAX_DEPTH} values inside") as caught:
        read(hostile / "deep.jsonl")
    assert caught.value.row == 2


def test_a_row_as_deep_as_allowed_is_read(tmp_path: Path) -> None:
    deep: list[object] = []
    for _ in range(MAX_DEPTH - 2):
        deep = [deep]
    lines(tmp_path / "a.jsonl", [{**GOOD, "x": deep}])
    assert len(read(tmp_path / "a.jsonl")) == 1


def test_a_row_that_is_too_large_is_refused_with_its_number(hostile: Path) -> None:
    with pytest.raises(SourceError, match="more than 16 MiB") as caught:
        read(hostile / "large.jsonl")
    assert caught.value.row == 2


def test_a_small_file_does_not_become_much_memory_at_once(hostile: Path) -> None:
    from async_opd.data.arrow_rows import parquet_rows

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert sum(len(row["long"]) for row in parquet_rows(hostile / "repeated.parquet")) == MANY << 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB: 1 GiB


def test_a_row_cannot_choose_its_own_verifier(hostile: Path) -> None:
    row = read(hostile / "forged_task.jsonl")[0]
    assert not has_verifier(row)
    assert load_grader("exact")("012", row) == 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("images", "has 'image', and only text and images are read"),
        ("escaping", "outside.arrow"),
        ("deep.jsonl", "row 2"),
        ("large.jsonl", "row 2"),
        ("many_fields.jsonl", "has no field 'prompt'"),
        ("forged_roles.jsonl", "'<eos>'"),
        ("forged_task.jsonl", "1 training prompts"),
    ],
)
def test_check_says_what_is_wrong_in_a_few_words(
    hostile: Path, tmp_path: Path, name: str, said: str
) -> None:
    config = good(tmp_path)
    config["data"] = {"train": [str(hostile / name)]}
    shown = checked(written(tmp_path, config))
    assert said in shown.out + shown.err
    assert len(shown.err) < 3000


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.slow
def test_a_long_value_of_many_rows_is_not_held_once_for_each(tmp_path: Path, stored: bool) -> None:
    """``stored``: the file says that the column is a dictionary."""
    import pyarrow
    import pyarrow.parquet

    from async_opd.data.arrow_rows import parquet_rows

    places = pyarrow.array([0] * 64, pyarrow.int32())
    values = pyarrow.DictionaryArray.from_arrays(places, pyarrow.array(["x" * (8 << 20)]))
    file = tmp_path / "long.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": values}), file, store_schema=stored)
    tracemalloc.start()
    before = pyarrow.total_allocated_bytes()
    rows = parquet_rows(file)
    assert len(next(rows)["prompt"]) == 8 << 20
    assert pyarrow.total_allocated_bytes() - before < 64 << 20
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert sum(1 for _ in rows) == 63


def test_a_data_source_that_is_no_name_is_refused_with_its_row(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [GOOD, {**GOOD, "data_source": "x" * 1001}])
    good_row, found = FileSource(path=str(tmp_path / "a.jsonl")).rows(0, DataConfig(train=[]))
    assert isinstance(good_row, Row)
    assert isinstance(found, SourceError)
    assert (found.row, "'data_source' has 1001 letters" in found.message) == (2, True)
