"""Why an attention keeps its stock kernel, said where that is found."""

from __future__ import annotations


class Declined(ValueError):
    """An attention that keeps its stock kernel, on purpose: `str()` of it is the reason.

    Attributes:
        remedy: what a user can change so that it is rewritten.
        stock_differs: whether the stock kernel, as it is called, gives other bits from run to run even in strict mode; None where
            that cannot be told.
    """

    def __init__(self, reason: str, remedy: str, *, stock_differs: bool | None = False) -> None:
        super().__init__(reason)
        self.remedy, self.stock_differs = remedy, stock_differs


class LeftToStock(Declined):
    """The stock kernel is deterministic as well and expected to be faster, or its user asked it to be: `on_unsupported` does not
    count it.

    Attributes:
        implementation: that of flash attention which makes it so, in torch's registry; None where it is torch's own.
    """

    def __init__(self, reason: str, remedy: str, *, implementation: str | None = None, stock_differs: bool | None = False) -> None:
        super().__init__(reason, remedy, stock_differs=stock_differs)
        self.implementation = implementation
