"""Level 4: read a CSV and a JSON, compute, write three files.

The smallest jobs that look like those of ClawGym-Bench: a few records to join, filter or add up, and several
deliverables, each worth a third.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from clawgym_env.tasks.bundled.expectation import Expectation, Kind, expect
from clawgym_env.tasks.bundled.family import Draft, TaskFamily, read, write
from clawgym_env.tasks.bundled.vocabulary import Vocabulary
from clawgym_env.tasks.task import SolutionStep

Rows = list[list[str]]


def report_draft(instruction: str, inputs: Mapping[str, str], outputs: Sequence[tuple[str, str, Kind]]) -> Draft:
    """Return the draft of a task that reads `inputs` (text by path) and writes `outputs` (path, text, kind)."""
    steps: list[SolutionStep] = [read(path) for path in inputs]
    checks: list[Expectation] = []
    for name, (path, text, kind) in zip(("first", "second", "third"), outputs, strict=True):
        steps.append(write(path, text))
        checks += expect(path, parsed(text, kind), kind=kind, name=name)
    return Draft(instruction, steps, checks, inputs)


def parsed(text: str, kind: Kind) -> JsonValue:
    """Return the value that a text of this kind stands for."""
    if kind in ("json", "number"):
        value: JsonValue = json.loads(text)
        return value
    if kind == "csv":
        return [[*line.split(",")] for line in text.splitlines()]
    return text.removesuffix("\n")


def csv_text(rows: Rows) -> str:
    """Return CSV text; drawn words need no quoting."""
    return "".join(",".join(row) + "\n" for row in rows)


def lines(texts: Sequence[str]) -> str:
    """Return a text file's content, one text a line."""
    return "".join(f"{text}\n" for text in texts)


def _order_costs(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    def draw() -> list[tuple[str, int, int]]:
        def row() -> tuple[str, int, int]:
            return vocabulary.word(), rng.randint(2, 9), vocabulary.number(10, 99)

        while True:
            rows = [vocabulary.settle(row, lambda drawn: [drawn[1] * drawn[2]]) for _ in range(3)]
            if len({count * price for _, count, price in rows}) == 3:  # one of them must be the dearest
                return rows

    orders = vocabulary.settle(draw, lambda drawn: [sum(count * price for _, count, price in drawn)])
    costs = {item: count * price for item, count, price in orders}
    item_column, count_column, cost_column = vocabulary.words(3)
    table, prices = vocabulary.file("csv"), vocabulary.file("json")
    total, dearest, report = vocabulary.file(), vocabulary.file("json"), vocabulary.file("csv")
    best = max(costs, key=costs.__getitem__)
    return report_draft(
        f'The file "{table}" lists ordered items: the column "{item_column}" is the item, "{count_column}" how many. '
        f'The file "{prices}" gives the price of one of each item. The cost of an item is its price times how many. '
        f'Write three files. "{report}": a CSV with the header "{item_column},{cost_column}" and the cost of each '
        f'item, in the order of "{table}". "{total}": only the sum of all costs. "{dearest}": a JSON object with the '
        f"item of the highest cost as its only key and that cost, a number, as the value.",
        {
            table: csv_text([[item_column, count_column], *([item, str(count)] for item, count, _ in orders)]),
            prices: json.dumps({item: price for item, _, price in orders}),
        },
        [
            (
                report,
                csv_text([[item_column, cost_column], *([item, str(cost)] for item, cost in costs.items())]),
                "csv",
            ),
            (total, f"{sum(costs.values())}\n", "number"),
            (dearest, json.dumps({best: costs[best]}), "json"),
        ],
    )


def _threshold(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    names, limit = [vocabulary.name() for _ in range(6)], vocabulary.number(400, 600)
    high, low = vocabulary.numbers(rng.randint(2, 4), 601, 999), vocabulary.numbers(4, 10, 399)
    numbers = (high + low)[:6]
    rng.shuffle(numbers)
    name_column, number_column, limit_key, above_key, below_key = vocabulary.words(5)
    table, settings = vocabulary.file("csv"), vocabulary.file("json")
    above_file, below_file, counts_file = vocabulary.file(), vocabulary.file(), vocabulary.file("json")
    people = list(zip(names, numbers, strict=True))
    above = [name for name, number in people if number > limit]
    below = [name for name, number in people if number < limit]
    return report_draft(
        f'The file "{table}" has the columns "{name_column}" and "{number_column}"; the file "{settings}" has a limit '
        f'under the key "{limit_key}". Write three files. "{above_file}": the "{name_column}" of each row whose '
        f'"{number_column}" is above the limit, one a line, in the order of the table. "{below_file}": the same for '
        f'the rows below the limit. "{counts_file}": a JSON object with how many there are, the key "{above_key}" for '
        f'those above and "{below_key}" for those below.',
        {
            table: csv_text([[name_column, number_column], *([name, str(number)] for name, number in people)]),
            settings: json.dumps({limit_key: limit}),
        },
        [
            (above_file, lines(above), "text"),
            (below_file, lines(below), "text"),
            (counts_file, json.dumps({above_key: len(above), below_key: len(below)}), "json"),
        ],
    )


def _join_names(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    rows = [(vocabulary.word(), vocabulary.number()) for _ in range(5)]
    unknown = rng.sample(range(5), 2)
    names = {code: vocabulary.name() for index, (code, _) in enumerate(rows) if index not in unknown}
    code_column, number_column, name_column = vocabulary.words(3)
    table, directory = vocabulary.file("csv"), vocabulary.file("json")
    joined_file, missing_file, numbers_file = vocabulary.file("csv"), vocabulary.file(), vocabulary.file("json")
    known = [(names[code], number) for code, number in rows if code in names]
    return report_draft(
        f'The file "{table}" has a code in the column "{code_column}" and a number in "{number_column}". The file '
        f'"{directory}" gives the name of some codes. Write three files. "{joined_file}": a CSV with the header '
        f'"{name_column},{number_column}" and a row for each code that has a name, in the order of the table. '
        f'"{missing_file}": the codes without a name, one a line, in the order of the table. "{numbers_file}": a JSON '
        f"object from each name to its number.",
        {
            table: csv_text([[code_column, number_column], *([code, str(number)] for code, number in rows)]),
            directory: json.dumps(names),
        },
        [
            (joined_file, csv_text([[name_column, number_column], *([n, str(number)] for n, number in known)]), "csv"),
            (missing_file, lines([code for code, _ in rows if code not in names]), "text"),
            (numbers_file, json.dumps(dict(known)), "json"),
        ],
    )


def _group_totals(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    def draw() -> dict[str, list[int]]:
        def amounts() -> list[int]:
            return vocabulary.numbers(rng.randint(2, 3), 10, 300)

        return {code: vocabulary.settle(amounts, lambda drawn: [sum(drawn)]) for code in vocabulary.words(3)}

    groups = vocabulary.settle(draw, lambda drawn: [sum(map(sum, drawn.values()))])
    rows = [(code, amount) for code, amounts in groups.items() for amount in amounts]
    rng.shuffle(rows)
    labels = {code: vocabulary.name() for code in groups}
    totals = {labels[code]: sum(groups[code]) for code in groups}
    code_column, amount_column, label_column = vocabulary.words(3)
    table, names = vocabulary.file("csv"), vocabulary.file("json")
    totals_file, sorted_file, sum_file = vocabulary.file("json"), vocabulary.file("csv"), vocabulary.file()
    return report_draft(
        f'The file "{table}" has a code in the column "{code_column}" and an amount in "{amount_column}". The file '
        f'"{names}" gives the label of each code. Write three files. "{totals_file}": a JSON object from each label to '
        f'the sum of its amounts. "{sorted_file}": a CSV with the header "{label_column},{amount_column}" and one row '
        f'with each label and its sum, sorted by label from a to z. "{sum_file}": only the sum of all amounts.',
        {
            table: csv_text([[code_column, amount_column], *([code, str(amount)] for code, amount in rows)]),
            names: json.dumps(labels),
        },
        [
            (totals_file, json.dumps(totals), "json"),
            (
                sorted_file,
                csv_text([[label_column, amount_column], *([n, str(totals[n])] for n in sorted(totals))]),
                "csv",
            ),
            (sum_file, f"{sum(totals.values())}\n", "number"),
        ],
    )


def _ranking(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    scores = {vocabulary.name(): vocabulary.number() for _ in range(6)}
    barred = rng.sample(list(scores), 2)
    name_column, score_column, list_key = vocabulary.words(3)
    table, settings = vocabulary.file("csv"), vocabulary.file("json")
    ranking_file, best_file, barred_file = vocabulary.file(), vocabulary.file("json"), vocabulary.file("csv")
    ranking = sorted((name for name in scores if name not in barred), key=lambda name: -scores[name])
    return report_draft(
        f'The file "{table}" has a name in the column "{name_column}" and a score in "{score_column}". The file '
        f'"{settings}" lists the names that are barred under the key "{list_key}". Write three files. '
        f'"{ranking_file}": the names that are not barred, one a line, from the highest to the lowest score. '
        f'"{best_file}": a JSON object with the first of these names under the key "{name_column}" and its score, a '
        f'number, under "{score_column}". "{barred_file}": the rows of the barred names as a CSV with the same header, '
        f"in the order of the table.",
        {
            table: csv_text([[name_column, score_column], *([name, str(score)] for name, score in scores.items())]),
            settings: json.dumps({list_key: barred}),
        },
        [
            (ranking_file, lines(ranking), "text"),
            (best_file, json.dumps({name_column: ranking[0], score_column: scores[ranking[0]]}), "json"),
            (
                barred_file,
                csv_text([[name_column, score_column], *([n, str(scores[n])] for n in scores if n in barred)]),
                "csv",
            ),
        ],
    )


def _stock(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    def draw() -> tuple[int, int]:
        return vocabulary.number(100, 999), vocabulary.number(10, 99)

    items = vocabulary.words(5)
    stock, orders = {}, {}
    for item in items[:3]:
        stock[item], orders[item] = vocabulary.settle(draw, lambda drawn: [drawn[0] - drawn[1]])
    for item in items[3:]:  # ordered in larger number than there are
        orders[item], stock[item] = draw()
    shuffled = rng.sample(items, 5)
    item_column, count_column, possible_key, short_key = vocabulary.words(4)
    table, wishes = vocabulary.file("csv"), vocabulary.file("json")
    left_file, short_file, counts_file = vocabulary.file("csv"), vocabulary.file(), vocabulary.file("json")
    left = [[item, str(stock[item] - orders[item])] for item in shuffled if orders[item] <= stock[item]]
    short = [item for item in shuffled if orders[item] > stock[item]]
    return report_draft(
        f'The file "{table}" has an item in the column "{item_column}" and how many there are in "{count_column}". The '
        f'file "{wishes}" says how many of each are ordered. Write three files. "{left_file}": a CSV with the same '
        f"header that says how many are left after the order, for each item of which there are enough, in the order of "
        f'the table. "{short_file}": the items of which there are too few, one a line, in the order of the table. '
        f'"{counts_file}": a JSON object with the number of items of which there are enough under the key '
        f'"{possible_key}", and of the others under "{short_key}".',
        {
            table: csv_text([[item_column, count_column], *([item, str(stock[item])] for item in shuffled)]),
            wishes: json.dumps(orders),
        },
        [
            (left_file, csv_text([[item_column, count_column], *left]), "csv"),
            (short_file, lines(short), "text"),
            (counts_file, json.dumps({possible_key: len(left), short_key: len(short)}), "json"),
        ],
    )


def _sort_into_files(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    kinds = vocabulary.words(3)
    paths = {kind: vocabulary.file() for kind in kinds}
    rows = [[vocabulary.word(), kind] for kind in kinds for _ in range(rng.randint(1, 3))]
    rng.shuffle(rows)
    word_column, kind_column = vocabulary.words(2)
    table, targets = vocabulary.file("csv"), vocabulary.file("json")
    return report_draft(
        f'The file "{table}" has a word in the column "{word_column}" and its kind in "{kind_column}". The file '
        f'"{targets}" names a file for each of the three kinds. Write these three files: each holds the words of its '
        f"kind, one a line, in the order of the table.",
        {table: csv_text([[word_column, kind_column], *rows]), targets: json.dumps(paths)},
        [(path, lines([word for word, kind in rows if kind == its_kind]), "text") for its_kind, path in paths.items()],
    )


FAMILIES = (
    TaskFamily("order_costs", 4, _order_costs),
    TaskFamily("threshold", 4, _threshold),
    TaskFamily("join_names", 4, _join_names),
    TaskFamily("group_totals", 4, _group_totals),
    TaskFamily("ranking", 4, _ranking),
    TaskFamily("stock", 4, _stock),
    TaskFamily("sort_into_files", 4, _sort_into_files),
)
