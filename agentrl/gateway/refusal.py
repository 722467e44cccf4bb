"""Refusals of the gateway: a status and a code, which each protocol writes in its own form."""


class CallRefusedError(Exception):
    """A call that is not answered. `code`: a short name for programs; the text is for people.
    `retry_after`: seconds after which the same call may succeed.
    """

    def __init__(
        self, status: int, code: str, detail: str, retry_after: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.retry_after = retry_after


def unsupported(name: str, instead: str) -> CallRefusedError:
    """A field that cannot be honoured, and that a program would miss if it were ignored."""
    return CallRefusedError(400, "unsupported_parameter", f"{name} is not supported: {instead}")
