"""Whether a training step gives the same bits again, and which operation is the first that does not."""


class StepError(ValueError):
    """A step that cannot be checked, in one line; `traceback` is the whole story."""

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(" ".join(message.split()))
        self.traceback = traceback
