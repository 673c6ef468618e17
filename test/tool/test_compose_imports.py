"""Imports of an edit file end up where isort wants them."""

from __future__ import annotations

import ast

import isort
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_mtp_staging.compose import ComposeError, compose_source

UPSTREAM = """\
from __future__ import annotations

import logging
from typing import TYPE_CHECKING, List

import torch

from sglang.srt.a import Alpha, beta
from sglang.srt.c import (
    Gamma,
)

if TYPE_CHECKING:
    from sglang.srt.t import Typed

logger = logging.getLogger(__name__)
"""


def test_present_names_are_not_added(compose):
    edit = (
        "import torch\nfrom typing import List\nfrom sglang.srt.a import beta\n"
        "if TYPE_CHECKING:\n    from sglang.srt.t import Typed\n"
        "    from sglang.srt.a import Alpha\n"
    )
    assert compose(UPSTREAM, edit) == UPSTREAM


def test_names_join_an_existing_import_in_order(compose):
    edited = compose(UPSTREAM, "from sglang.srt.a import LIMIT, Beta, alpha\n")
    assert edited == UPSTREAM.replace(
        "import Alpha, beta", "import LIMIT, Alpha, Beta, alpha, beta"
    )


def test_a_vertical_import_stays_vertical(compose):
    edited = compose(UPSTREAM, "from sglang.srt.c import Delta\n")
    assert edited == UPSTREAM.replace("    Gamma,\n", "    Delta,\n    Gamma,\n")


def test_a_long_line_becomes_vertical(compose):
    long_name = "a" * 60
    edited = compose(UPSTREAM, f"from sglang.srt.a import {long_name}\n")
    assert edited == UPSTREAM.replace(
        "from sglang.srt.a import Alpha, beta\n",
        f"from sglang.srt.a import (\n    Alpha,\n    {long_name},\n    beta,\n)\n",
    )


def test_new_modules_go_to_their_sections(compose):
    edited = compose(
        UPSTREAM,
        "import abc\nimport triton\nimport triton.language as tl\n"
        "from types import SimpleNamespace\nfrom sglang.srt.b import B\n",
    )
    expected = UPSTREAM.replace("import logging\n", "import abc\nimport logging\n")
    expected = expected.replace(
        "from typing", "from types import SimpleNamespace\nfrom typing"
    )
    expected = expected.replace(
        "import torch\n", "import torch\nimport triton\nimport triton.language as tl\n"
    )
    expected = expected.replace(
        "from sglang.srt.c", "from sglang.srt.b import B\nfrom sglang.srt.c"
    )
    assert edited == expected


def test_a_section_that_upstream_lacks_is_set_off_by_blank_lines(compose):
    upstream = "import logging\n\nfrom sglang.srt.a import A\n\nx = 1\n"
    assert compose(upstream, "import torch\n") == (
        "import logging\n\nimport torch\n\nfrom sglang.srt.a import A\n\nx = 1\n"
    )


def test_type_checking_imports_go_to_upstreams_block(compose):
    edited = compose(
        UPSTREAM,
        "if TYPE_CHECKING:\n    from sglang.srt.s import S\n"
        "    from sglang.srt.t import Other\n",
    )
    assert edited == UPSTREAM.replace(
        "    from sglang.srt.t import Typed\n",
        "    from sglang.srt.s import S\n    from sglang.srt.t import Other, Typed\n",
    )


def test_names_of_the_edited_module_itself_are_dropped(compose):
    assert compose(UPSTREAM, "from sglang.srt.some.module import logger\n") == UPSTREAM


@pytest.mark.parametrize(
    ("upstream", "edit", "reason"),
    [
        (UPSTREAM, "from sglang.srt.some.module import gone\n", "gone: imported from"),
        (
            "from sglang.srt.a import (  # reason\n    A,\n)\n",
            "from sglang.srt.a import B\n",
            "comments stand between them",
        ),
        ("import os\n", "if TYPE_CHECKING:\n    import abc\n", "no such block"),
        ("x = 1\n", "import os\n", "no import to place it beside"),
    ],
)
def test_imports_that_cannot_be_merged(compose, upstream, edit, reason):
    with pytest.raises(ComposeError, match=reason):
        compose(upstream, edit)


MODULES = [
    *("abc", "os", "typing", "types"),
    *("torch", "triton", "numpy", "sgl_kernel"),
    *("sglang.srt.a1", "sglang.srt.a2", "sglang.srt.a10", "sglang.srt.B", "sglang.a"),
    "sglang.srt." + "long_" * 12,
]
NAMES = ["A", "Bc", "LIMIT", "MAX_2", "MAX_10", "_private", "lower", "x1", "x10", "x9"]
IMPORTS = st.lists(
    st.one_of(
        st.sampled_from(MODULES).map(lambda module: f"import {module}"),
        st.tuples(
            st.sampled_from(MODULES),
            st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        ).map(lambda pair: f"from {pair[0]} import {', '.join(pair[1])}"),
    ),
    min_size=1,
    max_size=8,
)


def imported(source: str) -> set[tuple]:
    return {
        (getattr(node, "module", None), alias.name)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


@given(present=IMPORTS, wanted=IMPORTS)
def test_merged_imports_are_complete_and_as_isort_has_them(present, wanted):
    config = isort.Config(profile="black", known_first_party=("sglang",))
    upstream = isort.code("\n".join(present) + "\n\nx = 1\n", config=config)
    edit = isort.code("\n".join(wanted) + "\n", config=config)
    composed = compose_source(upstream, edit, path="srt/m.py")
    assert imported(composed) == imported(upstream) | imported(edit)
    assert composed == isort.code(composed, config=config)
