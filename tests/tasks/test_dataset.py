"""Datasets: rows of files as tasks, each once in an epoch, in an order that a resumed run
continues.
"""

import gzip
import json
import re
import sys
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.runs.task_sources import fingerprints
from agentrl.tasks.dataset import DatasetTasks
from agentrl.tasks.permutation import Permutation
from agentrl.tasks.rows import sources
from agentrl.trajectory import Task


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def questions(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"What is {n} + {n}?", "answer": str(2 * n), "id": f"sum/{n}"}
        for n in range(start, start + count)
    ]


def tasks(
    data: Path | str, split: str = "train", seed: int = 0, env: str = "qa", **settings: Any
) -> DatasetTasks:
    return DatasetTasks(DatasetTasks.Config(data=str(data), **settings), env, seed, split)


def prompts(source: DatasetTasks, count: int, first: int = 0) -> list[str]:
    return [source.task(index).options["prompt"] for index in range(first, first + count)]


@given(st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_a_permutation_has_each_number_once(size: int, seed: int) -> None:
    order = Permutation(size, seed)
    assert sorted(order[place] for place in range(size)) == list(range(size))
    with pytest.raises(IndexError):
        order[size]


def test_permutations_of_other_seeds_are_other_orders_and_every_number_comes_first_sometimes() -> (
    None
):
    orders = [[Permutation(5, seed)[place] for place in range(5)] for seed in range(400)]
    for place in range(5):
        for number in range(5):
            assert 40 <= sum(order[place] == number for order in orders) <= 125  # 80 are expected


def test_an_epoch_has_each_row_once_and_the_next_one_in_another_order(tmp_path: Path) -> None:
    source = tasks(write(tmp_path / "data.jsonl", questions(40)), held_out=0.0)
    first, second = prompts(source, 40), prompts(source, 40, first=40)
    assert sorted(first) == sorted(second) == sorted(row["prompt"] for row in questions(40))
    assert first != second
    assert len({source.task(index).id for index in range(80)}) == 80
    assert source.task(0).id.startswith("train-000000-sum_")


def test_a_task_depends_on_the_runs_seed_and_its_index_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", questions(50))
    first, again, other = tasks(path), tasks(path), tasks(path, seed=1)
    whole = [first.task(index) for index in range(120)]
    for stopped_at in range(0, 120, 12):  # killed and resumed at ten points
        assert [again.task(index) for index in range(stopped_at, 120)] == whole[stopped_at:]
    assert prompts(other, 40) != prompts(first, 40)


def test_a_share_is_held_out_whatever_the_seed_and_equal_prompts_stay_together(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "data.jsonl", [*questions(100), *questions(100)])
    train, held = tasks(path, held_out=0.2), tasks(path, "held-out", held_out=0.2)
    assert len(train) + len(held) == 200
    assert 40 <= len(held) <= 42
    assert not set(prompts(train, len(train))) & set(prompts(held, len(held)))
    assert prompts(tasks(path, "held-out", seed=7, held_out=0.2), 20) == prompts(held, 20)


def test_a_file_is_held_out_unless_a_task_of_it_is_trained_on(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", questions(30))
    held = write(tmp_path / "held.jsonl", questions(10, start=30))
    assert len(tasks(path, held_out=str(held))) == 30
    assert sorted(prompts(tasks(path, "held-out", held_out=str(held)), 10)) == sorted(
        row["prompt"] for row in questions(10, start=30)
    )
    held.write_text("\n" + held.read_text())
    write(held, [{"prompt": "new", "answer": 1}, *questions(2, start=4)])
    with pytest.raises(
        ConfigError, match=r"2 of 3 held-out rows .* line 2 is the task of .*data.jsonl, line 5"
    ):
        tasks(path, "held-out", held_out=str(held))


def test_the_key_says_which_columns_tell_tasks_apart(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", [{"prompt": "Solve it.", "answer": n, "board": n} for n in range(20)]
    )
    held = write(
        tmp_path / "b.jsonl",
        [{"prompt": "Solve it.", "answer": n, "board": n} for n in range(20, 30)],
    )
    with pytest.raises(ConfigError, match=r"tasks\.key"):
        tasks(path, "held-out", held_out=str(held))
    assert len(tasks(path, "held-out", held_out=str(held), key=("prompt", "board"))) == 10
    with pytest.raises(ConfigError, match="no column 'bord'"):
        tasks(path, key=("bord",))


def test_bad_rows_are_named_by_file_and_line_before_anything_starts(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps({"prompt": "2 + 2?", "answer": "4"})
    path.write_text(
        "\n".join(
            [good, "", '{"prompt": 3}', good, "{", "[1]", '{"prompt": "x", "answer": NaN}', good]
        )
    )
    with pytest.raises(ConfigError) as raised:
        tasks(path)
    text = str(raised.value)
    assert text.startswith("4 of 7 rows cannot be tasks:")
    for line, why in ((3, "prompt"), (5, "not JSON"), (6, "not an object"), (7, "not JSON")):
        assert f"data.jsonl, line {line}: " in text
        assert why in text
    path.write_text('{"prompt": 3}\n' * 50 + good)
    with pytest.raises(
        ConfigError, match=r"50 of 51 .*\n.*, line 1: prompt: .* not 3 \(and 49 more like it\)$"
    ) as alike:
        tasks(path)
    assert len(str(alike.value).splitlines()) == 2
    path.write_text('{"question": "x"}\n' * 50)
    with pytest.raises(ConfigError, match="none of the 50 rows can be a task") as all_bad:
        tasks(path)
    assert len(str(all_bad.value).splitlines()) == 1


def test_columns_are_mapped_by_name_and_a_missing_one_is_refused(tmp_path: Path) -> None:
    rows = [
        {"question": f"q{n}", "reward_model": {"ground_truth": n}, "source": "x"} for n in range(5)
    ]
    path = write(tmp_path / "data.jsonl", rows)
    source = tasks(
        path, held_out=0.0, columns={"prompt": "question", "answer": "reward_model.ground_truth"}
    )
    assert sorted(source.task(index).options["answer"] for index in range(5)) == list(range(5))
    assert source.task(0).options.keys() == {"prompt", "answer"}
    with pytest.raises(
        ConfigError, match=r"line 1: no column 'qestion'. Did you mean 'question'\?"
    ):
        tasks(path, columns={"prompt": "qestion"})


def test_a_row_may_have_a_seed_and_options_for_any_environment(tmp_path: Path) -> None:
    path = write(
        tmp_path / "data.jsonl", [{"seed": n, "options": {"high": 50 + n}} for n in range(9)]
    )
    source = DatasetTasks(
        DatasetTasks.Config(data=str(path), held_out=0.0),
        "guess_number",
        0,
        options={"max_turns": 3, "high": 2},
    )
    task = source.task(4)
    assert dict(task.options) == {"max_turns": 3, "high": 50 + task.seed}
    write(path, [{"options": {"hihg": 3}}])
    with pytest.raises(ConfigError, match="line 1: hihg: Extra inputs"):
        tasks(path, env="guess_number")
    write(path, [{"prompt": "x", "seed": -1}])
    with pytest.raises(ConfigError, match="its seed is -1"):
        tasks(path)


def as_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(
        "prompt,answer,id\n" + "".join(f'"{r["prompt"]}",{r["answer"]},{r["id"]}\n' for r in rows)
    )


def as_semicolons(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "prompt; answer ;id\r\n" + "".join(
        f"{r['prompt']};{r['answer']};{r['id']}\r\n" for r in rows
    )
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())


def as_tabs(path: Path, rows: list[dict[str, Any]]) -> None:
    text = "prompt\tanswer\tid\n" + "".join(
        f"{r['prompt']}\t{r['answer']}\t{r['id']}\n" for r in rows
    )
    path.write_bytes(gzip.compress(text.encode()))


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)


def as_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)


def as_feather(path: Path, rows: list[dict[str, Any]]) -> None:
    pa.feather.write_feather(pa.Table.from_pylist(rows), path)


def as_array(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(rows, indent=2).encode())


def as_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\r\n" for row in rows).strip())


def as_packed_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    as_lines(path, rows)
    text = path.read_bytes()
    with pa.output_stream(
        str(path), compression={".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}[path.suffix]
    ) as stream:
        stream.write(text)


@pytest.mark.parametrize(
    ("suffix", "save"),
    [
        (".csv", as_csv),
        (".CSV", as_semicolons),
        (".tsv.gz", as_tabs),
        (".parquet", as_parquet),
        (".arrow", as_arrow),
        (".feather.arrow", as_feather),
        (".json", as_array),
        (".json", as_lines),
        (".ndjson", as_lines),
        (".jsonl.gz", as_packed_lines),
        (".jsonl.zst", as_packed_lines),
        (".json.bz2", as_packed_lines),
    ],
)
def test_other_formats_have_the_same_tasks_in_the_same_order(
    tmp_path: Path, suffix: str, save: Any
) -> None:
    lines = tasks(write(tmp_path / "data.jsonl", questions(30)))
    save(tmp_path / f"other{suffix}", questions(30))
    other = tasks(tmp_path / f"other{suffix}")
    assert [other.task(index) for index in range(60)] == [lines.task(index) for index in range(60)]


def test_a_row_of_a_csv_file_without_a_field_is_named(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text('prompt,answer\n"two\nlines",1\nmissing\n')
    with pytest.raises(ConfigError, match=r"data.csv, line 4: it has 1 fields, and the head has 2"):
        tasks(tmp_path / "data.csv")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        (
            "a.csv",
            "prompt,answer\ncafé,1\n".encode("latin-1"),
            "line 2: column 'prompt' has text that is not UTF-8",
        ),
        ("a.csv", b"prompt,prompt\na,b\n", "two columns are called 'prompt'"),
        (
            "a.csv",
            b'prompt,answer\na,1\n"b,2\nc,3\n',
            "a.csv cannot be read further than line 2: unexpected end",
        ),
        ("a.json", b'[{"prompt": "a"},\n{"prompt": 3}]', r"row 2 \(line 2\): prompt"),
        (
            "a.json",
            b'[{"prompt": "a"},\n{"prompt": "b"',
            r"further than row 1 \(line 1\): .* the array is not closed",
        ),
        (
            "a.json",
            b'[{"prompt": "a"},\n{"prompt": "b"}',
            r"further than row 1 \(line 1\): .* the array is not closed",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "a"}\n' * 9999)[:-20],
            "cannot be read further than .*Truncated",
        ),
        ("a.jsonl.gz", b'{"prompt": "a"}\n', "cannot be read further than its beginning"),
        ("a.jsonl", b'{"prompt": "a", "answer": ' + b"[" * 99_999, "line 1: it is not JSON"),
        (
            "a.jsonl",
            b'{"prompt": "a"}\n{"prompt": "b", "answer": NaN}\n',
            "line 2: it is not JSON: NaN is not a number of JSON: write null instead",
        ),
        (
            "a.jsonl",
            b'{"prompt": "a"},\n{"prompt": "b"}\n',
            "line 1: it is not JSON: trailing characters .* A line has no comma at its end",
        ),
        (
            "a.jsonl",
            b'{"prompt": "a"}\n{"prompt": "b", "answer": "1", "answer" : "2"}\n',
            "line 2: it has the key 'answer' twice",
        ),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"prompt": "b", "more": [{"x": "\\":", "x": 2}]}\n'),
            "line 1: it has the key 'x' twice",
        ),
        (
            "a.json",
            b'[{"prompt": "a"},\n{"prompt": "b", "answer": "1", "answer": "2"}]',
            r"further than row 1 \(line 1\): it has the key 'answer' twice",
        ),
        (
            "a.json",
            b'[{"prompt": "a"},\n{"prompt": "b", "answer": Infinity}, {"prompt": "c"}]',
            r"further than row 1 \(line 1\): Infinity is not a number of JSON",
        ),
        ("a.json", b'{"prompt": "a", "prompt": "b"}', "it has the key 'prompt' twice"),
        (
            "a.json",
            b'[{"prompt": "a"}]' + b" " * 70_000 + b'\n[{"prompt": "b"}]\n',
            r"further than row 1 \(line 1\): something follows the end of the array: '\[\{",
        ),
        (
            "a.csv",
            b"prompt,answer,,\na,1,x,y\n",
            "line 2: 'x' and 'y' are in columns without a name: name these in the head",
        ),
    ],
    ids=[
        "latin-1",
        "twice",
        "quote",
        "bad row",
        "half a row",
        "no bracket",
        "cut off",
        "not packed",
        "deep",
        "nan",
        "comma",
        "key twice",
        "inner key twice",
        "key twice in an array",
        "infinity in an array",
        "key twice in an object",
        "two arrays",
        "columns without names",
    ],
)
def test_files_that_are_broken_are_refused_with_the_place(
    tmp_path: Path, name: str, content: bytes, why: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        tasks(tmp_path / name)


def test_a_text_that_looks_like_a_key_is_no_key(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", [{"prompt": 'say {"prompt": 1, "prompt": 2}', "answer": '": "'}])
    source = tasks(tmp_path / "a.jsonl", held_out=0.0)
    assert source.task(0).options["prompt"] == 'say {"prompt": 1, "prompt": 2}'


@pytest.mark.parametrize(
    "text",
    [
        "\r\n\r\nprompt,answer\r\na,1\r\n",
        "prompt,answer,,\na,1,,\n,,,\n",
        "prompt|answer\na|1\n",
        '"prompt";"a, b, c";answer\na;;1\n',
        '\nsep=|\n"prompt"|answer\na|1\n',
    ],
    ids=["empty lines", "empty columns", "bars", "names with commas", "sep"],
)
def test_tables_are_read_as_spreadsheets_and_databases_write_them(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "a.csv").write_bytes(text.encode())
    source = tasks(tmp_path / "a.csv", held_out=0.0)
    assert len(source) == 1
    options = source.task(0).options
    assert (options["prompt"], options["answer"]) == ("a", "1")
    assert "" not in options
    assert source.where(0) == f"{tmp_path / 'a.csv'}, row 1"


def test_lines_of_a_table_are_counted_with_those_before_its_head(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("\n\nsep=,\n\nprompt,answer\na,1\n,\nb\n")
    with pytest.raises(ConfigError, match="line 8: it has 1 fields, and the head has 2"):
        tasks(tmp_path / "a.csv")


def test_maps_are_objects_and_what_python_does_not_have_is_refused_with_its_place(
    tmp_path: Path,
) -> None:
    kind = pa.map_(pa.string(), pa.list_(pa.struct([("of", pa.map_(pa.string(), pa.int64()))])))
    extra = pa.array([[("k", [{"of": [("x", 1)]}, None])], None], kind)
    pq.write_table(pa.table({"prompt": ["a", "b"], "extra": extra}), tmp_path / "a.parquet")
    source = tasks(tmp_path / "a.parquet", held_out=0.0)
    found = {task.options["prompt"]: task.options["extra"] for task in map(source.task, range(2))}
    assert found == {"a": {"k": [{"of": {"x": 1}}, None]}, "b": None}
    twice = pa.array([[("k", []), ("k", [])]], kind)
    pq.write_table(pa.table({"prompt": ["a"], "extra": twice}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="further than its beginning: it has the key 'k' twice"):
        tasks(tmp_path / "a.parquet")
    late = pa.array([10**9], pa.date32())
    pq.write_table(pa.table({"prompt": ["a"], "day": late}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match=r"a.parquet cannot be read further than its beginning"):
        tasks(tmp_path / "a.parquet")


@pytest.mark.parametrize("content", ['{"epoch": 3}', "[1]", "{not json", "\xff"])
def test_the_state_file_of_another_program_is_no_saved_dataset(
    tmp_path: Path, content: str
) -> None:
    write(tmp_path / "data" / "a.jsonl", questions(3))
    (tmp_path / "data" / "state.json").write_bytes(content.encode("latin-1"))
    assert len(tasks(tmp_path / "data", held_out=0.0)) == 3


def test_columns_that_json_cannot_hold_are_named_unless_they_are_left_out(tmp_path: Path) -> None:
    rows = pa.table(
        {"prompt": ["a", "b"], "answer": [Decimal("1.50"), Decimal(2)], "image": [b"\xff", b"x"]}
    )
    pq.write_table(rows, tmp_path / "data.parquet")
    with pytest.raises(
        ConfigError, match=r"row 1: column 'image': bytes is no value of JSON: .* tasks.columns"
    ):
        tasks(tmp_path / "data.parquet")
    source = tasks(
        tmp_path / "data.parquet", held_out=0.0, columns={"prompt": "prompt", "answer": "answer"}
    )
    assert {source.task(index).options["answer"] for index in range(2)} == {"1.50", "2.00"}
    pq.write_table(pa.table({"prompt": ["a"], "answer": [float("nan")]}), tmp_path / "data.parquet")
    with pytest.raises(ConfigError, match=r"row 1: column 'answer': "):
        tasks(tmp_path / "data.parquet")


def test_long_rows_and_fields_are_read(tmp_path: Path) -> None:
    long = [{"prompt": letter * 300_000, "answer": "1"} for letter in "abc"]
    write(tmp_path / "a.jsonl", long)
    (tmp_path / "a.json").write_text(json.dumps(long))
    (tmp_path / "a.csv").write_text(
        "prompt,answer\n" + "".join(f"{row['prompt']},1\n" for row in long)
    )
    for name in ("a.jsonl", "a.json", "a.csv"):
        assert sorted(prompts(tasks(tmp_path / name, held_out=0.0), 3)) == [
            row["prompt"] for row in long
        ]


def test_a_folder_has_no_hidden_files_and_an_empty_part_is_no_error(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.jsonl", questions(10))
    write(tmp_path / "data" / "c.jsonl", questions(10, start=10))
    for name, content in (
        (".hidden.jsonl", b"x"),
        ("._a.jsonl", b"\0"),
        ("b.jsonl", b""),
        ("README.md", b"x"),
    ):
        (tmp_path / "data" / name).write_bytes(content)
    (tmp_path / "data" / "folder.jsonl").mkdir()
    source = tasks(tmp_path / "data", held_out=0.0)
    assert sorted(prompts(source, 20)) == sorted(row["prompt"] for row in questions(20))
    write(tmp_path / "data" / "a.jsonl", [])
    write(tmp_path / "data" / "c.jsonl", [])
    with pytest.raises(ConfigError, match="data has no rows"):
        tasks(tmp_path / "data")


def test_a_saved_dataset_has_its_own_rows_and_not_those_that_a_map_has_left_beside_them(
    tmp_path: Path,
) -> None:
    import datasets

    splits = {"train": questions(12), "test": questions(4, start=50)}
    saved = datasets.DatasetDict(
        {name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}
    )
    saved.save_to_disk(tmp_path / "saved")
    datasets.load_from_disk(tmp_path / "saved" / "train").map(
        lambda row: {"prompt": row["prompt"].upper()}
    )
    assert [*(tmp_path / "saved" / "train").glob("cache-*.arrow")]
    for data in (tmp_path / "saved", tmp_path / "saved" / "train"):
        source = tasks(data, held_out="test" if data.name == "saved" else 0.0)
        assert len(source) == 12
        assert sorted(prompts(source, 12)) == sorted(row["prompt"] for row in splits["train"])


def test_data_may_not_set_what_decides_what_code_runs_unless_its_column_is_named(
    tmp_path: Path,
) -> None:
    rows = [{"prompt": "x", "tool": "python", "allow_unsafe": True}, {"prompt": "y"}]
    path = write(tmp_path / "data.jsonl", rows)
    with pytest.raises(
        ConfigError, match=r"line 1: allow_unsafe can decide what code runs: set it in env.options"
    ):
        tasks(path)
    write(path, [{"prompt": "x", "options": {"allow_unsafe": True}}])
    with pytest.raises(ConfigError, match=r"line 1: allow_unsafe can decide"):
        tasks(path)
    write(
        path, [{"prompt": "x", "limits": {"wall": 3.0}}, {"prompt": "y", "limits": {"wall": 2.0}}]
    )
    assert len(tasks(path, columns={"prompt": "prompt", "limits": "limits"})) == 1


@pytest.mark.parametrize(
    ("train", "test"),
    [
        ("math.train.jsonl", "math.test.jsonl"),
        ("math.v1.train.jsonl", "math.v1.test.jsonl.gz"),
        ("math_train.v1.jsonl", "math_test.v1.jsonl"),
        ("train1.jsonl", "test1.jsonl"),
        ("my train.jsonl", "my test.jsonl"),
        ("training.jsonl", "testing.jsonl"),
    ],
)
def test_no_file_whose_name_says_test_is_trained_on(tmp_path: Path, train: str, test: str) -> None:
    for name in (train, test):
        (tmp_path / name).touch()
    for split, name in (("train", train), ("test", test)):
        assert sources(str(tmp_path), split) == [tmp_path / name]


def test_a_file_for_validation_beside_one_without_a_split_is_not_trained_on(tmp_path: Path) -> None:
    for name in ("problems.jsonl", "val.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="no files of the split 'train': it has val"):
        sources(str(tmp_path), "train")


def test_the_splits_of_a_folder_are_its_folders_or_the_beginnings_of_names(tmp_path: Path) -> None:
    write(tmp_path / "named" / "train-00000-of-00002.jsonl", questions(10))
    write(tmp_path / "named" / "train-00001-of-00002.jsonl", questions(10, start=10))
    write(tmp_path / "named" / "test.jsonl", questions(5, start=50))
    write(tmp_path / "inner" / "train" / "a.jsonl", questions(20))
    write(tmp_path / "inner" / "test" / "a.jsonl", questions(5, start=50))
    for name in ("named", "inner"):
        assert len(tasks(tmp_path / name, held_out="test")) == 20
        assert len(tasks(tmp_path / name, "held-out", held_out="test")) == 5
        with pytest.raises(ConfigError, match="no files of the split 'tset': it has test, train"):
            tasks(tmp_path / name, held_out="tset")


def test_a_dataset_of_the_hub_is_read_once_and_then_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def load_dataset(
        name: str, subset: str | None, *, split: str, revision: str | None
    ) -> list[dict[str, Any]]:
        asked.append((name, subset, split, revision))
        return questions(20, start=0 if split == "train" else 100)

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl-train\[data\]'"):
        tasks("someone/sums")
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source = tasks("someone/sums", held_out="test", subset="main")
    assert sorted(prompts(source, 20)) == sorted(row["prompt"] for row in questions(20))
    assert asked == [
        ("someone/sums", "main", "train", None),
        ("someone/sums", "main", "test", None),
    ]
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert prompts(tasks("someone/sums", held_out="test", subset="main"), 20) == prompts(source, 20)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the package datasets, which may not ask the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hub")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cache_hub_dataset(folder: Path, splits: dict[str, list[dict[str, Any]]]) -> None:
    """What the package datasets leaves in its cache of someone/sums: an Arrow file for each split,
    and their list.
    """
    import datasets
    from datasets.arrow_writer import ArrowWriter

    made = folder / "someone___sums" / "default" / "0.0.0" / ("a" * 40)
    made.mkdir(parents=True)
    sizes = datasets.SplitDict(dataset_name="sums")
    for split, rows in splits.items():
        features = datasets.Dataset.from_list(rows).features
        sizes.add(datasets.SplitInfo(split, num_examples=len(rows), dataset_name="sums"))
        with ArrowWriter(path=str(made / f"sums-{split}.arrow"), features=features) as writer:
            for row in rows:
                writer.write(row)
            writer.finalize()
    named = {
        "dataset_name": "sums",
        "builder_name": "json",
        "config_name": "default",
        "version": "0.0.0",
    }
    datasets.DatasetInfo(features=features, splits=sizes, **named).write_to_directory(str(made))


def test_a_cached_dataset_of_the_hub_is_read_by_its_real_package_without_the_hub(
    hub_cache: Path,
) -> None:
    cache_hub_dataset(hub_cache, {"train": questions(20), "test": questions(5, start=100)})
    source = tasks("someone/sums", held_out="test")
    assert sorted(prompts(source, 20)) == sorted(row["prompt"] for row in questions(20))
    held_out = tasks("someone/sums", "held-out", held_out="test")
    assert sorted(prompts(held_out, 5)) == sorted(row["prompt"] for row in questions(5, start=100))


def test_a_dataset_that_is_in_no_cache_is_refused_by_name_without_the_hub(hub_cache: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"'someone/sums' is no file .* cannot be loaded.*OfflineModeIsEnabled"
    ):
        tasks("someone/sums", held_out="test")


def test_an_index_is_made_once_and_made_again_when_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data.jsonl", questions(20))
    before = tasks(path)
    with monkeypatch.context() as patched:
        patched.setattr(
            "agentrl.tasks.row_index._build", lambda *args: pytest.fail("indexed again")
        )
        assert tasks(path).fingerprint == before.fingerprint
    write(path, questions(25))
    with pytest.raises(ConfigError, match="has changed while its tasks were in use"):
        before.task(0)
    after = tasks(path)
    assert after.fingerprint != before.fingerprint
    assert len(after) == 24  # one is held out
    [index] = (tmp_path / "cache").rglob("index.json")
    assert json.loads(index.read_text())["rows"] == 25


@pytest.mark.parametrize("lost", ["index.json", "offsets.u64", "keys.u64", "rows.jsonl"])
@pytest.mark.parametrize("cut", [True, False])
def test_an_index_of_which_a_file_is_lost_or_cut_off_is_made_again(
    tmp_path: Path, lost: str, cut: bool
) -> None:
    as_parquet(tmp_path / "a.parquet", questions(9))
    source = tasks(tmp_path / "a.parquet", held_out=0.0)
    before = [source.task(n) for n in range(9)]
    (file,) = (tmp_path / "cache").rglob(lost)
    file.write_bytes(file.read_bytes()[:20]) if cut else file.unlink()
    again = tasks(tmp_path / "a.parquet", held_out=0.0)
    assert [again.task(n) for n in range(9)] == before
    assert again.fingerprint == source.fingerprint


def test_a_file_that_changes_while_it_is_read_is_refused_and_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data.jsonl", questions(20))

    def growing(folder: Path | None, row: Mapping[str, Any]) -> str:
        if row == questions(1)[0]:
            write(path, [*questions(20), *questions(1, start=99)])
        return str(row)

    with monkeypatch.context() as patched:
        patched.setattr("agentrl.tasks.dataset._make_row_check", lambda *args: growing)
        with pytest.raises(ConfigError, match=r"data.jsonl has changed while it was read"):
            tasks(path)
    assert len(tasks(path, held_out=0.0)) == 21


def test_a_cache_folder_that_cannot_be_written_is_named_and_a_full_one_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data.jsonl", questions(20))
    before = tasks(path)
    with monkeypatch.context() as patched:
        patched.setattr(
            "agentrl.tasks.row_index._lock_folder",
            lambda folder: pytest.fail("it writes to its cache"),
        )
        assert tasks(path).task(3) == before.task(3)
    (tmp_path / "no_folder").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no_folder"))
    with pytest.raises(
        ConfigError, match=r"data.jsonl cannot be indexed in the cache folder .*XDG_CACHE_HOME"
    ):
        tasks(path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ("nowhere.jsonl", "there is no file or folder 'nowhere.jsonl'"),
        ("./nowhere", "there is no file or folder './nowhere'"),
        ("{tmp}/emtpy.jsonl", "emtpy.jsonl'. Did you mean 'empty.jsonl'?"),
        ("{tmp}/*.jsonl", "*.jsonl': a pattern is not read, so name the folder"),
        ("https://a.b/c.jsonl", "an address is not read, so fetch it, and name the file"),
        ("/" + "x" * 999 + "/a.jsonl", "File name too long"),
        (
            "{tmp}/data.txt",
            "a file of tasks is one of .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow",
        ),
        ("{tmp}/empty.jsonl", "has no rows"),
        ("{tmp}/broken.parquet", "broken.parquet cannot be read further than its beginning"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path, data: str, why: str) -> None:
    (tmp_path / "data.txt").write_text("x")
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "broken.parquet").write_text("x")
    with pytest.raises(ConfigError, match=re.escape(why)):
        tasks(data.format(tmp=tmp_path))


def test_shares_that_leave_nothing_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", questions(1))
    with pytest.raises(
        ConfigError, match=r"1 rows .* set tasks.held_out and evaluation.tasks to 0"
    ):
        tasks(write(tmp_path / "same.jsonl", questions(1)))
    with pytest.raises(
        ConfigError, match=r"'test', and .*data.jsonl is a single file, which has no splits"
    ):
        tasks(path, held_out="test")
    with pytest.raises(ConfigError, match="write a share of the rows below 1"):
        tasks(path, held_out=3)
    with pytest.raises(ConfigError, match=r"set evaluation\.tasks to 0 too"):
        tasks(path, "held-out", held_out=0.0)
    assert len(tasks(path, held_out=0.0)) == 1


@pytest.mark.parametrize(
    ("reward", "row", "why"),
    [
        ("exact", {"prompt": "x", "answr": 1}, "it has 'prompt', 'answr'. Write gold: OPTION"),
        ("exact", {"prompt": "x", "answer": None}, "it is None and no right answer"),
        ("{name: math, tag: a}", {"prompt": "x", "answer": ""}, "it is '' and no right answer"),
        (
            "[{name: length, free: 1, limit: 9}, numeric]",
            {"prompt": "x", "answer": "ten"},
            "'numeric' needs a number",
        ),
        ("choice", {"prompt": "x", "answer": "F"}, "needs one of the letters ABCDE"),
        ("regex", {"prompt": "x", "answer": "("}, "is no regular expression"),
        (
            "code",
            {"prompt": "x", "tests": [{"stdin": "1"}]},
            "Write a list of {stdin: ..., stdout: ...}",
        ),
    ],
)
def test_rows_that_the_reward_cannot_score_are_named_before_the_run(
    tmp_path: Path, reward: str, row: dict[str, Any], why: str
) -> None:
    good = {
        "prompt": "?",
        "answer": "1" if "choice" not in reward else "A",
        "tests": ["assert True"],
    }
    path = write(tmp_path / "data.jsonl", [*({**good, "prompt": f"q{n}"} for n in range(20)), row])
    config = tmp_path / "run.yaml"
    config.write_text(f"env: qa\ntasks: {path}\nreward: {reward}\nmodel: tiny\n")
    with pytest.raises(
        ConfigError, match=r"1 of 21 rows cannot be tasks:\n.*data.jsonl, line 21: "
    ) as raised:
        fingerprints(load_config(config).config)
    assert why.replace("'numeric'", "`numeric`") in str(raised.value)
    write(path, [{**good, "prompt": f"q{n}"} for n in range(20)])
    assert fingerprints(load_config(config).config).keys() == {"train", "held-out"}


def test_rows_that_a_reward_has_found_good_are_not_checked_by_it_again(tmp_path: Path) -> None:
    path, seen = write(tmp_path / "data.jsonl", questions(20)), list[Task]()
    for reward in ("one", "one", "another"):
        tasks(path).check([seen.append], reward)
    assert len(seen) == 40
    assert seen[3].options["answer"] == "6"


SOLUTION = "She has 2 + 2 = <<2+2=4>>4 eggs.\n#### 4"


@pytest.mark.parametrize(
    ("reward", "rows", "why"),
    [
        (
            "environment",
            [{"prompt": "x", "answer": SOLUTION}],
            "whole solution, .* pay nothing: .*reward=math",
        ),
        (
            "exact",
            [{"prompt": "x", "answer": SOLUTION}],
            "whole solution, .* pay nothing: .*reward=math",
        ),
        (
            "environment",
            [{"prompt": "x", "answer": r"So it is $\boxed{4}$."}],
            r"answer \| final\}\"' or reward=math",
        ),
        ("environment", [{"prompt": "x"}], "there is no right answer, for which env=qa pays"),
        (
            "environment",
            [{"prompt": "x", "solution": "4"}],
            "Write tasks.columns={prompt: prompt, answer: solution}",
        ),
        (
            "math",
            [{"prompt": "x", "reward_model": {"ground_truth": "4"}}],
            "answer: reward_model.ground_truth}",
        ),
        ("math", [{"prompt": "x", "answer": "---"}], "'---', in which there is no mathematics"),
        (
            "environment",
            [{"prompt": "x", "answer": {"text": "4"}}],
            "is an object of text: name one of its parts",
        ),
    ],
)
def test_answers_that_nothing_would_be_paid_for_are_said_before_the_run(
    tmp_path: Path, reward: str, rows: list[dict[str, Any]], why: str
) -> None:
    path = write(
        tmp_path / "data.jsonl", [row | {"prompt": f"q{n}"} for n in range(9) for row in rows]
    )
    config = tmp_path / "run.yaml"
    config.write_text(
        f"env: qa\ntasks: {path}\nreward: {reward}\nmodel: tiny\nevaluation: {{tasks: 2}}\n"
    )
    with pytest.raises(ConfigError, match=why) as raised:
        fingerprints(load_config(config, ["tasks.held_out=0.3"]).config)
    assert len(str(raised.value).splitlines()) <= 2


@pytest.mark.parametrize(
    "extra", ["reward=math", "reward=numeric", "tasks.answer={answer | final}"]
)
def test_whole_solutions_are_taken_where_they_are_read(tmp_path: Path, extra: str) -> None:
    path = write(
        tmp_path / "data.jsonl", [{"prompt": f"q{n}", "answer": SOLUTION} for n in range(9)]
    )
    (tmp_path / "run.yaml").write_text(
        f"env: qa\ntasks: {path}\nmodel: tiny\nevaluation: {{tasks: 2}}\n"
    )
    assert fingerprints(load_config(tmp_path / "run.yaml", [extra]).config)
