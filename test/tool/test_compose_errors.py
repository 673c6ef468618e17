"""An edit that does not fit is refused, with every reason in one message."""

from __future__ import annotations

import pytest

from inkling_mtp_staging.compose import ComposeError, compose_all, compose_source

UPSTREAM = '''\
import os


class Worker(Base):
    """Text."""

    size = 1

    def step(self, batch):
        total = sum(batch)
        log(total)
        if total:
            log(total)
        return total


def run():
    return 1
'''


def failures_of(compose, edit: str, upstream: str = UPSTREAM) -> list[str]:
    with pytest.raises(ComposeError) as caught:
        compose(upstream, edit)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("edit", "failure"),
    [
        (
            "@after('Worker.step', 'total = max(batch)')\ndef e():\n    x()\n",
            "srt/some/module.py: Worker.step: anchor 'total = max(batch)': matches "
            "nothing; nearest upstream line 10: total = sum(batch)",
        ),
        (
            "@after('Worker.step', 'log(total)')\ndef e():\n    x()\n",
            "srt/some/module.py: Worker.step: anchor 'log(total)': matches twice, "
            "lines 11 and 13",
        ),
        (
            "@after('Worker.stop', 'x')\ndef e():\n    x()\n",
            "srt/some/module.py: Worker.stop: upstream has no definition of Worker.stop",
        ),
        (
            "@after('Gone.step', 'x')\ndef e():\n    x()\n",
            "srt/some/module.py: Gone.step: upstream has no definition of Gone",
        ),
        (
            "@after('run', 'return 1; x')\ndef e():\n    x()\n",
            "srt/some/module.py: run: anchor 'return 1; x': the anchor is not exactly "
            "one statement",
        ),
        (
            "@after('run', 'return (')\ndef e():\n    x()\n",
            "srt/some/module.py: run: anchor 'return (': the anchor is not valid Python",
        ),
        (
            "@after('Worker.step', 'if total: log(total)')\ndef e():\n    x()\n",
            "srt/some/module.py: Worker.step: anchor 'if total: log(total)': a compound "
            "anchor is its header only, up to the colon",
        ),
        (
            "@after('run')\ndef e():\n    x()\n",
            "srt/some/module.py: e: @after takes 2 string(s) and stands alone",
        ),
        (
            "@other\n@after('run', 'return 1')\ndef e():\n    x()\n",
            "srt/some/module.py: e: @after takes 2 string(s) and stands alone",
        ),
        (
            "@after('run', 'return 1')\ndef e():\n    pass\n",
            "srt/some/module.py: e: has no statement to insert",
        ),
        (
            "@after('run', 'return 1')\ndef e():\n    x()\n    # lost\n",
            "srt/some/module.py: e: the comment after its last statement belongs to none",
        ),
        (
            "@replace('Worker.step', 'if total:')\ndef e():\n    while x:\n        ...\n",
            "srt/some/module.py: Worker.step: anchor 'if total:': its header can only "
            "become one of the same kind",
        ),
        (
            "@replace('run', 'return 1')\ndef e():\n    x()\n"
            "@replace('run', 'return 1')\ndef f():\n    y()\n",
            "srt/some/module.py: run: anchor 'return 1': edited twice",
        ),
        (
            "def run():\n    return 2\n@before('run', 'return 1')\ndef e():\n    x()\n",
            "srt/some/module.py: def run(): replaced whole, and also edited inside",
        ),
        (
            "def run():\n    return 2\ndef run():\n    return 3\n",
            "srt/some/module.py: run: edited twice",
        ),
        (
            "class Worker:\n    def gone(self): ...\n",
            "srt/some/module.py: Worker.gone: upstream has no such definition, and the "
            "body `...` says it has",
        ),
        (
            "class Gone:\n    def step(self): ...\n    def new(self):\n        x()\n",
            "srt/some/module.py: Gone: upstream has no such definition, and the body "
            "`...` says it has",
        ),
        (
            "class Worker(Other):\n    size = 2\n",
            "srt/some/module.py: Worker: the class's bases differ from upstream's",
        ),
        (
            "class Worker:\n    size = 2\n    print(1)\n",
            "srt/some/module.py: Worker: no member of a class: print(1)",
        ),
        (
            "for x in y:\n    pass\n",
            "srt/some/module.py: for x in y: no statement that an edit file may have",
        ),
        (
            "@append_docstring('run')\ndef e():\n    '''More.'''\n",
            "srt/some/module.py: run: upstream has no docstring to append to",
        ),
        (
            "@append_docstring('Worker')\ndef e():\n    '''More.'''\n    x()\n",
            "srt/some/module.py: e: must be a docstring and nothing else",
        ),
        (
            "class Worker:\n    '''A.'''\n"
            "@append_docstring('Worker')\ndef e():\n    '''B.'''\n",
            "srt/some/module.py: Worker: its docstring is edited twice",
        ),
    ],
)
def test_one_failure(compose, edit, failure):
    assert failures_of(compose, edit) == [failure]


def test_backslash_of_a_raw_docstring(compose):
    assert failures_of(
        compose, "@append_docstring('Worker')\ndef e():\n    r'''A \\d.'''\n"
    ) == [
        "srt/some/module.py: Worker: only one of the docstrings is raw; mind the "
        "backslash"
    ]


def test_upstream_that_defines_a_name_twice(compose):
    upstream = "def f():\n    pass\n\n\ndef f():\n    pass\n"
    assert failures_of(compose, "def f():\n    x()\n", upstream) == [
        "srt/some/module.py: f: upstream defines it twice, lines 1 and 5"
    ]


def test_invalid_sources(compose):
    assert failures_of(compose, "def (\n", "x = (\n") == [
        "srt/some/module.py: the module: upstream is not valid Python at line 1",
        "srt/some/module.py: the module: the edit is not valid Python at line 2",
    ]


def test_composed_source_must_be_valid(compose):
    assert failures_of(
        compose,
        "@append_docstring('f')\ndef e():\n    '''Ends in a \"'''\n",
        'def f():\n    """A.\n\n    B."""\n',
    ) == [
        "srt/some/module.py: the module: the composed source is not valid Python at line 6"
    ]


def test_all_failures_of_all_files_are_listed(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text(
            "from inkling_mtp_staging.edit import after\n\n\n"
            "@after('f', 'x()')\ndef one():\n    z()\n\n\n"
            "@after('g', 'x()')\ndef two():\n    z()\n"
        )
    upstream = "def f():\n    y()\n"
    with pytest.raises(ComposeError) as caught:
        compose_all({name: upstream for name in ("a.py", "b.py", "c.py")}, tmp_path)
    assert [(failure.path, failure.name) for failure in caught.value.failures] == [
        ("a.py", "f: anchor 'x()'"),
        ("a.py", "g"),
        ("b.py", "f: anchor 'x()'"),
        ("b.py", "g"),
        ("c.py", "the edit"),
    ]
    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize(
    ("upstream", "reason"),
    [
        (UPSTREAM.replace("\n", "\r\n"), "has line endings other than LF"),
        (UPSTREAM.replace("import os\n", "import os\r\n"), "has line endings other"),
        ("\ufeff" + UPSTREAM, "is not valid Python at line 1"),
        ("", "has no statement"),
        ("# nothing\n", "has no statement"),
        ("import os\0\n", "is not valid Python"),
        ("x = " + "(" * 5000 + ")" * 5000, "is not valid Python"),
        ("f(a=1, *b for b in c)\n", "is not valid Python at line 1"),
    ],
)
def test_upstream_that_cannot_be_composed(upstream, reason):
    with pytest.raises(ComposeError) as caught:
        compose_source(upstream, "def new(): ...\n", path="srt/some/module.py")
    (failure,) = caught.value.failures
    assert str(failure).startswith(f"srt/some/module.py: the module: upstream {reason}")
    assert "\n" not in str(failure)


def test_a_definition_inside_another_statement_is_not_taken_for_a_new_one(compose):
    upstream = (
        "class Worker:\n    if FAST:\n        def step(self):\n            pass\n"
    )
    edit = "class Worker:\n    def step(self):\n        go()\n"
    assert failures_of(compose, edit, upstream) == [
        "srt/some/module.py: Worker.step: upstream defines it inside another "
        "statement, out of reach"
    ]
    upstream = "import os\n\nif FAST:\n    def run():\n        pass\n"
    assert failures_of(compose, "def run():\n    go()\n", upstream) == [
        "srt/some/module.py: run: upstream defines it inside another statement, "
        "out of reach"
    ]


def test_an_edit_file_without_an_edit():
    with pytest.raises(ComposeError, match="the module: the edit has no statement"):
        compose_source(UPSTREAM, "# to do\n", path="srt/some/module.py")
