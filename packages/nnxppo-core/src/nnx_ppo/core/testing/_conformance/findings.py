"""What the kit reports: a broken rule, and the error and the warning that carry them."""

import dataclasses
import traceback
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Finding:
    """One way in which a module breaks a rule.

    Attributes:
        rule: Name of the rule.
        where: The leaf, attribute or method, e.g. `next_state['h']`.
        expected: What the contract asks for.
        got: What came instead.
        cure: What to do.
        is_warning: Whether the module may be meant to be like that.
    """

    rule: str
    where: str
    expected: str
    got: str
    cure: str
    is_warning: bool = False

    def __str__(self) -> str:
        return (
            f"[{self.rule}] {self.where}\n"
            f"    expected: {self.expected}\n"
            f"    got:      {self.got}\n"
            f"    to do:    {self.cure}"
        )


class ContractError(AssertionError):
    """A module breaks the contract of `StatefulModule`.

    Attributes:
        findings: All that was found.
    """

    def __init__(self, name: str, findings: Sequence[Finding]) -> None:
        self.findings = tuple(findings)
        rules = ", ".join(dict.fromkeys(finding.rule for finding in findings))
        listed = "\n".join(map(str, findings))
        super().__init__(f"{name} breaks the contract of StatefulModule ({rules}):\n{listed}")


class ContractWarning(UserWarning):
    """A module does something that is allowed but seldom meant."""


def last_words(error: BaseException) -> str:
    """Return type and message of an exception, and the line that raised it."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = str(error).strip().split("\n\n")[0]
    return f"{type(error).__name__}: {message} ({frame.filename}:{frame.lineno})"
