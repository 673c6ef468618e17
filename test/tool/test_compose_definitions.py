"""Where new, replaced and anchored definitions land."""

from __future__ import annotations

from textwrap import dedent

UPSTREAM = '''\
"""Module."""

import os

LIMIT   =  3 # odd formatting stays


class Base:
    """One line."""

    flag: bool = False

    def first(self):
        return   1

    # About second.
    @property
    def second(self):
        return 2


def run(x):
    """Run it.

    For long.
    """
    return x
'''


def test_new_member_lands_after_its_closest_preceding_anchor(compose):
    edited = compose(
        UPSTREAM,
        '''
        class Base:
            def first(self): ...

            # Why it is new.
            @staticmethod
            def added(a):
                """Text
                of two lines."""
                return a

            other: int = 4
            more: int = 5
        ''',
    )
    expected = UPSTREAM.replace(
        "        return   1\n",
        '''        return   1

    # Why it is new.
    @staticmethod
    def added(a):
        """Text
        of two lines."""
        return a

    other: int = 4
    more: int = 5
''',
    )
    assert edited == expected


def test_attribute_can_be_the_anchor(compose):
    edited = compose(
        UPSTREAM,
        """
        class Base:
            flag: bool = ...
            near: int = 1

            def method(self):
                return self.near
        """,
    )
    assert edited == UPSTREAM.replace(
        "    flag: bool = False\n",
        "    flag: bool = False\n    near: int = 1\n\n"
        "    def method(self):\n        return self.near\n",
    )


def test_without_preceding_anchor_before_the_following_one(compose):
    edited = compose(
        UPSTREAM,
        """
        class Base:
            early = 0

            def second(self): ...
        """,
    )
    assert edited == UPSTREAM.replace(
        "    # About second.\n", "    early = 0\n\n    # About second.\n"
    )


def test_before_the_first_member_keeps_a_blank_line_below_the_docstring(compose):
    edited = compose(
        UPSTREAM,
        """
        class Base:
            early = 0
            flag: bool = ...
        """,
    )
    assert edited == UPSTREAM.replace(
        "    flag: bool", "    early = 0\n    flag: bool", 1
    )


def test_without_any_anchor_at_the_end_of_the_class(compose):
    edited = compose(
        UPSTREAM,
        """
        class Base:
            def last(self):
                return 3
        """,
    )
    assert edited == UPSTREAM.replace(
        "        return 2\n",
        "        return 2\n\n    def last(self):\n        return 3\n",
    )


def test_existing_method_is_replaced_whole_under_its_comment(compose):
    edited = compose(
        UPSTREAM,
        """
        class Base:
            @property
            def second(self):
                return 22
        """,
    )
    assert edited == UPSTREAM.replace("return 2\n", "return 22\n")


def test_own_comment_takes_the_place_of_upstreams(compose):
    edited = compose(
        UPSTREAM,
        """
        class Base:
            # New reason.
            def second(self):
                return 22
        """,
    )
    assert edited == UPSTREAM.replace(
        "    # About second.\n    @property\n    def second(self):\n        return 2\n",
        "    # New reason.\n    def second(self):\n        return 22\n",
    )


def test_nested_class_is_edited_too(compose):
    edited = compose(
        "class A:\n    class B:\n        x = 1\n",
        """
        class A:
            class B:
                x = ...
                y = 2
        """,
    )
    assert edited == "class A:\n    class B:\n        x = 1\n        y = 2\n"


def test_class_docstring_grows_by_a_paragraph(compose):
    edited = compose(
        UPSTREAM,
        '''
        class Base:
            """Another paragraph
            of two lines."""
        ''',
    )
    assert edited == UPSTREAM.replace(
        '"""One line."""',
        '"""One line.\n\n    Another paragraph\n    of two lines.\n    """',
    )


def test_function_and_module_docstrings_grow(compose):
    edited = compose(
        UPSTREAM,
        '''
        @append_docstring("run")
        def about_speed():
            """Fast."""


        @append_docstring("")
        def about_module():
            """Here."""
        ''',
    )
    assert edited == UPSTREAM.replace(
        "    For long.\n", "    For long.\n\n    Fast.\n"
    ).replace('"""Module."""', '"""Module.\n\nHere.\n"""')


def test_docstring_that_ends_on_its_last_line_of_text_stays_so(compose):
    edited = compose(
        'def f():\n    """One.\n\n    Two."""\n',
        '''
        @append_docstring("f")
        def more():
            """Three."""
        ''',
    )
    assert edited == 'def f():\n    """One.\n\n    Two.\n\n    Three."""\n'


def test_new_top_level_code_lands_before_the_next_named_definition(compose):
    edited = compose(
        UPSTREAM,
        """
        # The size.
        SIZE = 4


        @decorated
        def helper():
            return SIZE


        def run(x): ...
        """,
    )
    assert edited == UPSTREAM.replace(
        "def run",
        "# The size.\nSIZE = 4\n\n\n@decorated\ndef helper():\n    return SIZE\n\n\n"
        "def run",
    )


def test_statement_edit_names_the_definition_that_it_changes(compose):
    edited = compose(
        UPSTREAM,
        """
        class Helper:
            x = 1


        @before("Base.first", "return 1")
        def use(): Helper()
        """.replace("def use(): Helper()", "def use():\n            Helper()"),
    )
    assert edited == UPSTREAM.replace(
        "class Base", "class Helper:\n    x = 1\n\n\nclass Base"
    ).replace("        return   1", "        Helper()\n        return   1")


def test_new_top_level_code_without_a_successor_lands_at_the_end(compose):
    edited = compose(UPSTREAM, "def run(x): ...\n\n\ndef helper():\n    return 1\n")
    assert edited == UPSTREAM + "\n\ndef helper():\n    return 1\n"


def test_existing_function_and_assignment_are_replaced(compose):
    edited = compose(UPSTREAM, "LIMIT = 4\n\n\ndef run(y):\n    return y\n")
    head, _ = UPSTREAM.split("def run")
    assert edited == head.replace(
        "LIMIT   =  3 # odd formatting stays", "LIMIT = 4"
    ) + ("def run(y):\n    return y\n")


def test_assignment_can_be_a_position_only(compose):
    edited = compose(UPSTREAM, "ABOVE = 1\nLIMIT = ...\n")
    assert edited == UPSTREAM.replace("LIMIT", "ABOVE = 1\nLIMIT")


def test_edit_of_nothing_changes_nothing(compose):
    edit = '"""About."""\n\n\nclass Base:\n    def first(self): ...\n'
    assert compose(UPSTREAM, edit) == UPSTREAM


def test_odd_upstream_formatting_survives(compose):
    upstream = dedent(
        """\
        x = [1,
          2]
        class A( object ):
          def f(self): return   1;
          y=2
        """
    )
    edited = compose(upstream, "class A:\n    y = ...\n    z = 3\n")
    assert edited == upstream + "  z = 3\n"
