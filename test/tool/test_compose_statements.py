"""Statement edits: anchors, and what becomes of the statements around them."""

from __future__ import annotations

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_mtp_staging.compose import ComposeError, compose_source

UPSTREAM = dedent(
    '''\
    import os

    READY = os.name


    class Worker:
        def step(self, batch):
            """Do a step."""
            total = 0

            # Counts all rows.
            for row in batch:
                if row.ok:
                    total   +=  row.size  # kept
                elif row.bad:
                    total -= 1
                else:
                    pass

            def inner():
                done = total
                return done

            with self.lock:
                self.total = total
            return total
    '''
)


def edit(marker: str, anchor: str, *lines: str, target: str = "Worker.step") -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"@{marker}({target!r}, {anchor!r})\ndef why(self, total):\n{body}\n"


def test_after_a_nested_statement_whatever_its_formatting(compose):
    edited = compose(UPSTREAM, edit("after", "total += row.size", "note(row)"))
    kept = "                total   +=  row.size  # kept\n"
    assert edited == UPSTREAM.replace(kept, f"{kept}                note(row)\n")


def test_after_a_compound_statement_is_after_its_blocks(compose):
    edited = compose(UPSTREAM, edit("after", "for row in batch:", "note(1)", "note(2)"))
    assert edited == UPSTREAM.replace(
        "                pass\n",
        "                pass\n        note(1)\n        note(2)\n",
    )


def test_before_takes_over_the_blank_lines_and_leaves_the_comment(compose):
    edited = compose(
        UPSTREAM, edit("before", "for row in batch:", "# First.", "note(1)")
    )
    assert edited == UPSTREAM.replace(
        "        # Counts all rows.\n",
        "        # First.\n        note(1)\n        # Counts all rows.\n",
    )


def test_anchor_inside_a_nested_function(compose):
    edited = compose(UPSTREAM, edit("before", "return done", "note(done)"))
    assert edited == UPSTREAM.replace(
        "            return done", "            note(done)\n            return done"
    )


def test_replace_a_statement_by_two(compose):
    edited = compose(
        UPSTREAM, edit("replace", "self.total = total", "self.a = 1", "", "self.b = 2")
    )
    assert edited == UPSTREAM.replace(
        "            self.total = total\n",
        "            self.a = 1\n\n            self.b = 2\n",
    )


def test_replace_by_pass_deletes_the_statement_and_its_comment(compose):
    edited = compose(UPSTREAM, edit("replace", "for row in batch:", "pass"))
    start, end = UPSTREAM.index("        # Counts"), UPSTREAM.index("        def inner")
    assert edited == UPSTREAM[:start] + UPSTREAM[end:]


def test_deleting_the_only_statement_leaves_a_valid_block(compose):
    edited = compose(UPSTREAM, edit("replace", "self.total = total", "pass"))
    assert edited == UPSTREAM.replace("self.total = total", "pass")


def test_replace_a_header_keeps_the_blocks(compose):
    edited = compose(UPSTREAM, edit("replace", "if row.ok:", "if row.fine:", "    ..."))
    assert edited == UPSTREAM.replace("if row.ok:", "if row.fine:")


def test_header_and_body_can_both_be_edited(compose):
    edited = compose(
        UPSTREAM,
        edit("replace", "with self.lock:", "with self.lock, self.other:", "    ...")
        + edit("after", "self.total = total", "self.extra = 1"),
    )
    assert edited == UPSTREAM.replace(
        "with self.lock:\n            self.total = total\n",
        "with self.lock, self.other:\n            self.total = total\n"
        "            self.extra = 1\n",
    )


def test_edits_of_one_anchor_stand_in_file_order(compose):
    edited = compose(
        UPSTREAM,
        edit("after", "total = 0", "a = 1")
        + edit("after", "total = 0", "b = 2")
        + edit("before", "total = 0", "c = 3")
        + edit("before", "total = 0", "d = 4"),
    )
    assert edited == UPSTREAM.replace(
        "        total = 0\n",
        "        c = 3\n        d = 4\n        total = 0\n        a = 1\n        b = 2\n",
    )


def test_anchors_match_the_pristine_source_only(compose):
    edited = compose(
        UPSTREAM,
        edit("after", "total = 0", "return total")
        + edit("before", "return total", "last()"),
    )
    assert edited == UPSTREAM.replace(
        "        total = 0\n", "        total = 0\n        return total\n"
    ).replace(
        "            self.total = total\n        return total\n",
        "            self.total = total\n        last()\n        return total\n",
    )


def test_module_level_anchor_does_not_look_into_functions(compose):
    upstream = UPSTREAM + "\n\ndef f():\n    READY = os.name\n"
    edited = compose(
        upstream, edit("after", "READY = os.name", "OTHER = READY", target="")
    )
    assert edited == upstream.replace(
        "READY = os.name\n", "READY = os.name\nOTHER = READY\n", 1
    )


def test_own_docstring_of_an_edit_is_not_composed(compose):
    edited = compose(UPSTREAM, edit("after", "total = 0", '"""Why."""', "a = 1"))
    assert edited == UPSTREAM.replace(
        "        total = 0\n", "        total = 0\n        a = 1\n"
    )


def test_multi_line_statement_moves_to_the_depth_of_its_anchor(compose):
    edited = compose(
        UPSTREAM,
        edit("after", "total += row.size", "call(", "    1,", ")", "if a:", "    b()"),
    )
    kept = "                total   +=  row.size  # kept\n"
    moved = "call(\n    1,\n)\nif a:\n    b()\n"
    indented = "".join(f"{' ' * 16}{line}\n" for line in moved.splitlines())
    assert edited == UPSTREAM.replace(kept, kept + indented)


def test_marker_can_be_imported_under_another_name(compose):
    edited = compose(
        UPSTREAM,
        "from inkling_mtp_staging.edit import replace as exchange\n"
        + edit("exchange", "total = 0", "total = 1"),
    )
    assert edited == UPSTREAM.replace("total = 0", "total = 1")


def test_try_and_async_and_match_headers_are_anchors(compose):
    upstream = dedent(
        """\
        async def f(x):
            try:
                await x
            finally:
                pass
            async with x:
                pass
            match x:
                case 1:
                    pass
        """
    )
    edited = compose(
        upstream,
        edit("before", "try:", "a()", target="f")
        + edit("before", "async with x:", "b()", target="f")
        + edit("before", "match x:", "c()", target="f"),
    )
    expected = upstream.replace("    try", "    a()\n    try")
    expected = expected.replace("    async with", "    b()\n    async with")
    assert edited == expected.replace("    match", "    c()\n    match")


def test_what_follows_a_deleted_first_statement_moves_up(compose):
    edited = compose(
        "def f():\n    a()\n\n    b()\n", edit("replace", "a()", "pass", target="f")
    )
    assert edited == "def f():\n    b()\n"


def test_elif_is_a_part_of_its_if_and_no_anchor(compose):
    with pytest.raises(ComposeError, match="'if row.bad:': matches nothing"):
        compose(UPSTREAM, edit("before", "if row.bad:", "note()"))


@given(
    names=st.lists(
        st.text("abcxyz", min_size=1, max_size=3), min_size=1, max_size=8, unique=True
    ),
    data=st.data(),
)
def test_an_insertion_adds_its_line_and_touches_no_other(names, data):
    chosen = data.draw(st.sampled_from(range(len(names))))
    marker = data.draw(st.sampled_from(["before", "after"]))
    blanks = data.draw(
        st.lists(st.integers(0, 1), min_size=len(names), max_size=len(names))
    )
    comments = data.draw(
        st.lists(st.booleans(), min_size=len(names), max_size=len(names))
    )
    lines = ["def f():"]
    for position, name in enumerate(names):
        lines += [""] * (blanks[position] if position else 0)
        lines += [f"    v_{name}  =  {position}" + "  # why" * comments[position]]
    edit_file = (
        f"from inkling_mtp_staging.edit import {marker}\n\n\n"
        f"@{marker}('f', 'v_{names[chosen]}={chosen}')\ndef e():\n    new()\n"
    )
    composed = compose_source("\n".join(lines) + "\n", edit_file, path="srt/m.py")
    result = composed.splitlines()
    at = result.index("    new()")
    assert result[:at] + result[at + 1 :] == lines
    code = [line for line in result if line]
    neighbour = code.index("    new()") + (1 if marker == "before" else -1)
    assert code[neighbour].startswith(f"    v_{names[chosen]}  =")
