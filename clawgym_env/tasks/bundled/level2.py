"""Level 2: two files to write, or one file to read before one is written.

Still nothing to compute: what is written is in the instruction or, word for word, in the file that was read.
"""

from __future__ import annotations

import random

from clawgym_env.tasks.bundled.expectation import expect
from clawgym_env.tasks.bundled.family import Draft, TaskFamily, read, write
from clawgym_env.tasks.bundled.vocabulary import Vocabulary


def two_files_draft(instruction: str, first: tuple[str, str], second: tuple[str, str]) -> Draft:
    """Return the draft of a task solved by two writes, each given as (path, content)."""
    return Draft(
        instruction,
        [write(*first), write(*second)],
        (*expect(*first, name="first"), *expect(*second, name="second")),
    )


def _two_files(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    first, second = (vocabulary.file(), vocabulary.word()), (vocabulary.file(), vocabulary.word())
    phrasing = rng.choice(
        (
            f'Write the word "{first[1]}" to the file "{first[0]}" and the word "{second[1]}" to the file '
            f'"{second[0]}".',
            f'Create the file "{first[0]}" with "{first[1]}" in it, and the file "{second[0]}" with "{second[1]}" '
            f"in it.",
        )
    )
    return two_files_draft(phrasing, first, second)


def _same_word_two_files(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    word, first, second = vocabulary.word(), vocabulary.file(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the word "{word}" to the file "{first}" and also to the file "{second}".',
            f'Create two files, "{first}" and "{second}", each with the word "{word}" in it.',
        )
    )
    return two_files_draft(phrasing, (first, word), (second, word))


def _word_and_number(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    first = (vocabulary.file(), vocabulary.word())
    second = (vocabulary.file(), str(vocabulary.number(100, 9999)))
    phrasing = rng.choice(
        (
            f'Write the word "{first[1]}" to the file "{first[0]}" and the number "{second[1]}" to the file '
            f'"{second[0]}".',
            f'Put the word "{first[1]}" into "{first[0]}", then the number "{second[1]}" into "{second[0]}".',
        )
    )
    return two_files_draft(phrasing, first, second)


def _two_lines(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    first, second, path = vocabulary.word(), vocabulary.word(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write two lines to the file "{path}": first "{first}", then "{second}".',
            f'Create the file "{path}" with the word "{first}" on line one and the word "{second}" on line two.',
        )
    )
    content = f"{first}\n{second}"
    return Draft(phrasing, [write(path, content)], expect(path, content))


def _copy_word(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    word, source, target = vocabulary.word(), vocabulary.file(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Read the file "{source}" and write the word in it to the file "{target}".',
            f'Copy the word in the file "{source}" to a new file "{target}".',
        )
    )
    return Draft(phrasing, [read(source), write(target, word)], expect(target, word), {source: f"{word}\n"})


def _replace_word(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    old, new, path = vocabulary.word(), vocabulary.word(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Replace what is in the file "{path}" by the word "{new}".',
            f'The file "{path}" holds the word "{old}". Make it hold "{new}" instead.',
        )
    )
    before = f"{old}\n"
    return Draft(phrasing, [write(path, new)], expect(path, new, before=before), {path: before})


FAMILIES = (
    TaskFamily("two_files", 2, _two_files),
    TaskFamily("same_word_two_files", 2, _same_word_two_files),
    TaskFamily("word_and_number", 2, _word_and_number),
    TaskFamily("two_lines", 2, _two_lines),
    TaskFamily("copy_word", 2, _copy_word),
    TaskFamily("replace_word", 2, _replace_word),
)
