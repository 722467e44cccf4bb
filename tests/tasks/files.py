"""Files as people have them: small ones in the shapes of well-known datasets, and what becomes of
each as tasks.

`FILES` is also the table of docs/tasks.md (`table`).
"""

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class DataFile:
    """A file of a shape, and what becomes of it. `line`: the end of the only line that it gets; ""
    if it is taken. `prompt` and `answer`: of its first task, with the settings that the line names,
    or with none.
    """

    shape: str
    name: str
    save: Callable[[Path], None]
    line: str = ""
    prompt: str | list[dict[str, Any]] = "2 + 2?"
    answer: Any = "4"
    settings: dict[str, Any] = field(default_factory=dict)


def lines(rows: Rows, encoding: str = "utf-8") -> Callable[[Path], None]:
    def save(path: Path) -> None:
        path.write_bytes("".join(json.dumps(row) + "\n" for row in rows).encode(encoding))

    return save


def packed(rows: Rows, codec: str) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        with pa.output_stream(str(path), compression=codec) as stream:
            stream.write("".join(json.dumps(row) + "\n" for row in rows).encode())

    return save


def text(content: str, encoding: str = "utf-8") -> Callable[[Path], None]:
    return lambda path: path.write_bytes(content.encode(encoding))


def parquet(rows: Rows) -> Callable[[Path], None]:
    return lambda path: pq.write_table(pa.Table.from_pylist(list(rows)), path)


def folder(files: dict[str, Callable[[Path], None]]) -> Callable[[Path], None]:
    def save(path: Path) -> None:
        for name, write in files.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            write(path / name)

    return save


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def said(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}
QA = {"prompt": "2 + 2?", "answer": "4"}
GSM8K = {
    "question": "Ann has 2 eggs and buys 2. How many has she?",
    "answer": "She has 2 + 2 = <<2+2=4>>4.\n#### 4",
}
CHOICES = ["3", "4", "5", "6"]
LETTERED = "2 + 2?\nA. 3\nB. 4\nC. 5\nD. 6"
WEATHER = {"name": "weather", "arguments": '{"city": "Rome"}'}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "c1", "type": "function", "function": WEATHER}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sun"}


def named(prompt: str, answer: str = "") -> str:
    """The setting that names columns."""
    return f"write tasks.columns={{prompt: {prompt}{f', answer: {answer}' if answer else ''}}}"


FILES = [
    DataFile("prompt and answer, JSON lines", "a.jsonl", lines([QA])),
    DataFile(
        "GSM8K",
        "gsm8k.parquet",
        parquet([GSM8K]),
        named("question", "answer"),
        GSM8K["question"],
        GSM8K["answer"],
    ),
    DataFile(
        "MATH (Hendrycks)",
        "math.jsonl",
        lines(
            [
                {
                    "problem": "2 + 2?",
                    "level": "Level 1",
                    "type": "Algebra",
                    "solution": r"It is $\boxed{4}$.",
                }
            ]
        ),
        named("problem", "solution"),
        answer=r"It is $\boxed{4}$.",
    ),
    DataFile(
        "MATH-500, AIME",
        "math500.jsonl",
        lines(
            [
                {
                    "problem": "2 + 2?",
                    "solution": r"It is $\boxed{4}$.",
                    "answer": "4",
                    "unique_id": "a/1.json",
                }
            ]
        ),
        named("problem", "answer"),
    ),
    DataFile(
        "MMLU",
        "mmlu.parquet",
        parquet([{"question": "2 + 2?", "subject": "algebra", "choices": CHOICES, "answer": 1}]),
        r"""write 'tasks.prompt="{question}\n{choices | lettered}"' """
        "and tasks.columns={answer: answer}",
        LETTERED,
        1,
    ),
    DataFile(
        "MMLU, as CSV with a column for each choice",
        "mmlu.csv",
        text("question,A,B,C,D,answer\n2 + 2?,3,4,5,6,B\n"),
        r"""write 'tasks.prompt="{question}\nA. {A}\nB. {B}\nC. {C}\nD. {D}"' """
        "and tasks.columns={answer: answer}",
        LETTERED,
        "B",
    ),
    DataFile(
        "MMLU-Pro",
        "mmlu_pro.parquet",
        parquet(
            [
                {
                    "question_id": 1,
                    "question": "2 + 2?",
                    "options": CHOICES,
                    "answer": "B",
                    "answer_index": 1,
                }
            ]
        ),
        r"""write 'tasks.prompt="{question}\n{options | lettered}"' """
        "and tasks.columns={answer: answer}",
        LETTERED,
        "B",
    ),
    DataFile(
        "ARC",
        "arc.parquet",
        parquet(
            [
                {
                    "id": "Mercury_1",
                    "question": "2 + 2?",
                    "choices": {"text": CHOICES, "label": ["A", "B", "C", "D"]},
                    "answerKey": "B",
                }
            ]
        ),
        r"""write 'tasks.prompt="{question}\n{choices.text | lettered}"' """
        "and tasks.columns={answer: answerKey}",
        LETTERED,
        "B",
    ),
    DataFile(
        "HellaSwag",
        "hellaswag.jsonl",
        lines(
            [{"ind": 1, "ctx": "A man sits. He", "endings": ["flies.", "stands."], "label": "1"}]
        ),
        r"""write 'tasks.prompt="{ctx}\n{endings | lettered}"' and tasks.columns={answer: label}""",
        "A man sits. He\nA. flies.\nB. stands.",
        "1",
    ),
    DataFile(
        "BoolQ",
        "boolq.jsonl",
        lines([{"question": "is it?", "passage": "It is.", "answer": True}]),
        r"""write 'tasks.prompt="{passage}\n\n{question}"' and tasks.columns={answer: answer}""",
        "It is.\n\nis it?",
        True,
    ),
    DataFile(
        "HotpotQA",
        "hotpot.parquet",
        parquet(
            [
                {
                    "id": "5a",
                    "question": "Where?",
                    "answer": "Rome",
                    "type": "bridge",
                    "context": {"title": ["Rome"], "sentences": [["It is there."]]},
                }
            ]
        ),
        r"""write 'tasks.prompt="{context}\n\n{question}"' and tasks.columns={answer: answer}""",
        '{"title": ["Rome"], "sentences": [["It is there."]]}\n\nWhere?',
        "Rome",
    ),
    DataFile(
        "SQuAD",
        "squad.parquet",
        parquet(
            [
                {
                    "id": "1",
                    "title": "Rome",
                    "context": "It is there.",
                    "question": "Where?",
                    "answers": {"text": ["there"], "answer_start": [6]},
                }
            ]
        ),
        r"""write 'tasks.prompt="{context}\n\n{question}"' """
        "and tasks.columns={answer: answers.text}",
        "It is there.\n\nWhere?",
        ["there"],
    ),
    DataFile(
        "SQuAD's own file, one object with the key data",
        "squad.json",
        text(
            json.dumps(
                {
                    "version": "2.0",
                    "data": [{"title": "Rome", "paragraphs": [{"context": "x", "qas": []}]}],
                }
            )
        ),
        "paragraphs is a list of objects, and a task is one row: write a row for each of them",
    ),
    DataFile(
        "Alpaca",
        "alpaca.json",
        text(json.dumps([{"instruction": "Add.", "input": "2 and 2", "output": "4"}], indent=1)),
        r"""write 'tasks.prompt="{instruction}\n\n{input}"' and tasks.columns={answer: output}""",
        "Add.\n\n2 and 2",
    ),
    DataFile(
        "Dolly",
        "dolly.jsonl",
        lines([{"instruction": "2 + 2?", "context": "", "response": "4", "category": "open_qa"}]),
        r"""write 'tasks.prompt="{context}\n\n{instruction}"' """
        "and tasks.columns={answer: response}",
    ),
    DataFile(
        "ShareGPT",
        "sharegpt.json",
        text(
            json.dumps(
                [
                    {
                        "id": "x1",
                        "conversations": [
                            {"from": "human", "value": "2 + 2?"},
                            {"from": "gpt", "value": "4"},
                        ],
                    }
                ]
            )
        ),
        named("conversations"),
        [user("2 + 2?")],
    ),
    DataFile(
        "ShareGPT of several turns, with a system message",
        "sharegpt.jsonl",
        lines(
            [
                {
                    "conversations": [
                        {"from": "system", "value": "Be brief."},
                        {"from": "human", "value": "1 + 1?"},
                        {"from": "gpt", "value": "2"},
                        {"from": "human", "value": "2 + 2?"},
                        {"from": "gpt", "value": "4"},
                    ]
                }
            ]
        ),
        named("conversations"),
        [SYSTEM, user("1 + 1?"), said("2"), user("2 + 2?")],
    ),
    DataFile(
        "ShareGPT with calls",
        "calls.jsonl",
        lines(
            [
                {
                    "conversations": [
                        {"from": "human", "value": "Weather in Rome?"},
                        {"from": "function_call", "value": json.dumps(WEATHER)},
                        {"from": "observation", "value": "sun"},
                        {"from": "gpt", "value": "4"},
                    ],
                    "tools": "[]",
                }
            ]
        ),
        named("conversations"),
        [user("Weather in Rome?")],
    ),
    DataFile(
        "UltraChat",
        "ultrachat",
        folder(
            {
                "data/train_sft-00000-of-00001.parquet": parquet(
                    [
                        {
                            "prompt": "2 + 2?",
                            "prompt_id": "p1",
                            "messages": [user("2 + 2?"), said("4")],
                        }
                    ]
                ),
                "data/test_sft-00000-of-00001.parquet": parquet(
                    [
                        {
                            "prompt": "3 + 3?",
                            "prompt_id": "p2",
                            "messages": [user("3 + 3?"), said("6")],
                        }
                    ]
                ),
            }
        ),
        answer=None,
        settings={"split": "train_sft"},
    ),
    DataFile(
        "OpenHermes",
        "openhermes.parquet",
        parquet(
            [
                {
                    "system_prompt": None,
                    "model": None,
                    "conversations": [
                        {"from": "human", "value": "2 + 2?", "weight": None},
                        {"from": "gpt", "value": "4", "weight": 1.0},
                    ],
                    "source": "airoboros",
                },
                {
                    "system_prompt": "x",
                    "model": "m",
                    "conversations": [{"from": "human", "value": "1?"}],
                    "source": "",
                },
            ]
        ),
        named("conversations"),
        [user("2 + 2?")],
    ),
    DataFile(
        "OASST (Guanaco), one text",
        "guanaco.jsonl",
        lines([{"text": "### Human: 2 + 2?### Assistant: 4"}]),
        named("text"),
        "### Human: 2 + 2?### Assistant: 4",
        None,
    ),
    DataFile(
        "BFCL",
        "bfcl.jsonl",
        lines(
            [
                {
                    "id": "simple_0",
                    "question": [[user("Weather in Rome?")]],
                    "function": [TOOL["function"]],
                }
            ]
        ),
        named("question"),
        [user("Weather in Rome?")],
        None,
    ),
    DataFile(
        "BFCL of several turns",
        "bfcl_multi_turn.jsonl",
        lines([{"id": "multi_0", "prompt": [[user("2 + 2?")], [user("3 + 3?")]], "path": ["x"]}]),
        "prompt: it has 2 turns with messages of their own, and a task asks once: choose one, such"
        " as tasks.columns={prompt: COLUMN.0}",
    ),
    DataFile(
        "UltraFeedback, with a prompt",
        "ultrafeedback.parquet",
        parquet(
            [
                {
                    "prompt": "2 + 2?",
                    "chosen": [user("2 + 2?"), said("4")],
                    "rejected": [user("2 + 2?"), said("5")],
                    "score_chosen": 8.0,
                }
            ]
        ),
        answer=None,
    ),
    DataFile(
        "DPO of chats without a prompt",
        "dpo.jsonl",
        lines([{"chosen": [user("2 + 2?"), said("4")], "rejected": [user("2 + 2?"), said("5")]}]),
        "these are preferences, which recipe=dpo learns from (recipe.preferences.path)",
    ),
    DataFile(
        "HH-RLHF",
        "hh.jsonl.gz",
        packed(
            [
                {
                    "chosen": "\n\nHuman: 2 + 2?\n\nAssistant: 4",
                    "rejected": "\n\nHuman: 2 + 2?\n\nAssistant: 5",
                }
            ],
            "gzip",
        ),
        "these are preferences, which recipe=dpo learns from (recipe.preferences.path)",
    ),
    DataFile(
        "verl's",
        "verl.parquet",
        parquet(
            [
                {
                    "data_source": "openai/gsm8k",
                    "prompt": [user("2 + 2?")],
                    "ability": "math",
                    "reward_model": {"style": "rule", "ground_truth": "4"},
                    "extra_info": {"index": 0, "split": "train"},
                }
            ]
        ),
        prompt=[user("2 + 2?")],
        answer=None,
    ),
    DataFile(
        "verl's, with its answer",
        "verl.parquet",
        parquet(
            [{"prompt": [user("2 + 2?")], "reward_model": {"style": "rule", "ground_truth": "4"}}]
        ),
        prompt=[user("2 + 2?")],
        settings={"columns": {"prompt": "prompt", "answer": "reward_model.ground_truth"}},
    ),
    DataFile(
        "TRL's prompt and completion",
        "trl.jsonl",
        lines([{"prompt": "2 + 2?", "completion": "4"}]),
        settings={"columns": {"prompt": "prompt", "answer": "completion"}},
    ),
    DataFile(
        "TRL's conversational prompt and completion",
        "trl_chat.jsonl",
        lines([{"prompt": [SYSTEM, user("2 + 2?")], "completion": [said("4")], "solution": "4"}]),
        prompt=[SYSTEM, user("2 + 2?")],
        answer=None,
    ),
    DataFile(
        "TRL's messages",
        "messages.jsonl",
        lines([{"messages": [user("2 + 2?"), said("4")]}]),
        named("messages"),
        [user("2 + 2?")],
    ),
    DataFile(
        "OpenAI's fine-tuning file, with tools",
        "openai.jsonl",
        lines(
            [
                {
                    "messages": [user("Weather in Rome?"), CALLED, RESULT, said("4")],
                    "tools": [TOOL],
                    "parallel_tool_calls": False,
                }
            ]
        ),
        named("messages"),
        [user("Weather in Rome?")],
    ),
    DataFile(
        "OpenAI's, an earlier call in the prompt, null keys as Arrow writes them",
        "openai.parquet",
        parquet(
            [
                {
                    "prompt": [
                        {**SYSTEM, "role": "developer"},
                        user("Weather in Rome?"),
                        {**CALLED, "name": None},
                        RESULT,
                        user("2 + 2?"),
                    ],
                    "answer": "4",
                }
            ]
        ),
        prompt=[
            SYSTEM,
            user("Weather in Rome?"),
            said("")
            | {
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": {"city": "Rome"}},
                    }
                ]
            },
            {"role": "tool", "content": "sun", "tool_call_id": "c1"},
            user("2 + 2?"),
        ],
    ),
    DataFile(
        "a chat with examples (few-shot)",
        "few.jsonl",
        lines([{"prompt": [SYSTEM, user("1 + 1?"), said("2"), user("2 + 2?")], "answer": "4"}]),
        prompt=[SYSTEM, user("1 + 1?"), said("2"), user("2 + 2?")],
    ),
    DataFile(
        "a chat of content parts",
        "parts.jsonl",
        lines(
            [
                {
                    "prompt": [
                        user([{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}])
                    ],
                    "answer": "4",
                }
            ]
        ),
        prompt=[user("2 + 2?")],
    ),
    DataFile(
        "CSV with a chat as JSON",
        "chat.csv",
        text('prompt,answer\n"[{""role"": ""user"", ""content"": ""2 + 2?""}]",4\n'),
        prompt=[user("2 + 2?")],
    ),
    DataFile(
        "CSV with a chat as pandas prints it",
        "pandas.csv",
        text("prompt,answer\n\"[{'role': 'user', 'content': '2 + 2?'}]\",4\n"),
        prompt=[user("2 + 2?")],
    ),
    DataFile(
        "a chat with the address of a picture",
        "picture.jsonl",
        lines(
            [
                {
                    "prompt": [
                        user([{"type": "image_url", "image_url": {"url": "https://a.b/c.png"}}])
                    ],
                    "answer": "4",
                }
            ]
        ),
        "picture 1: 'https://a.b/c.png' is an address, and pictures are never fetched: pass the"
        " bytes",
    ),
    DataFile(
        "a chat with another role",
        "role.jsonl",
        lines([{"prompt": [{"role": "narrator", "content": "x"}, user("2 + 2?")], "answer": "4"}]),
        "prompt: message 1 has the role 'narrator': write system, user, assistant, tool or"
        " developer",
    ),
    DataFile(
        "CSV with a mark of UTF-8 (Excel)",
        "excel.csv",
        text("prompt;answer\r\n2 + 2?;4\r\n", "utf-8-sig"),
    ),
    DataFile("CSV with a line sep=", "sep.csv", text("sep=;\r\nprompt;answer\r\n2 + 2?;4\r\n")),
    DataFile(
        "Excel's Unicode text, UTF-16 with tabs",
        "excel.tsv",
        text("prompt\tanswer\r\n2 + 2?\t4\r\n", "utf-16"),
    ),
    DataFile(
        "TSV in UTF-16 without a mark",
        "no_mark.tsv",
        text("prompt\tanswer\n2 + 2?\t4\n", "utf-16-le"),
    ),
    DataFile("CSV in UTF-16", "utf16.csv", text("prompt,answer\r\n2 + 2?,4\r\n", "utf-16")),
    DataFile("JSON lines in UTF-16 (PowerShell)", "utf16.jsonl", lines([QA], "utf-16")),
    DataFile(
        "CSV without a head",
        "headless.csv",
        text("What is 2 + 2?,3,4,5,6,B\n" * 3),
        "these are no names of columns: a file of fields begins with a line that names them",
    ),
    DataFile(
        "a dump of the hub's viewer",
        "viewer.json",
        text(json.dumps({"rows": [{"row_idx": 0, "row": {"question": "2 + 2?", "answer": "4"}}]})),
        named("row.question", "row.answer"),
    ),
    DataFile(
        "a pointer of Git LFS",
        "lfs.parquet",
        text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n"),
        "is a pointer of Git LFS, whose content was not fetched: run `git lfs pull`",
    ),
    DataFile("JSON array", "array.json", text(json.dumps([QA], indent=2))),
    DataFile("JSON array in a file called .jsonl", "array.jsonl", text(json.dumps([QA], indent=2))),
    DataFile(
        "JSON object with the key data",
        "data.json",
        text(json.dumps({"version": 1, "data": [QA]}, indent=2)),
    ),
    DataFile(
        "JSON object of columns (pandas)",
        "columns.json",
        text(json.dumps({"prompt": {"0": "2 + 2?"}, "answer": {"0": "4"}})),
        'write rows instead, as pandas does with to_json(path, orient="records", lines=True)',
    ),
    DataFile("JSON lines, gzip", "a.jsonl.gz", packed([QA], "gzip")),
    DataFile("JSON lines, zstd", "a.jsonl.zst", packed([QA], "zstd")),
    DataFile(
        "CSV, gzip",
        "a.csv.gz",
        lambda path: path.write_bytes(gzip.compress(b"prompt,answer\n2 + 2?,4\n")),
    ),
    DataFile(
        "folder of shards",
        "shards",
        folder({f"train-0000{n}-of-00002.jsonl": lines([QA] if n == 0 else []) for n in range(2)}),
    ),
    DataFile(
        "folder of splits",
        "splits",
        folder(
            {"sums_train.jsonl": lines([QA]), "sums_test.jsonl": lines([QA | {"prompt": "3 + 1?"}])}
        ),
        settings={"held_out": "test"},
    ),
    DataFile(
        "folder with a folder for each subset",
        "subsets",
        folder(
            {
                "main/train-00000-of-00001.jsonl": lines([QA]),
                "socratic/train-00000-of-00001.jsonl": lines([QA]),
            }
        ),
        settings={"subset": "main"},
    ),
    DataFile(
        "Excel's own file",
        "a.xlsx",
        lambda path: path.write_bytes(b"PK\x03\x04"),
        "texts compressed as .gz, .zst, .bz2, by its name: save the sheet as CSV",
    ),
]


def table() -> str:
    """The table of docs/tasks.md: what becomes of each file."""
    rows = ["| a file of | is |", "|---|---|"]
    for file in FILES:
        with_settings = ", ".join(
            f"`tasks.{name}={_written(value)}`" for name, value in file.settings.items()
        )
        taken = f"taken, with {with_settings}" if with_settings else "taken"
        ending = file.line.replace("`", "").replace("|", "\\|")
        rows.append(f"| {file.shape} | {f'refused: `{ending}`' if ending else taken} |")
    return "\n".join(rows) + "\n"


def _written(value: Any) -> str:
    inner = (
        ", ".join(f"{name}: {one}" for name, one in value.items())
        if isinstance(value, dict)
        else ""
    )
    return f"{{{inner}}}" if inner else str(value)
