"""Writes the twelve tasks of this folder, in Harbor's format, from a seed:

    python examples/harbor/generate.py

Their images need nothing but a shell, its usual programs and Python. Without a registry:

    python -m agentrl.sandbox.base_image | docker import - agentrl-base
"""

import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SEED = 44
WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grove",
    "heron",
    "inlet",
    "jetty",
    "kite",
    "larch",
]


@dataclass
class Task:
    """The files of a task. `test`: shell lines that fail if the task is not done."""

    name: str
    instruction: str
    files: dict[str, str]
    solution: str
    test: str
    tests: dict[str, str] = field(default_factory=dict)
    mode: str = "separate"
    """`separate`: in a fresh copy of the machine; `image`: in an image of its own; `shared`."""
    schema: str = "1.4"
    json: bool = False
    """The reward is a JSON file."""


def hello(rng: random.Random) -> Task:
    word = rng.choice(WORDS)
    return Task(
        "hello", f"Write the word {word} into the file /app/hello.txt.", {},
        f"echo {word} > hello.txt", f'[ "$(cat hello.txt)" = {word} ]', schema="1.0", mode="shared",
    )  # fmt: skip


def count_lines(rng: random.Random) -> Task:
    lines = rng.randint(40, 90)
    text = "".join(f"{rng.choice(WORDS)} {rng.randint(1, 9)}\n" for _ in range(lines))
    amber = sum(line.startswith("amber") for line in text.split("\n"))
    return Task(
        "count-lines",
        "How many lines of /app/log.txt begin with `amber`? Write the number into /app/count.txt.",
        {"log.txt": text}, "grep -c '^amber' log.txt > count.txt",
        f'[ "$(cat count.txt)" -eq {amber} ]', schema="1.1",
    )  # fmt: skip


def sum_column(rng: random.Random) -> Task:
    rows = [(rng.choice(WORDS), rng.randint(1, 500)) for _ in range(60)]
    text = "name,amount\n" + "".join(f"{name},{amount}\n" for name, amount in rows)
    return Task(
        "sum-column", "Write the sum of the column `amount` of /app/sales.csv into /app/sum.txt.",
        {"sales.csv": text},
        "awk -F, 'NR > 1 { sum += $2 } END { print sum }' sales.csv > sum.txt",
        f'[ "$(cat sum.txt)" -eq {sum(amount for _, amount in rows)} ]', schema="1.2",
    )  # fmt: skip


def rename_files(rng: random.Random) -> Task:
    names = rng.sample(WORDS, 6)
    checks = "\n".join(f'[ "$(cat notes/{n}.txt)" = "{n} {i}" ]' for i, n in enumerate(names))
    return Task(
        "rename-files",
        "Rename the files in /app/notes that end in .TXT, so that they end in .txt.",
        {f"notes/{n}.TXT": f"{n} {i}\n" for i, n in enumerate(names)},
        'for file in notes/*.TXT; do mv "$file" "${file%.TXT}.txt"; done',
        f'{checks}\n[ "$(ls notes | wc -l)" -eq {len(names)} ]', schema="1.3",
    )  # fmt: skip


def largest_file(rng: random.Random) -> Task:
    sizes = rng.sample(range(100, 4000), 9)
    files = {
        f"data/{rng.choice('abc')}/{word}": "x" * size
        for word, size in zip(WORDS, sizes, strict=False)
    }
    largest = max(files, key=lambda path: len(files[path]))
    return Task(
        "largest-file",
        "Find the largest file below /app/data and move it to /app/largest. Leave the others.",
        files,
        'file="$(find data -type f | while read -r f; do echo "$(wc -c < "$f") $f"; done'
        ' | sort -n | tail -1 | cut -d" " -f2)"\nmv "$file" largest',
        f"[ \"$(wc -c < largest)\" -eq {len(files[largest])} ]\n[ ! -e {largest} ]\n"
        f'[ "$(find data -type f | wc -l)" -eq {len(files) - 1} ]',
    )  # fmt: skip


def totals(rng: random.Random) -> Task:
    rows = [(rng.choice(WORDS[:5]), rng.randint(1, 99)) for _ in range(80)]
    sums = {
        name: sum(n for word, n in rows if word == name) for name in sorted({r[0] for r in rows})
    }
    return Task(
        "totals",
        "The lines of /app/orders.txt are a name and a number. Write a line `name total` for each"
        " name into /app/totals.txt, sorted by name.",
        {"orders.txt": "".join(f"{name} {n}\n" for name, n in rows)},
        "awk '{ sum[$1] += $2 } END { for (name in sum) print name, sum[name] }' orders.txt"
        " | sort > totals.txt",
        "cmp totals.txt /tests/expected",
        {"expected": "".join(f"{name} {total}\n" for name, total in sums.items())}, mode="image",
    )  # fmt: skip


def merge_lists(rng: random.Random) -> Task:
    lists = [sorted(rng.sample(range(1000), 30)) for _ in range(3)]
    merged = sorted(set().union(*lists) - set(lists[2]))
    return Task(
        "merge-lists",
        "/app/one.txt and /app/two.txt have a number in each line. Write the numbers that are in"
        " either of them and not in /app/not.txt into /app/merged.txt: each once, in order.",
        {f"{name}.txt": "".join(f"{n}\n" for n in numbers)
         for name, numbers in zip(("one", "two", "not"), lists, strict=True)},
        "sort -n -u one.txt two.txt | grep -v -x -F -f not.txt > merged.txt",
        "cmp merged.txt /tests/expected", {"expected": "".join(f"{n}\n" for n in merged)},
    )  # fmt: skip


def edit_config(rng: random.Random) -> Task:
    port, new = rng.sample(range(1000, 9999), 2)
    return Task(
        "edit-config",
        f"In /app/config.json, set `port` of `server` to {new}, add `debug` with the value false to"
        " it, and remove `old`. It must stay valid JSON.",
        {"config.json": f'{{\n  "server": {{"host": "localhost", "port": {port}}},\n'
                        '  "old": [1, 2],\n  "name": "kite"\n}\n'},
        "python3 - <<'END'\nimport json\nconfig = json.load(open('config.json'))\n"
        f"config['server'] |= {{'port': {new}, 'debug': False}}\ndel config['old']\n"
        "json.dump(config, open('config.json', 'w'))\nEND",
        "python3 - <<'END'\nimport json\nassert json.load(open('config.json')) == {\n"
        f"    'server': {{'host': 'localhost', 'port': {new}, 'debug': False}},\n"
        "    'name': 'kite'}\nEND",
        json=True,
    )  # fmt: skip


def frequent_words(rng: random.Random) -> Task:
    counts = dict(zip(rng.sample(WORDS, 8), rng.sample(range(3, 40), 8), strict=True))
    words = [
        w if rng.random() < 0.7 else w.capitalize() for w, n in counts.items() for _ in range(n)
    ]
    rng.shuffle(words)
    lines = [" ".join(words[at : at + 7]) for at in range(0, len(words), 7)]
    top = sorted(counts, key=lambda word: -counts[word])[:4]
    return Task(
        "frequent-words",
        "Write the four most frequent words of /app/text.txt into /app/top.txt, a line `count word`"
        " each, the most frequent first. Capital letters make no difference: write small ones.",
        {"text.txt": ".\n".join(lines) + ".\n"},
        "tr 'A-Z' 'a-z' < text.txt | tr -c 'a-z' '\\n' | grep . | sort | uniq -c | sort -rn"
        " | head -4 | awk '{ print $1, $2 }' > top.txt",
        "cmp top.txt /tests/expected", {"expected": "".join(f"{counts[w]} {w}\n" for w in top)},
        mode="image",
    )  # fmt: skip


def build_order(rng: random.Random) -> Task:
    names = rng.sample(WORDS, 8)
    needs = {
        n: sorted(rng.sample(names[:at], min(at, rng.randint(1, 2)))) for at, n in enumerate(names)
    }
    lines = [f"{name}: {' '.join(before)}".strip() for name, before in needs.items()]
    rng.shuffle(lines)
    return Task(
        "build-order",
        "Each line of /app/needs.txt is a part and, after the colon, the parts that must be built"
        " before it. Write all parts into /app/order.txt, one in a line, in an order that works.",
        {"needs.txt": "".join(f"{line}\n" for line in lines)},
        "python3 - <<'END'\nfrom graphlib import TopologicalSorter\n"
        "rows = [line.split(':') for line in open('needs.txt')]\n"
        "needs = {name: before.split() for name, before in rows}\n"
        "order = TopologicalSorter(needs).static_order()\n"
        "print(*order, sep='\\n', file=open('order.txt', 'w'))\nEND",
        "python3 /tests/check.py",
        {"check.py": "rows = [line.split(':') for line in open('/tests/needs.txt')]\n"
                     "needs = {name: set(before.split()) for name, before in rows}\n"
                     "built = []\nfor part in open('order.txt').read().split():\n"
                     "    assert needs[part] <= set(built), part\n    built.append(part)\n"
                     "assert sorted(built) == sorted(needs)\n",
         "needs.txt": "".join(f"{line}\n" for line in lines)},
    )  # fmt: skip


def mend_program(rng: random.Random) -> Task:
    rate, limit = rng.randint(2, 9), rng.randint(50, 90)
    wrong = (
        "import sys\n\n\ndef price(amount):\n"
        f"    # {rate} each; above {limit} pieces, each further one costs 1\n"
        f"    if amount < {limit}:\n        return amount * {rate}\n"
        f"    return {limit} * {rate} + amount\n\n\n"
        "for line in sys.stdin:\n    print(price(line))\n"
    )
    amounts = [1, 10, limit - 1, limit, limit + 1, limit + 100]
    prices = [min(a, limit) * rate + max(0, a - limit) for a in amounts]
    right = wrong.replace("+ amount", f"+ amount - {limit}").replace(
        "price(line)", "price(int(line))"
    )
    return Task(
        "mend-program",
        "The program /app/price.py reads an amount in each line and should print the price, as its"
        " comment says. It has more than one mistake: mend it.",
        {"price.py": wrong}, f"cat > price.py <<'END'\n{right}END",
        "python3 price.py < /tests/amounts | cmp - /tests/expected",
        {"amounts": "".join(f"{a}\n" for a in amounts),
         "expected": "".join(f"{p}\n" for p in prices)},
    )  # fmt: skip


def mend_pipeline(rng: random.Random) -> Task:
    rows = [
        (rng.choice(WORDS[:6]), rng.choice(["ok", "late"]), rng.randint(1, 50)) for _ in range(70)
    ]
    late: dict[str, int] = {}
    for name, state, minutes in rows:
        if state == "late":
            late[name] = late.get(name, 0) + minutes
    report = sorted(late.items(), key=lambda pair: (-pair[1], pair[0]))
    return Task(
        "mend-pipeline",
        "`sh /app/report.sh` should write /app/report.txt: for each name in trains.csv, the sum of"
        " the minutes of its rows that are late, as `name minutes`, the largest sum first. It runs"
        " three scripts, and each has a mistake. Mend them and run it.",
        {"trains.csv": "name,state,minutes\n" + "".join(f"{n},{s},{m}\n" for n, s, m in rows),
         "report.sh": "cd /app\nsh select.sh < trains.csv | sh add.sh | sh order.sh > report.txt\n",
         "select.sh": "grep ',ok,'\n", "add.sh": "awk -F, '{ sum[$1] += $2 } END"
         " { for (name in sum) print name, sum[name] }'\n", "order.sh": "sort -k 2\n"},
        "sed -i s/ok/late/ select.sh\nsed -i 's/+= $2/+= $3/' add.sh\n"
        "echo 'sort -k 2,2nr -k 1,1' > order.sh\nsh report.sh",
        "rm -f report.txt\nsh report.sh\ncmp report.txt /tests/expected",
        {"expected": "".join(f"{name} {minutes}\n" for name, minutes in report)}, mode="shared",
    )  # fmt: skip


TASKS: list[Callable[[random.Random], Task]] = [
    hello,
    count_lines,
    sum_column,
    rename_files,
    largest_file,
    totals,
    merge_lists,
    edit_config,
    frequent_words,
    build_order,
    mend_program,
    mend_pipeline,
]


def files_of(task: Task) -> Iterator[tuple[str, str]]:
    """The files of a task's folder."""
    separate = task.mode != "shared"
    artifacts = 'artifacts = ["/app"]\n' if separate else ""
    mode = 'environment_mode = "separate"\n' if separate else ""
    network = "allow_internet = false" if task.schema < "1.3" else 'network_mode = "no-network"'
    memory = 'memory = "256M"' if task.schema < "1.2" else "memory_mb = 256"
    yield "instruction.md", f"{task.instruction}\n"
    yield (
        "task.toml",
        f'schema_version = "{task.schema}"\n{artifacts}\n[metadata]\ndifficulty = "easy"\n\n'
        f"[agent]\ntimeout_sec = 600.0\n\n[verifier]\ntimeout_sec = 60.0\n{mode}\n"
        f"[environment]\ncpus = 1\n{memory}\n{network}\n",
    )
    copy = "COPY files/ /app/\n" if task.files else ""
    yield "environment/Dockerfile", f"FROM agentrl-base\nWORKDIR /app\n{copy}"
    for path, text in task.files.items():
        yield f"environment/files/{path}", text
    yield "solution/solve.sh", f"#!/bin/bash\nset -e\n{task.solution}\n"
    kind = ("reward.json", '{\\"reward\\": $done}') if task.json else ("reward.txt", "$done")
    yield (
        "tests/test.sh",
        f"#!/bin/bash\ncheck() (\nset -e\n{task.test}\n)\n"
        "# Not in a condition, where `set -e` would have no effect.\n"
        f'check\n[ $? = 0 ] && done=1 || done=0\necho "{kind[1]}" > /logs/verifier/{kind[0]}\n',
    )
    if task.mode == "image":
        yield "tests/Dockerfile", "FROM agentrl-base\nWORKDIR /app\nCOPY . /tests/\n"
    for path, text in task.tests.items():
        yield f"tests/{path}", text


def main(parent: Path) -> None:
    """Write the tasks as `01-hello`, ..., `12-mend-pipeline` into a folder, and a list of them."""
    names = []
    for number, make in enumerate(TASKS, 1):
        task = make(random.Random(SEED + number))
        names.append(f"{number:02}-{task.name}")
        folder = parent / names[-1]
        shutil.rmtree(folder, ignore_errors=True)
        for path, text in files_of(task):
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            if path.endswith(("solve.sh", "test.sh")) and "files" not in path:
                file.chmod(0o755)
    rows = "".join(f'{{"task": "{name}"}}\n' for name in names)
    (parent / "tasks.jsonl").write_text(rows)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent))
