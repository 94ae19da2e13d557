"""Level 3: several files, one small transformation.

What is written is no longer in the instruction word for word: it is repeated, appended, sorted, reversed, counted,
looked up or put into JSON or CSV.
"""

from __future__ import annotations

import json
import random

from pydantic import JsonValue

from clawgym_env.tasks.bundled.expectation import Kind, expect
from clawgym_env.tasks.bundled.family import Draft, TaskFamily, read, write
from clawgym_env.tasks.bundled.vocabulary import Vocabulary


def lines(texts: list[str]) -> str:
    """Return a text file's content, one text a line."""
    return "".join(f"{text}\n" for text in texts)


def transform_draft(instruction: str, source: tuple[str, str], target: tuple[str, str], kind: Kind = "text") -> Draft:
    """Return the draft of a task that turns one file into another, each given as (path, content)."""
    value = int(target[1]) if kind == "number" else target[1].removesuffix("\n")
    return Draft(instruction, [read(source[0]), write(*target)], expect(target[0], value, kind=kind), dict([source]))


def _upper_case(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    words, source, target = vocabulary.words(3), vocabulary.file(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the lines of the file "{source}" to the file "{target}" in upper case.',
            f'Create "{target}" as a copy of "{source}" in which every letter is a capital letter.',
        )
    )
    return transform_draft(phrasing, (source, lines(words)), (target, lines(words).upper()))


def _reverse_lines(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    words, source, target = vocabulary.words(4), vocabulary.file(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the lines of the file "{source}" to the file "{target}" in reverse order, the last line first.',
            f'Create "{target}" with the lines of "{source}" from bottom to top.',
        )
    )
    return transform_draft(phrasing, (source, lines(words)), (target, lines(words[::-1])))


def _sort_lines(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    words = sorted(vocabulary.words(5))
    turn = rng.randint(1, 4)
    shuffled = words[turn:] + words[:turn]  # a rotation leaves no line in its place, so a plain copy earns little
    source, target = vocabulary.file(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Sort the lines of the file "{source}" from a to z and write them to the file "{target}".',
            f'Create "{target}" with the lines of "{source}" in alphabetical order.',
        )
    )
    return transform_draft(phrasing, (source, lines(shuffled)), (target, lines(words)))


def _count_lines(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    words = vocabulary.words(rng.randint(2, 9))
    source, target = vocabulary.file(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Count the lines of the file "{source}" and write the number, in digits, to the file "{target}".',
            f'How many lines has the file "{source}"? Write only the number, in digits, to "{target}".',
        )
    )
    return transform_draft(phrasing, (source, lines(words)), (target, str(len(words))), "number")


def _look_up(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    entries = list(zip(vocabulary.words(4), vocabulary.words(4), strict=True))
    key, value = rng.choice(entries)
    source, target = vocabulary.file(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Find the value of "{key}" in the file "{source}" and write only the value to the file "{target}".',
            f'Each line of "{source}" is a key, a colon and a value. Write the value of "{key}" to "{target}".',
        )
    )
    return transform_draft(phrasing, (source, lines([f"{a}: {b}" for a, b in entries])), (target, value))


def _merge_files(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    parts = {vocabulary.file(): lines(vocabulary.words(2)) for _ in range(3)}
    first, second, third = parts
    target = vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the lines of "{first}", then of "{second}", then of "{third}" to one file "{target}".',
            f'Join the files "{first}", "{second}" and "{third}", in this order, into the file "{target}".',
        )
    )
    content = "".join(parts.values())
    steps = [*map(read, parts), write(target, content)]
    return Draft(phrasing, steps, expect(target, content.removesuffix("\n")), parts)


def _make_json(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    (first, second), word, number, target = (
        vocabulary.words(2),
        vocabulary.word(),
        vocabulary.number(),
        vocabulary.file("json"),
    )
    phrasing = rng.choice(
        (
            f'Write a JSON object to the file "{target}": the key "{first}" has the string "{word}", the key '
            f'"{second}" has the number {number}.',
            f'Create the JSON file "{target}" with two keys: "{first}" is the text "{word}" and "{second}" is the '
            f"number {number}.",
        )
    )
    value: dict[str, JsonValue] = {first: word, second: number}
    return Draft(phrasing, [write(target, json.dumps(value))], expect(target, value, kind="json"))


def _csv_row(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    header = vocabulary.words(2)
    rows = [[vocabulary.word(), str(vocabulary.number())] for _ in range(3)]
    path = vocabulary.file("csv")
    phrasing = rng.choice(
        (
            f'Add a row at the end of the CSV file "{path}": "{header[0]}" is "{rows[-1][0]}" and "{header[1]}" is '
            f'"{rows[-1][1]}".',
            f'Append the row "{rows[-1][0]},{rows[-1][1]}" to the CSV file "{path}" and keep the rows it has.',
        )
    )
    table = [header, *rows]
    before, content = (lines([",".join(row) for row in part]) for part in (table[:-1], table))
    checks = expect(path, [[*row] for row in table], kind="csv", before=before)
    return Draft(phrasing, [read(path), write(path, content)], checks, {path: before})


def _word_twice(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    word, path = vocabulary.word(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the word "{word}" twice, with a space between, to the file "{path}".',
            f'Create the file "{path}" with the word "{word}" in it two times, separated by one space.',
        )
    )
    return Draft(phrasing, [write(path, f"{word} {word}")], expect(path, f"{word} {word}"))


def _append_line(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    old, new, path = vocabulary.word(), vocabulary.word(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Add the line "{new}" at the end of the file "{path}".',
            f'The file "{path}" has one line. Add "{new}" as its second line.',
        )
    )
    before, content = f"{old}\n", f"{old}\n{new}"
    return Draft(phrasing, [read(path), write(path, content)], expect(path, content, before=before), {path: before})


FAMILIES = (
    TaskFamily("upper_case", 3, _upper_case),
    TaskFamily("reverse_lines", 3, _reverse_lines),
    TaskFamily("sort_lines", 3, _sort_lines),
    TaskFamily("count_lines", 3, _count_lines),
    TaskFamily("look_up", 3, _look_up),
    TaskFamily("merge_files", 3, _merge_files),
    TaskFamily("make_json", 3, _make_json),
    TaskFamily("csv_row", 3, _csv_row),
    TaskFamily("word_twice", 3, _word_twice),
    TaskFamily("append_line", 3, _append_line),
)
