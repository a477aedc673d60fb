"""How the package calls its ops: with refusals as ValueError, whatever torch makes of them."""

import re
from typing import Any, Callable, Optional

# What a refusal's text begins with where torch may have lost its type: see refusals.h.
_TYPE = "ValueError: "


def call(op: Callable, arguments: tuple, renamed: Optional[dict[str, str]] = None) -> Any:
    """``op(*arguments)``; ``renamed`` are arguments with another name in the caller's signature
    than in the op's errors."""
    try:
        return op(*arguments)
    except (ValueError, RuntimeError) as error:
        refusal = _refusal(error, renamed or {})
        if refusal is None:
            raise
        raise refusal from None


def _refusal(error: Exception, renamed: dict[str, str]) -> Optional[ValueError]:
    """The error to raise instead; None for one that is right as it is."""
    text = str(error)
    if not text.startswith(_TYPE) and (not renamed or not isinstance(error, ValueError)):
        return None
    text = text[len(_TYPE) :] if text.startswith(_TYPE) else text
    for name, other in renamed.items():
        text = re.sub(rf"\b{name}\b", other, text)
    return ValueError(text)
