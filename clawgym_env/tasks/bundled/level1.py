"""Level 1: one file to write, everything to write is spelled out in one short sentence.

A policy that can call the write tool and copy from the instruction solves these. Words stand in double quotes, so that
they are the same tokens in the instruction as in the JSON of the tool call.
"""

from __future__ import annotations

import random

from clawgym_env.tasks.bundled.expectation import expect
from clawgym_env.tasks.bundled.family import Draft, TaskFamily, write
from clawgym_env.tasks.bundled.vocabulary import Vocabulary


def one_file(instruction: str, path: str, content: str) -> Draft:
    """Return the draft of a task solved by one write."""
    return Draft(instruction, [write(path, content)], expect(path, content))


def _write_word(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    word, path = vocabulary.word(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the word "{word}" to the file "{path}".',
            f'Create the file "{path}" with the word "{word}" in it.',
            f'Put "{word}" into a new file named "{path}".',
        )
    )
    return one_file(phrasing, path, word)


def _word_in_folder(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    word, path = vocabulary.word(), f"{vocabulary.word()}/{vocabulary.file()}"
    phrasing = rng.choice(
        (
            f'Write the word "{word}" to the file "{path}".',
            f'In a new folder, create the file "{path}" with the word "{word}" in it.',
            f'Save "{word}" under the path "{path}".',
        )
    )
    return one_file(phrasing, path, word)


def _two_words(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    first, second, path = vocabulary.word(), vocabulary.word(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the two words "{first} {second}" to the file "{path}".',
            f'Create the file "{path}" with the words "{first} {second}" in it.',
            f'The file "{path}" should hold "{first}", then a space, then "{second}". Write it.',
        )
    )
    return one_file(phrasing, path, f"{first} {second}")


def _write_number(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    number, path = str(vocabulary.number(100, 9999)), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the number "{number}" to the file "{path}".',
            f'Create the file "{path}" with the number "{number}" in it.',
            f'Store the number "{number}" in "{path}".',
        )
    )
    return one_file(phrasing, path, number)


def _key_value(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    key, value, path = vocabulary.word(), vocabulary.word(), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the line "{key}: {value}" to the file "{path}".',
            f'Create the file "{path}" that sets the key "{key}" to "{value}", as a line "{key}: {value}".',
            f'The only line of the file "{path}" must be "{key}: {value}". Write it.',
        )
    )
    return one_file(phrasing, path, f"{key}: {value}")


def _three_words(rng: random.Random, vocabulary: Vocabulary) -> Draft:
    line, path = " ".join(vocabulary.words(3)), vocabulary.file()
    phrasing = rng.choice(
        (
            f'Write the line "{line}" to the file "{path}".',
            f'Create the file "{path}" with the line "{line}" in it.',
            f'Save the three words "{line}" as "{path}".',
        )
    )
    return one_file(phrasing, path, line)


FAMILIES = (
    TaskFamily("write_word", 1, _write_word),
    TaskFamily("word_in_folder", 1, _word_in_folder),
    TaskFamily("two_words", 1, _two_words),
    TaskFamily("write_number", 1, _write_number),
    TaskFamily("key_value", 1, _key_value),
    TaskFamily("three_words", 1, _three_words),
)
