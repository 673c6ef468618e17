"""Staged MTP draft metadata for SGLang: edits of its modules and the tool that applies them."""

__version__ = "0.1.0"


class ToolError(Exception):
    """A failure whose text tells the user what is wrong, where, and what to do."""
