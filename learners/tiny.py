"""The recipe of `tiny`, the embedded policy that needs no download: made and cold-started on this machine in minutes.

`clawgym policy build tiny` calls `build`. A byte-level BPE is trained on our own prompts, then a small Llama with
untied embeddings, in which copying works from the start (`copying_init`), is taught by demonstrations: the bundled
training tasks, played through mini. These are the first instances of each family, so that the tasks which reinforcement
learning trains on by default have been demonstrated here, flaws included; held-out ones never have.
Invariant: deterministic by seed, train split only, and the demonstrations are deliberately flawed, so that the policy
speaks the format but errs often enough for reinforcement learning to have something to gain.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from clawgym_env.messages import Message
from clawgym_env.policy import Policy, save_policy
from clawgym_env.rendering import ChatMLRenderer, tool_dicts
from clawgym_env.tasks.bundled import Instance, TaskFamily, Vocabulary, families
from clawgym_env.tasks.bundled.vocabulary import CONSONANTS, VOWELS
from clawgym_env.tasks.task import SolutionStep
from clawgym_env.tokenizer import CHATML_SPECIALS, TextTokenizer
from harness_adapters.mini.demonstrations import mini_tools, opening, play
from learners.cold_start import Example, batches, make_example, train
from learners.copying_init import give_copying_heads

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CONTEXT_LENGTH = 131_072
ANSWER = "Done."

PRE_TOKENS = r"\\n|\p{L}+|\d|\n+|(?:(?!\\n)[^\p{L}\d\n])+"
"""Letters, single digits, escaped newlines, newlines, runs of anything else. A word is the same tokens in the
instruction and inside the JSON of a call, and what stands between two words is one token, so that what to copy next is
decided by a token's neighbours."""

_PARTS = re.compile(r"[A-Za-z]+|\d+|[^A-Za-z\d]+")


@dataclass(frozen=True, slots=True)
class Flaws:
    """How often a demonstration goes wrong, and in which way; the rest is clean."""

    wrong_word: float = 0.0
    """A made-up word or number is written instead of one that was asked for."""
    wrong_file: float = 0.0
    """A made-up file name is used."""
    left_out: float = 0.0
    """The last step is left out."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what `tiny` becomes."""

    seed: int = 0
    vocab_size: int = 2048
    num_layers: int = 3
    levels: tuple[int, ...] = (1, 2)
    num_steps: int = 600
    batch_size: int = 8
    learning_rate: float = 2e-3
    flaws: Flaws = Flaws(wrong_word=0.45, wrong_file=0.2, left_out=0.1)
    """Such that sampled reward on held-out instances starts near 0.33."""


def build(folder: Path) -> None:
    """Make the policy with the default recipe and save it."""
    save_policy(cold_start(Recipe()), folder)


def cold_start(recipe: Recipe) -> Policy:
    """Make tokenizer and model, and train."""
    torch.manual_seed(recipe.seed)
    chosen = [family for family in families() if family.level in recipe.levels]
    tokenizer = make_tokenizer(recipe.vocab_size, chosen)
    module = make_module(recipe, tokenizer)
    policy = Policy(module, tokenizer, ChatMLRenderer(tokenizer), "tiny", None, CONTEXT_LENGTH)
    examples = demonstrations(policy, chosen, recipe)
    steps = batches(examples, recipe.batch_size, np.random.default_rng(recipe.seed))
    train(module, iter(steps), num_steps=recipe.num_steps, learning_rate=recipe.learning_rate, warmup_steps=20)
    return policy


def make_tokenizer(vocab_size: int, chosen: Sequence[TaskFamily]) -> TextTokenizer:
    """Train a byte-level BPE on instructions, calls and English."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(CHATML_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(chosen), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CHATML_SPECIALS])
    return TextTokenizer(tokenizer, eos_token="<|im_end|>")


def corpus(chosen: Sequence[TaskFamily]) -> Iterator[str]:
    """Yield the texts the tokenizer is trained on. Syllables are so frequent that each becomes one token."""
    from pydoc_data.topics import topics  # English that every Python brings along

    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    yield from (f"{syllable} \\n" for syllable in syllables for _ in range(5000))
    for family in chosen:
        for index in range(100):
            yield family.instance(index).task.instruction
    furniture = [message.content for message in opening("system\nuser\nassistant\n")]
    tools = json.dumps(tool_dicts(mini_tools()), separators=(",", ":"))
    call = json.dumps({"name": "write", "arguments": {"path": "a.txt", "content": "b"}})
    yield from [*furniture, tools, call, "Tools:", "ok", ANSWER] * 500
    yield from sorted(topics.values())[:60]


def make_module(recipe: Recipe, tokenizer: TextTokenizer) -> LlamaForCausalLM:
    """Return the network before any training; its random numbers are torch's global ones."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    module: LlamaForCausalLM = LlamaForCausalLM(config)
    # What may be copied stands after an opening quote or in a tool's answer, and goes to the same kind of places.
    openers = (' "', "\\n", "<tool_response>")
    alike = [index for index in range(tokenizer.vocab_size) if tokenizer.decode([index]).endswith(openers)]
    give_copying_heads(module, alike=alike)
    return module


def demonstrations(policy: Policy, chosen: Sequence[TaskFamily], recipe: Recipe) -> list[Example]:
    """Return one rendered conversation per example of the whole run; no instance comes twice."""
    tools = mini_tools()
    rng = random.Random(recipe.seed)
    examples: list[Example] = []
    for index in range(recipe.num_steps * recipe.batch_size):
        instance = chosen[index % len(chosen)].instance(recipe.seed * 1_000_000 + index // len(chosen))
        examples.append(make_example(policy.renderer, demonstrate(instance, recipe.flaws, rng), tools))
    return examples


def demonstrate(instance: Instance, flaws: Flaws, rng: random.Random) -> list[Message]:
    """Play the oracle of one instance, spoiled now and then."""
    task = instance.task
    steps = spoil(instance.oracle, flaws, rng)
    files = {file.path: file.read() for file in task.files}
    return play(task.instruction, files, [(step.tool, step.arguments) for step in steps], ANSWER)


def spoil(steps: Sequence[SolutionStep], flaws: Flaws, rng: random.Random) -> list[SolutionStep]:
    """Return the steps with at most one flaw."""
    spoiled = list(steps)
    draw = rng.random()
    vocabulary = Vocabulary(rng, "train")
    at = rng.choice([i for i, step in enumerate(steps) if step.tool == "write"])
    step = steps[at]
    if draw < flaws.wrong_word:
        content = "".join(_other(part, vocabulary) for part in _PARTS.findall(step.arguments["content"]))
        spoiled[at] = replace(step, arguments={**step.arguments, "content": content})
    elif draw < flaws.wrong_word + flaws.wrong_file:
        path = step.arguments["path"]
        spoiled[at] = replace(step, arguments={**step.arguments, "path": vocabulary.file(path.rpartition(".")[2])})
    elif draw < flaws.wrong_word + flaws.wrong_file + flaws.left_out:
        spoiled.pop()
    return spoiled


def _other(part: str, vocabulary: Vocabulary) -> str:
    if part.isalpha():
        return vocabulary.word()
    if part.isdigit():
        return str(vocabulary.number(100, 9999))
    return part
