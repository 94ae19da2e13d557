"""What the scripted policy says in each scenario, and what a well-behaved harness makes of it.

A line is one turn, written for the tools of the request it answers (`tools.Toolbox`). `teacher` plays the lines, `run`
the scenarios, and `expectations` lists where a harness is known to do something else than the expectation stated here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, TypeAlias

from clawgym_env.fidelity.tools import Call, Toolbox
from clawgym_env.sandbox.base import WORKDIR

CHILD_MARK = "Fidelity errand:"
"""Opens what the main agent asks of a sub-agent: a conversation that holds it in a user message is the child's."""
INSTRUCTION = "Fidelity check. Follow the conversation and use the tools as you are told."
ANSWER = "All done."
SUMMARY = "<analysis>Nothing is open.</analysis>\n<summary>Lines were printed, as asked. The work goes on.</summary>"


@dataclass(frozen=True, slots=True)
class Turn:
    """One scripted reply."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    broken: bool = False
    """The arguments of the last call are cut in the middle, so that they are no JSON."""
    cut: bool = False
    """The turn ends at the token limit instead of by itself."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a scripted agent is."""

    turn: int
    """Turns this agent has said before."""
    compactions: int
    """How often its history was summarised."""
    since_compaction: int
    """Turns after the latest summary."""
    rows: int
    """Lines of `ROW` that grow the context by a fair step."""


Line: TypeAlias = Callable[[Toolbox, Progress], Turn]
Script: TypeAlias = Callable[[Progress], Line]


@dataclass(frozen=True, slots=True)
class Expectation:
    """What must come of a scenario, beyond the invariants that hold always."""

    files: Mapping[str, str] = field(default_factory=dict)
    """Workspace files at the end, with their text."""
    main_calls: int | None = None
    """Calls of the main agent; None for any number."""
    subagent_calls: int = 0
    forks: int = 0
    """Main calls the harness did not go on from, at most."""
    drift: frozenset[str] = frozenset()
    """Reasons for which a call may restart its tokens."""
    skip: str = ""
    """Why the harness is not held to the scenario at all."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scripted run."""

    name: str
    main: Script
    child: Script | None = None
    """Of the sub-agents."""
    fault: Literal["hang_up"] | None = None
    """hang_up: the connection is cut before the last bytes of the main agent's second reply."""
    small_window: bool = False
    """The policy's window is a little larger than the harness's first prompt, and a compaction is expected."""
    expect: Expectation = field(default_factory=Expectation)


def lines(*several: Line) -> Script:
    """Say these one after the other, then give the answer whenever asked again."""
    return lambda progress: several[progress.turn] if progress.turn < len(several) else answer


def answer(tools: Toolbox, progress: Progress) -> Turn:
    """End the work."""
    ending = tools.ending(ANSWER)
    return Turn(ANSWER) if ending is None else Turn("", (ending,))


def shell(command: str) -> Line:
    """Run a command."""
    return lambda tools, progress: Turn("", (tools.shell(command),))


def write(name: str, content: str) -> Line:
    """Write a file of the workspace, with a word before it."""
    return lambda tools, progress: Turn(f"I write {name}.", (tools.write(f"{WORKDIR}/{name}", content),))


def together(*several: Line) -> Line:
    """Say several lines as one turn with all their calls."""

    def line(tools: Toolbox, progress: Progress) -> Turn:
        return Turn("Both at once.", tuple(call for one in several for call in one(tools, progress).calls))

    return line


def spawn(task: str) -> Line:
    """Hand a task to a sub-agent."""
    return lambda tools, progress: Turn("", (tools.spawn(f"{CHILD_MARK} {task}"),))


def wait(tools: Toolbox, progress: Progress) -> Turn:
    """Wait for the sub-agent, by its own tool or by doing something else for a while."""
    call = tools.wait()
    return Turn("", (tools.shell("sleep 2; echo waited") if call is None else call,))


def broken(line: Line) -> Line:
    """Say a line with arguments that are no JSON."""

    def cut(tools: Toolbox, progress: Progress) -> Turn:
        return Turn("", line(tools, progress).calls, broken=True)

    return cut


def unknown(tools: Toolbox, progress: Progress) -> Turn:
    """Call a tool that is not offered."""
    return Turn("", (tools.unknown(),))


def nothing(tools: Toolbox, progress: Progress) -> Turn:
    """End the turn at once."""
    return Turn()


def unfinished(tools: Toolbox, progress: Progress) -> Turn:
    """Stop in mid-sentence at the token limit."""
    return Turn("I was about to say that", cut=True)


ROW = "row 100000 of a table\n"
"""What a line of much output looks like; the number is another one in every line."""


def print_much(tools: Toolbox, progress: Progress) -> Turn:
    """Print enough to bring the end of the window nearer, something else every time."""
    first = 100_000 + 2000 * progress.turn
    # No loop: Gemini CLI refuses commands with a substitution in them.
    return Turn("", (tools.shell(f"seq -f 'row %.0f of a table' {first} {first + progress.rows}"),))


MOST_GROWING_TURNS = 40


def until_compacted(progress: Progress) -> Line:
    """Let the context grow until it is summarised, go on for two turns, answer."""
    if progress.compactions:
        # Never the same command twice: Qwen Code takes that for a loop and ends the run.
        return answer if progress.since_compaction >= 2 else shell(f"echo going on {progress.turn}")
    return print_much if progress.turn < MOST_GROWING_TURNS else answer


_FILE = MappingProxyType({"a.txt": "hi"})

SCENARIOS: tuple[Scenario, ...] = (
    Scenario(
        "write-check-answer",
        lines(write("a.txt", "hi"), shell("cat a.txt")),
        expect=Expectation(_FILE, main_calls=3),
    ),
    Scenario(
        "twenty-turns",
        lines(*(shell(f"echo step {number}") for number in range(1, 19)), write("a.txt", "hi")),
        expect=Expectation(_FILE, main_calls=20),
    ),
    Scenario(
        "parallel-tools",
        lines(together(write("a.txt", "hi"), shell("printf two > b.txt"))),
        expect=Expectation({**_FILE, "b.txt": "two"}, main_calls=2),
    ),
    Scenario(
        "sub-agent",
        lines(spawn("write hi into a.txt."), wait),
        child=lines(write("a.txt", "hi")),
        expect=Expectation(_FILE, subagent_calls=2),
    ),
    Scenario("compaction", until_compacted, small_window=True),
    Scenario(
        "malformed-arguments",
        lines(broken(shell("echo lost")), write("a.txt", "hi")),
        # Hardly any harness sends back what it could not read: a substitute in its place opens a new token branch.
        expect=Expectation(_FILE, main_calls=3, drift=frozenset({"reply_rewritten"})),
    ),
    Scenario(
        "unknown-tool",
        lines(unknown, write("a.txt", "hi")),
        expect=Expectation(_FILE, main_calls=3),
    ),
    Scenario("empty-reply", lines(nothing, write("a.txt", "hi"))),
    Scenario("length-stop", lines(unfinished, write("a.txt", "hi"))),
    Scenario(
        "hang-up",
        lines(write("a.txt", "hi"), shell("cat a.txt")),
        fault="hang_up",
        expect=Expectation(_FILE, main_calls=3),
    ),
)
