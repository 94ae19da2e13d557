"""Where an image starts, read from its Dockerfile."""

import pytest

from clawgym_env.tasks.dockerfile import working_directory


@pytest.mark.parametrize(
    ("text", "workdir"),
    [
        ("FROM debian\n", None),
        ("", None),
        ("FROM debian\nWORKDIR /app\n", "/app"),
        ("from debian\nworkdir /app\n", "/app"),
        ("FROM debian\nWORKDIR /app\nWORKDIR src\n", "/app/src"),
        ("FROM debian\nWORKDIR src\n", "/src"),
        ("FROM debian\nWORKDIR /a\nWORKDIR /b\n", "/b"),
        ("FROM debian\nWORKDIR /app\n# WORKDIR /no\n", "/app"),
        ('FROM debian\nWORKDIR "/with blank"\n', "/with blank"),
        ("FROM debian\nWORKDIR \\\n  /app\n", "/app"),
        ("FROM debian\nRUN echo \\\n  # a comment in between\n  WORKDIR /no\nWORKDIR /yes\n", "/yes"),
        ("FROM debian\nENV HOME_DIR=/srv/x\nWORKDIR $HOME_DIR/y\n", "/srv/x/y"),
        ("FROM debian\nENV HOME_DIR /srv/x\nWORKDIR ${HOME_DIR}\n", "/srv/x"),
        ('FROM debian\nARG A="/a" B=/b\nWORKDIR $A\nWORKDIR ${B}\n', "/b"),
        ("FROM debian\nWORKDIR ${NOWHERE:-/default}\n", "/default"),
        ("ARG TAG=1\nFROM debian:$TAG\nARG TAG\nWORKDIR /v$TAG\n", "/v1"),
        ("FROM debian AS build\nWORKDIR /build\nFROM debian\nCOPY --from=build /x /x\n", None),
        ("FROM debian AS build\nWORKDIR /build\nFROM build\nRUN true\n", "/build"),
        ("FROM --platform=linux/amd64 debian AS Base\nWORKDIR /b\nFROM base\nWORKDIR c\n", "/b/c"),
    ],
)
def test_the_last_stage_says_where_the_image_starts(text: str, workdir: str | None) -> None:
    assert working_directory(text) == workdir
