"""The native module: attributes are defined in csrc/bind."""

from typing import Any

class Error(ValueError): ...

def __getattr__(name: str) -> Any: ...
