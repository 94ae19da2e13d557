"""What a judge is shown of a workspace."""

import asyncio
import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from clawgym_env.grading.evidence import MAX_FILES, Evidence, bounded, collect
from clawgym_env.grading.office_text import office_text
from clawgym_env.grading.specs import Criterion, RubricGrading
from clawgym_env.sandbox.base import SandboxSpec
from clawgym_env.tasks import Task, TaskFile
from clawgym_env.testing import FakeBackend

GIVEN = (TaskFile(path="in/a.txt", data=b"given"), TaskFile(path="in/b.txt", data=b"given"))


def shown(
    workspace: Mapping[str, bytes], *patterns: str, criterion_file: str | None = None, script: str = "true"
) -> Evidence:
    """Collect from a workspace that holds `GIVEN` and `workspace`, after the agent ran `script`."""
    task = Task(id="t", instruction="", files=GIVEN)
    grading = RubricGrading(criteria=(Criterion(name="c", question="?", file=criterion_file),), files=patterns)

    async def main() -> Evidence:
        sandbox = await FakeBackend().open(SandboxSpec(workdir=task.workdir))
        try:
            for path, data in {**{file.path: file.read() for file in GIVEN}, **workspace}.items():
                await sandbox.write_file(f"{task.workdir}/{path}", data)
            assert (await sandbox.exec(["sh", "-c", script])).exit_code == 0
            return await collect(grading, task, sandbox)
        finally:
            await sandbox.close()

    return asyncio.run(main())


def texts(evidence: Evidence) -> dict[str, str]:
    return {file.path: file.text for file in evidence.files}


def test_without_patterns_what_the_agent_made_or_changed_is_shown() -> None:
    evidence = shown({"out/new.txt": b"new", "in/b.txt": b"edited", ".cache/x": b"", "node_modules/x/y.js": b""})
    assert texts(evidence) == {"in/b.txt": "edited", "out/new.txt": "new"}


def test_hidden_files_and_workflows_are_work_and_what_programs_keep_in_hidden_folders_is_not() -> None:
    work = {".gitignore": b"*.o", ".github/workflows/ci.yml": b"on: push"}
    kept = {".git/HEAD": b"ref", ".venv/x.py": b"", ".github/__pycache__/x.pyc": b"", ".tool/state.json": b"{}"}
    assert texts(shown(work | kept)) == {".github/workflows/ci.yml": "on: push", ".gitignore": "*.o"}


def test_given_files_that_are_gone_are_told_where_nothing_else_is_asked_for() -> None:
    assert shown({}, script="rm in/a.txt").removed == ("in/a.txt",)
    assert shown({}, script="rm in/a.txt").is_empty is False
    assert shown({}).is_empty is True
    assert shown({}, "out/*", script="rm in/a.txt").is_empty is True
    assert shown({}, script="mv in/a.txt in/c.txt && ln -s nowhere in/a.txt").removed == ()


@pytest.mark.parametrize("codec", ["utf-8", "utf-8-sig", "utf-16", "cp1252"])
def test_text_is_text_in_every_usual_encoding(codec: str) -> None:
    said = "Größe;Übermaß;Äpfel\n" * 9
    evidence = shown({"a.csv": said.encode(codec)})
    assert texts(evidence) == {"a.csv": said}
    assert evidence.files[0].is_text


def test_patterns_choose_among_all_files_and_a_folder_stands_for_what_is_in_it() -> None:
    files = {"out/deep/x.txt": b"x", "out/y.md": b"y", "z.md": b"z"}
    assert texts(shown(files, "in/a.*")) == {"in/a.txt": "given"}
    assert set(texts(shown(files, "out"))) == {"out/deep/x.txt", "out/y.md"}
    assert set(texts(shown(files, "**/*.md"))) == {"out/y.md", "z.md"}
    assert list(texts(shown(files, "z.md", "*.md", "out/*.md"))) == ["z.md", "out/y.md"]
    assert shown(files, "nothing/*") == Evidence(())


def test_a_criterions_file_is_shown_first_or_known_to_be_missing() -> None:
    assert list(texts(shown({"x.txt": b"x", "y.txt": b"y"}, "x.txt", criterion_file="y.txt"))) == ["y.txt", "x.txt"]
    evidence = shown({"x.txt": b"x"}, criterion_file="gone.txt")
    assert evidence.missing == {"gone.txt"}
    assert texts(evidence) == {"x.txt": "x"}


def test_links_show_nothing_outside_the_workspace(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("host only")
    script = f"ln -s {tmp_path}/secret leak.txt; ln -s {tmp_path} folder; ln -s loop loop; ln -s ../../secret up.txt"
    evidence = shown({}, "**/*", "leak.txt", "folder/*", criterion_file="leak.txt", script=script)
    assert evidence.missing == {"leak.txt"}
    assert set(texts(evidence)) == {"in/a.txt", "in/b.txt"}
    assert "host only" not in str(evidence)


def test_what_is_no_text_is_only_described() -> None:
    evidence = shown({"a.png": b"\x89PNG\r\n\x1a\n" + bytes(90), "b.bin": bytes(range(128, 256)) * 9, "c.txt": b""})
    assert texts(evidence) == {
        "a.png": "(a binary file of 98 bytes)",
        "b.bin": "(a binary file of 1152 bytes)",
        "c.txt": "(an empty file)",
    }


def test_text_with_a_mark_or_a_few_broken_bytes_is_text() -> None:
    evidence = shown({"a.txt": b"\xef\xbb\xbfhi", "b.txt": b"caf\xe9", "\u2603 ;x.txt": "ü".encode()})
    assert texts(evidence) == {"a.txt": "hi", "b.txt": "caf\ufffd", "\u2603 ;x.txt": "ü"}


def test_long_files_keep_head_and_tail_and_all_files_together_are_bounded() -> None:
    head_and_tail = b"HEAD" + b"x" * (9 << 20) + b"TAIL"
    evidence = shown({f"{i:03d}.txt": head_and_tail if i == 0 else b"y" * 9000 for i in range(MAX_FILES + 5)})
    assert len(evidence.files) == MAX_FILES
    assert evidence.not_shown == tuple(f"{i:03d}.txt" for i in range(MAX_FILES, MAX_FILES + 5))
    first = evidence.files[0].text
    assert first.startswith("HEAD")
    assert first.endswith("TAIL")
    assert "characters left out" in first
    assert sum(len(file.text) for file in evidence.files) < 260_000


def test_a_text_within_its_bound_stays_as_it_is() -> None:
    assert bounded("abc", 3) == "abc"
    assert bounded("abcdef", 3) == "ab\n[… 3 characters left out …]\nf"


def package(parts: Mapping[str, str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return data.getvalue()


def damaged(at: int, data: bytes) -> bytes:
    """Return a Word file with other bytes in it: at an offset in its first local header, and in the directory."""
    whole = bytearray(package({"word/document.xml": f"<x>{' '.join(map(str, range(999)))}</x>"}))
    whole[at : at + len(data)] = data
    if at < 0x1A:  # the directory repeats flags and method two bytes further on
        directory = whole.index(b"PK\x01\x02")
        whole[directory + at + 2 : directory + at + 2 + len(data)] = data
    return bytes(whole)


DOCX = package(
    {
        "word/document.xml": '<w:document xmlns:w="urn:w"><w:body><w:p><w:r><w:t>One</w:t><w:tab/><w:t>two</w:t></w:r>'
        "</w:p><w:p><w:r><w:t>Three</w:t></w:r></w:p></w:body></w:document>"
    }
)
XLSX = package(
    {
        "xl/workbook.xml": '<workbook><sheets><sheet name="Costs"/></sheets></workbook>',
        "xl/sharedStrings.xml": "<sst><si><t>Item</t></si><si><r><t>Pri</t></r><r><t>ce</t></r></si></sst>",
        "xl/worksheets/sheet1.xml": '<worksheet><sheetData><row><c r="A1" t="s"><v>0</v></c><c r="C1" t="s"><v>1</v>'
        '</c></row><row><c r="A2" t="inlineStr"><is><t>tea</t></is></c><c r="C2"><v>2.5</v></c>'
        '<c r="D2"><f>C2*2</f></c>'
        "</row></sheetData></worksheet>",
    }
)


def test_the_words_of_office_files_are_shown() -> None:
    slides = {f"ppt/slides/slide{i}.xml": f'<s xmlns:a="urn:a"><a:p><a:t>S{i}</a:t></a:p></s>' for i in (1, 2, 10)}
    evidence = shown({"a.docx": DOCX, "b.xlsx": XLSX, "c.pptx": package(slides)})
    assert texts(evidence) == {
        "a.docx": "One\ttwo\nThree",
        "b.xlsx": "-- sheet Costs\nA1=Item\tC1=Price\nA2=tea\tC2=2.5\tD2==C2*2",
        "c.pptx": "-- slide 1\nS1\n-- slide 2\nS2\n-- slide 3\nS10",
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no archive",
        package({}),
        package({"word/document.xml": "<broken"}),
        package({"word/document.xml": '<!DOCTYPE x [<!ENTITY a "aaaa">]><x>&a;</x>'}),
        package({"word/document.xml": "<x>" + " " * (17 << 20) + "</x>"}),
        DOCX[:-30],
        damaged(0x06, b"\x01"),  # says that it is encrypted
        damaged(0x08, b"\x63"),  # a method of compression that nobody knows
        damaged(0x40, b"\xff" * 8),  # its compressed bytes
        package({"word/document.xml": "<a>" * 100_000 + "</a>" * 99_999}),
    ],
)
def test_an_office_file_that_is_none_or_too_much_is_no_text(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.docx").write_bytes(data)
    assert office_text(tmp_path / "a.docx") is None


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", ""])
def test_a_rubric_asks_for_nothing_outside_the_workspace(path: str) -> None:
    criterion = Criterion(name="c", question="?")
    with pytest.raises(ValueError, match="Expected files inside the workspace"):
        RubricGrading(criteria=(criterion,), files=(path,))
    with pytest.raises(ValueError, match="Expected files inside the workspace"):
        RubricGrading(criteria=(criterion.model_copy(update={"file": path}),))
    with pytest.raises(ValueError, match="names of their own"):
        RubricGrading(criteria=(criterion, criterion))
