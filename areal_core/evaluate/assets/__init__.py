"""The template and style of the page."""

from importlib.resources import files


def asset(name: str) -> str:
    """The text of a file of this folder."""
    return (files(__name__) / name).read_text(encoding="utf-8")
